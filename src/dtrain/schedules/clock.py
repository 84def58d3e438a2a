"""Count training progress in steps, epochs, samples, tokens and seconds (``Clock``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration, RunLength

_UNIT_FIELDS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens", "sec": "seconds"}
_COUNT_FIELDS = ("step", "epoch", "step_in_epoch", "samples", "tokens", "seconds")
_NO_LOADER_REASON = "no dtrain loader returned the batch of the last step, or the batch was made of new tensors"


class EpochPosition(NamedTuple):
    """Position in a loader's data: completed epochs, and batches of the current epoch (None if the loader has no count)."""

    epoch: int = 0
    batch: int | None = 0


# Without slots, because a copy of ``__dict__`` is several times as fast as a copy of slots, and each step makes two clocks.
@dataclass(frozen=True, kw_only=True)
class Clock:
    """Progress of training. All counts are global (summed over ranks) and exact.

    ``epoch`` and ``step_in_epoch`` are the position of the last batch in its loader's data, and do not depend on the number of
    steps per batch. Every tick makes a new clock.

    Args:
        step: optimizer steps done.
        epoch: completed epochs of the loader.
        step_in_epoch: batches of the current epoch.
        samples: samples trained on.
        tokens: tokens trained on.
        seconds: rank 0's time in and between steps, summed over resumes. Equal on every rank, but not bit-reproducible.
        run_length: length of the run, for ``"0.1dur"``. Set by ``Step.init``, and not part of a checkpoint.

    Example:
        >>> import dtrain as dt
        >>> clock = dt.schedules.Clock(step=250, samples=8000)
        >>> clock.reached("5_000sp"), clock.count("ba")
        (True, 250)
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # Counts that ``crossed`` compares with: one tick ago, and for epochs at the start of the batch.
    _previous: Clock | None = None
    run_length: RunLength | None = None
    # Position at the start of the last step, if batches passed without a step before it.
    _step_start: EpochPosition | None = None
    # Reason why the last batch has no position. If set, all durations in epochs raise.
    _no_epochs_reason: str | None = field(default=None, compare=False)

    def tick(self, *, samples: int, tokens: int, seconds: float, position: EpochPosition | None = None) -> Clock:
        """Return the clock after one step over ``samples`` and ``tokens`` that took ``seconds``.

        Args:
            samples: samples of all ranks.
            tokens: tokens of all ranks.
            seconds: rank 0's time.
            position: position in the loader's data after the batch; None if no loader returned the batch.
        """
        epoch, batch = (self.epoch, self.step_in_epoch) if position is None else position
        return self._replace(
            step=self.step + 1,
            epoch=epoch,
            step_in_epoch=(self.step_in_epoch + 1) * (epoch == self.epoch) if batch is None else batch,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            # Without its own previous clock, so that old clocks are freed.
            _previous=self._replace(_previous=None, _step_start=None, _no_epochs_reason=None),
            _step_start=None,
            _no_epochs_reason=(self._no_epochs_reason or _NO_LOADER_REASON) if position is None else None,
        )

    @property
    def _position(self) -> EpochPosition:
        """Position in the loader's data."""
        return EpochPosition(self.epoch, self.step_in_epoch)

    def _counts_at(self, position: EpochPosition) -> Clock:
        """Return the counts at ``position``, without the previous clock, so that old clocks are freed."""
        return self._replace(
            epoch=position.epoch, step_in_epoch=position.batch or 0, _previous=None, _step_start=None, _no_epochs_reason=None
        )

    def _start_of_batch(self, *, repeated: bool) -> EpochPosition:
        """Return the position before the next batch; if ``repeated``, before the batch of the last step."""
        return self._previous._position if repeated and self._previous is not None else self._position

    def _crossing_from(self, position: EpochPosition) -> Clock:
        """Return the clock after a step, whose ``crossed`` counts epochs from ``position`` instead of from the step's start."""
        if self._previous is None or self._previous._position == position:
            return self
        return self._replace(_previous=self._previous._counts_at(position), _step_start=self._previous._position)

    def _begin_step(self, start: EpochPosition) -> Clock:
        """Return the clock at the start of a step whose batch begins at ``start``.

        Inside of a step, ``crossed`` compares the starts of two steps.
        """
        if start == self._position and self._step_start is None and self._no_epochs_reason is None:
            return self
        previous = self._previous
        if previous is not None and self._step_start is not None:
            previous = previous._counts_at(self._step_start)
        return self._replace(
            epoch=start.epoch, step_in_epoch=start.batch or 0, _previous=previous, _step_start=None, _no_epochs_reason=None
        )

    def _without_epochs(self, reason: str) -> Clock:
        """Return the clock at the start of a step whose batch has no position in a loader."""
        return self if self._no_epochs_reason == reason else self._replace(_no_epochs_reason=reason)

    def _replace(self, **changes: Any) -> Clock:
        """Return this clock with ``changes``; faster than ``dataclasses.replace``."""
        clock = object.__new__(Clock)
        fields = clock.__dict__
        fields |= self.__dict__
        fields |= changes
        return clock

    def count(self, unit: str) -> int | float:
        """Return the count of ``unit``; ``ep`` counts completed epochs, ``dur`` is the share of the run.

        Raises:
            ConfigError: an unknown unit, ``dur`` in a run of unknown length, ``ep`` in a loop without a loader.
        """
        if unit == "dur":
            return float(self._run_fraction())
        if unit == "ep":
            self._check_epochs("ep")
        if unit not in _UNIT_FIELDS:
            raise ConfigError(f"clock: unit must be one of {', '.join(_UNIT_FIELDS)} or dur, got {unit!r}. Choose one of them.")
        count: int | float = getattr(self, _UNIT_FIELDS[unit])
        return count

    def reached(self, point: Duration | int | str) -> bool:
        """Return True if training has come to ``point`` or beyond.

        >>> Clock(tokens=3000).reached("2_500tok"), Clock(step=9).reached(10)
        (True, False)

        Raises:
            ConfigError: not a duration, ``dur`` in a run of unknown length, epochs in a loop without a loader.
        """
        point = Duration.parse(point, allow_zero=True)
        if point.unit == "dur" and point.value:
            return self._count_intervals(point) >= 1
        if not point.value:
            return True
        return self.count(point.unit) >= point.value

    def crossed(self, every: Duration | int | str) -> bool:
        """Return True if the last tick crossed a boundary of ``every``, for ticks of any size.

        Epochs are the loader's epochs. If a batch takes several steps, all of them return True if the epoch ended with the
        batch. So call once per batch, after its last step.

        >>> clock = Clock().tick(
        ...     samples=30, tokens=0, seconds=0.1, position=EpochPosition(0, 1)
        ... )
        >>> (
        ...     clock.crossed("1ba"),
        ...     clock.crossed("25sp"),
        ...     clock.crossed("40sp"),
        ...     clock.crossed("1ep"),
        ... )
        (True, True, False, False)

        Raises:
            ConfigError: not a duration, ``dur`` in a run of unknown length, epochs in a loop without a loader.
        """
        length = Duration.parse(every)
        if self._uses_epochs(length):
            self._check_epochs(length)
        if self._previous is None:
            return False
        # Clocks from a checkpoint have no run length, and a resumed run may have another length.
        previous = self._previous._replace(run_length=self.run_length) if length.unit == "dur" else self._previous
        return self._count_intervals(length) > previous._count_intervals(length)

    def _uses_epochs(self, length: Duration) -> bool:
        """Return True if ``length`` depends on the position in the loader's data: epochs, or a share of a run in epochs."""
        total = None if self.run_length is None else self.run_length.total
        return length.unit == "ep" or (length.unit == "dur" and total is not None and total.unit == "ep")

    def _check_epochs(self, duration: object) -> None:
        if self._no_epochs_reason is not None:
            raise ConfigError(
                f"clock: {duration} is counted in epochs, and this loop has none: {self._no_epochs_reason}. Take batches from "
                "dt.build_loader, or name the loader: step.init(model, optimizer, loader=loader). Or count in steps ('100ba')."
            )

    def _count_intervals(self, every: Duration) -> int:
        """Return the number of completed intervals."""
        if every.unit == "dur":
            return math.floor(self._run_fraction(every) / every.fraction)
        return int(self.count(every.unit) // every.value)

    def _run_fraction(self, share: Duration | None = None) -> Fraction:
        """Return the exact completed share of the run. For a run in epochs, count the steps of the current epoch."""
        total = None if self.run_length is None else self.run_length.total
        if total is None:
            raise ConfigError(
                f"clock: {share or 'dur'} is a share of the run, whose length is not known. "
                "Give the length to the step: step.init(model, optimizer, run_length=loader.run_length('3ep'))."
            )
        if total.unit == "ep":
            self._check_epochs(share or "dur")
        if total.unit != "ep":
            return Fraction(self.count(total.unit)) / Fraction(total.value)
        steps = self.run_length.steps_per_epoch if self.run_length is not None else None
        if steps is None:
            if share is not None and (share.fraction * int(total.value)).denominator == 1:
                # All boundaries are ends of epochs.
                return Fraction(self.epoch, int(total.value))
            raise ConfigError(
                f"clock: {share or 'dur'} of a run of {total} may end inside of an epoch, whose steps are not known. "
                f"Give RunLength(total={str(total)!r}, steps_per_epoch=...), or loader.run_length({str(total)!r})."
            )
        return Fraction(self.epoch * steps + min(self.step_in_epoch, steps), int(total.value) * steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data, with the counts of ``previous`` and the position ``step_start``.

        ``previous`` is None at the start. ``step_start`` exists only if it differs from the position of ``previous``.
        """
        own = {name: getattr(self, name) for name in _COUNT_FIELDS}
        previous = None if self._previous is None else {name: getattr(self._previous, name) for name in _COUNT_FIELDS}
        return {**own, "previous": previous, **({} if self._step_start is None else {"step_start": [*self._step_start]})}


def elapsed_fraction(clock: Clock, start: Duration, length: Duration) -> Fraction:
    """Return the elapsed fraction of ``length`` since ``start``, from 0 to 1, in steps if the units differ.

    Raises:
        ConfigError: the run cannot convert a duration to steps.
    """
    if start.unit == length.unit:
        # A count of "dur" is a float close to a fraction whose denominator is the number of steps. Recover this fraction.
        elapsed = (Fraction(clock.count(start.unit)).limit_denominator(10**7) - start.fraction) / length.fraction
    else:
        elapsed = Fraction(clock.step - start.steps(clock.run_length), length.steps(clock.run_length))
    return min(max(elapsed, Fraction(0)), Fraction(1))
