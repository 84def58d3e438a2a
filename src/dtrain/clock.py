"""Training time: the frozen ``Clock``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError

_FIELD = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens", "sec": "seconds"}
_COUNTS = ("step", "epoch", "step_in_epoch", "samples", "tokens", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far training has come. All counts are global (summed over ranks) and exact.

    ``seconds`` is rank 0's time inside steps and between them, summed over resumes; it is the same number on every rank,
    and not part of bit-equality. ``before`` is the clock one tick ago, which is what ``crossed`` compares with. ``run`` is how
    long the run is to be, which ``"0.1dur"`` is a share of; it is what ``Step.init`` was told, and in no checkpoint.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: Clock | None = None
    run: RunLength | None = None

    def tick(self, *, samples: int, tokens: int, seconds: float, end_of_epoch: bool) -> Clock:
        """The clock after one step over ``samples`` and ``tokens`` that took ``seconds``."""
        return Clock(
            step=self.step + 1,
            epoch=self.epoch + end_of_epoch,
            step_in_epoch=0 if end_of_epoch else self.step_in_epoch + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            before=self if self.before is None else self._alone(),
            run=self.run,
        )

    def _alone(self) -> Clock:
        """This clock without the one before it: a chain of all clocks of a run would never be freed."""
        made = object.__new__(Clock)
        for name in _COUNTS:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "before", None)
        object.__setattr__(made, "run", self.run)
        return made

    def count(self, unit: str) -> int | float:
        """How many of ``unit`` there have been; ``ep`` counts whole epochs, and ``dur`` is the share of the run.

        Raises:
            ConfigError: an unknown unit, or ``dur`` where the length of the run is not known.
        """
        if unit == "dur":
            return float(self._share())
        if unit not in _FIELD:
            raise ConfigError(f"clock: counts {', '.join(_FIELD)} and dur, got {unit!r}")
        found: int | float = getattr(self, _FIELD[unit])
        return found

    def reached(self, point: Duration | int | str) -> bool:
        """Whether training has come as far as ``point``.

        >>> Clock(tokens=3000).reached("2_500tok"), Clock(step=9).reached(10)
        (True, False)

        Raises:
            ConfigError: no duration, or ``dur`` where the length of the run is not known.
        """
        point = Duration.parse(point, zero=True)
        if point.unit == "dur":
            return self._intervals(point) >= 1 if point.value else True
        return self.count(point.unit) >= point.value

    def crossed(self, interval: Duration | int | str) -> bool:
        """Whether the last tick crossed a boundary of ``interval``, whatever the size of the tick.

        >>> clock = Clock().tick(samples=30, tokens=0, seconds=0.1, end_of_epoch=False)
        >>> clock.crossed("1ba"), clock.crossed("25sp"), clock.crossed("40sp"), clock.crossed("1ep")
        (True, True, False, False)

        Raises:
            ConfigError: no duration, or ``dur`` where the length of the run is not known.
        """
        every = Duration.parse(interval)
        if self.before is None:
            return False
        # The clock of a checkpoint, and so the one before it, knows no length of a run; and the run may be of another one now.
        before = replace(self.before, run=self.run) if every.unit == "dur" else self.before
        return self._intervals(every) > before._intervals(every)

    def _intervals(self, every: Duration) -> int:
        """How many whole ones have passed."""
        if every.unit == "dur":
            return math.floor(self._share(every) / every.fraction)
        return int(self.count(every.unit) // every.value)

    def _share(self, part: Duration | None = None) -> Fraction:
        """How much of the run is done, exactly; of a run in epochs, by the steps of the current one."""
        total = None if self.run is None else self.run.total
        if total is None:
            raise ConfigError(
                f"clock: {part or 'dur'} is a share of the run, whose length is not known; "
                "give it to the step: step.init(model, optimizer, run=loader.run_length('3ep'))"
            )
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
        """The counts as plain data, and as ``before`` those of one tick ago (None at the beginning)."""
        own = {name: getattr(self, name) for name in _COUNTS}
        return {**own, "before": None if self.before is None else {name: getattr(self.before, name) for name in _COUNTS}}
