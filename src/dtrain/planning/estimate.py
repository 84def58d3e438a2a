"""Estimate the memory and communication of one rank, and compare strategies and microbatch sizes, without the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from dtrain.arguments import check_int, check_number
from dtrain.planning.fork_map import fork_map
from dtrain.planning.simulate import (
    DeviceType,
    KeepPolicy,
    MemoryBreakdown,
    ParallelismConfig,
    SimulatedRun,
    StepPhase,
    simulate,
)
from dtrain.planning.traffic import CollectiveTraffic
from dtrain.planning.workload import Workload
from dtrain.shard.precision import Precision
from dtrain.state import Accumulate


class EstimateOptions(TypedDict, total=False):
    """Arguments of ``ParallelismConfig`` that have a default."""

    dp_replicate: int
    tp: int
    precision: Precision | None
    accumulate: Accumulate
    checkpoint: KeepPolicy | None
    device: DeviceType


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory and communication of the rank with the largest shards in one step. Sizes are in bytes.

    Args:
        config: layout of the model.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: microbatches per step of a rank.
        parameter_count: elements of all parameters, over all ranks.
        peak: most bytes held at once.
        peak_phase: phase of the peak: ``"forward"``, ``"backward"`` or ``"update"``.
        peaks: most bytes held at once in each phase.
        at_rest: bytes of each part between steps. An asynchronous save copies parameters, optimizer and transforms to the host.
        at_peak: bytes of each part at the peak; they add up to the peak.
        max_by_part: most bytes of each part, at any time.
        traffic: collectives by kind, sorted by the bytes sent.
    """

    config: ParallelismConfig
    microbatch_size: int
    microbatches: int
    parameter_count: int
    peak: int
    peak_phase: StepPhase
    peaks: Mapping[StepPhase, int]
    at_rest: MemoryBreakdown
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown
    traffic: tuple[CollectiveTraffic, ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a step, over all collectives."""
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
    """Estimate the memory and communication of a rank, without its device, the other ranks, or memory for the model.

    A step of the first rank, which has the largest shards, runs on fake tensors in a fake process group, with the code of
    ``shard_model``, ``microbatch_step``, the transforms and the optimizer. Storages are
    counted. Not counted is memory outside of tensors: the context of a device (about half a GiB on CUDA), buffers of NCCL,
    workspaces of cuBLAS, and fragmentation of the allocator. The batch counts as if on the device.

    Args:
        workload: the model, and the parts of its training loop.
        world_size: number of ranks, from 1 to 4,096.
        strategy: strategy of ``shard_model``.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: microbatches per step of a rank.
        options: ``dp_replicate``, ``tp``, ``precision`` and ``accumulate`` as in ``build_mesh`` and ``shard_model``;
            ``checkpoint``: None, or the tensors kept by checkpointed blocks (``"nothing"``, ``"matmuls"``); ``device``:
            ``"cuda"`` (the default) or ``"cpu"``, where optimizers need different memory.

    Mutates: nothing that lasts. The call creates fake process groups and destroys them; no process group may exist.

    Example:
        workload = dt.planning.Workload(model=build_model, loss_fn=loss_fn, batch=make_batch, blocks=(Block,))
        estimate = dt.planning.estimate_memory(workload, world_size=64, microbatch_size=4)
        print(estimate.peak / 2**30, estimate.peak_phase)

    Raises:
        ConfigError: invalid numbers, arguments that ``shard_model`` refuses, existing process groups, or a model whose shapes
            depend on values.
    """
    config = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, config) as run:
        return _Estimates(run, config, microbatches).of(microbatch_size)


DEFAULT_HEADROOM = 0.05
"""Default share of a device's memory that stays free for memory that is not counted."""

MAX_MICROBATCH_SIZE = 4096
"""Largest microbatch size of a search, in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicrobatch:
    """Result of ``largest_microbatch``.

    Args:
        microbatch_size: samples; 0 if one sample does not fit.
        estimate: estimate for this size, or for one sample.
        memory: memory of the device, in bytes.
        sizes_tried: number of simulated sizes.
    """

    microbatch_size: int
    estimate: MemoryEstimate
    memory: int
    sizes_tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """Estimate of one strategy in a comparison.

    Args:
        estimate: estimate with the requested microbatch size.
        largest: largest microbatch for the given memory; None without memory.
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
    """Find the most samples per microbatch with which a rank stays within its device's memory.

    Args:
        workload: as in ``estimate_memory``, like all further options.
        memory: memory of the device, in bytes.
        headroom: share of ``memory`` that stays free for memory that is not counted.
        max_size: largest size to consider, in samples.

    Returns:
        The size and its estimate. The next larger size does not fit.

    Example:
        result = dt.planning.largest_microbatch(workload, 80 * 2**30, world_size=64, strategy="full_shard")
        print(result.microbatch_size, result.estimate.peak)

    Raises:
        ConfigError: as in ``estimate_memory``; memory that is not positive, or headroom outside of [0, 1).
    """
    limit = _usable_memory(memory, headroom)
    check_int("plan", "max_size", max_size)
    config = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, config) as run:
        return _find_largest(_Estimates(run, config, microbatches), memory, limit, max_size)


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
    processes: int = 1,
    on_estimate: Callable[[StrategyEstimate, int, int], object] | None = None,
    **options: Unpack[EstimateOptions],
) -> list[StrategyEstimate]:
    """Estimate one workload for several strategies, each with and without activation checkpointing.

    Args:
        workload: as in ``estimate_memory``, like all further options.
        memory: memory of the device, in bytes; if given, the largest microbatch of each strategy is found, too.
        strategies: names as in ``shard_model``; None uses all, and ``hybrid_shard`` only if ``dp_replicate`` > 1.
        checkpoints: tensors kept by checkpointed blocks, None for no checkpointing. By default without checkpointing, and with
            ``"nothing"`` if the workload has blocks.
        processes: forked processes that estimate layouts in parallel; 1 estimates in this process.
        on_estimate: function of an estimate, the number of estimates so far, and their total; called for each layout.

    Example:
        for row in dt.planning.compare_strategies(workload, world_size=64, memory=80 * 2**30):
            print(row.estimate.config.strategy, row.estimate.peak, row.largest.microbatch_size)

    Raises:
        ConfigError: as in ``largest_microbatch``.
    """
    hybrid = ("hybrid_shard",) if options.get("dp_replicate", 1) > 1 else ()
    strategies = ("replicate", "shard_grad_op", "full_shard", *hybrid) if strategies is None else strategies
    if checkpoints is None:
        defaults: tuple[KeepPolicy | None, ...] = (None, "nothing") if workload.blocks else (None,)
        checkpoints = (options["checkpoint"],) if options.get("checkpoint") else defaults
    check_int("plan", "processes", processes)

    def estimate(layout: tuple[str, KeepPolicy | None]) -> StrategyEstimate:
        row_options: EstimateOptions = {**options, "checkpoint": layout[1]}
        return estimate_strategy(
            workload,
            world_size=world_size,
            memory=memory,
            strategy=layout[0],
            microbatch_size=microbatch_size,
            microbatches=microbatches,
            headroom=headroom,
            **row_options,
        )

    layouts = [(strategy, checkpoint) for strategy in strategies for checkpoint in checkpoints]
    rows: dict[int, StrategyEstimate] = {}
    for number, row in fork_map(estimate, layouts, processes=processes):
        rows[number] = row
        if on_estimate is not None:
            on_estimate(row, len(rows), len(layouts))
    return [rows[number] for number in range(len(layouts))]


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
    """Return the estimate of one strategy, as in ``compare_strategies``."""
    limit = None if memory is None else _usable_memory(memory, headroom)
    config = ParallelismConfig(world_size=world_size, strategy=strategy, **options)
    with simulate(workload, config) as run:
        estimates = _Estimates(run, config, microbatches)
        estimate = estimates.of(microbatch_size)
        largest = None if memory is None or limit is None else _find_largest(estimates, memory, limit, MAX_MICROBATCH_SIZE)
        return StrategyEstimate(estimate=estimate, largest=largest)


