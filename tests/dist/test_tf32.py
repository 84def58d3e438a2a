"""use_tf32 sets torch's switches and restores the previous settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dtrain.dist.rng import Tf32, use_tf32
from dtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = switches()
    yield
    torch.set_float32_matmul_precision(before[2])
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    assert switches() == before


def switches() -> list:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]


def test_tf32_switches_are_set_and_restored():
    first = switches()
    assert use_tf32() == Tf32(matmul=first[0], cudnn=first[1])
    assert switches() == [True, True, "high"]
    before = use_tf32(False)
    assert before == Tf32(matmul=True, cudnn=True)
    assert switches() == [False, False, "highest"]
    use_tf32(Tf32(matmul=False, cudnn=True))
    assert switches() == [False, True, "highest"]


def test_unchanged_setting_keeps_torch_matmul_precision():
    torch.set_float32_matmul_precision("medium")
    assert use_tf32(use_tf32()).matmul
    assert switches()[2] == "medium"


def test_newer_torch_fp32_precision_switches_are_read_and_set():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert use_tf32(False).matmul
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    use_tf32(True)
    assert [torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision] == ["tf32", "tf32"]


@pytest.mark.parametrize("settings", [None, "high", 1])
def test_invalid_tf32_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="use_tf32: settings must be True, False or the result of an earlier call, got"):
        use_tf32(settings)
