"""A snapshot where memory runs out: the steps that write it, and the steps that do not."""

import json

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import OutOfMemoryError
from dtrain.profiling.profiler import snapshot_on_oom
from dtrain.testing import memory_budget
from falling import begin, take


def greedy(failing_step: int, size: int, seam: str) -> dt.Transform:
    """Asks for so many bytes in one step."""

    def wrap(inner):
        def ask(state, *given, **options):
            if state.step == failing_step:
                torch.zeros(size, dtype=torch.uint8)
            return inner(state, *given, **options)

        return ask

    return dt.Transform(name="greedy", **{seam: wrap})


@pytest.mark.parametrize("seam", ["grad", "update"])
def test_oom_error_in_step_writes_snapshot_and_propagates(tmp_path, seam):
    step, state = begin(snapshot_on_oom(tmp_path / "memory"), greedy(2, 1 << 20, seam))
    with memory_budget(100_000) as budget:
        kept = torch.zeros(5000)
        with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"):
            take(step, state, 4)
        assert budget.refused == 1
    content = json.loads((tmp_path / "memory" / "oom-rank-00000-step-00000002.json").read_text())
    assert content["storages"][0]["bytes"] == kept.nbytes
    assert len(list((tmp_path / "memory").iterdir())) == 1


def test_snapshot_context_covers_any_code(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), memory_budget(100), snapshot_on_oom(tmp_path):
        torch.zeros(1000)
    assert [path.name.split("-step-")[0] for path in tmp_path.iterdir()] == ["oom-rank-00000"]


def test_other_errors_write_no_snapshot(tmp_path):
    with memory_budget(1000), snapshot_on_oom(tmp_path):
        torch.zeros(10)
    with pytest.raises(ZeroDivisionError), memory_budget(1000), snapshot_on_oom(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_missing_memory_data_warns_and_propagates_error(tmp_path):
    with (
        pytest.warns(UserWarning, match="snapshot_on_oom: CPU memory is counted only inside"),
        pytest.raises(MemoryError),
        snapshot_on_oom(tmp_path),
    ):
        raise MemoryError
    assert list(tmp_path.iterdir()) == []


def test_unwritable_snapshot_warns_and_keeps_original_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.warns(UserWarning, match="snapshot_on_oom: .* No snapshot is written"),
        pytest.raises(torch.OutOfMemoryError),
        memory_budget(100),
        snapshot_on_oom(tmp_path / "file" / "memory"),
    ):
        torch.zeros(1000)


def sized(*transforms: dt.Transform, limit: int = 330_000) -> int:
    """A step that fits only in smaller parts: how often it did not."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    loss_fn = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
    step = dt.compose_step(loss_fn, transforms)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(512, 64)
    with memory_budget(limit, existing=[*model.parameters(), batch]) as budget:
        state, _ = step(state, batch)
    assert state.step == 1
    return budget.refused


@pytest.mark.costly
@pytest.mark.parametrize("outside", [True, False])
def test_retried_microbatch_sizes_write_no_snapshot(tmp_path, outside):
    watching, sizing = snapshot_on_oom(tmp_path), dt.auto_microbatch()
    assert sized(*((watching, sizing) if outside else (sizing, watching))) > 0
    assert list(tmp_path.iterdir()) == []


def test_oom_at_smallest_microbatch_writes_snapshot(tmp_path):
    with pytest.raises(OutOfMemoryError):
        sized(snapshot_on_oom(tmp_path), dt.auto_microbatch(), limit=150_000)
    assert [path.name for path in tmp_path.iterdir()] == ["oom-rank-00000-step-00000000.json"]
