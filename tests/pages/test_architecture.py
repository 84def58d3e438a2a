"""docs/architecture.md: the four walks are the calls that the code makes, in that order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import dtrain as dt
from pages.fences import DOCS

PAGE = (DOCS / "architecture.md").read_text()
SOURCE = Path(dt.__file__).parent
WALKS = {
    title: re.findall(r"^\d+\. `([\w.]+)`$", part, re.M)
    for title, part in re.findall(r"^\*\*(A [\w]+).*?\*\*\n\n((?:\d+\. .*\n)+)", PAGE, re.M)
}
WAIT_S = 300


def code_name(frame: FrameType) -> str:
    """Return a function's name as the page writes the name: ``step.compose.Step.__call__``."""
    path = Path(frame.f_code.co_filename)
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts) if path.is_relative_to(SOURCE) else ""
    return f"{module}.{frame.f_code.co_qualname}"


def first_calls(walk: str, work: Callable[[], None]) -> list[str]:
    """Run ``work`` and return the functions of a walk, in the order of their first calls, from all threads."""
    wanted, seen = set(WALKS[walk]), dict.fromkeys(())

    def record(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and (name := code_name(frame)) in wanted:
            seen.setdefault(name)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


def new_state() -> dt.TrainState:
    model = nn.Linear(2, 1)
    return dt.compose_step(loss_fn).init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=torch.tensor(float(len(batch))))


def one_step() -> None:
    step = dt.compose_step(loss_fn)
    state = new_state()
    for batch in dt.build_loader(torch.randn(8, 2), global_batch_size=4, seed=0).until("1ba"):
        state, _ = step(state, batch)


def test_architecture_page_has_four_short_call_lists():
    assert {title: len(names) <= 10 for title, names in WALKS.items()} == dict.fromkeys(
        ("A batch", "A save", "A load", "A launch"), True
    )


def test_call_list_of_a_batch_matches_the_code():
    assert first_calls("A batch", one_step) == WALKS["A batch"]


def test_call_lists_of_save_and_load_match_the_code(tmp_path: Path):
    with dt.init_dist():
        state = new_state()
        assert first_calls("A save", lambda: dt.save_sharded(tmp_path, state).wait()) == WALKS["A save"]
        assert first_calls("A load", lambda: dt.load_sharded(tmp_path, new_state())) == WALKS["A load"]


RECORDER = """
import json, os, sys, threading
WANTED, SOURCE, OUT = json.loads(os.environ["WALK"]), os.environ["WALK_SOURCE"], os.environ["WALK_OUT"]

def record(frame, event, arg):
    path = frame.f_code.co_filename
    if event != "call" or not path.startswith(SOURCE):
        return
    name = path[len(SOURCE) + 1 : -3].replace("/", ".") + "." + frame.f_code.co_qualname
    if name in WANTED:
        with open(OUT, "a") as file:
            file.write(name + chr(10))

sys.setprofile(record)
"""


def test_call_list_of_a_launch_matches_the_code(tmp_path: Path):
    """Every interpreter of the job loads the recorder; forks inherit the recorder."""
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    (tmp_path / "loop.py").write_text("import dtrain as dt\nwith dt.init_dist():\n    pass\n")
    out = tmp_path / "calls"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WALK": json.dumps(WALKS["A launch"]),
        "WALK_SOURCE": str(SOURCE),
        "WALK_OUT": str(out),
    }
    command = [
        sys.executable,
        "-m",
        "dtrain",
        "launch",
        "-n",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
        str(tmp_path / "loop.py"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, textwrap.indent(done.stderr, "    ")
    assert list(dict.fromkeys(out.read_text().split())) == WALKS["A launch"]


def test_call_list_check_detects_an_uncalled_function(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(WALKS, "A batch", [*WALKS["A batch"], "checkpoint.save.save_sharded"])
    assert first_calls("A batch", one_step) != WALKS["A batch"]
