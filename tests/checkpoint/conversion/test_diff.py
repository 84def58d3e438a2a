"""Differences between two checkpoints, and their size."""

import math

import pytest
import torch
from safetensors.torch import save_file

from dtrain.checkpoint.conversion import diff
from dtrain.checkpoint.conversion.diff import count_differences, diff_tensors, diff_values, without_seconds
from dtrain.checkpoint.weights import open_safetensors

NAN, INF = float("nan"), float("inf")


def u64(*values):
    return torch.tensor(values, dtype=torch.int64).view(torch.uint64)


PAIRS = {
    "equal": (torch.ones(3), torch.ones(3), 0, None),
    "one": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 1, 0.5),
    "scalars": (torch.tensor(1), torch.tensor(4), 1, 3.0),
    "empty": (torch.zeros(0, 3), torch.zeros(0, 3), 0, None),
    "the same NaN": (torch.tensor([NAN]), torch.tensor([NAN]), 0, None),
    "a number and NaN": (torch.tensor([1.0, 0.0]), torch.tensor([2.0, NAN]), 2, NAN),
    "infinite": (torch.tensor([INF]), torch.tensor([1.0]), 1, INF),
    "two zeros": (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
    "flags": (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
    "bytes": (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8), 1, 255.0),
    "whole numbers that float64 cannot tell apart": (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1, 1.0),
    "unsigned": (u64(1), u64(-1), 1, 2.0**64),
    "16 bits": (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), 2, 1.0),
    "8 bits": (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), 2, 1.0),
    "another dtype, equal": (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN], dtype=torch.float16), 0, None),
    "another dtype": (torch.tensor([1.0, 0.1]), torch.tensor([1.0, 0.125], dtype=torch.bfloat16), 1, 0.025),
    "not contiguous": (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(2, 3).t(), 0, None),
}


@pytest.mark.parametrize("run", [1, 2**21])
@pytest.mark.parametrize(("a", "b", "count", "largest"), PAIRS.values(), ids=PAIRS)
def test_count_differences_returns_count_and_largest_difference(monkeypatch, a, b, count, largest, run):
    monkeypatch.setattr(diff, "_RUN_ELEMENTS", run)
    assert count_differences(a, b)[0] == count
    assert repr(count_differences(a, b)[1]) == repr(largest) or math.isclose(count_differences(a, b)[1], largest, rel_tol=1e-6)


@pytest.mark.parametrize("limit", [8, 2**20])
def test_diff_tensors_sums_over_batches(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(diff, "BUFFER_BYTES", limit)
    a = {"x": torch.zeros(50, 2), "y": torch.zeros(3)}
    b = {"x": torch.zeros(50, 2), "y": torch.zeros(3)}
    b["x"][7, 1], b["x"][40, 0], b["x"][49, 1] = 0.25, -2.0, 1.0
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    compared = []
    rows = list(
        diff_tensors(
            open_safetensors(tmp_path / "a.safetensors"),
            open_safetensors(tmp_path / "b.safetensors"),
            on_bytes_compared=compared.append,
        )
    )
    assert [(row.key, row.kind, row.differing, row.max_abs) for row in rows] == [("x", "values", 3, 2.0)]
    assert sum(compared) == 412


def test_diff_values_reports_type_changes_and_missing_keys():
    a = {"same": NAN, "kind": 1, "gone": "text", "long": "x" * 100}
    b = {"same": NAN, "kind": 1.0, "new": None, "long": "y" * 100}
    values = {row.key: (row.a, row.b) for row in diff_values(a, b)}
    assert values == {
        "kind": ("1", "1.0"),
        "gone": ("'text'", None),
        "new": (None, "None"),
        "long": (f"'{'x' * 56}...", f"'{'y' * 56}..."),
    }


def test_seconds_of_clocks_are_not_compared():
    values = {"clock/seconds": 1.5, "clock/previous/seconds": 1.0, "states/a/clock/seconds": 2.0, "clock/step": 3}
    others = {"extra/clock/seconds": 4.0, "optimizer/state/clock/seconds": 5.0}
    assert without_seconds({**values, **others}) == {"clock/step": 3, **others}
