"""One try of a step at one size, and what it leaves: the step, or nothing at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain import spans
from dtrain.batch import count_samples, tensors_of
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.control import Verdict
from dtrain.dist.init import current
from dtrain.dist.replay import Traces
from dtrain.dist.rng import KeptRandomness
from dtrain.errors import StepError
from dtrain.memory.failure import is_out_of_memory
from dtrain.memory.gauge import Gauge, gauge_for
from dtrain.shard.replicas import KeptBuffers
from dtrain.state import TrainState
from dtrain.step.attempt import Abandoned, Attempt, attempting
from dtrain.step.search import Memory, Try
from dtrain.transform import GradFn
from dtrain.types import Batch, Metrics


@dataclass(slots=True, eq=False)
class Trials:
    """What one run's tries have in common, from step to step. Kept by the process, not in checkpoints.

    Args:
        traces: of the model's collectives.
        buffers: the model's, to go back to.
        device: whose memory it is.
        on_failure: called on a rank that runs out of memory, before anything is given back.
        retries: of the allocator, when last seen.
        samples: of this rank, in the last try.
        largest: samples of the fullest rank, when last measured.
        measurable: every rank has a gauge.
        asked: what this rank's allocator said in the last try; empty where it did not refuse.
    """

    traces: Traces
    buffers: KeptBuffers
    device: torch.device
    on_failure: Callable[[], object] | None = None
    retries: int = 0
    samples: int = 0
    largest: int = 0
    measurable: bool = False
    asked: str = ""

    @property
    def gauge(self) -> Gauge | None:
        """Of the device; None where nothing is known of its memory."""
        return gauge_for(self.device)

    def attempt(self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, at_most: int | None = None) -> Trial:
        """Try a step with microbatches of ``size`` samples (None: the whole local batch).

        If its collectives differ from their trace, the step is tried once more, in checked mode.

        Args:
            inner: leaves the gradient; called once.
            at_most: a rehearsal of so many microbatches, after which nothing is left, whether it fits or not.

        Mutates: as ``inner``; where it is a rehearsal or fails on any rank, nothing.
        Collective: as ``inner``, and its vote.

        Raises:
            StepError: the loss function writes into its batch, so that it cannot be tried again.
        """
        while True:
            trial = self._attempt(inner, state, batch, size, at_most)
            if not trial.attempt.repeat:
                return trial
            state = trial.state  # the trace is dropped, so the next try has none to differ from

    def _attempt(self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, at_most: int | None) -> Trial:
        shared = state.spec.mesh is not None and current().world_size > 1
        kept, before = KeptRandomness(), _versions(batch)
        if not shared:
            self.buffers.keep()
        attempt = Attempt(
            run=state.shared,
            traces=self.traces,
            shared=shared,
            at_most=at_most,
            prepare=self.buffers.keep if shared else None,
            on_failure=self.on_failure,
            thrashed=self.thrashed,
            live=None if at_most is None or (gauge := self.gauge) is None else lambda: gauge.read().live,
        )
        begun, made = time.monotonic(), None
        try:
            with attempting(attempt):
                made = inner(state, batch, **({} if size is None else {"microbatch_size": size}))
            tally = made[0].tally
        except Abandoned as abandoned:
            tally = abandoned.tally
        except Exception as error:
            if shared or not is_out_of_memory(error):
                self._put_back(state, kept)
                raise
            # A grad function of the user's own, which knows of no attempts; alone, there is nobody to agree with.
            tally = state.tally
            attempt.note(error)
            attempt.samples = count_samples(batch)
        trial = Trial(
            fits=made is not None,
            made=made if at_most is None else None,
            attempt=attempt,
            state=state.but(tally=tally),
            seconds=time.monotonic() - begun,
        )
        self.asked, self.samples = attempt.asked, attempt.samples
        if trial.made is None:
            self._put_back(state, kept)
            _check_untouched(batch, before, state.step)
        return trial

    def _put_back(self, state: TrainState, kept: KeptRandomness) -> None:
        state.drop_gradients()
        self.buffers.put_back()
        kept.put_back()

    def rehearse(
        self, inner: GradFn, state: TrainState, batch: Batch, size: int | None, *, microbatches: int
    ) -> tuple[Try, TrainState]:
        """Whether ``size`` fits, and how much memory it takes; the state knows of the time that it took.

        Mutates: the peak of the device's memory statistics starts again.
        Collective: as a step, and one record on the control group.
        """
        move, before = spans.moving("step"), 0
        if (gauge := self.gauge) is not None:
            gauge.reset()
            before = gauge.read().live
        trial = self.attempt(inner, state, batch, size, at_most=microbatches)
        move("search")
        ranks = self.measured(before, trial.attempt.kept)
        tried = Try(
            size=self.largest if size is None else size,
            fits=trial.fits,
            ranks=ranks if trial.fits else (),
            seconds=trial.seconds,
        )
        return tried, trial.state

    def measured(self, before: int, kept: int = 0) -> tuple[Memory, ...]:
        """What every rank has measured since the last reset; nothing where one cannot measure.

        Collective: one record on the control group. Mutates: ``largest``, the samples of the fullest rank.
        """
        reading = gauge.read() if (gauge := self.gauge) is not None else None
        row = [
            self.samples,
            reading is not None,
            kept,
            before,
            reading.peak if reading else 0,
            reading.capacity if reading else 0,
        ]
        rows = all_gather_numbers(row, where="auto_microbatch")
        self.largest = int(max(row[0] for row in rows))
        if not all(row[1] for row in rows):
            return ()
        return tuple(Memory(kept=int(row[2]), before=int(row[3]), peak=int(row[4]), capacity=int(row[5])) for row in rows)

    def count(self) -> None:
        """Learn how many samples the fullest rank has. Collective: one record on the control group. Mutates: ``largest``."""
        self.largest = int(max(row[0] for row in all_gather_numbers([self.samples], where="auto_microbatch")))

    def thrashed(self) -> bool:
        """Whether the allocator of this rank had to flush its cache since the last time that this was asked."""
        if self.device.type != "cuda":
            return False
        # All that a reading holds would take longer to read.
        retries = int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))
        thrashed, self.retries = retries > self.retries, retries
        return thrashed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """What became of a try: the step ``made``, if it fitted and was no rehearsal; ``state`` to try again from."""

    fits: bool
    made: tuple[TrainState, Metrics] | None
    attempt: Attempt
    state: TrainState
    seconds: float

    @property
    def thrashed(self) -> bool:
        """Whether it fitted on some rank only because its allocator gave memory back."""
        return any(Verdict.THRASHED in verdict for verdict in self.attempt.verdicts)


def trials_for(state: TrainState) -> Trials:
    """The tries of a run begin."""
    trials = Trials(traces=Traces(always_check=state.spec.copies > 1), buffers=KeptBuffers(state.model), device=state.device)
    # What ranks exchange inside a batch is as large as the batch, and so unknown before.
    trials.thrashed()  # what was before does not count
    return trials


def _versions(batch: Batch) -> Sequence[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors_of(batch)]


def _check_untouched(batch: Batch, before: Sequence[tuple[Tensor, int]], step: int) -> None:
    changed = [tensor for tensor, version in before if tensor._version != version]
    if changed:
        raise StepError(
            f"auto_microbatch: step {step}: the loss function wrote into its batch (a tensor of shape "
            f"{tuple(changed[0].shape)}), so the step cannot be tried again with smaller microbatches; clone what "
            "it changes"
        )
