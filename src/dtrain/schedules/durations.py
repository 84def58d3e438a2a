"""Parse durations of training such as ``"3ep"``, ``"100ba"``, ``"0.1dur"`` or ``"1h20m40s"``, and convert them to steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from dtrain.arguments import check_int, check_number, explain_fields
from dtrain.errors import ConfigError

UNITS = {
    "ep": "epochs",
    "ba": "batches (steps)",
    "sp": "samples",
    "tok": "tokens",
    "sec": "seconds",
    "dur": "share of the whole run",
}
# Words that people write for units, without a plural s.
_WORDS = {
    **dict.fromkeys(("ep", "epoch"), "ep"),
    **dict.fromkeys(("ba", "batch", "batche", "step", "it", "iter", "iteration", "update"), "ba"),
    **dict.fromkeys(("sp", "sample", "example", "sequence"), "sp"),
    **dict.fromkeys(("tok", "token"), "tok"),
    **dict.fromkeys(("sec", "second"), "sec"),
    **dict.fromkeys(("min", "minute"), "m"),
    **dict.fromkeys(("hr", "hour"), "h"),
    "day": "d",
    **dict.fromkeys(("run", "total"), "dur"),
}
_WORD_PATTERN = re.compile(r"\s*([0-9][0-9_.]*)?\s*([a-z]+?)s?\s*")
_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?)\s*([a-z]+)\s*")
_TIME_PATTERN = re.compile(r"\s*(?:([0-9]+)d)?\s*(?:([0-9]+)h)?\s*(?:([0-9]+)m)?\s*(?:([0-9]+)s)?\s*")
_UNIT_SECONDS = (86400, 3600, 60, 1)


@dataclass(frozen=True, slots=True)
class Duration:
    """Duration of training in one unit: ``Duration(3, "ep")``, ``Duration.parse("100ba")``.

    Args:
        value: whole number of at least 0; for ``dur`` a finite number of at least 0, such as ``0.1``.
        unit: ``ep``, ``ba``, ``sp``, ``tok``, ``sec`` or ``dur``.

    Example:
        >>> import dtrain as dt
        >>> dt.schedules.Duration.parse("3ep") + "2ep"
        Duration(value=5, unit='ep')
    """

    value: int | float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigError(f"duration: unknown unit {self.unit!r}. Use one of {', '.join(UNITS)} (as in '3ep', '100ba').")
        whole = self.unit != "dur"
        if type(self.value) is not int and (whole or type(self.value) is not float or not math.isfinite(self.value)):
            kind = "a whole number" if whole else "a finite number"
            raise ConfigError(
                f"duration: needs {kind} of {self.unit}, got {self.value!r} {self.unit}. {_whole_number_hint(self.unit)}"
            )
        if self.value < 0:
            raise ConfigError(f"duration: needs at least 0, got {self.value!r} {self.unit}. Remove the sign.")

    @classmethod
    def parse(cls, text: Duration | int | str, *, allow_zero: bool = False) -> Duration:
        """Parse a duration. A plain integer counts steps.

        Args:
            text: a number and a unit; days, hours, minutes and seconds in this order; an integer; or a duration.
            allow_zero: if True, zero (``"0ba"``) is allowed, for a point in time instead of an interval.

        Example:
            >>> import dtrain as dt
            >>> (
            ...     dt.schedules.Duration.parse("5_000sp"),
            ...     dt.schedules.Duration.parse("1e9tok"),
            ...     dt.schedules.Duration.parse(10),
            ... )
            (Duration(value=5000, unit='sp'), Duration(value=1000000000, unit='tok'), Duration(value=10, unit='ba'))
            >>> dt.schedules.Duration.parse("1h20m40s"), dt.schedules.Duration.parse("0.1dur")
            (Duration(value=4840, unit='sec'), Duration(value=0.1, unit='dur'))

        Raises:
            ConfigError: not a number and a unit, several units, an unknown unit, a fraction of a whole number, or zero if
                ``allow_zero`` is False.
        """
        duration = cls._parse(text)
        if duration.value == 0 and not allow_zero:
            raise ConfigError(
                f"duration: needs at least 1 {duration.unit}, got {text!r}. Raise the number."
                if duration.unit != "dur"
                else _ZERO_FRACTION_ERROR
            )
        return duration

    @classmethod
    def _parse(cls, text: Duration | int | str) -> Duration:
        if isinstance(text, Duration):
            return text
        if isinstance(text, int):
            return cls(text, "ba")
        if isinstance(text, str):
            match = _PATTERN.fullmatch(text)
            if not (match and match[2] in UNITS):
                _refuse_word(text)
            if match:
                if match[2] in UNITS:
                    return cls(_parse_number(match[1], match[2], text), match[2])
                if match[2] not in "dhms":
                    # Raises the error for an unknown unit.
                    cls(1, match[2])
            if (match := _TIME_PATTERN.fullmatch(text)) and any(match.groups()):
                seconds = sum(int(number or 0) * size for number, size in zip(match.groups(), _UNIT_SECONDS, strict=True))
                return cls(seconds, "sec")
        raise ConfigError(
            f"duration: cannot read {text!r}. Write one number and one unit of {', '.join(UNITS)}, as in '3ep', '100ba', "
            "'1e9tok', '0.1dur', '90sec', or a time as in '1h20m40s'."
        )

    def steps(self, run_length: RunLength | None = None) -> int:
        """Return the first step count at which a run has completed this duration.

        Args:
            run_length: length of the run. ``ep`` needs ``steps_per_epoch``, ``sp`` and ``tok`` their number per step, ``dur``
                the total.

        Example:
            >>> import dtrain as dt
            >>> dt.schedules.Duration.parse("3ep").steps(
            ...     dt.schedules.RunLength(steps_per_epoch=100)
            ... )
            300
            >>> dt.schedules.Duration.parse("1_000sp").steps(
            ...     dt.schedules.RunLength(samples_per_step=256)
            ... )
            4

        Raises:
            ConfigError: ``run_length`` lacks a field that this unit needs, or the unit is seconds, which have no number of
                steps.
        """
        return math.ceil(self._exact_steps(run_length if run_length is not None else RunLength()))

    def _exact_steps(self, run_length: RunLength) -> Fraction:
        if self.unit == "ba":
            return Fraction(self.value)
        if self.unit == "sec":
            raise ConfigError(
                f"duration: {self} cannot be converted to steps, because the time of a step is unknown. Use another unit."
            )
        if self.unit == "dur":
            if run_length.total is None:
                raise ConfigError(f"duration: {self} needs the length of the run. {_run_length_advice('total=...')}")
            return self.fraction * run_length.total._exact_steps(run_length)
        name = {"ep": "steps_per_epoch", "sp": "samples_per_step", "tok": "tokens_per_step"}[self.unit]
        per = getattr(run_length, name)
        if per is None:
            raise ConfigError(f"duration: {self} in steps needs {name}. {_run_length_advice(name + '=...')}")
        return Fraction(self.value) * per if self.unit == "ep" else Fraction(self.value) / Fraction(per)

    @property
    def fraction(self) -> Fraction:
        """Exact decimal value: ``0.1`` is a tenth, not the nearest binary number."""
        return Fraction(str(self.value))

    def __add__(self, other: Duration | int | str) -> Duration:
        """Add a duration of the same unit.

        Raises:
            ConfigError: another unit.
        """
        addend = Duration.parse(other, allow_zero=True)
        if addend.unit != self.unit:
            raise ConfigError(f"duration: cannot add {addend} to {self}, units must be equal. Convert both with .steps(run).")
        total = self.fraction + addend.fraction
        return Duration(float(total) if self.unit == "dur" else int(total), self.unit)

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Length of a run, and conversion factors between units, as far as known.

    Args:
        total: whole run, equal to ``"1dur"``: ``"3ep"``, ``10_000``, or any argument of ``Duration.parse``.
        steps_per_epoch: batches of an epoch.
        samples_per_step: global batch size.
        tokens_per_step: tokens of a global batch.

    Example:
        >>> import dtrain as dt
        >>> dt.schedules.RunLength(total="3ep", steps_per_epoch=100).steps()
        300
    """

    total: Duration | None = None
    steps_per_epoch: int | None = None
    samples_per_step: int | float | None = None
    tokens_per_step: int | float | None = None

    def __init__(
        self,
        *,
        total: Duration | int | str | None = None,
        steps_per_epoch: int | None = None,
        samples_per_step: int | float | None = None,
        tokens_per_step: int | float | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "total", None if total is None else Duration.parse(total))
        if self.total is not None and self.total.unit == "dur":
            raise ConfigError(
                f"RunLength: total must be in another unit than 'dur', a share of the total, got {str(total)!r}. "
                "Give it in epochs, steps, samples, tokens or seconds."
            )
        if steps_per_epoch is not None:
            check_int("RunLength", "steps_per_epoch", steps_per_epoch)
        put(self, "steps_per_epoch", steps_per_epoch)
        for name, value in (("samples_per_step", samples_per_step), ("tokens_per_step", tokens_per_step)):
            if value is not None:
                check_number("RunLength", name, value, above=0)
            put(self, name, value)

    def steps(self) -> int:
        """Return the whole run in steps.

        Raises:
            ConfigError: the known fields do not give the number of steps.
        """
        return Duration(1, "dur").steps(self)


