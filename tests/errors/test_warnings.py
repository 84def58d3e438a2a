"""Warnings name the line of the user's script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import dtrain as dt
from dtrain import surgery

MODEL = nn.LayerNorm(2)


def in_thread(fn: Callable[..., object], *args: object) -> None:
    thread = threading.Thread(target=fn, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("call", "argument"),
    [(surgery.fused_layer_norm, MODEL), (MODEL.apply, surgery.fused_layer_norm)],
    ids=["directly", "through torch"],
)
def test_warning_names_the_line_of_the_script(call, argument):
    with pytest.warns(UserWarning, match="fused_layer_norm: ") as caught:
        call(argument)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert caught[0].filename == __file__
    assert lines[caught[0].lineno - 1].strip() == "call(argument)"


def test_warning_of_a_thread_names_the_line_of_dtrain():
    with pytest.warns(UserWarning, match="fused_layer_norm: ") as caught:
        in_thread(surgery.fused_layer_norm, MODEL)
    assert Path(caught[0].filename).is_relative_to(Path(dt.__file__).parent)
