"""A series with a million points as one with a thousand, in which no spike is lost."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

from dtrain.report.model import Mark, Series

POINTS = 1000
MARKS = 200
_ALL_POINTS = 150_000  # of all series together: a page that holds more takes long to open

Moment = Callable[[float], tuple[float, float | None]]
"""When a step was done, by the ledgers, and how many tokens there had been; raises LookupError if nobody knows."""


def make_series(
    steps: Sequence[float],
    times: Sequence[float],
    values: Sequence[float],
    *,
    started_at: float,
    moment: Moment,
    points: int = POINTS,
) -> Series:
    """The series of a metric, out of its columns.

    Args:
        steps: in order.
        times: seconds since 1970, NaN where not known.
        values: at the steps.
        started_at: where times are counted from.
        moment: for what the records do not say.
        points: at most so many are kept, even.
    """
    last_step, count = int(steps[-1]), len(values)
    marks: list[Mark] = []
    bad = 0
    if not math.isfinite(sum(values)):  # in C; looking at each takes a second for ten million. Large ones may overflow too
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        bad = count - len(finite)
        marks = _marks(steps, times, values, started_at, moment)
        steps, times, values = ([column[index] for index in finite] for column in (steps, times, values))
    chosen = chosen_points(values, points)
    at, tokens = _moments([steps[index] for index in chosen], [times[index] for index in chosen], started_at, moment)
    low = min(range(len(chosen)), key=lambda index: values[chosen[index]], default=None)
    high = max(range(len(chosen)), key=lambda index: values[chosen[index]], default=None)
    return Series(
        steps=[int(steps[index]) for index in chosen],
        values=[values[index] for index in chosen],
        tokens=tokens,
        times=at,
        marks=marks,
        count=count,
        bad=bad,
        last=values[-1] if values else None,
        last_step=last_step,
        low=None if low is None else values[chosen[low]],
        high=None if high is None else values[chosen[high]],
        low_step=None if low is None else int(steps[chosen[low]]),
        high_step=None if high is None else int(steps[chosen[high]]),
    )


def points_each(names: int) -> int:
    """How many points each of so many series may have."""
    return max(20, min(POINTS, _ALL_POINTS // max(names, 1)) // 2 * 2)


def chosen_points(values: Sequence[float], points: int) -> list[int]:
    """Which points to keep, by number: the first and the last, and of each stretch the least and the greatest value."""
    count = len(values)
    if count <= points:
        return list(range(count))
    stretches = points // 2 - 1
    chosen = {0, count - 1}
    for stretch in range(stretches):
        begin, end = stretch * count // stretches, (stretch + 1) * count // stretches
        part = array("d", values[begin:end])
        chosen |= {begin + part.index(min(part)), begin + part.index(max(part))}
    return sorted(chosen)


def _marks(
    steps: Sequence[float], times: Sequence[float], values: Sequence[float], started_at: float, moment: Moment
) -> list[Mark]:
    found = [index for index, value in enumerate(values) if not math.isfinite(value)]
    if len(found) > MARKS:
        found = [found[at * (len(found) - 1) // (MARKS - 1)] for at in range(MARKS)]
    at, tokens = _moments([steps[index] for index in found], [times[index] for index in found], started_at, moment)
    return [
        Mark(
            step=int(steps[index]),
            what=_what(values[index]),
            tokens=tokens[number] if tokens else None,
            at=at[number] if at else None,
        )
        for number, index in enumerate(found)
    ]


def _what(value: float) -> Literal["nan", "inf", "-inf"]:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _moments(
    steps: Sequence[float], times: Sequence[float], started_at: float, moment: Moment
) -> tuple[list[float], list[float]]:
    """Seconds since the start, and tokens, at each step; an empty list for what is not known of all of them."""
    at, tokens = [], []
    for step, time in zip(steps, times, strict=True):
        try:
            when, many = moment(step)
        except LookupError:
            when, many = math.nan, None
        at.append((time if math.isfinite(time) else when) - started_at)
        tokens.append(math.nan if many is None else many)
    return _known(at), _known(tokens)


def _known(values: list[float]) -> list[float]:
    return values if all(map(math.isfinite, values)) else []
