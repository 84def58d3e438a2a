"""Steps that another job removes, replaces or commits while a load reads the root: none of them is corrupt."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.states import digest, plain_state, train
from dtrain import storage
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.load_weights import load_weights_
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state


@pytest.fixture
def steps(tmp_path) -> list[Path]:
    """Return the folders of steps 1, 2 and 3 of a run, in a root without readers."""
    state, folders = plain_state(), []
    for _ in range(3):
        state = train(state, 1)
        folders.append(save_sharded(tmp_path / "written", state).path)
    return folders


def commit(folder: Path, root: Path) -> None:
    root.mkdir(exist_ok=True)
    shutil.copytree(folder, root / folder.name)


def remove(root: Path, name: str) -> None:
    """Remove a step as a job does: first the name, then the files."""
    (root / name).rename(root / f"{name}.old-00000000-00000000")
    shutil.rmtree(root / f"{name}.old-00000000-00000000")


@contextmanager
def when_read(name: str, *acts: Callable[[], None]) -> Iterator[list[str]]:
    """Before the files called ``name`` are read for the second time on, do one of ``acts`` each, as another job would."""
    real, left, seen = storage.read_file, list(acts), []

    def read_file(path: Any, *args: Any, **options: Any) -> bytes:
        seen.append(str(path))
        if path.name == name and len(seen) > 1 and left:
            left.pop(0)()
        return real(path, *args, **options)

    storage.read_file = read_file
    try:
        yield seen
    finally:
        storage.read_file = real
    assert not left, "the other job was not needed"


@pytest.mark.parametrize("on_corrupt", ["raise", "previous"])
def test_load_takes_the_newer_step_when_its_choice_is_pruned(tmp_path, steps, on_corrupt, capsys):
    root = tmp_path / "root"
    commit(steps[0], root)

    def prune() -> None:
        commit(steps[1], root)
        remove(root, steps[0].name)

    with when_read("manifest.json", prune):
        result = load_sharded(root, plain_state(5), on_corrupt=on_corrupt)
    assert result.step == 2
    assert digest(result) == digest(load_sharded(steps[1], plain_state(6)))
    assert "corrupt" not in capsys.readouterr().err


def test_load_takes_the_newest_step_after_several_removals(tmp_path, steps):
    root = tmp_path / "root"
    commit(steps[0], root)

    def prune(number: int) -> Callable[[], None]:
        return lambda: (commit(steps[number + 1], root), remove(root, steps[number].name))[1]

    with when_read("manifest.json", prune(0), prune(1)):
        assert load_sharded(root, plain_state(5)).step == 3


def test_replaced_step_is_read_again(tmp_path, steps):
    root, other = tmp_path / "root", train(plain_state(9), 1)
    commit(steps[0], root)
    again = save_sharded(tmp_path / "other", other).path

    def replace() -> None:
        remove(root, steps[0].name)
        commit(again, root)

    with when_read_index(replace):
        result = load_sharded(root, plain_state(5))
    assert digest(result) == digest(load_sharded(again, plain_state(6)))


@contextmanager
def when_read_index(act: Callable[[], None]) -> Iterator[None]:
    real, left = storage.list_sizes, [act]

    def list_sizes(folder: Any) -> Any:
        if left:
            left.pop()()
        return real(folder)

    storage.list_sizes = list_sizes
    try:
        yield
    finally:
        storage.list_sizes = real
    assert not left, "the folder was not listed"


def test_named_step_that_is_removed_is_not_called_corrupt(tmp_path, steps):
    root = tmp_path / "root"
    for read in (
        lambda path: load_sharded(path, plain_state()),
        lambda path: load_weights_(plain_state().model, path),
        lambda path: convert(path, tmp_path / "out", to="hf"),
        verify,
    ):
        commit(steps[0], root)
        commit(steps[1], root)
        with (
            when_read_index(lambda: remove(root, steps[0].name)),
            pytest.raises(CheckpointError, match="was removed by another process while it was read") as raised,
        ):
            read(root / steps[0].name)
        assert not isinstance(raised.value, CorruptCheckpointError)
        shutil.rmtree(root)


def test_step_that_vanishes_while_the_root_is_listed_does_not_start_the_run_anew(tmp_path, steps):
    root = tmp_path / "root"
    commit(steps[0], root)

    def prune() -> None:
        commit(steps[1], root)
        remove(root, steps[0].name)

    with when_first_read(prune):
        assert load_sharded(root, plain_state(5), missing_ok=True).step == 2


def test_root_that_is_emptied_during_a_load_is_an_error(tmp_path, steps):
    root = tmp_path / "root"
    commit(steps[0], root)
    with (
        when_read_index(lambda: remove(root, steps[0].name)),
        pytest.raises(CheckpointError, match=r"all steps of .* were removed by another process"),
    ):
        load_sharded(root, plain_state(), missing_ok=True)


def test_damaged_step_stays_corrupt(tmp_path, steps):
    root = tmp_path / "root"
    commit(steps[0], root)
    (root / steps[0].name / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="is corrupt"):
        load_sharded(root, plain_state())


def test_step_committed_during_a_load_is_not_called_earlier(tmp_path, steps, capsys):
    root = tmp_path / "root"
    commit(steps[0], root)
    with when_read_index(lambda: commit(steps[1], root)):
        assert load_sharded(root, plain_state()).step == 1
    assert capsys.readouterr().err.startswith(f"dtrain: load_sharded: loaded {root}/{steps[0].name} in ")


def load_while_pruned(root: str, folders: list[str], pruning_rank: int) -> int | None:
    """Load on all ranks, while one rank finds that another job has pruned the step. Returns the step that was loaded."""

    def prune() -> None:
        commit(Path(folders[1]), Path(root))
        remove(Path(root), Path(folders[0]).name)

    torch.manual_seed(0)
    model = shard_model(plain_state().model, build_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), amsgrad=True)
    state = init_state(model, optimizer)
    state = plain_transforms(state)
    if get_dist_info().rank != pruning_rank:
        return load_sharded(root, state).step
    with when_read("manifest.json", prune) if pruning_rank == 0 else when_first_read(prune):
        return load_sharded(root, state).step


@contextmanager
def when_first_read(act: Callable[[], None]) -> Iterator[None]:
    real, left = storage.read_file, [act]

    def read_file(path: Any, *args: Any, **options: Any) -> bytes:
        if left:
            left.pop()()
        return real(path, *args, **options)

    storage.read_file = read_file
    try:
        yield
    finally:
        storage.read_file = real


def plain_transforms(state: Any) -> Any:
    shadow = {name: p.detach().clone() for name, p in state.params.items()}
    content = {"ema": {"shadow": shadow, "updates": 0}, "spikes": {"worst": float("inf"), "window": (1, 2)}}
    for name, value in content.items():
        state = state.with_transform_state(name, value)
    return state


@pytest.mark.parametrize("pruning_rank", [0, 1])
def test_all_ranks_take_the_newer_step_when_one_finds_the_choice_pruned(tmp_path, ranks, steps, pruning_rank):
    root = tmp_path / "root"
    commit(steps[0], root)
    assert ranks(2).run(load_while_pruned, str(root), list(map(str, steps)), pruning_rank) == [2, 2]
