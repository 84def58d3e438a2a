"""Durations as numbers of one unit: of what the clock counts where they agree on it, else of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_finite, check_listed
from dtrain.schedules.units import STEPS, in_unit
from dtrain.types import Schedule

Length: TypeAlias = "Duration | int | str"

_AS_COUNTED = ("sp", "tok", "sec")  # a schedule of these needs no conversion; whole epochs would make stairs of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Durations by the name of their argument, as exact numbers of ``unit``."""

    unit: str
    exact: Mapping[str, Fraction]

    def __getitem__(self, name: str) -> float:
        """One of them; whole ones are integers."""
        found = self.exact[name]
        return int(found) if found.denominator == 1 else float(found)

    def schedule(self, at: Schedule) -> Schedule:
        """``at`` as a function of their unit."""
        return in_unit(self.unit, at)


def lengths(where: str, run: RunLength, given: Mapping[str, Length]) -> Lengths:
    """The durations ``given`` by the names of their arguments, in one unit. A ``t_warmup`` may be none at all.

    Raises:
        ConfigError: no duration, or one that ``run`` knows too little for; units that cannot be converted into each other.
    """
    if not isinstance(run, RunLength):
        raise ConfigError(f"{where}: needs the length of the run first, got {run!r}; loader.run_length('3ep') gives it")
    parsed = {name: Duration.parse(length, zero=name == "t_warmup") for name, length in given.items()}
    try:
        found = {name: _absolute(length, run) for name, length in parsed.items()}
        if len(units := {unit for value, unit in found.values() if value}) == 1 and units <= set(_AS_COUNTED):
            return Lengths(unit=units.pop(), exact={name: value for name, (value, _) in found.items()})
        return Lengths(unit=STEPS, exact={name: _in_steps(length, run) for name, length in parsed.items()})
    except ConfigError as error:
        told = ", ".join(f"{name}={length}" for name, length in parsed.items())
        one = "; or give all of them in one unit" if len({length.unit for length in parsed.values()}) > 1 else ""
        raise ConfigError(f"{where}: {told}: {error}{one}") from None


def check_covers(where: str, run: RunLength, t_max: Length, alpha_i: float, alpha_f: float) -> None:
    """Return unless ``t_max`` ends before the run does and leaves it a rate of 0, with which nothing is learned.

    Raises:
        ConfigError: it does, or a factor is not a finite number.
    """
    check_finite(where, alpha_i=alpha_i, alpha_f=alpha_f)
    if run.total is None or not alpha_i > alpha_f == 0:
        return
    try:
        both = lengths(where, run, {"t_max": t_max, "total": run.total})
    except ConfigError:
        return  # they cannot be compared
    if both.exact["t_max"] < both.exact["total"]:
        raise ConfigError(
            f"{where}: t_max={t_max} ends before the run of {run.total} does, and the rest of it would have a rate of 0; "
            "give t_max='1dur', or alpha_f above 0, or leave total out of RunLength(...) where this is meant"
        )


def named(where: str, name: str, values: Sequence[Length]) -> dict[str, Length]:
    """Several durations of one argument, each by a name of its own.

    Raises:
        ConfigError: one duration instead of several.
    """
    check_listed(where, name, values)
    return {f"{name}[{number}]": value for number, value in enumerate(values)}


def _absolute(length: Duration, run: RunLength) -> tuple[Fraction, str]:
    """Its exact number and unit; a share of the run in the unit of the run."""
    if length.unit != "dur":
        return length.fraction, length.unit
    if run.total is None:
        raise ConfigError(f"{length} is a share of the run, whose length is not known; give RunLength(total=...)")
    return length.fraction * run.total.fraction, run.total.unit


def _in_steps(length: Duration, run: RunLength) -> Fraction:
    if not length.value:
        return Fraction(0)  # of whatever unit
    length.steps(run)  # refuses what cannot be told; it rounds up to whole steps, and a schedule must not
    value, unit = _absolute(length, run)
    per = {"ep": run.steps_per_epoch, "sp": run.samples_per_step, "tok": run.tokens_per_step}.get(unit)
    if per is None:
        return value
    return value * Fraction(per) if unit == "ep" else value / Fraction(per)