def _usable_memory(memory: int, headroom: float) -> int:
    check_number("plan", "memory", memory, above=0, advice="80 GiB is 80 * 2**30.")
    check_number("plan", "headroom", headroom, minimum=0, below=1, advice="0.05 is usual.")
    return int(memory * (1 - headroom))


class _Estimates:
    """Estimates of one layout by microbatch size, each computed once."""

    def __init__(self, run: SimulatedRun, config: ParallelismConfig, microbatches: int) -> None:
        self._run, self._config, self._microbatches = run, config, microbatches
        self.by_size: dict[int, MemoryEstimate] = {}

    def of(self, size: int) -> MemoryEstimate:
        if size not in self.by_size:
            usage = self._run.step(size, self._microbatches)
            peak_phase = max(usage.peaks, key=lambda phase: usage.peaks[phase])
            self.by_size[size] = MemoryEstimate(
                config=self._config,
                microbatch_size=size,
                microbatches=self._microbatches,
                parameter_count=self._run.parameter_count,
                peak=usage.peaks[peak_phase],
                peak_phase=peak_phase,
                peaks=usage.peaks,
                at_rest=usage.at_rest,
                at_peak=usage.at_peak,
                max_by_part=usage.max_by_part,
                traffic=usage.traffic,
            )
        return self.by_size[size]


def _find_largest(estimates: _Estimates, memory: int, limit: int, max_size: int) -> LargestMicrobatch:
    """Return the largest size from 1 to ``max_size`` whose peak is within ``limit``.

    At each time of a step the live bytes are a linear function of the size, so their peak is a maximum of linear functions and
    convex. A line through two sizes that both fit, or that both do not fit, is below the peak outside of the two sizes. So a
    size that is too large for the line is too large. Each iteration tries the largest remaining size (Newton's method on a
    convex function), which meets each of the linear functions at most twice.
    """
    best, too_large, guess = 0, max_size + 1, 1
    # The last size that fits, and the last one that does not.
    last: dict[bool, int] = {}
    while best + 1 < too_large:
        fits = estimates.of(guess).peak <= limit
        if fits:
            best = guess
        else:
            too_large = guess
        if fits in last:
            low, high = sorted((last[fits], guess))
            low_peak = estimates.of(low).peak
            rise = estimates.of(high).peak - low_peak
            if rise > 0:
                first = low + (limit - low_peak) * (high - low) // rise + 1
                too_large = max(best + 1, min(too_large, first))
        last[fits] = guess
        guess = min(_SECOND_GUESS, too_large - 1) if guess == 1 else too_large - 1
    estimate = estimates.of(max(best, 1))
    return LargestMicrobatch(microbatch_size=best, estimate=estimate, memory=memory, sizes_tried=len(estimates.by_size))


# The size after 1. With 2, memory that does not depend on the size would hide more of the slope.
_SECOND_GUESS = 4
