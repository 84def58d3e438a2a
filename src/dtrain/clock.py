"""Training time: the frozen ``Clock``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError

_UNIT_FIELDS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens", "sec": "seconds"}
_COUNT_FIELDS = ("step", "epoch", "step_in_epoch", "samples", "tokens", "seconds")
_LINK_FIELDS = ("previous", "step_start", "batch_start", "no_epochs_reason")
_NO_LOADER_REASON = "no dtrain loader handed out the batch of the last step, or it was made of new tensors"


class EpochPosition(NamedTuple):
    """A place in a loader's data: whole epochs done, and batches of the current epoch (None if the loader cannot say)."""

    epoch: int = 0
    batch: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The progress of training. All counts are global (summed over ranks) and exact.

    ``step``, ``samples``, ``tokens`` and ``seconds`` count steps and what they trained on. ``seconds`` is rank 0's time inside
    steps and between them, summed over resumes; it is the same number on every rank, and not part of bit-equality.

    ``epoch`` and ``step_in_epoch`` are the place of the last batch in its loader: whole epochs that were handed out, and
    batches of the current one. They do not depend on how many steps a batch takes. ``no_epochs_reason`` is the reason if the last
    batch was not a loader's; then everything that is counted in epochs raises.

    ``previous`` is the clock that ``crossed`` compares with: one tick ago, and for epochs before the batch. ``step_start`` is the
    place that the last step started from, if ``previous`` is at another one, because batches passed without a step. ``batch_start``
    is the same of a clock inside a step: the place that ``crossed`` will compare with. ``run`` is the length of the run, for
    ``"0.1dur"``; ``Step.init`` sets it, and no checkpoint has it.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    previous: Clock | None = None
    run: RunLength | None = None
    step_start: EpochPosition | None = None
    batch_start: EpochPosition | None = None
    no_epochs_reason: str | None = field(default=None, compare=False)

    @property
    def position(self) -> EpochPosition:
        """Epoch and batches of it."""
        return EpochPosition(self.epoch, self.step_in_epoch)

    def begin_batch(self, begin: EpochPosition, *, repeated: bool = False) -> Clock:
        """The clock that a step starts from whose batch begins at ``begin``.

        Args:
            begin: place before the batch; without a number of batches, the clock has counted them.
            repeated: if True, the last step was on the same batch, so its end is not the past yet.
        """
        past = self.previous.position if repeated and self.previous is not None else self.batch_start or self.position
        counted = past.batch if begin.epoch == past.epoch else 0
        here = EpochPosition(begin.epoch, counted if begin.batch is None else begin.batch)
        previous = self.previous if self.step_start is None or self.previous is None else self.previous._counts_at(self.step_start)
        if here == self.position == past and not (self.step_start or self.batch_start or self.no_epochs_reason):
            return self
        batch_start = past if past != here else None
        return replace(
            self,
            epoch=here.epoch,
            step_in_epoch=here.batch or 0,
            previous=previous,
            step_start=None,
            batch_start=batch_start,
            no_epochs_reason=None,
        )

    def without_epochs(self, reason: str) -> Clock:
        """The clock that a step starts from whose batch has no place in a loader."""
        return replace(self, no_epochs_reason=reason)

    def tick(self, *, samples: int, tokens: int, seconds: float, position: EpochPosition | None = None) -> Clock:
        """The clock after one step over ``samples`` and ``tokens`` that took ``seconds``.

        Args:
            position: place in the loader's data once the batch is consumed; None if no loader handed out the batch.
        """
        after = self.position if position is None else position
        counted = after.batch if after.batch is not None else (self.step_in_epoch + 1) * (after.epoch == self.epoch)
        return Clock(
            step=self.step + 1,
            epoch=after.epoch,
            step_in_epoch=counted,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            previous=self._counts_at(self.batch_start),
            run=self.run,
            step_start=None if self.batch_start is None else self.position,
            no_epochs_reason=(self.no_epochs_reason or _NO_LOADER_REASON) if position is None else None,
        )

    def _counts_at(self, position: EpochPosition | None) -> Clock:
        """The counts of this clock, at ``position`` if given. It has no ``previous``: a chain of clocks would never be freed."""
        if position is None and not (self.previous or self.step_start or self.batch_start or self.no_epochs_reason):
            return self
        made = object.__new__(Clock)
        for name in _COUNT_FIELDS:
            object.__setattr__(made, name, getattr(self, name))
        if position is not None:
            object.__setattr__(made, "epoch", position.epoch)
            object.__setattr__(made, "step_in_epoch", position.batch or 0)
        for name in _LINK_FIELDS:
            object.__setattr__(made, name, None)
        object.__setattr__(made, "run", self.run)
        return made

    def count(self, unit: str) -> int | float:
        """How many of ``unit`` there have been; ``ep`` counts whole epochs, and ``dur`` is the share of the run.

        Raises:
            ConfigError: an unknown unit, ``dur`` if the length of the run is not known, ``ep`` of a loop without a loader.
        """
        if unit == "dur":
            return float(self._run_fraction())
        if unit == "ep":
            self._check_epochs("ep")
        if unit not in _UNIT_FIELDS:
            raise ConfigError(f"clock: counts {', '.join(_UNIT_FIELDS)} and dur, got {unit!r}")
        found: int | float = getattr(self, _UNIT_FIELDS[unit])
        return found

    def reached(self, point: Duration | int | str) -> bool:
        """Whether training has come as far as ``point``.

        >>> Clock(tokens=3000).reached("2_500tok"), Clock(step=9).reached(10)
        (True, False)

        Raises:
            ConfigError: no duration, ``dur`` if the length of the run is not known, epochs of a loop without a loader.
        """
        point = Duration.parse(point, allow_zero=True)
        if point.unit == "dur" and point.value:
            return self._count_intervals(point) >= 1
        if not point.value:
            return True
        return self.count(point.unit) >= point.value

    def crossed(self, interval: Duration | int | str) -> bool:
        """Return True if the last tick crossed a boundary of ``interval``, whatever the size of the tick.

        Epochs are those of the loader. If a batch takes several steps, the answer is the same after each of them: True if the
        epoch ended with the batch. So ask once per batch, after its last step.

        >>> clock = Clock().tick(samples=30, tokens=0, seconds=0.1, place=Place(0, 1))
        >>> clock.crossed("1ba"), clock.crossed("25sp"), clock.crossed("40sp"), clock.crossed("1ep")
        (True, True, False, False)

        Raises:
            ConfigError: no duration, ``dur`` if the length of the run is not known, epochs of a loop without a loader.
        """
        every = Duration.parse(interval)
        if self.uses_epochs(every):
            self._check_epochs(every)
        if self.previous is None:
            return False
        # The clock of a checkpoint, and so the one before it, knows no length of a run; and the run may be of another one now.
        previous = replace(self.previous, run=self.run) if every.unit == "dur" else self.previous
        return self._count_intervals(every) > previous._count_intervals(every)

    def uses_epochs(self, length: Duration) -> bool:
        """Return True if ``length`` is measured by the place in the loader's data: epochs, or a share of a run in epochs."""
        total = None if self.run is None else self.run.total
        return length.unit == "ep" or (length.unit == "dur" and total is not None and total.unit == "ep")

    def _check_epochs(self, what: object) -> None:
        if self.no_epochs_reason is not None:
            raise ConfigError(
                f"clock: {what} is counted in epochs, and this loop has none: {self.no_epochs_reason}. Take batches from "
                "dt.build_loader, or name the loader: step.init(model, optimizer, loader=loader); or count in steps ('100ba')"
            )

    def _count_intervals(self, every: Duration) -> int:
        """How many whole ones have passed."""
        if every.unit == "dur":
            return math.floor(self._run_fraction(every) / every.fraction)
        return int(self.count(every.unit) // every.value)

    def _run_fraction(self, part: Duration | None = None) -> Fraction:
        """How much of the run is done, exactly; of a run in epochs, by the steps of the current one."""
        total = None if self.run is None else self.run.total
        if total is None:
            raise ConfigError(
                f"clock: {part or 'dur'} is a share of the run, whose length is not known; "
                "give it to the step: step.init(model, optimizer, run=loader.run_length('3ep'))"
            )
        if total.unit == "ep":
            self._check_epochs(part or "dur")
        if total.unit != "ep":
            return Fraction(self.count(total.unit)) / Fraction(total.value)
        steps = self.run.steps_per_epoch if self.run is not None else None
        if steps is None:
            if part is not None and (part.fraction * int(total.value)).denominator == 1:
                return Fraction(self.epoch, int(total.value))  # all boundaries are ends of epochs
            raise ConfigError(
                f"clock: {part or 'dur'} of a run of {total} may end inside of an epoch, whose steps are not known; "
                f"give RunLength(total={str(total)!r}, steps_per_epoch=...), or loader.run_length({str(total)!r})"
            )
        return Fraction(self.epoch * steps + min(self.step_in_epoch, steps), int(total.value) * steps)

    def state_dict(self) -> dict[str, Any]:
        """The counts as plain data, with those of ``previous`` and the place of ``step_start``.

        ``previous`` is None at the beginning. ``step_start`` is there only if it is another place than that of ``previous``.
        """
        own = {name: getattr(self, name) for name in _COUNT_FIELDS}
        previous = None if self.previous is None else {name: getattr(self.previous, name) for name in _COUNT_FIELDS}
        return {**own, "previous": previous, **({} if self.step_start is None else {"step_start": [*self.step_start]})}
