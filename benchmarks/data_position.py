"""Measure the cost of a position in the data: to resume, to find a sample, to agree; and the quality of the shuffle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

import dtrain as dt
from data_peers import mosaicml_shuffles
from dtrain.data.sample_order import BlockShuffle, SampleOrder, shard_order, shuffle_quality
from dtrain.dist.step_sync import ForwardRecord, sync_before_forward
from dtrain.testing import run_ranks
from measure import CPU, WALL, Figure, Rounds, Run, interleaved, typical, verdict_line

M, G = 10**6, 10**9
BATCH = 1_024
RESUME_S = 0.050
STRETCH = 1 << 16  # positions that are worked out at a time
PERMUTE_S = 0.2e-6  # an index
STEP_S, AGREE_SHARE = 0.100, 0.01


class Numbers:
    """So many samples, each its own number: reading them costs next to nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def resume(rounds: int, peer_size: int) -> None:
    """Print how long it takes to build a loader, give it a state amid a shuffled epoch, and have its first batch."""
    by_size = interleaved({f"{size // M:,} M": our_resume(size) for size in (20 * M, G)}, rounds=rounds, clocks={"wall": WALL})[
        "wall"
    ]
    theirs = interleaved({"theirs": their_resume(peer_size)}, rounds=1, warmup=0, clocks={"wall": WALL})["wall"]["theirs"]
    print(f"resume to the first batch, {peer_size / M:g} M samples, StatefulDataLoader: {_shown(typical(theirs), 1, 's')}")
    for size, timings in by_size.items():
        print(f"resume to the first batch, {size} samples, dtrain: {_shown(typical(timings), 1e3, 'ms')}")
    for size, timings in by_size.items():
        print(verdict_line(f"resume at {size} samples", _scaled(typical(timings), 1e3), at_most=RESUME_S * 1e3, unit=" ms"))


