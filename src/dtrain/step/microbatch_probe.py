"""Run one training step at a given microbatch size; roll back if any rank runs out of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain import spans
from dtrain.batch import count_samples, list_tensors
from dtrain.dist.collective_replay import TraceCache
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot
from dtrain.dist.step_sync import RankStatus
from dtrain.errors import StepError
from dtrain.memory.device_memory import DeviceMemory, get_device_memory
from dtrain.memory.oom import is_out_of_memory
from dtrain.shard.buffers import BufferSnapshot
from dtrain.state import TrainState
from dtrain.step.microbatch_search import ProbeResult, RankMemory
from dtrain.step.oom_guard import StepAborted, StepGuard, use_guard
from dtrain.transform import GradFn
from dtrain.typing import Batch, Metrics


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
        """Run a step with microbatches of ``size`` samples (None: the whole local batch).

        If the collectives differ from their trace, the step runs once more, and ranks check each collective.

        Args:
            inner: function that leaves the gradient; called once per run.
            max_microbatches: number of microbatches of a probe, which is always rolled back; None runs a full step.

        Mutates: as ``inner``; nothing by a probe or a failure on any rank.
        Collective: as ``inner``, and the exchange of statuses.

        Raises:
            StepError: the loss function writes into its batch, so the step cannot be repeated.
        """
        while True:
            result = self._run_guarded_once(inner, state, batch, size, max_microbatches)
            if not result.guard.retry:
                return result
            # The trace was dropped, so the next run has no trace to differ from.
            state = result.state

    def _run_guarded_once(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, max_microbatches: int | None
    ) -> GuardedStepResult:
        multi_rank = state.spec.mesh is not None and get_dist_info().world_size > 1
        rng_snapshot, versions = RNGSnapshot(), _tensor_versions(batch)
        if not multi_rank:
            self.buffers.capture()
        guard = StepGuard(
            owner=state.run_context,
            traces=self.traces,
            multi_rank=multi_rank,
            max_microbatches=max_microbatches,
            prepare=self.buffers.capture if multi_rank else None,
            on_oom=self.on_oom,
            allocator_retried=self.allocator_retried,
            read_live_bytes=None
            if max_microbatches is None or (memory := self.device_memory) is None
            else lambda: memory.read().live,
        )
        started, output = time.monotonic(), None
        try:
            with use_guard(guard):
                output = inner(state, batch, **({} if size is None else {"microbatch_size": size}))
            counts = output[0].step_counts
        except StepAborted as aborted:
            counts = aborted.counts
        except Exception as error:
            if multi_rank or not is_out_of_memory(error):
                self._restore(state, rng_snapshot)
                raise
            # The user's own grad function does not use the guard; a single rank needs no agreement.
            counts = state.step_counts
            guard.record_failure(error)
            guard.samples = count_samples(batch)
        result = GuardedStepResult(
            fits=output is not None,
            output=output if max_microbatches is None else None,
            guard=guard,
            state=state._replace(step_counts=counts),
            seconds=time.monotonic() - started,
        )
        self.oom_message, self.samples = guard.oom_message, guard.samples
        if result.output is None:
            self._restore(state, rng_snapshot)
            _check_batch_unchanged(batch, versions, state.step)
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
        Collective: as a step, and one record on the control group.
        """
        reassign, before = spans.reassign_later("step"), 0
        if (memory := self.device_memory) is not None:
            memory.reset()
            before = memory.read().live
        result = self.run_guarded(inner, state, batch, size, max_microbatches=microbatches)
        reassign("search")
        ranks = self.gather_memory(before, result.guard.forward_bytes)
        probe = ProbeResult(
            size=self.largest_batch if size is None else size,
            fits=result.fits,
            rank_memory=ranks if result.fits else (),
            seconds=result.seconds,
        )
        return probe, result.state

    def gather_memory(self, before: int, forward_bytes: int = 0) -> tuple[RankMemory, ...]:
        """Return the measurements of every rank since the last reset; empty if one rank cannot measure.

        Collective: one record on the control group. Mutates: ``largest_batch``.
        """
        stats = memory.read() if (memory := self.device_memory) is not None else None
        row = [
            self.samples,
            stats is not None,
            forward_bytes,
            before,
            stats.peak if stats else 0,
            stats.capacity if stats else 0,
        ]
        rows = all_gather_numbers(row, caller="auto_microbatch")
        self.largest_batch = int(max(row[0] for row in rows))
        if not all(row[1] for row in rows):
            return ()
        return tuple(
            RankMemory(forward_bytes=int(row[2]), before=int(row[3]), peak=int(row[4]), capacity=int(row[5])) for row in rows
        )

    def gather_largest_batch(self) -> None:
        """Update ``largest_batch``. Collective: one record on the control group. Mutates: ``largest_batch``."""
        self.largest_batch = int(max(row[0] for row in all_gather_numbers([self.samples], caller="auto_microbatch")))

    def allocator_retried(self) -> bool:
        """Return True if this rank's allocator flushed its cache since the last call."""
        if self.device.type != "cuda":
            return False
        # DeviceMemory.read() would take longer, because it reads all statistics.
        retries = int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))
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
    # Inside a tp or cp group, ranks exchange tensors as large as the batch, so every collective is checked.
    traces = TraceCache(always_check=state.spec.ranks_per_batch > 1)
    prober = MicrobatchProber(traces=traces, buffers=BufferSnapshot(state.model), device=state.device)
    # Earlier retries of the allocator do not count.
    prober.allocator_retried()
    return prober


def _tensor_versions(batch: Batch) -> Sequence[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in list_tensors(batch)]


def _check_batch_unchanged(batch: Batch, versions: Sequence[tuple[Tensor, int]], step: int) -> None:
    changed = [tensor for tensor, version in versions if tensor._version != version]
    if changed:
        raise StepError(
            f"auto_microbatch: step {step}: loss_fn wrote into its batch (a tensor of shape {tuple(changed[0].shape)}), so the "
            "step cannot be repeated with smaller microbatches. Clone tensors before loss_fn changes them."
        )
