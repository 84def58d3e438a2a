"""One try of a step at one size, and what it leaves: the step, or nothing at all."""

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
    """What one run's tries have in common, from step to step. Kept by the process, not in checkpoints.

    Args:
        traces: of the model's collectives.
        buffers: the model's, to go back to.
        device: whose memory it is.
        on_oom: called on a rank that runs out of memory, before anything is given back.
        allocator_retries: of the allocator, when last seen.
        samples: of this rank, in the last try.
        largest_batch: samples of the fullest rank, when last measured.
        measurable: every rank has a gauge.
        oom_message: what this rank's allocator said in the last try; empty where it did not refuse.
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
        """Of the device; None where nothing is known of its memory."""
        return get_device_memory(self.device)

    def run_guarded(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, max_microbatches: int | None = None
    ) -> GuardedStepResult:
        """Try a step with microbatches of ``size`` samples (None: the whole local batch).

        If its collectives differ from their trace, the step is tried once more, in checked mode.

        Args:
            inner: leaves the gradient; called once.
            max_microbatches: a rehearsal of so many microbatches, after which nothing is left, whether it fits or not.

        Mutates: as ``inner``; where it is a rehearsal or fails on any rank, nothing.
        Collective: as ``inner``, and its vote.

        Raises:
            StepError: the loss function writes into its batch, so that it cannot be tried again.
        """
        while True:
            trial = self._run_guarded_once(inner, state, batch, size, max_microbatches)
            if not trial.guard.retry:
                return trial
            state = trial.state  # the trace is dropped, so the next try has none to differ from

    def _run_guarded_once(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, max_microbatches: int | None
    ) -> GuardedStepResult:
        shared = state.spec.mesh is not None and get_dist_info().world_size > 1
        kept, before = RNGSnapshot(), _tensor_versions(batch)
        if not shared:
            self.buffers.capture()
        attempt = StepGuard(
            owner=state.run_context,
            traces=self.traces,
            multi_rank=shared,
            max_microbatches=max_microbatches,
            prepare=self.buffers.capture if shared else None,
            on_oom=self.on_oom,
            allocator_retried=self.allocator_retried,
            read_live_bytes=None
            if max_microbatches is None or (gauge := self.device_memory) is None
            else lambda: gauge.read().live,
        )
        begun, made = time.monotonic(), None
        try:
            with use_guard(attempt):
                made = inner(state, batch, **({} if size is None else {"microbatch_size": size}))
            tally = made[0].step_counts
        except StepAborted as abandoned:
            tally = abandoned.counts
        except Exception as error:
            if shared or not is_out_of_memory(error):
                self._restore(state, kept)
                raise
            # A grad function of the user's own, which knows of no attempts; alone, there is nobody to agree with.
            tally = state.step_counts
            attempt.record_failure(error)
            attempt.samples = count_samples(batch)
        trial = GuardedStepResult(
            fits=made is not None,
            output=made if max_microbatches is None else None,
            guard=attempt,
            state=state._replace(step_counts=tally),
            seconds=time.monotonic() - begun,
        )
        self.oom_message, self.samples = attempt.oom_message, attempt.samples
        if trial.output is None:
            self._restore(state, kept)
            _check_batch_unchanged(batch, before, state.step)
        return trial

    def _restore(self, state: TrainState, kept: RNGSnapshot) -> None:
        state.drop_gradients()
        self.buffers.restore()
        kept.restore()

    def probe(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, microbatches: int
    ) -> tuple[ProbeResult, TrainState]:
        """Whether ``size`` fits, and how much memory it takes; the state knows of the time that it took.

        Mutates: the peak of the device's memory statistics starts again.
        Collective: as a step, and one record on the control group.
        """
        move, before = spans.reassign_later("step"), 0
        if (gauge := self.device_memory) is not None:
            gauge.reset()
            before = gauge.read().live
        trial = self.run_guarded(inner, state, batch, size, max_microbatches=microbatches)
        move("search")
        ranks = self.gather_memory(before, trial.guard.forward_bytes)
        tried = ProbeResult(
            size=self.largest_batch if size is None else size,
            fits=trial.fits,
            rank_memory=ranks if trial.fits else (),
            seconds=trial.seconds,
        )
        return tried, trial.state

    def gather_memory(self, before: int, forward_bytes: int = 0) -> tuple[RankMemory, ...]:
        """What every rank has measured since the last reset; nothing where one cannot measure.

        Collective: one record on the control group. Mutates: ``largest``, the samples of the fullest rank.
        """
        reading = gauge.read() if (gauge := self.device_memory) is not None else None
        row = [
            self.samples,
            reading is not None,
            forward_bytes,
            before,
            reading.peak if reading else 0,
            reading.capacity if reading else 0,
        ]
        rows = all_gather_numbers(row, caller="auto_microbatch")
        self.largest_batch = int(max(row[0] for row in rows))
        if not all(row[1] for row in rows):
            return ()
        return tuple(
            RankMemory(forward_bytes=int(row[2]), before=int(row[3]), peak=int(row[4]), capacity=int(row[5])) for row in rows
        )

    def gather_largest_batch(self) -> None:
        """Learn how many samples the fullest rank has. Collective: one record on the control group. Mutates: ``largest``."""
        self.largest_batch = int(max(row[0] for row in all_gather_numbers([self.samples], caller="auto_microbatch")))

    def allocator_retried(self) -> bool:
        """Whether the allocator of this rank had to flush its cache since the last time that this was asked."""
        if self.device.type != "cuda":
            return False
        # All that a reading holds would take longer to read.
        retries = int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))
        thrashed, self.allocator_retries = retries > self.allocator_retries, retries
        return thrashed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuardedStepResult:
    """What became of a try: the step ``output``, if it fitted and was no rehearsal; ``state`` to try again from."""

    fits: bool
    output: tuple[TrainState, Metrics] | None
    guard: StepGuard
    state: TrainState
    seconds: float

    @property
    def allocator_retried(self) -> bool:
        """Whether it fitted on some rank only because its allocator gave memory back."""
        return any(RankStatus.ALLOCATOR_RETRIED in verdict for verdict in self.guard.statuses)


def make_prober(state: TrainState) -> MicrobatchProber:
    """The tries of a run begin."""
    trials = MicrobatchProber(
        traces=TraceCache(always_check=state.spec.ranks_per_batch > 1), buffers=BufferSnapshot(state.model), device=state.device
    )
    # What ranks exchange inside a batch is as large as the batch, and so unknown before.
    trials.allocator_retried()  # what was before does not count
    return trials


def _tensor_versions(batch: Batch) -> Sequence[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in list_tensors(batch)]


def _check_batch_unchanged(batch: Batch, before: Sequence[tuple[Tensor, int]], step: int) -> None:
    changed = [tensor for tensor, version in before if tensor._version != version]
    if changed:
        raise StepError(
            f"auto_microbatch: step {step}: the loss function wrote into its batch (a tensor of shape "
            f"{tuple(changed[0].shape)}), so the step cannot be tried again with smaller microbatches; clone what "
            "it changes"
        )
