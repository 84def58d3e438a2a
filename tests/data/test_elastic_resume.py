"""The contract of the loader: any chain of resumes, on any ranks and workers, sees the samples of the uninterrupted run.

Ranks are simulated by argument in the property; five chains run on real ranks with real workers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dtrain as dt
from dtrain.data.sample_order import BlockShuffle, shard_order
from samples import Numbers


class Shards(Numbers):
    """Numbers in shards of seven, which bring an order of their own."""

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> Any:
        sizes = [7] * (self.size // 7) + [self.size % 7] * (self.size % 7 > 0)
        return shard_order(sizes, seed=seed, shuffle=shuffle)


def dataset_of(kind: str, size: int) -> Any:
    if kind == "mixture":
        return dt.data.mix({"a": Numbers(size), "b": Numbers(size // 2 + 1)}, weights={"a": 2, "b": 1})
    return Shards(size) if kind == "shards" else Numbers(size)


def build(kind: str, size: int, **options) -> dt.data.Loader:
    return dt.build_loader(dataset_of(kind, size), shuffle=kind != "in order", **options)


KINDS = ["shuffled", "in order", "shards", "mixture"]


def uninterrupted(kind: str, size: int, steps: int, **options) -> list[list[int]]:
    return [sorted(batch.tolist()) for batch in build(kind, size, **options).until(steps)]


def leg(kind: str, size: int, state: dict[str, Any] | None, steps: int, ranks: int, **options) -> tuple[list[list[int]], Any]:
    """``steps`` batches on ``ranks`` simulated ranks, each sorted, and the state after them."""
    streams, group = [], []
    for rank in range(ranks):
        member = build(kind, size, **options)
        member._source.options = replace(member._source.options, rank=rank, ranks=ranks)
        if state is not None:
            member.load_state_dict(state)
        group.append(member)
        streams.append(member.until(member.position.batches + steps))
    batches = [sorted(chain.from_iterable(indices.tolist() for indices in parts)) for parts in zip(*streams, strict=True)]
    states = [member.state_dict() for member in group]
    assert all(other == states[0] for other in states)
    return batches, states[0]


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 60),
    batch=st.integers(1, 12),
    last_batch=st.sampled_from(["short", "drop", "pad"]),
    seed=st.integers(0, 3),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=10),
)
@settings(max_examples=150, deadline=None)
def test_chained_resumes_on_any_ranks_read_the_same_samples(kind, size, batch, last_batch, seed, legs):
    last_batch = "short" if last_batch == "drop" and size < batch else last_batch
    options = {"global_batch_size": batch, "last_batch": last_batch, "seed": seed}
    seen, state = [], None
    for steps, ranks in legs:
        batches, state = leg(kind, size, state, steps, ranks, **options)
        seen += batches
    assert seen == uninterrupted(kind, size, sum(steps for steps, _ in legs), **options)


@given(
    kind=st.sampled_from(KINDS[:3]),
    size=st.integers(1, 60),
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=10),
)
@settings(max_examples=80, deadline=None)
def test_chained_batch_sizes_read_each_sample_once_per_epoch(kind, size, legs):
    seen, state = [], None
    for steps, ranks, batch in legs:
        batches, state = leg(kind, size, state, steps, ranks, global_batch_size=batch, seed=1)
        seen += chain.from_iterable(batches)
    for begin in range(0, len(seen) - size + 1, size):
        assert sorted(seen[begin : begin + size]) == list(range(size))


def on_real_ranks(kind: str, size: int, state: Any, steps: int, options: dict[str, Any]) -> tuple[list[list[int]], Any]:
    """Run one rank's part of a leg; the loop ends in the middle, with batches that its workers have prefetched."""
    loader = build(kind, size, mesh=dt.build_mesh(), start_method="fork", **options)
    if state is not None:
        loader.load_state_dict(state)
    seen, goal = [], loader.position.batches + steps
    for batch in loader.until("100ep"):
        seen.append(batch.tolist())
        if loader.position.batches == goal:
            break
    return seen, loader.state_dict()


CHAINS = {  # steps, ranks, workers of the node
    "one rank, more workers each time": ("shuffled", "short", [(3, 1, 0), (2, 1, 1), (4, 1, 2), (5, 1, 4)]),
    "more ranks and fewer": ("shards", "short", [(3, 1, 0), (4, 2, 2), (2, 4, 0), (5, 2, 3)]),
    "dropped tails": ("in order", "drop", [(4, 2, 0), (7, 2, 2), (3, 1, 1)]),
    "padded tails": ("shuffled", "pad", [(5, 4, 0), (6, 2, 2)]),
    "a mixture, ten resumes": ("mixture", "short", [(1, 1 + number % 2, 2 * (number % 3 == 0)) for number in range(10)]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chained_resumes_with_processes_and_workers_read_the_same_samples(ranks, name):
    kind, last_batch, legs = CHAINS[name]
    options = {"global_batch_size": 6, "last_batch": last_batch, "seed": 2}
    seen, state = [], None
    for steps, world, workers in legs:
        parts = ranks(world).run(on_real_ranks, kind, 40, state, steps, {**options, "num_workers": workers})
        assert all(theirs == parts[0][1] for _, theirs in parts)
        state = parts[0][1]
        seen += [sorted(chain.from_iterable(row)) for row in zip(*(batches for batches, _ in parts), strict=True)]
    assert seen == uninterrupted(kind, 40, len(seen), **options)
