"""The registry of schedules, with what is known of each by hand; and schedules that are broken on purpose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import dtrain as dt


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule under contract.

    Args:
        make: makes it anew.
        values: some of its values, worked out by hand; the last one is where it ends and stays.
        steepest: no step changes it by more.
        joins: where two formulas meet.
        of: the public function that it is an example of.
    """

    make: Callable[[], dt.Schedule]
    values: Mapping[float, float]
    steepest: float
    joins: tuple[float, ...] = ()
    of: str = field(default="", compare=False)


def _half_cosine(t: float) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2


ROWS: dict[str, Row] = {
    "constant": Row(make=lambda: dt.constant(0.3), values={0: 0.3, 7: 0.3}, steepest=0.0, of="constant"),
    "linear": Row(
        make=lambda: dt.linear(1.0, 0.2, 8), values={0: 1.0, 2: 0.8, 4: 0.6, 8: 0.2}, steepest=0.1, joins=(0, 8), of="linear"
    ),
    "cosine": Row(
        make=lambda: dt.cosine(1.0, 0.1, 12),
        values={0: 1.0, 3: _half_cosine(1 / 4), 6: 0.55, 12: 0.1},
        steepest=0.9 * math.pi / 2 / 12,
        joins=(0, 12),
        of="cosine",
    ),
    "with_warmup-constant": Row(
        make=lambda: dt.with_warmup(dt.constant(0.4), 4), values={0: 0.0, 1: 0.1, 4: 0.4}, steepest=0.1, joins=(0, 4)
    ),
    "with_warmup-linear": Row(
        make=lambda: dt.with_warmup(dt.linear(1.0, 0.0, 10), 5),
        values={0: 0.0, 1: 0.1, 4: 0.4, 5: 0.5, 9: 0.1, 10: 0.0},
        steepest=0.1,
        joins=(0, 5, 10),
        of="with_warmup",
    ),
    "with_warmup-cosine": Row(
        make=lambda: dt.with_warmup(dt.cosine(1.0, 0.1, 12), 3),
        values={0: 0.0, 1: _half_cosine(1 / 4) / 3, 3: _half_cosine(1 / 4), 6: 0.55, 12: 0.1},
        steepest=_half_cosine(1 / 4) / 3,
        joins=(0, 3, 12),
    ),
}


def _by_calls() -> dt.Schedule:
    calls = itertools.count()
    return lambda t: 1.0 / (1 + next(calls))


BROKEN: dict[str, tuple[str, Row]] = {
    "counts its calls": ("pure", Row(make=_by_calls, values={}, steepest=1.0)),
    "counts its calls, after a resume": ("resume", Row(make=_by_calls, values={}, steepest=1.0)),
    "warm-up that starts the decay anew": (
        "continuous",
        Row(make=lambda: lambda t: t / 4 if t < 4 else dt.linear(0.5, 0.0, 8)(t - 4), values={}, steepest=0.25, joins=(4,)),
    ),
    "steeper than it says": ("continuous", Row(make=lambda: dt.linear(1.0, 0.0, 4), values={}, steepest=0.1)),
    "no end": ("end", Row(make=lambda: lambda t: 1.0 - t / 8, values={8: 0.0}, steepest=0.125)),
    "undefined behind its end": ("end", Row(make=lambda: lambda t: math.nan if t > 8 else 1.0, values={8: 1.0}, steepest=0.0)),
    "off by one": (
        "values",
        Row(make=lambda: lambda t: dt.linear(1.0, 0.0, 8)(t + 1), values={0: 1.0, 4: 0.5}, steepest=0.125),
    ),
}


def row(name: str) -> Row:
    """A row, sound or broken."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]
