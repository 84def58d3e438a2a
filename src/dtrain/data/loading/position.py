"""Where a loader is: a few integers, and the arithmetic of epochs, batches and samples. Nothing here reads data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtrain.data.order.tails import Tail, batch_bounds, batches_left, epoch_samples
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.types import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a loader has come: whole epochs, samples of the current one (over all ranks); batches and samples in all.

    Samples that were skipped are in ``epoch`` and ``samples``, not in ``batches`` and ``total``.
    """

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    total: int = 0


def reached(goal: Duration, at: Position) -> bool:
    """Whether a run that has come to ``at`` is as long as ``goal``, in epochs, batches or samples."""
    return {"ep": at.epoch, "ba": at.batches, "sp": at.total}[goal.unit] >= goal.value


def countable(length: Duration | int | str) -> Duration:
    """``length`` in a unit that a loader counts.

    Raises:
        ConfigError: tokens or seconds.
    """
    goal = Duration.parse(length)
    if goal.unit in ("ep", "ba", "sp"):
        return goal
    raise ConfigError(f"loader: cannot count steps in {goal.unit!r} ({goal}); give epochs (ep), batches (ba) or samples (sp)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Global batches over the positions of an epoch; one may begin anywhere, since the batch size may change on the way.

    Args:
        size: samples of the dataset.
        global_batch_size: samples per batch, over all ranks; or a schedule of such, of the batch's number in the run.
        tail: what becomes of a last batch that is not full.
    """

    size: int
    global_batch_size: int | Schedule
    tail: Tail = "short"

    def batch_size(self, at: Position) -> int:
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

    def _constant(self, where: str) -> int:
        if callable(self.global_batch_size):
            raise ConfigError(f"loader: {where} differs between epochs: global_batch_size is a schedule; ask for total_steps")
        return self.global_batch_size

    @property
    def samples(self) -> int:
        """Samples that a whole epoch hands out."""
        return self.size if self.tail == "short" else epoch_samples(self.size, self._constant("epoch_samples"), self.tail)

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch."""
        return batches_left(0, self.size, self._constant("steps_per_epoch"), self.tail)

    def total_steps(self, goal: Duration) -> int:
        """Batches from the start of a run to ``goal``, in epochs or samples."""
        if callable(self.global_batch_size):
            at = Position()
            while not reached(goal, at):
                at = self.after(at)
            return at.batches
        whole = int(goal.value)
        if goal.unit == "ep":
            return whole * self.steps_per_epoch()
        epochs, rest = divmod(whole, self.samples)
        return epochs * self.steps_per_epoch() + -(-rest // self.global_batch_size)

    def bounds(self, at: Position) -> tuple[int, int]:
        """First and last position of the global batch at ``at``, which is one that ``after`` or ``inside`` gave."""
        bounds = batch_bounds(at.samples, self.size, self.batch_size(at), self.tail)
        assert bounds is not None, f"no batch at {at}"
        return bounds

    def after(self, at: Position) -> Position:
        """Where the next batch begins."""
        start, stop = self.bounds(at)
        here = Position(epoch=at.epoch, samples=stop, batches=at.batches + 1, total=at.total + stop - start)
        return self.inside(here)

    def skipped(self, at: Position, samples: int) -> Position:
        """``at`` moved on by ``samples``, over the ends of epochs."""
        epochs, rest = divmod(at.samples + samples, self.samples)
        return self.inside(replace(at, epoch=at.epoch + epochs, samples=rest))

    def inside(self, at: Position) -> Position:
        """``at``, or the start of the next epoch where this one has no batch left."""
        # A schedule is not asked for the size of a batch beyond the run, of which it may know nothing.
        size = 1 if self.tail == "short" else self.batch_size(at)
        ended = batch_bounds(at.samples, self.size, size, self.tail) is None
        return replace(at, epoch=at.epoch + 1, samples=0) if ended else at
