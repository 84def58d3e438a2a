"""Run one gradient step so that an out-of-memory error on any rank undoes the step on all ranks (``StepGuard``).

``MicrobatchProber`` runs such steps, and measures their memory. Optimizer state is reserved before the optimizer allocates it,
so that a search accounts for it. ``raise_does_not_fit`` reports a minimum size that does not fit, with suggestions.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from dtrain import spans
from dtrain.arguments import single_line
from dtrain.data.batch import count_samples, counts_tokens
from dtrain.device import backend_function, counts_memory, is_accelerator
from dtrain.dist.collective_replay import CollectiveGuard, CollectivesChanged, PeerFailed, TraceCache, open_guard
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.dtensor import to_local
from dtrain.dist.incident import is_collective_error
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot
from dtrain.dist.step_sync import BackwardSync, RankStatus, StepCounts
from dtrain.errors import OutOfMemoryError, PeerError
from dtrain.memory.device_memory import DeviceMemory, get_device_memory, is_out_of_memory
from dtrain.named_optimizers import NamedOptimizers
from dtrain.shard.buffers import BufferSnapshot
from dtrain.state import TrainState
from dtrain.step.microbatch_search import ProbeResult, RankMemory
from dtrain.step.transform import GradFn
from dtrain.typing import Batch, Metrics, Plain

# In the order of their cost: (remedy, strategies that it replaces; none means that it always applies).
_REMEDIES = (
    ("strategy='shard_grad_op'", ("none", "replicate")),
    ("strategy='full_shard'", ("none", "replicate", "shard_grad_op", "hybrid_shard")),
    ("activation checkpointing (dt.shard.checkpoint_activations)", ()),
    ("CPU offload (shard_model(offload='params'))", ()),
    ("a smaller model", ()),
)
# The smallest shape that optimizers for matrices accept, too.
_PROBE_SHAPE = (2, 2)
# Optimizers of these modules change only state and parameters in a step.
_KNOWN_MODULES = ("torch.optim.", "dtrain.")
# State tensors per parameter of any other optimizer: as many as Adam has.
_ASSUMED_STATE_TENSORS = 2
# A step calls neither of these methods.
_IGNORED_METHODS = {"__init__", "__repr__"}


# Only the modules of this package see this error; no user catches it.
class StepAborted(Exception):
    """All ranks have aborted a step, because memory ran out on some rank or the step must be repeated.

    Args:
        counts: counts that ranks agreed on before the step.
        retry: if True, the step says nothing about memory and must be repeated.
    """

    def __init__(self, counts: StepCounts, *, retry: bool) -> None:
        super().__init__("a guarded step was aborted")
        self.counts, self.retry = counts, retry


@dataclass(slots=True, eq=False)
class StepGuard:
    """Options and outcome of one guarded step, which travels in ``TrainState._guard``. Fields marked "out" are outcomes.

        with guard.attempt(plan):
            ...  # forward and backward
        if guard.failed:
            guard.roll_back(undo)

    Args:
        traces: traces of the model's collectives, shared by the steps of a run.
        multi_rank: if True, the model runs on several ranks, and no rank may be left waiting.
        max_microbatches: number of microbatches of a probe, which leaves no gradient; None runs all microbatches.
        prober: prober that runs the step, and measures its memory; None for a part of an evaluation.
        forward_bytes: out: bytes kept by the first forward of a probe.
        samples: out: this rank's samples.
        oom_message: out: message of the allocator on this rank.
        failed: out: True if the step failed on this rank, or if this rank had to leave the step of another rank.
        status: out: status of this rank.
        statuses: out: status of every rank.
        error: out: error of this rank that is not out of memory.
        collective_guard: out: guard of the collectives of the last attempt.
    """

    traces: TraceCache
    multi_rank: bool
    max_microbatches: int | None = None
    prober: MicrobatchProber | None = None
    forward_bytes: int = 0
    samples: int = 0
    oom_message: str = ""
    failed: bool = False
    status: RankStatus = RankStatus.OK
    statuses: Sequence[RankStatus] = ()
    error: Exception | None = None
    collective_guard: CollectiveGuard | None = field(default=None, repr=False)

    @property
    def collectives_issued(self) -> int:
        """Number of collectives before this rank's failure."""
        return self.collective_guard.collective_index if self.failed and self.collective_guard is not None else 0

    def limit_microbatches(self, required: int) -> int:
        """Return the number of microbatches to run out of ``required``."""
        return required if self.max_microbatches is None else min(required, self.max_microbatches)

    def capture_buffers(self) -> None:
        """Take the snapshot of the model's buffers, in ``attempt``, because memory may run out on one of several ranks."""
        if self.prober is not None and self.multi_rank:
            self.prober.buffers.capture()

    def begin_first_forward(self) -> None:
        """Start to measure the memory that the first forward keeps for its backward."""
        self.forward_bytes = -self._live_bytes()

    def end_first_forward(self) -> None:
        """End the measurement of ``begin_first_forward``."""
        self.forward_bytes += self._live_bytes()

    def _live_bytes(self) -> int:
        memory = None if self.prober is None or self.max_microbatches is None else self.prober.device_memory
        return 0 if memory is None else memory.read().live

    @contextmanager
    def attempt(self, plan: object, *, traced: bool = True) -> Iterator[None]:
        """Run the forwards and backwards of the context. An exception ends the context, and is recorded instead of raised.

        Args:
            plan: facts that decide the collectives of the context; equal on all ranks.
            traced: if False, every collective is checked, and no trace is stored.

        Raises:
            DistError: a collective failed, so this rank waits for no other rank.
        """
        traces = self.traces if traced else TraceCache(always_check=True)
        guard = self.collective_guard = open_guard(traces, plan) if self.multi_rank else None
        try:
            if guard is None:
                yield
            else:
                with guard.intercept():
                    yield
                    guard.finish()
        except Exception as error:
            if is_collective_error(error):
                raise
            # The loss may have replaced the reason for which this rank had to abort by an error of its own.
            self.record_failure(error if guard is None or guard.exit_reason is None else guard.exit_reason)
        else:
            if self.prober is not None and self.prober.allocator_retried():
                self.status |= RankStatus.ALLOCATOR_RETRIED

    def roll_back(self, undo: Callable[[], None]) -> None:
        """Free the memory of a failed ``attempt``, and let the other ranks complete their collectives.

        Args:
            undo: function that frees the objects of the failed step.

        Collective: the remaining collectives of the attempt, on every rank; see ``dist/collective_replay.py``.

        Raises:
            OutOfMemoryError: this rank has no memory to issue its remaining collectives; the other ranks lose this rank.
        """
        # An exception and its frames form a cycle that keeps the tensors of the frames.
        gc.collect()
        undo()
        if self.collective_guard is not None:
            try:
                self.collective_guard.issue_remaining()
            except Exception as error:
                if is_collective_error(error) or not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"step: rank {get_dist_info().rank} is out of memory and cannot issue the collectives that the other "
                    f"ranks wait in ({error}), so it leaves them. Find what uses the memory, and start again from the last "
                    "checkpoint."
                ) from error

    def record_failure(self, error: Exception) -> None:
        """Record that this rank has failed. Mutates: this guard; frees the tensors in the frames of ``error``."""
        self.failed = True
        if isinstance(error, PeerFailed | CollectivesChanged):
            self.status |= RankStatus.COLLECTIVES_CHANGED if isinstance(error, CollectivesChanged) else RankStatus.OK
            _free_frames(error)
        elif is_out_of_memory(error):
            self.status |= RankStatus.OUT_OF_MEMORY
            self.oom_message = single_line(error) or type(error).__name__
            if self.prober is not None and self.prober.on_oom is not None:
                self.prober.on_oom()
            _free_frames(error)
        else:
            self.status |= RankStatus.ERROR
            self.error = error

    def raise_if_failed(self, outcome: BackwardSync, counts: StepCounts) -> None:
        """Return if no rank failed; otherwise abort the step on all ranks.

        The ranks that failed first decide: a rank that failed later may have computed with zeros in place of their results.

        Args:
            outcome: statuses of all ranks.
            counts: counts of the step, for ``StepAborted``.

        Raises:
            StepAborted: memory ran out on some rank, or the step must be repeated, and no rank had another error.
            PeerError: another rank had another error. The rank with the error raises its own error.
        """
        self.statuses = outcome.statuses
        failed = [rank for rank, status in enumerate(self.statuses) if status.failed]
        if self.collective_guard is not None:
            changed = any(RankStatus.COLLECTIVES_CHANGED in status for status in self.statuses)
            self.collective_guard.update_traces(failed=bool(failed), collectives_changed=changed)
        if not failed:
            return
        indices = outcome.collective_indices or [0] * len(self.statuses)
        first = [rank for rank in failed if indices[rank] == min(indices[rank] for rank in failed)]
        broken = [rank for rank in first if RankStatus.ERROR in self.statuses[rank]]
        error, self.error = self.error, None
        if error is not None and (not self.multi_rank or get_dist_info().rank in broken):
            raise error
        if error is not None:
            _free_frames(error)
        if broken:
            raise PeerError(
                f"step: rank {broken[0]} failed ({len(broken)} of {len(self.statuses)} ranks did). See its own error."
            )
        raise StepAborted(counts, retry=not any(RankStatus.OUT_OF_MEMORY in self.statuses[rank] for rank in first))


