"""Steps in memory that do not fit: no launcher, a folder that is gone or another user's, another model, a missing part.

On other ranks a step is resharded, as one on disk is.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain import launch_protocol
from dtrain.checkpoint.node_memory import find_memory_root
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError


def begin(width: int = 6):
    torch.manual_seed(0)
    mesh = dt.build_mesh()
    model = dt.shard_model(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)), mesh)
    loader = dt.build_loader(torch.arange(64.0).reshape(16, 4), mesh=mesh, global_batch_size=4, seed=0, collate=torch.stack)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch).sum(1)))
    return step, step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader=loader), loader


def train(folder: Path, steps: int = 2, *, on_disk: int | None = None):
    """Train some steps, keep each in memory, and save one on disk. Return the state."""
    step, state, loader = begin()
    checkpoints = dt.Checkpointer(folder / "ckpt", memory_every=1)
    for batch in loader.until(steps):
        state, _ = step(state, batch)
        if state.step == on_disk:
            checkpoints.save(state)
        assert checkpoints.keep(state)
    checkpoints.close()
    return state


def weights(state) -> list[list[float]]:
    return [param.full_tensor().flatten().tolist() for param in state.model.parameters()]


@pytest.fixture
def alone():
    with dt.init_dist():
        yield


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(launch_protocol.MEMORY_FOLDER, str(folder))
    return folder


def test_without_launcher_keep_does_nothing_and_a_save_says_what_to_do(alone, tmp_path, monkeypatch):
    monkeypatch.delenv(launch_protocol.MEMORY_FOLDER, raising=False)
    step, state, loader = begin()
    checkpoints = dt.Checkpointer(tmp_path / "ckpt", memory_every=1)
    state, _ = step(state, next(iter(loader)))
    assert not checkpoints.keep(state)
    with pytest.raises(ConfigError, match=r"got 'memory': .* Start the job with `dtrain launch`"):
        dt.save_sharded(tmp_path / "ckpt", state, mode="memory")
    assert not (tmp_path / "ckpt").exists()


def test_memory_of_a_launch_that_has_ended_is_not_made_again(alone, tmp_path, memory):
    memory.rmdir()
    step, state, loader = begin()
    state, _ = step(state, next(iter(loader)))
    assert not dt.Checkpointer(tmp_path / "ckpt", memory_every=1).keep(state)
    assert not memory.exists()


def test_memory_of_another_user_is_not_used(alone, tmp_path, memory, monkeypatch):
    assert find_memory_root(tmp_path / "ckpt") is not None
    monkeypatch.setattr(os, "getuid", lambda: memory.stat().st_uid + 1)
    assert find_memory_root(tmp_path / "ckpt") is None


def test_another_model_is_refused(alone, tmp_path, memory):
    train(tmp_path)
    _, state, _ = begin(width=7)
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight"):
        dt.load_sharded(tmp_path / "ckpt", state)


@pytest.mark.parametrize(("on_disk", "expected"), [(1, 1), (None, None)], ids=["disk", "nothing"])
def test_a_missing_part_of_a_step_is_never_guessed(alone, tmp_path, memory, on_disk, expected):
    train(tmp_path, on_disk=on_disk)
    (kept,) = memory.glob("*/step-00000002")
    (part,) = kept.glob("rank-*.safetensors")
    part.unlink()
    _, state, _ = begin()
    if expected is None:
        with pytest.raises(CheckpointError, match="in memory is corrupt"):
            dt.load_sharded(tmp_path / "ckpt", state)
        return
    with pytest.warns(UserWarning, match="in memory is corrupt"):
        state = dt.load_sharded(tmp_path / "ckpt", state)
    assert state.step == expected
    assert not kept.exists()


def test_a_step_whose_copy_was_not_complete_gives_way_to_the_one_before(alone, tmp_path, memory):
    step, state, loader = begin()
    checkpoints = dt.Checkpointer(tmp_path / "ckpt", memory_every=1)
    for batch in loader.until(3):
        state, _ = step(state, batch)
        assert checkpoints.keep(state)
        if state.step == 2:
            kept = next(memory.glob("*/step-00000002"))
            shutil.copytree(kept, tmp_path / "aside")
    checkpoints.close()
    # As on the last node of a job, whose lost node had a part of the newest step.
    shutil.move(tmp_path / "aside", kept)
    next(memory.glob("*/step-00000003/rank-*.safetensors")).unlink()
    step, state, loader = begin()
    state = checkpoints.load(state)
    assert state.step == 2
    for batch in loader.until(4):
        state, _ = step(state, batch)
        assert checkpoints.keep(state)
    assert [path.name for path in kept.parent.glob("step-*")] == ["step-00000004"]


def test_steps_of_another_run_in_the_folder_are_not_loaded_before_those_on_disk(alone, tmp_path, memory):
    train(tmp_path, steps=3)
    # Another run has saved into the root since, as after a restart by hand from nothing.
    kept = find_memory_root(tmp_path / "ckpt")
    shutil.move(kept, tmp_path / "aside")
    train(tmp_path, steps=1, on_disk=1)
    shutil.rmtree(kept)
    shutil.move(tmp_path / "aside", kept)
    _, state, _ = begin()
    assert dt.load_sharded(tmp_path / "ckpt", state).step == 1


def keep_on_ranks(folder: str) -> list[list[float]]:
    os.environ[launch_protocol.MEMORY_FOLDER] = f"{folder}/memory"
    try:
        return weights(train(Path(folder)))
    finally:
        del os.environ[launch_protocol.MEMORY_FOLDER]


def load_on_ranks(folder: str) -> list:
    os.environ[launch_protocol.MEMORY_FOLDER] = f"{folder}/memory"
    try:
        _, state, _ = begin()
        state = dt.load_sharded(f"{folder}/ckpt", state)
        return [state.step, weights(state)]
    finally:
        del os.environ[launch_protocol.MEMORY_FOLDER]


def test_another_number_of_ranks_loads_the_step_resharded(ranks, tmp_path, memory):
    expected = ranks(2).run(keep_on_ranks, str(tmp_path))[0]
    for count in (1, 3):
        assert set(map(str, ranks(count).run(load_on_ranks, str(tmp_path)))) == {str([2, expected])}
