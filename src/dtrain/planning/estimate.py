"""Estimate the memory and communication of one rank, and compare strategies and microbatch sizes, without the devices.

A layout is simulated with two microbatch sizes, which predict the memory of larger sizes. ``library_memory`` adds the memory
that dtrain and its backends hold beside the tensors of a step.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypedDict, TypeVar, Unpack

from dtrain.arguments import check_int, check_number, single_line
from dtrain.dist.control_protocol import Layout, peers_of
from dtrain.errors import ConfigError, DtrainError
from dtrain.planning.device_facts import ASSUMED_FACTS, DeviceFacts
from dtrain.planning.memory_trace import LinearTrace, MemoryBreakdown, StepPhase
from dtrain.planning.operation_cache import OperationCache
from dtrain.planning.simulate import (
    DeviceType,
    KeepPolicy,
    ParallelismConfig,
    SequenceMethod,
    SimulatedRun,
    StepUsage,
    simulate,
)
from dtrain.planning.step_work import CollectiveTraffic, StepWork
from dtrain.planning.workload import Workload
from dtrain.shard.precision import Precision
from dtrain.shard.spec import Accumulate


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
        rounding: bytes that torch's allocator on CUDA holds above ``peak``, because it rounds sizes up.
        traffic: collectives by kind, sorted by the bytes sent.
        batch_bytes: bytes of the rank's batch of one step.
        work: floating-point operations of a step, and memory traffic of the optimizer.
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
    rounding: int
    traffic: tuple[CollectiveTraffic, ...]
    batch_bytes: int
    work: StepWork

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a step, over all collectives."""
        return sum(each.bytes_sent for each in self.traffic)


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


class EstimateOptions(TypedDict, total=False):
    """Arguments of ``ParallelismConfig`` that have a default."""

    dp_replicate: int
    cp: int
    tp: int
    precision: Precision | None
    accumulate: Accumulate
    checkpoint: KeepPolicy | None
    device: DeviceType
    cp_method: SequenceMethod


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
    counted. Not counted is memory outside of tensors: the context of a device (about half a GiB on CUDA), fragmentation of the
    allocator, and what ``library_memory`` returns. The batch counts as if on the device.

    Args:
        workload: the model, and the parts of its training loop.
        world_size: number of ranks, from 1 to 4,096.
        strategy: strategy of ``shard_model``.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: microbatches per step of a rank.
        options: ``dp_replicate``, ``cp``, ``tp``, ``precision`` and ``accumulate`` as in ``build_mesh`` and ``shard_model``;
            ``checkpoint``: None, or the tensors kept by checkpointed blocks (``"nothing"``, ``"matmuls"``); ``device``:
            ``"cuda"`` (the default) or ``"cpu"``, where optimizers need different memory; ``cp_method``: ``method`` of
            ``context_parallel``, in which each row is one document.

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
    limit = 0 if memory is None else _usable_memory(memory, headroom)

    layouts: list[ParallelismConfig] = []
    for strategy in strategies:
        for checkpoint in checkpoints:
            layout: EstimateOptions = {**options, "checkpoint": checkpoint}
            layouts.append(ParallelismConfig(world_size=world_size, strategy=strategy, **layout))
    rows: dict[int, StrategyEstimate] = {}

    def report(config: ParallelismConfig, size: int | None) -> None:
        if on_progress is not None:
            on_progress(PlanProgress(config=config, microbatch_size=size, done=len(rows), total=len(layouts)))

    # The layouts of one model run many equal operations.
    operations = OperationCache()

    def estimate(config: ParallelismConfig) -> StrategyEstimate:
        with simulate(workload, config, operations) as run:
            on_step = partial(report, config) if processes == 1 else None
            estimates = SizeEstimates(run, config, microbatches, on_step)
            found = estimates.of(microbatch_size)
            largest = None if memory is None else find_largest(estimates, memory, limit, MAX_MICROBATCH_SIZE)
            return StrategyEstimate(estimate=found, largest=largest)

    for number, row in fork_map(estimate, layouts, processes=processes):
        rows[number] = row
        report(layouts[number], None)
    return [rows[number] for number in range(len(layouts))]


def _usable_memory(memory: int, headroom: float) -> int:
    check_number("plan", "memory", memory, above=0, advice="80 GiB is 80 * 2**30.")
    check_number("plan", "headroom", headroom, minimum=0, below=1, advice="0.05 is usual.")
    return int(memory * (1 - headroom))