def _free_frames(error: BaseException) -> None:
    """Free the tensors in the frames of ``error``, even if the error is kept. Mutates: ``error`` and its causes."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__


def raise_does_not_fit(prefix: str, *, device: torch.device, strategy: str, oom_message: str, subject: str) -> NoReturn:
    """Raise ``OutOfMemoryError`` with suggestions because ``subject`` does not fit. Every rank must call the function.

    Args:
        prefix: start of the message.
        device: device whose memory ran out.
        strategy: current strategy, which limits the suggestions.
        oom_message: message of this rank's allocator; empty on a rank that did not run out of memory.
        subject: name of what does not fit, for the message.

    Collective: one exchange of JSON.

    Raises:
        OutOfMemoryError: always.
    """
    memory = ""
    if (device_memory := get_device_memory(device)) is not None:
        stats = device_memory.read()
        sizes = (stats.capacity, stats.live, stats.free, stats.used_by_others)
        capacity, live, free, others = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        memory = f" (of {capacity}, {live} in use and {free} free without it, {others} used by others)"
    own: Plain = [" ".join(oom_message.split())[:300], memory]
    reports = cast("list[list[str]]", all_gather_json(own, caller=prefix.partition(":")[0]))
    rank = next((rank for rank, (message, _) in enumerate(reports) if message), get_dist_info().rank)
    message, memory = reports[rank]
    remedies = [text for text, replaced in _REMEDIES if not replaced or strategy in replaced]
    raise OutOfMemoryError(
        f"{prefix} {subject} does not fit on rank {rank}: {message.rstrip('.') or 'out of memory'}{memory}. "
        f"Try, in this order: {', '.join(remedies)}."
    )


@dataclass(slots=True, eq=False)
class MicrobatchProber:
    """Runner of guarded steps, shared by the steps of one run. Checkpoints do not contain the prober.

    Args:
        traces: traces of the model's collectives.
        buffers: snapshot of the model's buffers, for the rollback.
        device: device whose memory is measured.
        on_oom: function called on a rank that runs out of memory, before any memory is freed.
        allocator_retries: last count of the allocator's retries.
        samples: this rank's samples in the last step.
        largest_batch: samples of the rank with the most samples, when last measured.
        measurable: if True, every rank can measure its memory.
        oom_message: message of this rank's allocator in the last step; empty if the step fitted.
    """

    traces: TraceCache
    buffers: BufferSnapshot
    device: torch.device
    on_oom: Callable[[], object] | None = None
    allocator_retries: int = 0
    samples: int = 0
    largest_batch: int = 0
    measurable: bool = False
    oom_message: str = ""

    @property
    def device_memory(self) -> DeviceMemory | None:
        """Device memory; None if the memory of the device cannot be measured."""
        return get_device_memory(self.device)

    def run_guarded(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, max_microbatches: int | None = None
    ) -> GuardedStepResult:
        """Run a step with microbatches of ``size`` (None: the whole local batch, or the microbatches of the loader).

        ``size`` counts samples, or tokens if the loader has split the batch by tokens.

        If the collectives differ from their trace, the step runs once more, and ranks check each collective.

        Args:
            inner: function that leaves the gradient; called once per run.
            max_microbatches: number of microbatches of a probe, which is always rolled back; None runs a full step.

        Mutates: as ``inner``; nothing by a probe or a failure on any rank.
        Collective: as ``inner``, and the exchange of statuses.

        Raises:
            StepError: the step must run again, and its loss function wrote into the batch; on all ranks.
        """
        multi_rank = state.spec.mesh is not None and get_dist_info().world_size > 1
        rng_snapshot = RNGSnapshot()
        if not multi_rank:
            self.buffers.capture()
        guard = StepGuard(traces=self.traces, multi_rank=multi_rank, max_microbatches=max_microbatches, prober=self)
        started, output, retry = time.monotonic(), None, False
        try:
            options = {} if size is None else {"microbatch_size": size}
            limited = batch
            if counts_tokens(batch):
                limited, options = batch.with_max_tokens(size), {}
                # A probe runs the first microbatches, and its order has no effect.
                limited = limited if max_microbatches is None else limited.largest_first()
            after, metrics = inner(state._replace(_guard=guard), limited, **options)
            counts = after._step_counts
            output = after._replace(_guard=None), metrics
        except StepAborted as aborted:
            counts, retry = aborted.counts, aborted.retry
        except Exception as error:
            if multi_rank or not is_out_of_memory(error):
                self._restore(state, rng_snapshot)
                raise
            # The user's own grad function does not use the guard; a single rank needs no agreement.
            counts = state._step_counts
            guard.record_failure(error)
            guard.samples = count_samples(batch)
        result = GuardedStepResult(
            fits=output is not None,
            output=output if max_microbatches is None else None,
            guard=guard,
            state=state._replace(_step_counts=counts),
            seconds=time.monotonic() - started,
        )
        self.oom_message, self.samples = guard.oom_message, guard.samples
        if result.output is None:
            self._restore(state, rng_snapshot)
        if retry:
            # The trace was dropped, so the next run has no trace to differ from.
            return self.run_guarded(inner, result.state, batch, size, max_microbatches=max_microbatches)
        return result

    def _restore(self, state: TrainState, rng_snapshot: RNGSnapshot) -> None:
        state.drop_gradients()
        self.buffers.restore()
        rng_snapshot.restore()

    def probe(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, microbatches: int
    ) -> tuple[ProbeResult, TrainState]:
        """Measure the memory of a step with ``size``, and if it fits; the returned state includes the time of the probe.

        Mutates: the device's peak memory statistics start again.
        Collective: as a step, and one record on the control channel.
        """
        reassign, before = spans.reassign_later("step"), 0
        if (memory := self.device_memory) is not None:
            memory.reset()
            before = memory.read().live
        result = self.run_guarded(inner, state, batch, size, max_microbatches=microbatches)
        reassign("search")
        ranks = self.gather_memory(before, result.guard.forward_bytes)
        probe = ProbeResult(
            size=self.largest_batch if size is None else min(size, self.largest_batch),
            fits=result.fits,
            rank_memory=ranks if result.fits else (),
            seconds=result.seconds,
        )
        return probe, result.state

    def gather_memory(self, before: int = 0, forward_bytes: int = 0) -> tuple[RankMemory, ...]:
        """Return the measurements of every rank since the last reset; empty if one rank cannot measure.

        Collective: one record on the control channel. Mutates: ``largest_batch``.
        """
        stats = memory.read() if (memory := self.device_memory) is not None else None
        measured = (0, 0) if stats is None else (stats.peak, stats.capacity)
        rows = all_gather_numbers([self.samples, stats is not None, forward_bytes, before, *measured], caller="auto_microbatch")
        self.largest_batch = int(max(row[0] for row in rows))
        if not all(row[1] for row in rows):
            return ()
        return tuple(
            RankMemory(forward_bytes=int(row[2]), before=int(row[3]), peak=int(row[4]), capacity=int(row[5])) for row in rows
        )

    def allocator_retried(self) -> bool:
        """Return True if this rank's allocator flushed its cache since the last call."""
        if not (is_accelerator(self.device) and counts_memory(self.device.type)):
            return False
        # DeviceMemory.read() and torch.accelerator.memory_stats() take longer, because they make a flat dict of all statistics.
        read_stats = backend_function(self.device, "memory_stats_as_nested_dict") or torch.accelerator.memory_stats
        retries = int(read_stats(self.device).get("num_alloc_retries", 0))
        retried, self.allocator_retries = retries > self.allocator_retries, retries
        return retried


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuardedStepResult:
    """Outcome of a guarded step: ``output`` if the step fits and is not a probe, and ``state`` for the next run."""

    fits: bool
    output: tuple[TrainState, Metrics] | None
    guard: StepGuard
    state: TrainState
    seconds: float

    @property
    def allocator_retried(self) -> bool:
        """Return True if the step fits on some rank only because its allocator freed cached memory."""
        return any(RankStatus.ALLOCATOR_RETRIED in status for status in self.guard.statuses)


