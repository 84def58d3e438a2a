"""Convert the durations of Composer's schedulers to one unit: a count of the clock that all share, or steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dtrain.arguments import check_number
from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import STEP_UNIT, attach_unit, check_sequence
from dtrain.typing import Schedule

Length: TypeAlias = "Duration | int | str"

# Units of the clock that need no conversion to steps. Epochs are excluded, because the clock counts whole epochs only.
_COUNTED_UNITS = ("sp", "tok", "sec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Durations by the name of their argument, as exact numbers of ``unit``."""

    unit: str
    fractions: Mapping[str, Fraction]

    def __getitem__(self, name: str) -> float:
        """Return the length ``name``, as an int if integral."""
        length = self.fractions[name]
        return int(length) if length.denominator == 1 else float(length)

    def to_schedule(self, schedule: Schedule) -> Schedule:
        """Return ``schedule`` as a function of the unit of these lengths."""
        return attach_unit(self.unit, schedule)


def parse_lengths(caller: str, run: RunLength, durations: Mapping[str, Length]) -> Lengths:
    """Convert ``durations``, by argument name, to one unit. Only ``t_warmup`` may be 0.

    Raises:
        ConfigError: an entry is not a duration, or ``run`` lacks the numbers for a conversion to one unit.
    """
    if not isinstance(run, RunLength):
        raise ConfigError(f"{caller}: run must be a dt.RunLength, got {run!r}. Give loader.run_length('3ep').")
    parsed = {name: Duration.parse(length, allow_zero=name == "t_warmup") for name, length in durations.items()}
    try:
        absolute = {name: _to_absolute(length, run) for name, length in parsed.items()}
        if len(units := {unit for value, unit in absolute.values() if value}) == 1 and units <= set(_COUNTED_UNITS):
            return Lengths(unit=units.pop(), fractions={name: value for name, (value, _) in absolute.items()})
        return Lengths(unit=STEP_UNIT, fractions={name: _in_steps(length, run) for name, length in parsed.items()})
    except ConfigError as error:
        arguments = ", ".join(f"{name}={length}" for name, length in parsed.items())
        several = len({length.unit for length in parsed.values()}) > 1
        advice = " Or give all durations in one unit." if several else ""
        raise ConfigError(f"{caller}: {arguments}: {error}{advice}") from None


def check_covers_run(caller: str, run: RunLength, t_max: Length, alpha_i: float, alpha_f: float) -> None:
    """Raise if ``t_max`` ends before the run and the remaining steps would have a factor of 0.

    Raises:
        ConfigError: the remaining steps have a factor of 0, or a factor is not a finite number.
    """
    check_number(caller, "alpha_i", alpha_i)
    check_number(caller, "alpha_f", alpha_f)
    if run.total is None or not alpha_i > alpha_f == 0:
        return
    try:
        lengths = parse_lengths(caller, run, {"t_max": t_max, "total": run.total})
    except ConfigError:
        # The lengths cannot be compared.
        return
    if lengths.fractions["t_max"] < lengths.fractions["total"]:
        raise ConfigError(
            f"{caller}: t_max must not end before the run of {run.total} with a factor of 0, got t_max={t_max}. "
            "Give t_max='1dur', or alpha_f above 0, or omit total in RunLength(...) if this is intended."
        )


def name_each(caller: str, name: str, values: Sequence[Length]) -> dict[str, Length]:
    """Return the durations of one argument by generated names: ``"milestones[0]"``, ``"milestones[1]"``.

    Raises:
        ConfigError: ``values`` is a single duration.
    """
    check_sequence(caller, name, values)
    return {f"{name}[{index}]": value for index, value in enumerate(values)}


def _to_absolute(length: Duration, run: RunLength) -> tuple[Fraction, str]:
    """Return the exact number and unit of ``length``. A fraction of the run has the unit of the run."""
    if length.unit != "dur":
        return length.fraction, length.unit
    if run.total is None:
        raise ConfigError(f"{length} is a fraction of the run, whose length is not known. Give RunLength(total=...).")
    return length.fraction * run.total.fraction, run.total.unit


def _in_steps(length: Duration, run: RunLength) -> Fraction:
    if not length.value:
        # 0 is the same length in every unit.
        return Fraction(0)
    # Raise if the conversion is impossible. The result is not used, because steps() rounds up to whole steps.
    length.steps(run)
    value, unit = _to_absolute(length, run)
    per = {"ep": run.steps_per_epoch, "sp": run.samples_per_step, "tok": run.tokens_per_step}.get(unit)
    if per is None:
        return value
    return value * Fraction(per) if unit == "ep" else value / Fraction(per)
