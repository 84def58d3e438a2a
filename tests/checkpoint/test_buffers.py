"""Buffers that each rank has for itself are saved once per rank and come back to the ranks they belong to."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import dtrain as dt
from checkpoint.filled import laid_out
from checkpoint.states import Net
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.load_weights import load_weights_
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import get_dist_info
from dtrain.state import TrainState, init_state

WORLDS = (1, 2, 3)


def state_with(seen: int, buffers: str) -> TrainState:
    model = laid_out(Net(), "full_shard", buffers=buffers)
    model.seen.fill_(seen)
    return init_state(model, torch.optim.AdamW(model.parameters()))


def save_buffers(root: str, buffers: str) -> None:
    save_sharded(root, state_with(10 + get_dist_info().rank if buffers == "own" else 10, buffers))


def load_buffers(roots: list[str], buffers: str) -> list:
    counters = []
    for root in roots:
        state = load_sharded(root, state_with(0, buffers))
        weights = state_with(0, buffers).model
        load_weights_(weights, root)
        counters.append([int(state.model.seen), int(weights.seen)])
    return counters


@pytest.fixture(scope="module")
def roots(tmp_path_factory, ranks) -> dict[int, Path]:
    """Checkpoints of 1, 2 and 3 ranks that each have buffers of their own."""
    folders = {world: tmp_path_factory.mktemp(f"local-{world}") for world in WORLDS}
    for world, root in folders.items():
        ranks(world).run(save_buffers, str(root), "own")
    return folders


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_local_buffers_load_by_rank_modulo_saved_world_size(roots, ranks, world):
    results = ranks(world).run(load_buffers, [str(root) for root in roots.values()], "own")
    for rank, result in enumerate(results):
        assert result == [[10 + rank % saved_world] * 2 for saved_world in WORLDS]


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
def test_synchronized_buffers_load_from_rank_0(roots, ranks, buffers):
    for result in ranks(3).run(load_buffers, [str(root) for root in roots.values()], buffers):
        assert result == [[10, 10]] * 3


@pytest.mark.parametrize("buffers", ["broadcast", "own"])
def test_equal_buffers_are_stored_once_and_load_everywhere(tmp_path, ranks, buffers):
    ranks(2).run(save_buffers, str(tmp_path), "broadcast")
    assert stored_buffers(tmp_path) == 1
    for result in ranks(3).run(load_buffers, [str(tmp_path)], buffers):
        assert result == [[10, 10]]


def test_local_buffers_are_stored_once_per_rank(roots):
    for world, root in roots.items():
        assert stored_buffers(root) == world
        assert verify(root).world_size == world


def by_name(root: str, buffers, save: bool) -> list:
    model = nn.Module()
    model.linear = nn.Linear(2, 2)
    for name in ("seen", "kept"):
        model.register_buffer(name, torch.tensor(10.0 + get_dist_info().rank * (name == "kept") if save else 0.0))
    model = dt.shard_model(model, dt.build_mesh(), buffers=buffers, sync=not save)
    state = init_state(model, torch.optim.AdamW(model.parameters()))
    if save:
        save_sharded(root, state)
    else:
        load_sharded(root, state)
    return [float(model.seen), float(model.kept)]


@pytest.mark.parametrize(
    ("saved", "loaded", "kept"),
    [
        ({"kept": "own"}, {"kept": "own"}, [10.0, 11.0, 10.0]),
        ({"kept": "own"}, None, [10.0] * 3),
        ("own", {"kept": "own"}, [10.0, 11.0, 10.0]),
        ({"kept": "own"}, "own", [10.0, 11.0, 10.0]),
    ],
)
def test_buffers_of_one_model_are_stored_by_their_choice(tmp_path, ranks, saved, loaded, kept):
    ranks(2).run(by_name, str(tmp_path), saved, True)
    assert stored_buffers(tmp_path) == (2 if saved == "own" else 1)
    assert ranks(3).run(by_name, str(tmp_path), loaded, False) == [[10.0, value] for value in kept]


def stored_buffers(root: Path) -> int:
    count = 0
    for path in (root / "step-00000000").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += "buffers/seen" in file.keys()  # noqa: SIM118  # it is no dict
    return count
