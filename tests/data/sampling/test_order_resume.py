"""An epoch is the same for every reader and every division. Ranks and kills are simulated by argument."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.mixture import mix
from dtrain.data.position import LAST_BATCH_MODES, batch_bounds, batch_indices
from dtrain.data.sample_order import BlockShuffle, CachedOrder, ElasticSampler, rank_positions, shard_order


def sharded(size, seed):
    sizes = torch.randint(1, 40, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    return shard_order(sizes, seed=seed, shuffle=BlockShuffle(block_size=2, streams=4))


def mixed(size, seed):
    sources = {"a": range(size), "b": range(size // 3 + 1)}
    return mix(sources, weights={"a": 0.3, "b": 0.7}, epoch_samples=size).order(seed, True)


ORDERS = {
    "full": lambda size, seed: ElasticSampler(size=size, seed=seed),
    "none": lambda size, seed: ElasticSampler(size=size, shuffle=False),
    "blocks": sharded,
    "mixture": mixed,
}


def consumed(make, *, batch, last_batch, until, legs):
    """Return the samples in training order of successive runs of ``(world, batches)``; each run builds its order anew.

    A run sees the state of the run before it and nothing else. The last run continues until ``until`` batches.
    """
    state, epoch, start, done, seen = None, 0, 0, 0, []
    for world, steps in [*legs, (1, until)]:
        order = make()
        if state is not None:
            order = order.at_state(state, epoch, start)
        ranks = [CachedOrder(order) for _ in range(world)]
        for _ in range(min(steps, until - done)):
            bounds = batch_bounds(start, order.size, batch, last_batch)
            if bounds is None:
                epoch, start = epoch + 1, 0
                bounds = batch_bounds(start, order.size, batch, last_batch)
            samples = {}
            for rank, prepared in enumerate(ranks):
                mine = rank_positions(*bounds, rank, world, order.streams)
                assert samples.keys().isdisjoint(mine)
                if mine:
                    indices = batch_indices(prepared, epoch, mine[0], mine[-1] + 1)[:: mine.step]
                    samples |= dict(zip(mine, indices.tolist(), strict=True))
            seen += [samples[position] for position in range(*bounds)]
            start, done = bounds[1], done + 1
        state = order.state(epoch, start)
    return seen


@pytest.mark.parametrize("kind", ORDERS)
@given(
    size=st.integers(1, 150),
    seed=st.integers(0, 2**40),
    batch=st.integers(1, 40),
    last_batch=st.sampled_from(LAST_BATCH_MODES),
    until=st.integers(1, 40),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), max_size=10),
)
@settings(max_examples=50, deadline=None)
def test_chained_resumes_with_changing_world_sizes_equal_one_run(kind, size, seed, batch, last_batch, until, legs):
    def make():
        return ORDERS[kind](size, seed)

    if last_batch == "drop":
        batch = min(batch, make().size)
    expected = consumed(make, batch=batch, last_batch=last_batch, until=until, legs=[])
    assert consumed(make, batch=batch, last_batch=last_batch, until=until, legs=legs) == expected


@pytest.mark.parametrize("kind", ["full", "none", "blocks"])
@given(size=st.integers(1, 150), seed=st.integers(0, 2**40), batches=st.lists(st.integers(1, 40), min_size=1, max_size=10))
@settings(max_examples=50, deadline=None)
def test_epoch_has_every_sample_once_for_any_batch_sizes(kind, size, seed, batches):
    order, start, seen = ORDERS[kind](size, seed), 0, []
    while start < order.size:
        batch = batches[len(seen) % len(batches)]
        bounds = batch_bounds(start, order.size, batch, "short")
        seen += order.indices(1, *bounds).tolist()
        start = bounds[1]
    assert sorted(seen) == list(range(order.size))
    assert seen == order.indices(1, 0, order.size).tolist()


def test_resume_check_detects_a_discontinuous_order():
    class StartsOver(ElasticSampler):
        def at_state(self, state, epoch, start):
            return ElasticSampler(size=self.size, seed=state["seed"] + 1)

    runs = [
        consumed(lambda: StartsOver(size=50), batch=4, last_batch="short", until=10, legs=legs)
        for legs in ([], [(2, 3)], [(1, 3)])
    ]
    assert runs[0] != runs[1]
    assert runs[1] == runs[2]
