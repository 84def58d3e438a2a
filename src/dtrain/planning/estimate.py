"""``estimate_memory``: what one rank of a run would hold and send, part by part.

``largest_microbatch`` and ``compare_strategies``: plans of several sizes and layouts, to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from dtrain.errors import ConfigError
from dtrain.planning.resource_usage import CollectiveTraffic, MemoryBreakdown, StepPhase
from dtrain.planning.simulate import DeviceType, KeepPolicy, ParallelismConfig, SimulatedRun, StepUsage, simulate
from dtrain.planning.workload import Workload
from dtrain.shard.precision import Precision
from dtrain.state import Accumulate


class EstimateOptions(TypedDict, total=False):
    """The arguments of ``Setting`` that have a default."""

    dp_replicate: int
    precision: Precision | None
    accumulate: Accumulate
    checkpoint: KeepPolicy | None
    device: DeviceType


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What the fullest rank of a run holds and sends in one step. Sizes are in bytes.

    Args:
        config: how the model is laid out.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: how many of those make a step of a rank.
        parameter_count: elements of all parameters, over all ranks.
        peak: the most bytes that are held at once.
        peak_phase: the phase in which that is: ``"forward"``, ``"backward"`` or ``"update"``.
        peaks: the most in each phase.
        at_peak: what the peak is made of; its parts add up to it.
        max_by_part: the most of each part, which need not be at the peak.
        traffic: collectives by kind, those that send most first.
    """

    config: ParallelismConfig
    microbatch_size: int
    microbatches: int
    parameter_count: int
    peak: int
    peak_phase: StepPhase
    peaks: Mapping[StepPhase, int]
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown
    traffic: tuple[CollectiveTraffic, ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a step, for all collectives together."""
        return sum(each.bytes_sent for each in self.traffic)


def estimate_memory(
    workload: Workload,
    *,
    world_size: int,
    strategy: str = "full_shard",
    microbatch_size: int = 1,
    microbatches: int = 1,
    **options: Unpack[EstimateOptions],
) -> MemoryEstimate:
    """What a rank would hold and send, without its device, the other ranks, or memory for the model.

    A step of the first rank, which has the largest shards, is run on fake tensors in a pretended world: the code of
    ``shard_model``, ``microbatch_step``, the transforms and the optimizer, so that the plan follows it. Storages are counted.
    What no tensor holds is not in it: the context of a device (about half a GiB on CUDA), buffers of NCCL and workspaces of
    cuBLAS, and what the allocator cannot use between blocks. The batch counts, as if it were on the device.

    Args:
        workload: the model, and what its loop does.
        world_size: ranks, from 1 to 4,096.
        strategy: as for ``shard_model``.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: how many of those make a step of a rank.
        options: ``dp_replicate``, ``precision`` and ``accumulate`` as for ``build_mesh`` and ``shard_model``; ``checkpoint``:
            None, or what checkpointed blocks keep (``"nothing"``, ``"matmuls"``); ``device``: ``"cuda"`` (the default) or
            ``"cpu"``, on which optimizers work otherwise.

    Mutates: nothing that stays. There must be no process groups: it makes pretended ones for the time of the call.

    Raises:
        ConfigError: numbers that do not fit, what ``shard_model`` refuses, process groups that are open, or a model whose
            shapes depend on values.
    """
    setting = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, setting) as rehearsal:
        trace = rehearsal.step(microbatch_size, microbatches)
        return build_estimate(setting, microbatch_size, microbatches, rehearsal.parameter_count, trace)


def build_estimate(
    config: ParallelismConfig, microbatch_size: int, microbatches: int, parameter_count: int, usage: StepUsage
) -> MemoryEstimate:
    """The estimate that a rehearsed step comes to."""
    peaks = usage.memory.peaks
    where = max(peaks, key=lambda phase: peaks[phase])
    return MemoryEstimate(
        config=config,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        parameter_count=parameter_count,
        peak=peaks[where],
        peak_phase=where,
        peaks=peaks,
        at_peak=usage.memory.at_peak,
        max_by_part=usage.memory.max_by_part,
        traffic=usage.traffic,
    )


DEFAULT_HEADROOM = 0.05
"""Share of a device's memory that a plan leaves to what it does not count, unless it is told otherwise."""

MAX_MICROBATCH_SIZE = 4096
"""Samples in a microbatch beyond which nobody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicrobatch:
    """The answer of ``largest_microbatch``.

    Args:
        microbatch_size: samples, 0 when not even one fits.
        estimate: of that size; of one sample when that does not fit.
        memory: of the device, in bytes.
        sizes_tried: how many sizes were planned.
    """

    microbatch_size: int
    estimate: MemoryEstimate
    memory: int
    sizes_tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One layout of a comparison.

    Args:
        estimate: with the microbatch size that was asked for.
        largest: the largest one for the memory that was given, None without.
    """

    estimate: MemoryEstimate
    largest: LargestMicrobatch | None


def largest_microbatch(
    workload: Workload,
    memory: int,
    *,
    world_size: int,
    strategy: str = "full_shard",
    microbatches: int = 1,
    headroom: float = DEFAULT_HEADROOM,
    max_size: int = MAX_MICROBATCH_SIZE,
    **options: Unpack[EstimateOptions],
) -> LargestMicrobatch:
    """The most samples per microbatch with which a rank stays within its device's memory.

    Args:
        workload: as for ``estimate_memory``; further options are those of ``estimate_memory``, too.
        memory: of the device, in bytes.
        headroom: share of ``memory`` that is left to what a plan does not count.
        max_size: samples; larger microbatches are not looked at.

    Returns:
        It, with the plan for it. The next larger size does not fit.

    Raises:
        ConfigError: as ``estimate_memory`` does; memory that is no positive number, headroom that is no share.
    """
    limit = _usable_memory(memory, headroom)
    if type(max_size) is not int or max_size < 1:
        raise ConfigError(f"plan: at_most must be a whole number of at least 1, got {max_size!r}")
    setting = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, setting) as rehearsal:
        return _find_largest(_EstimateCache(rehearsal, setting, microbatches), memory, limit, max_size)