def make_prober(state: TrainState) -> MicrobatchProber:
    """Return the prober of a new run."""
    prober = MicrobatchProber(traces=TraceCache(), buffers=BufferSnapshot(state.model), device=state.device)
    # Earlier retries of the allocator do not count.
    prober.allocator_retried()
    return prober


def reserve_optimizer_state(prefix: str, state: TrainState) -> list[Tensor]:
    """Allocate tensors as large as the missing optimizer state, on every rank or on no rank.

    Assumed state that does not fit is left out, because the optimizer may need less.

    Collective: one small record.

    Raises:
        OutOfMemoryError: the state does not fit; on all ranks.
    """
    reserved, oom_message = [], ""
    try:
        reserved = allocate_missing_state(state.optimizer)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        oom_message = str(problem) or type(problem).__name__
    if any(row[0] for row in all_gather_numbers([bool(oom_message)], caller=prefix.partition(":")[0])):
        reserved.clear()
        if has_unknown_state(state.optimizer):
            return reserved
        raise_does_not_fit(
            prefix,
            device=state.device,
            strategy=state.spec.strategy,
            oom_message=oom_message,
            subject="the optimizer's state",
        )
    return reserved


def allocate_missing_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return tensors as large as the state that ``optimizer`` does not have yet.

    For an optimizer of torch or dtrain, a copy of the optimizer runs a step on a parameter of four numbers. The optimizer
    itself does not change: state of zeros differs from no state if the first step is special (SGD with dampening). A step of
    any other optimizer may change objects outside of the optimizer, so two tensors are assumed for each parameter.

    Raises:
        torch.OutOfMemoryError: the tensors do not fit.
    """
    if isinstance(optimizer, NamedOptimizers):
        return [tensor for member in optimizer.members.values() for tensor in allocate_missing_state(member)]
    reserved: list[Tensor] = []
    for group in optimizer.param_groups:
        new = [param for param in group["params"] if param.requires_grad and not optimizer.state.get(param)]
        dtypes = {
            param.dtype: [param.dtype] * _ASSUMED_STATE_TENSORS
            if has_unknown_state(optimizer)
            else _probe_state_dtypes(optimizer, group, param)
            for param in {param.dtype: param for param in new}.values()
        }
        for param in new:
            shard = to_local(param)
            reserved += [torch.empty_like(shard, dtype=dtype) for dtype in dtypes[param.dtype]]
    return reserved


def has_unknown_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state of ``optimizer`` is unknown before its first step, because the user defines its methods."""
    if isinstance(optimizer, NamedOptimizers):
        return any(map(has_unknown_state, optimizer.members.values()))
    for base in type(optimizer).__mro__:
        if base.__module__.startswith(_KNOWN_MODULES):
            return False
        if any(callable(value) and name not in _IGNORED_METHODS for name, value in vars(base).items()):
            return True
    return True


def _probe_state_dtypes(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    """Return the dtypes of the state tensors that have a parameter's shape, for a parameter like ``param``."""
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=param.dtype, device=to_local(param).device))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{**group, "params": [probe]}])
    # The undecorated method runs no hooks, because this is no step of the run.
    step: Any = type(optimizer).step
    step = getattr(step, "__wrapped__", step)
    # An optimizer may use random numbers.
    rng_snapshot = RNGSnapshot()
    try:
        with torch.no_grad():
            step(twin)
    # The state of an optimizer that cannot run this step is unknown.
    except Exception:  # noqa: BLE001
        return []
    finally:
        rng_snapshot.restore()
    return [value.dtype for value in twin.state[probe].values() if isinstance(value, Tensor) and value.shape == probe.shape]
