"""Loader position and the arithmetic to advance it; the batch that the loader issued last; the list of skipped samples.

Positions are the positions of a ``SampleOrder``, and an epoch starts at 0. The batch size may change in the middle of an epoch,
so a batch may start anywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from dtrain.data.sample_order import CachedOrder, SampleOrder
from dtrain.dist.batch_info import BatchStatus
from dtrain.dist.context import current_context
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.schedules.clock import EpochPosition
from dtrain.schedules.durations import Duration, RunLength
from dtrain.typing import Plain, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Progress of a loader: complete epochs, samples of the current epoch over all ranks, and batches and samples in total.

    Skipped samples count in ``epoch`` and ``samples``, but not in ``batches`` and ``total``.
    """

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    total: int = 0

    def after_batch(self, samples: int) -> Position:
        """Return the position after a batch of ``samples`` samples, in the same epoch."""
        return Position(epoch=self.epoch, samples=self.samples + samples, batches=self.batches + 1, total=self.total + samples)

    def in_epoch(self, global_batch_size: int | Schedule) -> EpochPosition:
        """Return the epoch and the number of batches in it; None instead of the number if the batch size is a schedule."""
        size = global_batch_size
        return EpochPosition(self.epoch, None if callable(size) else -(-self.samples // size))


_STATE_VERSION = 1


def write_position(position: Position) -> dict[str, Plain]:
    """Return the entries of a loader's saved state that ``read_position`` reads."""
    return {"version": _STATE_VERSION, **asdict(position)}


def read_position(state: Mapping[str, Plain]) -> Position:
    """Read the position of a loader's saved state.

    Raises:
        CheckpointMismatchError: the state has another format version, or an entry is not an integer.
    """
    if state.get("version") != _STATE_VERSION:
        raise CheckpointMismatchError(
            f"loader: the saved position has format version {state.get('version')}, this release reads {_STATE_VERSION}. "
            "Pass ignore=['loader'] to start over."
        )
    values = {name: state.get(name) for name in ("epoch", "samples", "batches", "total")}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointMismatchError(
                f"loader: {name!r} of the saved position must be an integer, got {value!r}. "
                "Load another step, or pass ignore=['loader'] to start over."
            )
    return Position(**cast("dict[str, int]", values))


def is_reached(goal: Duration, position: Position) -> bool:
    """Return True if a run at ``position`` has reached ``goal``, in epochs, batches or samples."""
    return _count(goal.unit, position) >= goal.value


def _count(unit: str, position: Position) -> int:
    return position.epoch if unit == "ep" else position.batches if unit == "ba" else position.total


class StopCondition(Protocol):
    """Condition that ends a run before its length."""

    @property
    def stopped(self) -> bool:
        """True if the run has ended."""
        ...


def describe_end(goal: Duration, position: Position, stops: Sequence[StopCondition]) -> str | None:
    """Return a line for the user if a loop from ``position`` to ``goal`` has no batch; None if it has batches."""
    ended = next((condition for condition in stops if condition.stopped), None)
    if ended is not None:
        return f"until: the run has ended by {ended!r}. Nothing is left to train"
    if not is_reached(goal, position):
        return None
    count, value = _count(goal.unit, position), int(goal.value)
    later = Duration((count // max(value, 1) + 1) * max(value, 1), goal.unit)
    return (
        f'until: {goal} was reached {"at" if count == value else "by"} batch {position.batches}; until("{later}") would go on'
    )


def describe_epoch(position: Position) -> str:
    """Return a line for the user whose loop after a load does not count the epochs of the run."""
    verb, number = "continues" if position.samples else "begins", position.epoch + 1
    return f'loader: epoch {number} of this run {verb}; until("{number}ep") counts the epochs of the run'


def parse_length(run_length: Duration | int | str) -> Duration:
    """Parse ``run_length`` to a duration in a unit that a loader counts.

    Raises:
        ConfigError: the unit is tokens or seconds.
    """
    goal = Duration.parse(run_length)
    if goal.unit in ("ep", "ba", "sp"):
        return goal
    raise ConfigError(f"loader: cannot count steps in {goal.unit!r} ({goal}). Give epochs (ep), batches (ba) or samples (sp).")


LastBatch = Literal["short", "drop", "pad"]
"""Issue the short batch, drop it, or pad it with the first samples of the epoch."""

LAST_BATCH_MODES: tuple[LastBatch, ...] = ("short", "drop", "pad")


def batch_bounds(start: int, size: int, global_batch_size: int, last_batch: LastBatch) -> tuple[int, int] | None:
    """Return the positions of the global batch that begins at ``start``; None if the epoch has no batch left.

    With ``"pad"`` the positions may exceed ``size``, see ``batch_indices``.

    >>> [batch_bounds(8, 10, 4, mode) for mode in LAST_BATCH_MODES]
    [(8, 10), None, (8, 12)]
    """
    stop = start + global_batch_size
    if start >= size or (last_batch == "drop" and stop > size):
        return None
    return start, min(stop, size) if last_batch == "short" else stop


def batch_indices(order: SampleOrder | CachedOrder, epoch: int, start: int, stop: int) -> Tensor:
    """Return ``order.indices``. Positions beyond the epoch wrap around to its start, several times if necessary."""
    if stop <= order.size:
        return order.indices(epoch, start, stop)
    parts = [order.indices(epoch, min(start, order.size), order.size)]
    begin = max(start, order.size)
    while begin < stop:
        first = begin % order.size
        count = min(stop - begin, order.size - first)
        parts.append(order.indices(epoch, first, first + count))
        begin += count
    return torch.cat(parts)


def convert_run_length(goal: Duration, global_batch_size: int | Schedule, epoch_batches: EpochBatches | None) -> RunLength:
    """Return a run of length ``goal``. Without ``epoch_batches`` the dataset has no length, and no unit can be converted."""
    size = None if callable(global_batch_size) else global_batch_size
    if epoch_batches is None:
        return RunLength(total=goal, samples_per_step=size)
    # With a schedule, the epochs may have different numbers of steps.
    if size is None:
        return RunLength(total=Duration(epoch_batches.total_steps(goal), "ba"))
    run = RunLength(total=goal, steps_per_epoch=epoch_batches.steps_per_epoch(), samples_per_step=size)
    uneven = goal.unit == "sp" and run.steps() != epoch_batches.total_steps(goal)
    return replace(run, total=Duration(epoch_batches.total_steps(goal), "ba")) if uneven else run


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBatches:
    """Arithmetic of the global batches of an epoch. A batch may begin at any sample, since the batch size may change.

    Args:
        size: samples of the dataset.
        global_batch_size: samples per batch, over all ranks; or a schedule of the batch's number in the run.
        last_batch: treatment of a last batch that is not full.
    """

    size: int
    global_batch_size: int | Schedule
    last_batch: LastBatch = "short"

    def batch_size_at(self, position: Position) -> int:
        """Return the samples of a full batch at ``position``.

        Raises:
            ConfigError: the schedule of the batch size returns less than 1.
        """
        if not callable(self.global_batch_size):
            return self.global_batch_size
        size = self.global_batch_size(position.batches)
        if not 1 <= size < math.inf:
            raise ConfigError(
                f"loader: a schedule of global_batch_size must give 1 or more, got {size!r} at batch {position.batches}. "
                "Correct the schedule so that no batch is empty."
            )
        return int(size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that a complete epoch issues."""
        batch = self.global_batch_size
        return self.size if self.last_batch == "short" or callable(batch) else self.steps_per_epoch() * batch

    def steps_per_epoch(self) -> int:
        """Count the batches of a complete epoch.

        Raises:
            ConfigError: the batch size is a schedule.
        """
        batch = self.global_batch_size
        if callable(batch):
            raise ConfigError(
                "loader: steps_per_epoch differs between epochs, because global_batch_size is a schedule. "
                "Call total_steps instead."
            )
        return self.remaining_steps(Position())

    def total_steps(self, goal: Duration) -> int:
        """Count the batches from the start of a run to ``goal``."""
        if goal.unit == "ba":
            return int(goal.value)
        if callable(self.global_batch_size):
            position = Position()
            while not is_reached(goal, position):
                position = self.advance(position)
            return position.batches
        whole = int(goal.value)
        if goal.unit == "ep":
            return whole * self.steps_per_epoch()
        epochs, rest = divmod(whole, self.samples_per_epoch)
        return epochs * self.steps_per_epoch() + -(-rest // self.global_batch_size)

    def remaining_steps(self, position: Position) -> int:
        """Count the batches from ``position`` to the end of its epoch. ``position`` comes from ``advance`` or ``normalize``."""
        batch = self.global_batch_size
        if callable(batch):
            end = position
            while end.epoch == position.epoch:
                end = self.advance(end)
            return end.batches - position.batches
        samples = self.size - position.samples
        return samples // batch if self.last_batch == "drop" else -(-samples // batch)

    def bounds(self, position: Position) -> tuple[int, int]:
        """Return the bounds of the global batch at ``position``, which comes from ``advance`` or ``normalize``."""
        bounds = batch_bounds(position.samples, self.size, self.batch_size_at(position), self.last_batch)
        assert bounds is not None, f"no batch at {position}"
        return bounds

    def advance(self, position: Position) -> Position:
        """Return the position of the next batch."""
        start, stop = self.bounds(position)
        return self.normalize(position.after_batch(stop - start))

    def skip(self, position: Position, samples: int) -> Position:
        """Move ``position`` forward by ``samples``, over the ends of epochs."""
        epochs, rest = divmod(position.samples + samples, self.samples_per_epoch)
        return self.normalize(replace(position, epoch=position.epoch + epochs, samples=rest))

    def normalize(self, position: Position) -> Position:
        """Return ``position``, or the start of the next epoch if the epoch of ``position`` has no batch left."""
        # A schedule may be undefined beyond the end of the run. So "short", which needs no batch size, does not call it.
        size = 1 if self.last_batch == "short" else self.batch_size_at(position)
        ended = batch_bounds(position.samples, self.size, size, self.last_batch) is None
        return replace(position, epoch=position.epoch + 1, samples=0) if ended else position


_MAX_LISTED = 1000


@dataclass(slots=True, kw_only=True)
class SkippedSamples:
    """Samples that ``on_error="skip"`` left out on this rank: the count, and the first thousand samples with the reason.

    The number of a sample is its index in the dataset, or its position in the epoch if the dataset is iterable.
    """

    count: int = 0
    samples: list[tuple[int, str]]

    def add(self, skipped: list[tuple[int, str]]) -> None:
        """Append samples. Mutates: this list."""
        if skipped:
            self.count += len(skipped)
            self.samples += skipped[: _MAX_LISTED - len(self.samples)]

    def remove(self, added: list[tuple[int, str]]) -> None:
        """Remove samples that ``add`` appended, since the loader reads them again. Mutates: this list."""
        self.count -= len(added)
        self.samples = [sample for sample in self.samples if not any(sample is removed for removed in added)]


class BatchesWithoutStep:
    """The newest batches of a run that had no step when the loop asked for the next batch."""

    def __init__(self) -> None:
        self._batches: deque[tuple[BatchStatus, int]] = deque(maxlen=64)

    def add(self, status: BatchStatus, number: int) -> None:
        """Add the batch with this number in the run."""
        self._batches.append((status, number))

    def clear(self) -> None:
        self._batches.clear()

    def pop_lost(self) -> list[int]:
        """Return the batches that the loop holds back behind a batch with a late step: a resume leaves them out.

        Mutates: this object, which forgets them, if there are any.
        """
        stepped = [index for index, (status, _) in enumerate(self._batches) if status.consumed]
        lost = [number for _, number in self._batches][stepped[-1] + 1 :] if stepped else []
        if lost:
            self.clear()
        return lost


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True, kw_only=True)
class IssuedBatch:
    """The batch that a loader issued last.

    Args:
        status: status of the step on the batch; the same object if the loader issues the batch again.
        position_before: position before the batch.
        dataset_state: state of an iterable dataset at ``position_before``.
        position_after: position once the batch is consumed.
        skipped: samples of the batch that could not be read.
        step_expected: if True, a step on this batch is expected: a run holds the loader, or the previous batch had a step.
        unplaced_steps: steps on untracked batches so far. A later untracked step may use a slice of this batch.
    """

    status: BatchStatus
    position_before: Position
    dataset_state: Plain
    position_after: Position
    skipped: list[tuple[int, str]]
    step_expected: bool
    unplaced_steps: int = field(default_factory=lambda: current_context().untracked_steps)

    @property
    def is_stepped(self) -> bool:
        """True if a step on the batch, or possibly on a slice of it, is complete."""
        return self.status.consumed or self.unplaced_steps != current_context().untracked_steps

    @property
    def is_pending(self) -> bool:
        """True if a step on the batch has started or is expected, and is not complete."""
        expected = self.step_expected and self.unplaced_steps == current_context().untracked_steps
        return not self.status.consumed and (self.status.started or expected)
