"""Where a loader is: a few integers, and the arithmetic of epochs, batches and samples. Nothing here reads data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.clock import Duration
from dtrain.data.order.tails import Tail, batch_bounds, batches_left, epoch_samples
from dtrain.errors import ConfigError


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
        global_batch_size: samples per batch, over all ranks.
        tail: what becomes of a last batch that is not full.
    """

    size: int
    global_batch_size: int
    tail: Tail = "short"

    @property
    def samples(self) -> int:
        """Samples that a whole epoch hands out."""
        return epoch_samples(self.size, self.global_batch_size, self.tail)

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch."""
        return batches_left(0, self.size, self.global_batch_size, self.tail)

    def total_steps(self, goal: Duration) -> int:
        """Batches from the start of a run to ``goal``, in epochs or samples."""
        if goal.unit == "ep":
            return goal.value * self.steps_per_epoch()
        epochs, rest = divmod(goal.value, self.samples)
        return epochs * self.steps_per_epoch() + -(-rest // self.global_batch_size)

    def bounds(self, at: Position) -> tuple[int, int]:
        """First and last position of the global batch at ``at``, which is one that ``after`` or ``inside`` gave."""
        bounds = batch_bounds(at.samples, self.size, self.global_batch_size, self.tail)
        assert bounds is not None, f"no batch at {at}"
        return bounds

    def after(self, at: Position) -> Position:
        """Where the next batch begins."""
        start, stop = self.bounds(at)
        ended = batch_bounds(stop, self.size, self.global_batch_size, self.tail) is None
        return Position(
            epoch=at.epoch + ended, samples=0 if ended else stop, batches=at.batches + 1, total=at.total + stop - start
        )

    def skipped(self, at: Position, samples: int) -> Position:
        """``at`` moved on by ``samples``, over the ends of epochs."""
        epochs, rest = divmod(at.samples + samples, self.samples)
        return self.inside(replace(at, epoch=at.epoch + epochs, samples=rest))

    def inside(self, at: Position) -> Position:
        """``at``, or the start of the next epoch where this one has no batch left."""
        ended = batch_bounds(at.samples, self.size, self.global_batch_size, self.tail) is None
        return replace(at, epoch=at.epoch + 1, samples=0) if ended else at
