"""Training time: the frozen ``Clock``, and durations such as ``"3ep"`` and ``"100ba"``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dtrain.errors import ConfigError

UNITS = {
    "ep": "epochs",
    "ba": "batches, which are steps",
    "sp": "samples",
    "tok": "tokens",
    "sec": "seconds",
}
_FIELD = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens", "sec": "seconds"}
_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]+)\s*")


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training in one unit: ``Duration(3, "ep")``, ``Duration.parse("100ba")``.

    Args:
        value: how many, a positive whole number.
        unit: ``ep``, ``ba``, ``sp``, ``tok`` or ``sec``.
    """

    value: int
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigError(f"duration: unknown unit {self.unit!r}; use one of {', '.join(UNITS)} (as in '3ep', '100ba')")
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 1:
            raise ConfigError(f"duration: needs a whole number of at least 1, got {self.value!r} {self.unit}")

    @classmethod
    def parse(cls, text: Duration | int | str) -> Duration:
        """The duration that ``text`` names; a plain integer counts steps.

        >>> Duration.parse("5_000sp"), Duration.parse("1e9tok"), Duration.parse(10)
        (Duration(value=5000, unit='sp'), Duration(value=1000000000, unit='tok'), Duration(value=10, unit='ba'))

        Raises:
            ConfigError: not a number and a unit, an unknown unit, or not a whole number of at least 1.
        """
        if isinstance(text, Duration):
            return text
        if isinstance(text, int):
            return cls(text, "ba")
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(f"duration: cannot read {text!r}; write a number and a unit, as in '3ep', '100ba', '90sec'")
        number = float(match[1].replace("_", ""))
        if number != int(number):
            raise ConfigError(f"duration: needs a whole number of {match[2]}, got {text!r}")
        return cls(int(number), match[2])

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


_COUNTS = ("step", "epoch", "step_in_epoch", "samples", "tokens", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far training has come. All counts are global (summed over ranks) and exact.

    ``seconds`` is rank 0's time inside steps and between them, summed over resumes; it is the same number on every rank,
    and not part of bit-equality. ``before`` is the clock one tick ago, which is what ``crossed`` compares with.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: Clock | None = None

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
        )

    def _alone(self) -> Clock:
        """This clock without the one before it: a chain of all clocks of a run would never be freed."""
        made = object.__new__(Clock)
        for name in _COUNTS:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "before", None)
        return made

    def crossed(self, interval: Duration | int | str) -> bool:
        """Whether the last tick crossed a boundary of ``interval``, whatever the size of the tick.

        >>> clock = Clock().tick(samples=30, tokens=0, seconds=0.1, end_of_epoch=False)
        >>> clock.crossed("1ba"), clock.crossed("25sp"), clock.crossed("40sp"), clock.crossed("1ep")
        (True, True, False, False)
        """
        every = Duration.parse(interval)
        if self.before is None:
            return False
        now, then = (getattr(clock, _FIELD[every.unit]) for clock in (self, self.before))
        return bool(now // every.value > then // every.value)

    def state_dict(self) -> dict[str, Any]:
        """The counts as plain data, without ``before``."""
        return {name: getattr(self, name) for name in _COUNTS}
