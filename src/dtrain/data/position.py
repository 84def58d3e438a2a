"""Where a loader is: a few integers, and the arithmetic of epochs, batches and samples. Nothing here reads data.

The batch that a loader handed out last, and whether its step is complete; the samples that were left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dtrain.data.sampling.last_batch import LastBatch, batch_bounds, batches_left, epoch_samples
from dtrain.dist.batch_info import UNTRACKED_BATCHES, BatchStatus
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.typing import Plain, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a loader has come: whole epochs, samples of the current one (over all ranks); batches and samples in all.

    Samples that were skipped are in ``epoch`` and ``samples``, not in ``batches`` and ``total``.
    """

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    total: int = 0


def is_reached(goal: Duration, at: Position) -> bool:
    """Whether a run that has come to ``at`` is as long as ``goal``, in epochs, batches or samples."""
    return {"ep": at.epoch, "ba": at.batches, "sp": at.total}[goal.unit] >= goal.value


def parse_length(length: Duration | int | str) -> Duration:
    """``length`` in a unit that a loader counts.

    Raises:
        ConfigError: tokens or seconds.
    """
    goal = Duration.parse(length)
    if goal.unit in ("ep", "ba", "sp"):
        return goal
    raise ConfigError(f"loader: cannot count steps in {goal.unit!r} ({goal}); give epochs (ep), batches (ba) or samples (sp)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBatches:
    """Global batches over the positions of an epoch; one may begin anywhere, since the batch size may change on the way.

    Args:
        size: samples of the dataset.
        global_batch_size: samples per batch, over all ranks; or a schedule of such, of the batch's number in the run.
        last_batch: what becomes of a last batch that is not full.
    """

    size: int
    global_batch_size: int | Schedule
    last_batch: LastBatch = "short"

    def batch_size_at(self, at: Position) -> int:
        """Samples of a full batch at ``at``.

        Raises:
            ConfigError: a schedule gave less than 1 there.
        """
        if not callable(self.global_batch_size):
            return self.global_batch_size
        size = self.global_batch_size(at.batches)
        if not 1 <= size < math.inf:
            raise ConfigError(
                f"loader: a schedule of global_batch_size must give 1 or more, got {size!r} at batch {at.batches}"
            )
        return int(size)

    def _constant_batch_size(self, where: str) -> int:
        if callable(self.global_batch_size):
            raise ConfigError(f"loader: {where} differs between epochs: global_batch_size is a schedule; ask for total_steps")
        return self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples that a whole epoch hands out."""
        return (
            self.size
            if self.last_batch == "short"
            else epoch_samples(self.size, self._constant_batch_size("epoch_samples"), self.last_batch)
        )

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch."""
        return batches_left(0, self.size, self._constant_batch_size("steps_per_epoch"), self.last_batch)

    def total_steps(self, goal: Duration) -> int:
        """Batches from the start of a run to ``goal``, in epochs or samples."""
        if callable(self.global_batch_size):
            at = Position()
            while not is_reached(goal, at):
                at = self.advance(at)
            return at.batches
        whole = int(goal.value)
        if goal.unit == "ep":
            return whole * self.steps_per_epoch()
        epochs, rest = divmod(whole, self.samples_per_epoch)
        return epochs * self.steps_per_epoch() + -(-rest // self.global_batch_size)

    def bounds(self, at: Position) -> tuple[int, int]:
        """First and last position of the global batch at ``at``, which is one that ``after`` or ``inside`` gave."""
        bounds = batch_bounds(at.samples, self.size, self.batch_size_at(at), self.last_batch)
        assert bounds is not None, f"no batch at {at}"
        return bounds

    def advance(self, at: Position) -> Position:
        """Where the next batch begins."""
        start, stop = self.bounds(at)
        here = Position(epoch=at.epoch, samples=stop, batches=at.batches + 1, total=at.total + stop - start)
        return self.normalize(here)

    def skip(self, at: Position, samples: int) -> Position:
        """``at`` moved on by ``samples``, over the ends of epochs."""
        epochs, rest = divmod(at.samples + samples, self.samples_per_epoch)
        return self.normalize(replace(at, epoch=at.epoch + epochs, samples=rest))

    def normalize(self, at: Position) -> Position:
        """``at``, or the start of the next epoch where this one has no batch left."""
        # A schedule is not asked for the size of a batch beyond the run, of which it may know nothing.
        size = 1 if self.last_batch == "short" else self.batch_size_at(at)
        ended = batch_bounds(at.samples, self.size, size, self.last_batch) is None
        return replace(at, epoch=at.epoch + 1, samples=0) if ended else at


_MAX_LISTED = 1000


@dataclass(slots=True, kw_only=True)
class SkippedSamples:
    """Samples that ``on_error="skip"`` left out on this rank: how many, and the first thousand with the reason.

    A sample is named by its index in the dataset, or by its place in the epoch where the dataset is iterable.
    """

    count: int = 0
    samples: list[tuple[int, str]]

    def add(self, more: list[tuple[int, str]]) -> None:
        """Mutates: this list."""
        self.count += len(more)
        self.samples += more[: _MAX_LISTED - len(self.samples)]

    def remove(self, added: list[tuple[int, str]]) -> None:
        """Remove what ``add`` was given, since the same samples will be read again. Mutates: this list."""
        self.count -= len(added)
        self.samples = [sample for sample in self.samples if not any(sample is one for one in added)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedBatch:
    """The batch that a loader handed out last.

    Args:
        agreement: the answers of the step on the batch; the same object if the batch is handed out again.
        position_before: position before the batch.
        dataset_state: state of an iterable dataset there.
        position_after: position once the batch is consumed.
        skipped: samples of the batch that were left out.
        step_expected: if True, a step was made on the batch before it, so a step is to be expected on this batch.
        unplaced_steps: steps over batches without a place when it was handed out. A later one may be over a slice of this batch.
    """

    agreement: BatchStatus
    position_before: Position
    dataset_state: Plain
    position_after: Position
    skipped: list[tuple[int, str]]
    step_expected: bool
    unplaced_steps: int = field(default_factory=lambda: UNTRACKED_BATCHES.steps)

    @property
    def is_stepped(self) -> bool:
        """True if a step on the batch, or perhaps on a slice of it, is complete."""
        return self.agreement.consumed or self.unplaced_steps != UNTRACKED_BATCHES.steps

    @property
    def is_pending(self) -> bool:
        """True if a step on the batch was begun or is to be expected, and is not complete."""
        expected = self.step_expected and self.unplaced_steps == UNTRACKED_BATCHES.steps
        return not self.agreement.consumed and (self.agreement.started or expected)