_ZERO_FRACTION_ERROR = "duration: needs more than 0 of the run. Write '0.1dur' for a tenth."


def _run_length_advice(field: str) -> str:
    return f"Give RunLength({field}), or loader.run_length('3ep')."


def _parse_number(digits: str, unit: str, text: str) -> int | float:
    """Parse the number before a unit exactly."""
    exact = Fraction(digits.replace("_", ""))
    if unit == "dur":
        return float(exact)
    if exact.denominator != 1:
        raise ConfigError(f"duration: needs a whole number of {unit}, got {text!r}. {_whole_number_hint(unit)}")
    return int(exact)


def _whole_number_hint(unit: str) -> str:
    return "Write a time as in '1h20m40s'." if unit == "sec" else "Round the number."


def _refuse_word(text: str) -> None:
    """Raise for a unit that is written as a word, such as ``"3 epochs"``, and show the unit."""
    match = _WORD_PATTERN.fullmatch(text.lower())
    # One letter is a time, such as "1h".
    if match and len(match[2]) > 1 and (unit := _WORDS.get(match[2])):
        number = match[1] if match[1] and "." not in match[1] else "1"
        raise ConfigError(f"duration: the unit must be one of {', '.join(UNITS)}, got {text!r}. Write '{number}{unit}'.")


def parse_window(caller: str, start: Duration | int | str, end: Duration | int | str) -> tuple[Duration, Duration]:
    """Parse the bounds of a part of a run: ``start`` may be 0, ``end`` may have another unit.

    Raises:
        ConfigError: a bound is not a duration, or ``start`` is not before ``end`` in one unit.
    """
    first, last = Duration.parse(start, allow_zero=True), Duration.parse(end)
    if first.unit == last.unit and first.value >= last.value:
        raise ConfigError(f"{caller}: start must be before end, got start={str(first)!r}, end={str(last)!r}. Swap them.")
    return first, last
