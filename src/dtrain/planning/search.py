"""``largest_microbatch`` and ``compare_strategies``: plans of several sizes and layouts, to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from dtrain.errors import ConfigError
from dtrain.planning.estimate import MemoryEstimate, Options, estimate_of
from dtrain.planning.rehearsal import Keep, Rehearsal, Setting, Trace, rehearsing
from dtrain.planning.workload import Workload

HEADROOM = 0.05
"""Share of a device's memory that a plan leaves to what it does not count, unless it is told otherwise."""

AT_MOST = 4096
"""Samples in a microbatch beyond which nobody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The answer of ``largest_microbatch``.

    Args:
        microbatch_size: samples, 0 when not even one fits.
        estimate: of that size; of one sample when that does not fit.
        memory: of the device, in bytes.
        tries: how many sizes were planned.
    """

    microbatch_size: int
    estimate: MemoryEstimate
    memory: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One layout of a comparison.

    Args:
        estimate: with the microbatch size that was asked for.
        largest: the largest one for the memory that was given, None without.
    """

    estimate: MemoryEstimate
    largest: Largest | None


def largest_microbatch(
    workload: Workload,
    memory: int,
    *,
    world_size: int,
    strategy: str = "full_shard",
    microbatches: int = 1,
    headroom: float = HEADROOM,
    at_most: int = AT_MOST,
    **options: Unpack[Options],
) -> Largest:
    """The most samples per microbatch with which a rank stays within its device's memory.

    Args:
        workload: as for ``estimate_memory``; further options are those of ``estimate_memory``, too.
        memory: of the device, in bytes.
        headroom: share of ``memory`` that is left to what a plan does not count.
        at_most: samples; larger microbatches are not looked at.

    Returns:
        It, with the plan for it. The next larger size does not fit.

    Raises:
        ConfigError: as ``estimate_memory`` does; memory that is no positive number, headroom that is no share.
    """
    limit = _limit(memory, headroom)
    if type(at_most) is not int or at_most < 1:
        raise ConfigError(f"plan: at_most must be a whole number of at least 1, got {at_most!r}")
    setting = Setting(world_size=world_size, strategy=strategy, **options)
    with rehearsing(workload, setting) as rehearsal:
        return _largest(_Sizes(rehearsal, setting, microbatches), memory, limit, at_most)


def compare_strategies(
    workload: Workload,
    *,
    world_size: int,
    memory: int | None = None,
    strategies: Sequence[str] | None = None,
    checkpoints: Sequence[Keep | None] | None = None,
    microbatch_size: int = 1,
    microbatches: int = 1,
    headroom: float = HEADROOM,
    **options: Unpack[Options],
) -> list[Compared]:
    """Plans of one workload for several strategies, each with and without activation checkpointing.

    Args:
        workload: as for ``estimate_memory``; further options are those of ``estimate_memory``, too.
        memory: of the device, in bytes; with it, the largest microbatch of each.
        strategies: names as for ``shard_model``; by default all, ``hybrid_shard`` where ``dp_replicate`` > 1.
        checkpoints: what checkpointed blocks keep, None for no checkpointing; by default without, and with ``"nothing"`` where
            the workload has blocks.

    Raises:
        ConfigError: as ``largest_microbatch`` does.
    """
    hybrid = ("hybrid_shard",) if options.get("dp_replicate", 1) > 1 else ()
    strategies = ("replicate", "shard_grad_op", "full_shard", *hybrid) if strategies is None else strategies
    if checkpoints is None:
        with_and_without: tuple[Keep | None, ...] = (None, "nothing") if workload.blocks else (None,)
        checkpoints = (options["checkpoint"],) if options.get("checkpoint") else with_and_without
    rows = []
    for strategy in strategies:
        for checkpoint in checkpoints:
            chosen: Options = {**options, "checkpoint": checkpoint}
            rows.append(
                plan_one(
                    workload,
                    world_size=world_size,
                    memory=memory,
                    strategy=strategy,
                    microbatch_size=microbatch_size,
                    microbatches=microbatches,
                    headroom=headroom,
                    **chosen,
                )
            )
    return rows


def plan_one(
    workload: Workload,
    *,
    world_size: int,
    memory: int | None = None,
    strategy: str = "full_shard",
    microbatch_size: int = 1,
    microbatches: int = 1,
    headroom: float = HEADROOM,
    **options: Unpack[Options],
) -> Compared:
    """The plan for one layout, as ``compare_strategies`` makes it for each."""
    limit = None if memory is None else _limit(memory, headroom)
    setting = Setting(world_size=world_size, strategy=strategy, **options)
    with rehearsing(workload, setting) as rehearsal:
        sizes = _Sizes(rehearsal, setting, microbatches)
        estimate = sizes.estimate(microbatch_size)
        largest = None if memory is None or limit is None else _largest(sizes, memory, limit, AT_MOST)
        return Compared(estimate=estimate, largest=largest)


def _limit(memory: int, headroom: float) -> int:
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf"):
        raise ConfigError(f"plan: memory must be a positive number of bytes, got {memory!r}; 80 GiB is 80 * 2**30")
    if not 0 <= headroom < 1:
        raise ConfigError(f"plan: headroom is a share of the memory from 0 to below 1, got {headroom!r}; 0.05 is usual")
    return int(memory * (1 - headroom))


class _Sizes:
    """Plans of one layout by microbatch size, each made once."""

    def __init__(self, rehearsal: Rehearsal, setting: Setting, microbatches: int) -> None:
        self._rehearsal, self._setting, self._microbatches = rehearsal, setting, microbatches
        self._traces: dict[int, Trace] = {}

    def peak(self, size: int) -> int:
        if size not in self._traces:
            self._traces[size] = self._rehearsal.step(size, self._microbatches)
        return max(self._traces[size].page.peaks.values())

    def estimate(self, size: int) -> MemoryEstimate:
        self.peak(size)
        count = self._rehearsal.parameter_count
        return estimate_of(self._setting, size, self._microbatches, count, self._traces[size])

    @property
    def tries(self) -> int:
        return len(self._traces)


def _largest(sizes: _Sizes, memory: int, limit: int, at_most: int) -> Largest:
    """The largest size from 1 to ``at_most`` whose peak is within ``limit``.

    At each moment of a step the bytes that are held are a line over the size, so their peak is the highest of many lines: it
    grows ever faster. A line through two sizes that both fit, or both do not, lies below it outside of these two, so whatever
    that line says is too large is. The largest size that is left is tried each time (Newton's method on a convex function), and
    each of the lines is met twice at most, wherever the limit is.
    """
    best, too_large, guess = 0, at_most + 1, 1
    last: dict[bool, int] = {}  # the size tried last that fits, and the one that does not
    while best + 1 < too_large:
        fits = sizes.peak(guess) <= limit
        if fits:
            best = guess
        else:
            too_large = guess
        if fits in last:
            low, high = sorted((last[fits], guess))
            rise = sizes.peak(high) - sizes.peak(low)
            if rise > 0:
                first = low + (limit - sizes.peak(low)) * (high - low) // rise + 1
                too_large = max(best + 1, min(too_large, first))
        last[fits] = guess
        guess = min(_SECOND, too_large - 1) if guess == 1 else too_large - 1
    return Largest(microbatch_size=best, estimate=sizes.estimate(max(best, 1)), memory=memory, tries=sizes.tries)


_SECOND = 4  # the size after 1: memory that does not depend on the size hides less of the slope than with 2
