"""Estimate the memory and communication of one rank, and compare strategies and microbatch sizes, without the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

from dtrain.arguments import check_int, check_number
from dtrain.planning.fork_map import fork_map
from dtrain.planning.simulate import DeviceType, KeepPolicy, ParallelismConfig, simulate
from dtrain.planning.size_search import LargestMicrobatch, MemoryEstimate, SizeEstimates, find_largest
from dtrain.planning.workload import Workload
from dtrain.shard.precision import Precision
from dtrain.shard.spec import Accumulate


class EstimateOptions(TypedDict, total=False):
    """Arguments of ``ParallelismConfig`` that have a default."""

    dp_replicate: int
    cp: int
    tp: int
    precision: Precision | None
    accumulate: Accumulate
    checkpoint: KeepPolicy | None
    device: DeviceType


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
        options: ``dp_replicate``, ``cp``, ``tp``, ``precision`` and ``accumulate`` as in ``build_mesh`` and ``shard_model``;
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
        return SizeEstimates(run, config, microbatches).of(microbatch_size)


DEFAULT_HEADROOM = 0.05
"""Default share of a device's memory that stays free for memory that is not counted."""

MAX_MICROBATCH_SIZE = 4096
"""Largest microbatch size of a search, in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """Progress of a search over layouts.

    Args:
        config: layout whose step runs, or the layout that is done.
        microbatch_size: samples of the step that runs; None if the layout is done.
        done: layouts that are done.
        total: layouts of the search.
    """

    config: ParallelismConfig
    microbatch_size: int | None
    done: int
    total: int


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
        return find_largest(SizeEstimates(run, config, microbatches), memory, limit, max_size)


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
    on_progress: Callable[[PlanProgress], object] | None = None,
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
        on_progress: function called before each simulated step, and after each layout; with several ``processes`` only after
            each layout.

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

    layouts: list[ParallelismConfig] = []
    for strategy in strategies:
        for checkpoint in checkpoints:
            row: EstimateOptions = {**options, "checkpoint": checkpoint}
            layouts.append(ParallelismConfig(world_size=world_size, strategy=strategy, **row))
    rows: dict[int, StrategyEstimate] = {}

    def report(config: ParallelismConfig, size: int | None) -> None:
        if on_progress is not None:
            on_progress(PlanProgress(config=config, microbatch_size=size, done=len(rows), total=len(layouts)))

    def estimate(config: ParallelismConfig) -> StrategyEstimate:
        return _estimate_layout(
            workload,
            config,
            memory=memory,
            microbatch_size=microbatch_size,
            microbatches=microbatches,
            headroom=headroom,
            on_step=partial(report, config) if processes == 1 else None,
        )

    for number, found in fork_map(estimate, layouts, processes=processes):
        rows[number] = found
        report(layouts[number], None)
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
    on_progress: Callable[[PlanProgress], object] | None = None,
    **options: Unpack[EstimateOptions],
) -> StrategyEstimate:
    """Return the estimate of one strategy, as in ``compare_strategies``."""
    config = ParallelismConfig(world_size=world_size, strategy=strategy, **options)

    def report(size: int) -> None:
        if on_progress is not None:
            on_progress(PlanProgress(config=config, microbatch_size=size, done=0, total=1))

    sizes = {"microbatch_size": microbatch_size, "microbatches": microbatches}
    return _estimate_layout(workload, config, memory=memory, headroom=headroom, on_step=report, **sizes)


def _estimate_layout(
    workload: Workload,
    config: ParallelismConfig,
    *,
    memory: int | None,
    microbatch_size: int,
    microbatches: int,
    headroom: float,
    on_step: Callable[[int], None] | None,
) -> StrategyEstimate:
    limit = None if memory is None else _usable_memory(memory, headroom)
    with simulate(workload, config) as run:
        estimates = SizeEstimates(run, config, microbatches, on_step)
        estimate = estimates.of(microbatch_size)
        largest = None if memory is None or limit is None else find_largest(estimates, memory, limit, MAX_MICROBATCH_SIZE)
        return StrategyEstimate(estimate=estimate, largest=largest)


def _usable_memory(memory: int, headroom: float) -> int:
    check_number("plan", "memory", memory, above=0, advice="80 GiB is 80 * 2**30.")
    check_number("plan", "headroom", headroom, minimum=0, below=1, advice="0.05 is usual.")
    return int(memory * (1 - headroom))
