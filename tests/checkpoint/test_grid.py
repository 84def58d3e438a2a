"""Every layout loads into every other: all pairs of (world size, strategy), every tensor equal, optimizer state included."""

from typing import Any

import pytest
import torch

from checkpoint.filled import LAYOUTS, check_filled, full, load_filled, sharded_state, value_of
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.load_weights import load_weights_
from dtrain.checkpoint.reader import verify
from dtrain.dist.dtensor import to_local
from dtrain.fqn import parameters_by_fqn


def load_all(paths: list[str], strategy: str) -> list:
    return [load_filled(path, strategy) for path in paths]


QUICK = {(1, "none"), (1, "full_shard"), (2, "replicate"), (3, "shard_grad_op"), (4, "hybrid_shard")}


def quick_or_slow(world: int, strategy: str) -> Any:
    """Every world size and every strategy is quick once as a target. As a source, every layout is."""
    return pytest.param(world, strategy, marks=() if (world, strategy) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("world", "strategy"), [quick_or_slow(world, s) for world in LAYOUTS for s in LAYOUTS[world]])
def test_every_layout_loads_into_every_other(saved, ranks, world, strategy):
    results = ranks(world).run(load_all, [str(path) for path, _ in saved.values()], strategy)
    assert [len(result) for result in results] == [16] * world
    for index, ((saved_world, saved_strategy), (_, draws)) in enumerate(saved.items()):
        for rank, (step, history, drawn, derived) in enumerate(result[index] for result in results):
            assert (step, history) == (4, [1, 2])
            expected = draws[rank] if world == saved_world else derived
            assert drawn == expected, f"generators of rank {rank}: {saved_world} {saved_strategy} into {world}"
        assert len({result[index][2] for result in results}) == world, "ranks have streams of their own"


def test_single_process_loads_every_layout(saved):
    for path, _ in saved.values():
        verify(path)
        check_filled(load_sharded(path, sharded_state("none", filled=False), extra={"history": []}))


def weights_of_all(paths: list[str], strategy: str) -> list[bool]:
    model, equal = sharded_state(strategy, filled=False).model, []
    for path in paths:
        with torch.no_grad():
            for tensor in (*model.parameters(), model.seen):
                to_local(tensor).zero_()
        load_weights_(model, path)
        params, _ = parameters_by_fqn(model)
        equal.append(all(torch.equal(full(p.detach()), value_of(name, p.shape)) for name, p in params.items()))
        equal.append(int(model.seen) == 5)
    return equal


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_load_weights_reads_every_layout(saved, ranks, world):
    for strategy in LAYOUTS[world]:
        for equal in ranks(world).run(weights_of_all, [str(path) for path, _ in saved.values()], strategy):
            assert equal == [True] * 32