def our_resume(size: int) -> Run:
    """Build a loader, load the state, and return the next batch; checked once to be the right batch."""

    def build() -> dt.data.Loader:
        return dt.build_loader(Numbers(size), global_batch_size=BATCH, seed=0, collate=torch.tensor)

    loader = build()
    loader.skip(size // 2)
    batches = loader.until("1ep")
    next(batches)
    state = loader.state_dict()

    def run() -> Any:
        again = build()
        again.load_state_dict(state)
        return next(again.until("1ep"))

    check_next("dtrain", run(), next(batches))
    return run


def their_resume(size: int) -> Run:
    """The same of torchdata's, which has to be led to the middle."""

    def build() -> Any:
        draw = torch.Generator().manual_seed(0)
        return StatefulDataLoader(Numbers(size), batch_size=BATCH, shuffle=True, generator=draw, collate_fn=torch.tensor)

    loader = build()
    batches = iter(loader)
    for _ in islice(batches, size // 2 // BATCH):
        pass
    state, expected = loader.state_dict(), next(batches)

    def run() -> None:
        again = build()
        again.load_state_dict(state)
        check_next("StatefulDataLoader", next(iter(again)), expected)

    return run


def check_next(name: str, batch: Any, expected: Any) -> None:
    if not torch.equal(batch, expected):
        raise SystemExit(f"data: {name} does not go on where it was")


def permutation(rounds: int, peer_size: int) -> None:
    """Print the CPU time of an index of a shuffled order, in stretches that are worked out ahead."""
    torch.set_num_threads(1)
    shards = [G // 10_000] * 10_000
    orders: dict[str, SampleOrder] = {
        "1 G samples": dt.data.ElasticSampler(size=G),
        "2**30 + 1 samples (the slowest size)": dt.data.ElasticSampler(size=2**30 + 1),
        "1 G samples in 10,000 shards, block shuffle": shard_order(shards, seed=0, shuffle=True),
    }
    runs: dict[str, Run] = {name: _stretches(order) for name, order in orders.items()}
    peer = f"torch.randperm of {peer_size / M:g} M, which is kept"
    runs[peer] = lambda: torch.randperm(peer_size)
    seen = interleaved(runs, rounds=rounds, clocks={"CPU": CPU})["CPU"]
    print(f"CPU time of an index, {peer}: {_shown(_scaled(typical(seen[peer]), 1 / peer_size), 1e9, 'ns')}")
    for name in orders:
        figure = _scaled(typical(seen[name]), 1e6 / STRETCH)
        print(verdict_line(f"an index of {name}", figure, at_most=PERMUTE_S * 1e6, unit=" us"))


def _stretches(order: SampleOrder) -> Run:
    starts = iter(range(0, order.size - STRETCH, 97 * STRETCH))

    def run() -> None:
        start = next(starts)
        order.indices(0, start, start + STRETCH)

    return run


def agreeing(steps: int) -> Rounds:
    """Seconds of the vote before a step on this rank, after ranks have computed for a while; in twos."""
    seen = []
    for step in range(2 * steps):
        time.sleep(0.005)  # stands for a step, which evicts the last vote from the caches
        dist.barrier()
        begun = time.perf_counter()
        sync_before_forward(ForwardRecord(samples=8, tokens=0, microbatches=1), loss_terms=("loss",), step=step)
        seen.append(time.perf_counter() - begun)
    return list(zip(seen[::2], seen[1::2], strict=True))


def agreement(steps: int) -> None:
    """Print the cost of the agreement per step, on the slower of two ranks."""
    ranks = run_ranks(agreeing, 2, steps, timeout_s=600.0)
    slower = [(max(a for a, _ in same), max(b for _, b in same)) for same in zip(*ranks, strict=True)]
    share = _scaled(typical(slower), 100 / STEP_S)
    print(f"the ranks' agreement before a step, 2 ranks: {_shown(typical(slower), 1e6, 'us')}")
    what = f"the agreement, of a step of {STEP_S * 1e3:.0f} ms"
    print(verdict_line(what, share, at_most=AGREE_SHARE * 100, unit="%"), flush=True)


def quality(shards: int, samples: int, batch_size: int = 256) -> None:
    """Print how near shuffles with limited locality come to a full shuffle, dtrain's and MosaicML's, by shards in use."""
    sizes = [samples] * shards
    print(f"shuffles of {shards} shards of {samples} samples, batches of {batch_size}; a full shuffle has 1, 0, 1, 1:")
    orders: dict[str, SampleOrder] = {"full": dt.data.ElasticSampler(size=sum(sizes))}
    for window, streams in ((1, 8), (4, 8), (4, 32), (16, 8)):
        shuffle = BlockShuffle(block_size=window, streams=streams)
        orders[f"window={window}, streams={streams}"] = shard_order(sizes, seed=0, shuffle=shuffle)
    orders |= {name: _Given(draw()) for name, draw in _mosaicml(sizes).items()}
    for name, order in orders.items():
        held = shards_in_use(order, sizes, batch_size)
        print(f"  {name}: {shuffle_quality(order, sizes, batch_size=batch_size)}, shards in use {held}")


def shards_in_use(order: SampleOrder, sizes: Sequence[int], batch_size: int) -> int:
    """Return the largest number of partly read shards over an epoch, which a cache must hold."""
    shard = np.searchsorted(np.cumsum(sizes), order.indices(0, 0, order.size).numpy(), side="right")
    first, last = np.full(len(sizes), order.size), np.zeros(len(sizes), np.int64)
    places = np.arange(order.size) // batch_size
    np.minimum.at(first, shard, places)
    np.maximum.at(last, shard, places)
    begun = np.bincount(first, minlength=places[-1] + 2)
    ended = np.bincount(last + 1, minlength=places[-1] + 2)
    return int(np.cumsum(begun - ended).max())


class _Given(dt.data.ElasticSampler):
    """A stored order."""

    def __init__(self, indices: torch.Tensor) -> None:
        super().__init__(size=len(indices))
        object.__setattr__(self, "_indices", indices)

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        return self._indices[start:stop]


def _mosaicml(sizes: Sequence[int]) -> dict[str, Callable[[], torch.Tensor]]:
    """Their usual shuffle, with its own block size and with one of 32 shards."""
    theirs = mosaicml_shuffles()
    if theirs is None:
        return {}
    counts = np.asarray(sizes)
    blocks = (1 << 18, 32 * int(counts[0]))
    return {
        f"mosaicml py1e, blocks of {block} samples": lambda block=block: torch.from_numpy(
            theirs.get_shuffle("py1e", counts, 1, 0, 0, block).astype(np.int64)
        )
        for block in blocks
    }


def _scaled(figure: Figure, factor: float) -> Figure:
    return Figure(value=figure.value * factor, low=figure.low * factor, high=figure.high * factor)


def _shown(figure: Figure, factor: float, unit: str) -> str:
    value, low, high = (f"{number * factor:.3g}" for number in (figure.value, figure.low, figure.high))
    return f"{value} {unit} ({low}..{high})"