def compare_strategies(
    workload: Workload,
    *,
    world_size: int,
    memory: int | None = None,
    strategies: Sequence[str] | None = None,
    checkpoints: Sequence[KeepPolicy | None] | None = None,
    microbatch_size: int = 1,
    microbatches: int = 1,
    headroom: float = DEFAULT_HEADROOM,
    **options: Unpack[EstimateOptions],
) -> list[StrategyEstimate]:
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
        with_and_without: tuple[KeepPolicy | None, ...] = (None, "nothing") if workload.blocks else (None,)
        checkpoints = (options["checkpoint"],) if options.get("checkpoint") else with_and_without
    rows = []
    for strategy in strategies:
        for checkpoint in checkpoints:
            chosen: EstimateOptions = {**options, "checkpoint": checkpoint}
            rows.append(
                estimate_strategy(
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


def estimate_strategy(
    workload: Workload,
    *,
    world_size: int,
    memory: int | None = None,
    strategy: str = "full_shard",
    microbatch_size: int = 1,
    microbatches: int = 1,
    headroom: float = DEFAULT_HEADROOM,
    **options: Unpack[EstimateOptions],
) -> StrategyEstimate:
    """The plan for one layout, as ``compare_strategies`` makes it for each."""
    limit = None if memory is None else _usable_memory(memory, headroom)
    setting = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, setting) as rehearsal:
        sizes = _EstimateCache(rehearsal, setting, microbatches)
        estimate = sizes.estimate(microbatch_size)
        largest = None if memory is None or limit is None else _find_largest(sizes, memory, limit, MAX_MICROBATCH_SIZE)
        return StrategyEstimate(estimate=estimate, largest=largest)


def _usable_memory(memory: int, headroom: float) -> int:
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf"):
        raise ConfigError(f"plan: memory must be a positive number of bytes, got {memory!r}; 80 GiB is 80 * 2**30")
    if not 0 <= headroom < 1:
        raise ConfigError(f"plan: headroom is a share of the memory from 0 to below 1, got {headroom!r}; 0.05 is usual")
    return int(memory * (1 - headroom))


class _EstimateCache:
    """Plans of one layout by microbatch size, each made once."""

    def __init__(self, run: SimulatedRun, config: ParallelismConfig, microbatches: int) -> None:
        self._run, self._config, self._microbatches = run, config, microbatches
        self._traces: dict[int, StepUsage] = {}

    def peak(self, size: int) -> int:
        if size not in self._traces:
            self._traces[size] = self._run.step(size, self._microbatches)
        return max(self._traces[size].memory.peaks.values())

    def estimate(self, size: int) -> MemoryEstimate:
        self.peak(size)
        count = self._run.parameter_count
        return build_estimate(self._config, size, self._microbatches, count, self._traces[size])

    @property
    def sizes_tried(self) -> int:
        return len(self._traces)


def _find_largest(sizes: _EstimateCache, memory: int, limit: int, max_size: int) -> LargestMicrobatch:
    """The largest size from 1 to ``max_size`` whose peak is within ``limit``.

    At each moment of a step the bytes that are held are a line over the size, so their peak is the highest of many lines: it
    grows ever faster. A line through two sizes that both fit, or both do not, lies below it outside of these two, so whatever
    that line says is too large is. The largest size that is left is tried each time (Newton's method on a convex function), and
    each of the lines is met twice at most, wherever the limit is.
    """
    best, too_large, guess = 0, max_size + 1, 1
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
        guess = min(_SECOND_GUESS, too_large - 1) if guess == 1 else too_large - 1
    return LargestMicrobatch(
        microbatch_size=best, estimate=sizes.estimate(max(best, 1)), memory=memory, sizes_tried=sizes.sizes_tried
    )


_SECOND_GUESS = 4  # the size after 1: memory that does not depend on the size hides less of the slope than with 2