class SizeEstimates:
    """Estimates of one layout by microbatch size.

    The traces of two simulated sizes give those of larger sizes, if the same operations ran with both.
    """

    def __init__(
        self,
        run: SimulatedRun,
        config: ParallelismConfig,
        microbatches: int,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self._run, self._config, self._microbatches, self._on_step = run, config, microbatches, on_step
        self._steps: dict[int, StepUsage] = {}
        self._linear: LinearTrace | None = None
        self._by_size: dict[int, MemoryEstimate] = {}

    @property
    def sizes_tried(self) -> int:
        """Number of simulated sizes."""
        return len(self._steps)

    def of(self, size: int) -> MemoryEstimate:
        """Return the estimate of ``size``, simulated or from the line through two simulated sizes."""
        if size not in self._by_size:
            if self._linear is None or size < max(self._steps):
                self.simulate(size)
            else:
                last = self._steps[max(self._steps)]
                self._by_size[size] = self._estimate(size, replace(last, trace=self._linear.at(size)))
        return self._by_size[size]

    def simulate(self, size: int) -> bool:
        """Simulate a step with ``size``. Return False, and forget the line, if the memory differs from the prediction."""
        if size in self._steps:
            return True
        predicted = self._by_size.get(size)
        if self._on_step is not None:
            self._on_step(size)
        self._steps[size] = self._run.step(size, self._microbatches)
        estimate = self._estimate(size, self._steps[size])
        is_right = predicted is None or (
            (predicted.peaks, predicted.at_peak, predicted.max_by_part)
            == (estimate.peaks, estimate.at_peak, estimate.max_by_part)
        )
        if not is_right:
            self._linear = None
            self._by_size = {known: self._estimate(known, step) for known, step in self._steps.items()}
        self._by_size[size] = estimate
        if len(self._steps) == 2:
            self._linear = LinearTrace.between({known: step.trace for known, step in self._steps.items()})
        return is_right

    def _estimate(self, size: int, step: StepUsage) -> MemoryEstimate:
        return MemoryEstimate(
            config=self._config,
            microbatch_size=size,
            microbatches=self._microbatches,
            parameter_count=self._run.parameter_count,
            **step.trace.memory(),
            traffic=step.traffic,
            batch_bytes=step.batch_bytes,
            work=step.work,
        )


def find_largest(estimates: SizeEstimates, memory: int, limit: int, max_size: int) -> LargestMicrobatch:
    """Return the largest size from 1 to ``max_size`` whose peak is within ``limit``. A step with that size is simulated.

    If the step differs from the prediction, the search begins again without predictions.
    """
    best = search_largest(estimates, limit, max_size)
    while not estimates.simulate(max(best, 1)):
        best = search_largest(estimates, limit, max_size)
    estimate = estimates.of(max(best, 1))
    return LargestMicrobatch(microbatch_size=best, estimate=estimate, memory=memory, sizes_tried=estimates.sizes_tried)


def search_largest(estimates: SizeEstimates, limit: int, max_size: int) -> int:
    """Return the largest size from 1 to ``max_size`` whose peak is within ``limit``; 0 if no size is.

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
    return best


# The size after 1. With 2, memory that does not depend on the size would hide more of the slope.
_SECOND_GUESS = 4


Item = TypeVar("Item")
Result = TypeVar("Result")


def fork_map(function: Callable[[Item], Result], items: Sequence[Item], *, processes: int) -> Iterator[tuple[int, Result]]:
    """Yield ``(number, function(items[number]))`` in the order in which the results arrive.

    Each item is computed in a forked child of its own, which sees everything that this process has in memory. Only results and
    errors are pickled. If the caller stops early, the children are ended.

    Args:
        function: function of one item.
        items: the items.
        processes: maximum of children at a time; 1 computes in this process.

    Raises:
        DtrainError: the function has raised it in a child.
        ConfigError: a child raised any other error, or was killed.
    """
    if processes == 1 or len(items) < 2:
        yield from ((number, function(item)) for number, item in enumerate(items))
        return
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(items))[::-1]
    running: dict[Any, tuple[int, BaseProcess]] = {}

    def compute(item: Item, sender: Connection) -> None:
        try:
            answer: tuple[bool, object] = True, function(item)
        except DtrainError as error:
            answer = False, error
        # The parent raises it as its own error.
        except Exception as error:  # noqa: BLE001
            text = single_line(error)
            answer = False, ConfigError(f"plan: {type(error).__name__}: {text}. Run with --processes 1 for the traceback.")
        sender.send(answer)
        sender.close()

    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number, item = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                child = context.Process(target=compute, args=(item, sender), daemon=True)
                with warnings.catch_warnings():
                    # A plan computes nothing in other threads, so no lock can be held in the child.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    child.start()
                sender.close()
                running[receiver] = number, child
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                number, process = running[receiver]
                try:
                    has_result, answer = receiver.recv()
                except EOFError:
                    process.join()
                    raise ConfigError(
                        f"plan: a process of the search ended with exit code {process.exitcode}. "
                        "Free memory, or run with --processes 1."
                    ) from None
                process.join()
                receiver.close()
                del running[receiver]
                if not has_result:
                    raise answer
                yield number, answer
    finally:
        for receiver, (_, process) in running.items():
            process.kill()
            process.join()
            receiver.close()


# Batches that ``build_loader`` prepares in advance, on the device and in each worker.
_PREFETCHED_BATCHES = 2
# Channels of the control plane, and the largest read of a connection.
_CHANNELS, _READ_BYTES = 2, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryMemory:
    """Bytes of one rank that are no part of ``MemoryEstimate.peak``.

    Args:
        device_batches: batches that ``build_loader(device=...)`` copies to the device in advance.
        device_workspaces: workspaces of cuBLAS in torch's allocator.
        device_rounding: bytes that torch's allocator adds to the sizes of tensors at the peak.
        device_collectives: buffers of NCCL, outside of torch's allocator.
        host_staging: staging buffer of an asynchronous save, pinned on CUDA; the next save uses it again.
        host_batches: batches that loader workers, and the copy to the device, hold in advance.
        host_control: read buffers of the control plane's connections, at most.
    """

    device_batches: int
    device_workspaces: int
    device_rounding: int
    device_collectives: int
    host_staging: int
    host_batches: int
    host_control: int

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self._total("device_")

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self._total("host_")

    def _total(self, prefix: str) -> int:
        return sum(getattr(self, each.name) for each in fields(self) if each.name.startswith(prefix))


def library_memory(
    estimate: MemoryEstimate, *, workers: int = 0, local_world_size: int = 8, facts: DeviceFacts = ASSUMED_FACTS
) -> LibraryMemory:
    """Return the memory that dtrain and its backends hold beside the tensors of a step.

    ``estimate.peak + device_workspaces + device_rounding`` stands for ``torch.cuda.max_memory_allocated()``. Not counted: the
    context of a device, Python and its modules (about 400 MB a process), and the order of an epoch (69 bytes a shard of the
    dataset).

    Args:
        estimate: result of ``estimate_memory``.
        workers: loader processes of the rank.
        local_world_size: ranks of a node.
        facts: memory of libraries on the device, from ``measure_device``; assumptions by default.

    Example:
        estimate = dt.planning.estimate_memory(workload, world_size=64)
        dt.planning.library_memory(estimate, workers=4).host

    Raises:
        ConfigError: a number that is not an integer of at least 0 (``local_world_size``: 1).
    """
    check_int("library_memory", "workers", workers, minimum=0)
    check_int("library_memory", "local_world_size", local_world_size)
    config, held = estimate.config, estimate.at_rest
    on_cuda = config.device == "cuda"
    prefetched = _PREFETCHED_BATCHES * estimate.batch_bytes
    local = min(local_world_size, config.world_size)
    layout = Layout(0, config.world_size, local if config.world_size % local == 0 else 1)
    groups = {(each.group_size, each.stride) for each in estimate.traffic}
    return LibraryMemory(
        device_batches=prefetched if on_cuda else 0,
        device_workspaces=facts.workspaces if on_cuda else 0,
        device_rounding=estimate.rounding if on_cuda else 0,
        device_collectives=facts.bytes_per_group * len(groups) if on_cuda else 0,
        host_staging=held.parameters + held.optimizer + held.transforms,
        host_batches=prefetched * (workers + on_cuda),
        host_control=_CHANNELS * _READ_BYTES * len(peers_of(layout)),
    )
