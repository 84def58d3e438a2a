"""The registry of schedules, with their properties found by hand; and schedules that are broken on purpose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import dtrain as dt
from dtrain.schedules import composer
from dtrain.schedules.curves import (
    clip,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    linear,
    multi_step,
    multiply,
    one_cycle,
    polynomial,
    sequential,
    step_decay,
    time_scale,
    warmup,
    warmup_stable_decay,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule under contract.

    Args:
        make: makes it anew.
        values: some of its values, worked out by hand; the last value is where it ends and stays, if it does.
        steepest: no step changes it by more; within a step, not by more than this times the share of it to the power ``root``.
        joins: where two formulas meet.
        jumps: where it may change at once: from there on, not just behind it.
        ends: whether it stays somewhere.
        root: 1/2 for a schedule that begins like a square root, infinitely steep.
        of: the public function that it is an example of.
    """

    make: Callable[[], dt.typing.Schedule]
    values: Mapping[float, float]
    steepest: float
    joins: tuple[float, ...] = ()
    jumps: tuple[float, ...] = ()
    ends: bool = True
    root: float = 1.0
    of: str = field(default="", compare=False)


RUN = dt.schedules.RunLength(total="2ep", steps_per_epoch=6)


def _half_cosine(t: float) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2


PLAIN: dict[str, Row] = {
    "constant": Row(make=lambda: constant(0.3), values={0: 0.3, 7: 0.3}, steepest=0.0, of="constant"),
    "linear": Row(
        make=lambda: linear(1.0, 0.2, 8), values={0: 1.0, 2: 0.8, 4: 0.6, 8: 0.2}, steepest=0.1, joins=(0, 8), of="linear"
    ),
    "cosine": Row(
        make=lambda: cosine(1.0, 0.1, 12),
        values={0: 1.0, 3: _half_cosine(1 / 4), 6: 0.55, 12: 0.1},
        steepest=0.9 * math.pi / 2 / 12,
        joins=(0, 12),
        of="cosine",
    ),
    "polynomial": Row(
        make=lambda: polynomial(1.0, 0.2, 8, power=2.0),
        values={0: 1.0, 2: 0.65, 4: 0.4, 8: 0.2},
        steepest=0.8 * 2 / 8,
        joins=(0, 8),
        of="polynomial",
    ),
    "polynomial-root": Row(
        make=lambda: polynomial(1.0, 0.0, 16, power=0.5),
        values={0: 1.0, 7: 0.75, 12: 0.5, 15: 0.25, 16: 0.0},
        steepest=1 / 4,
        joins=(0, 16),
        root=0.5,
    ),
    "exponential": Row(
        make=lambda: exponential(1.0, 0.5, 4, end=0.2),
        values={0: 1.0, 4: 0.5, 6: 0.25 * math.sqrt(2), 8: 0.25, 12: 0.2},
        steepest=math.log(2) / 4,
        joins=(0, 4 * math.log2(5)),
        of="exponential",
    ),
    "exponential-growth": Row(
        make=lambda: exponential(0.25, 4.0, 8, end=2.0),
        values={0: 0.25, 4: 0.5, 8: 1.0, 12: 2.0},
        steepest=2 * math.log(4) / 8,
        joins=(0, 12),
    ),
    "exponential-endless": Row(
        make=lambda: exponential(0.8, 0.5, 4), values={0: 0.8, 4: 0.4, 12: 0.1}, steepest=0.8 * math.log(2) / 4, ends=False
    ),
    "inverse_sqrt": Row(
        make=lambda: inverse_sqrt(0.8, 4),
        values={0: 0.8, 4: 0.8, 16: 0.4, 64: 0.2},
        steepest=0.8 / 2 / 4,
        joins=(4,),
        ends=False,
        of="inverse_sqrt",
    ),
    "step_decay": Row(
        make=lambda: step_decay(1.0, 0.5, 4, end=0.2),
        values={0: 1.0, 3.5: 1.0, 4: 0.5, 8: 0.25, 12: 0.2},
        steepest=0.0,
        jumps=(4, 8, 12),
        of="step_decay",
    ),
    "step_decay-growth": Row(
        make=lambda: step_decay(16, 2, 10, end=50), values={0: 16, 10: 32, 20: 50}, steepest=0.0, jumps=(10, 20)
    ),
    "multi_step": Row(
        make=lambda: multi_step(1.0, 0.5, [3, 7]),
        values={0: 1.0, 2.5: 1.0, 3: 0.5, 7: 0.25},
        steepest=0.0,
        jumps=(3, 7),
        of="multi_step",
    ),
    "cosine_restarts": Row(
        make=lambda: cosine_restarts(1.0, 0.1, 4, multiplier=2),
        values={0: 1.0, 1: _half_cosine(1 / 4), 4: 1.0, 8: 0.55, 12: 1.0, 20: 0.55},
        steepest=0.9 * math.pi / 2 / 4,
        jumps=(4, 12, 28),
        ends=False,
        of="cosine_restarts",
    ),
    "cosine_restarts-equal": Row(
        make=lambda: cosine_restarts(1.0, 0.1, 8),
        values={0: 1.0, 2: _half_cosine(1 / 4), 4: 0.55, 8: 1.0, 12: 0.55},
        steepest=0.9 * math.pi / 2 / 8,
        jumps=(8, 16, 24),
        ends=False,
    ),
    "one_cycle": Row(
        make=lambda: one_cycle(0.2, 1.0, 0.0, 10, rise=0.4),
        values={0: 0.2, 2: 0.6, 4: 1.0, 7: 0.5, 10: 0.0},
        steepest=0.8 * math.pi / 2 / 4,
        joins=(0, 4, 10),
        of="one_cycle",
    ),
    "one_cycle-three_phase": Row(
        make=lambda: one_cycle(0.25, 1.0, 0.0, 10, rise=0.4, shape="linear", three_phase=True),
        values={0: 0.25, 2: 0.625, 4: 1.0, 6: 0.625, 8: 0.25, 9: 0.125, 10: 0.0},
        steepest=0.75 / 4,
        joins=(0, 4, 8, 10),
    ),
    "warmup_stable_decay": Row(
        make=lambda: warmup_stable_decay(0.8, warmup=4, decay_start=10, decay=8),
        values={0: 0.0, 2: 0.4, 4: 0.8, 9: 0.8, 14: 0.4, 18: 0.0},
        steepest=0.2,
        joins=(0, 4, 10, 18),
        of="warmup_stable_decay",
    ),
    "warmup_stable_decay-cosine": Row(
        make=lambda: warmup_stable_decay(1.0, warmup=0, decay_start=2, decay=12, end=0.1, shape="cosine"),
        values={0: 1.0, 2: 1.0, 5: _half_cosine(1 / 4), 8: 0.55, 14: 0.1},
        steepest=0.9 * math.pi / 2 / 12,
        joins=(2, 14),
    ),
    "warmup_stable_decay-1-sqrt": Row(
        make=lambda: warmup_stable_decay(0.8, warmup=4, decay_start=10, decay=8, shape="1-sqrt"),
        values={2: 0.4, 4: 0.8, 10: 0.8, 12: 0.4, 14.5: 0.2, 18: 0.0},
        steepest=0.8 / math.sqrt(8),
        joins=(0, 4, 10, 18),
        root=0.5,
    ),
    "warmup_stable_decay-exponential": Row(
        make=lambda: warmup_stable_decay(0.8, warmup=4, decay_start=10, decay=8, end=0.05, shape="exponential"),
        values={2: 0.4, 4: 0.8, 10: 0.8, 12: 0.4, 14: 0.2, 16: 0.1, 18: 0.05},
        steepest=0.8 * math.log(16) / 8,
        joins=(0, 4, 10, 18),
    ),
    "warmup_stable_decay-trunk": Row(
        make=lambda: warmup_stable_decay(0.8, warmup=4), values={0: 0.0, 2: 0.4, 4: 0.8, 100: 0.8}, steepest=0.2, joins=(0, 4)
    ),
}

MADE_OF_OTHERS: dict[str, Row] = {
    "warmup-constant": Row(make=lambda: warmup(constant(0.4), 4), values={0: 0.0, 1: 0.1, 4: 0.4}, steepest=0.1, joins=(0, 4)),
    "warmup-linear": Row(
        make=lambda: warmup(linear(1.0, 0.0, 10), 5),
        values={0: 0.0, 1: 0.1, 4: 0.4, 5: 0.5, 9: 0.1, 10: 0.0},
        steepest=0.1,
        joins=(0, 5, 10),
        of="warmup",
    ),
    "warmup-cosine": Row(
        make=lambda: warmup(cosine(1.0, 0.1, 12), 3),
        values={0: 0.0, 1: _half_cosine(1 / 4) / 3, 3: _half_cosine(1 / 4), 6: 0.55, 12: 0.1},
        steepest=_half_cosine(1 / 4) / 3,
        joins=(0, 3, 12),
    ),
    "warmup-shifted": Row(
        make=lambda: warmup(linear(1.0, 0.0, 10), 5, start=0.5, shifted=True),
        values={0: 0.5, 2: 0.7, 5: 1.0, 10: 0.5, 15: 0.0},
        steepest=0.1,
        joins=(0, 5, 15),
    ),
    "warmup-cosine-shape": Row(
        make=lambda: warmup(constant(1.0), 12, start=0.1, shape="cosine"),
        values={0: 0.1, 6: 0.55, 9: _half_cosine(1 / 4), 12: 1.0},
        steepest=0.9 * math.pi / 2 / 12,
        joins=(0, 12),
    ),
    "warmup-exponential-shape": Row(
        make=lambda: warmup(constant(0.8), 8, start=1 / 16, shape="exponential"),
        values={0: 0.05, 2: 0.1, 4: 0.2, 6: 0.4, 8: 0.8},
        steepest=0.8 * math.log(16) / 8,
        joins=(0, 8),
    ),
    "warmup-inverse_sqrt": Row(  # of the Transformer: min(t / w, sqrt(w / t))
        make=lambda: warmup(inverse_sqrt(1.0, 4), 4),
        values={0: 0.0, 2: 0.5, 4: 1.0, 16: 0.5, 64: 0.25},
        steepest=0.25,
        joins=(0, 4),
        ends=False,
    ),
    "sequential": Row(
        make=lambda: sequential([linear(0.0, 0.8, 4), constant(0.8), linear(0.8, 0.2, 6)], [4, 10]),
        values={0: 0.0, 2: 0.4, 4: 0.8, 9: 0.8, 13: 0.5, 16: 0.2},
        steepest=0.2,
        joins=(0, 4, 10, 16),
        of="sequential",
    ),
    "sequential-not-shifted": Row(
        make=lambda: sequential([constant(0.6), linear(1.0, 0.0, 10)], [4], shifted=False),
        values={0: 0.6, 4: 0.6, 5: 0.5, 10: 0.0},
        steepest=0.1,
        joins=(4, 10),
    ),
    "multiply": Row(
        make=lambda: multiply(linear(1.0, 0.2, 8), 0.5),
        values={0: 0.5, 4: 0.3, 8: 0.1},
        steepest=0.05,
        joins=(0, 8),
        of="multiply",
    ),
    "time_scale": Row(
        make=lambda: time_scale(warmup(linear(1.0, 0.0, 10), 5), 2.0),
        values={0: 0.0, 2: 0.1, 10: 0.5, 18: 0.1, 20: 0.0},
        steepest=0.05,
        joins=(0, 10, 20),
        of="time_scale",
    ),
    "clip": Row(
        make=lambda: clip(linear(1.0, 0.0, 10), low=0.25, high=0.75),
        values={0: 0.75, 2: 0.75, 5: 0.5, 8: 0.25, 10: 0.25},
        steepest=0.1,
        joins=(2.5, 7.5),
        of="clip",
    ),
}

COMPOSER: dict[str, Row] = {
    "composer.constant": Row(
        make=lambda: composer.constant(RUN, 0.5, t_max="1ep"),
        values={0: 0.5, 5.5: 0.5, 6: 1.0, 11: 1.0},
        steepest=0.0,
        jumps=(6,),
        of="composer.constant",
    ),
    "composer.linear": Row(
        make=lambda: composer.linear(RUN, 0.2, 0.8, t_max="1ep"),
        values={0: 0.2, 3: 0.5, 6: 0.8, 11: 0.8},
        steepest=0.1,
        joins=(0, 6),
        of="composer.linear",
    ),
    "composer.cosine": Row(
        make=lambda: composer.cosine(RUN, alpha_f=0.1),
        values={0: 1.0, 3: _half_cosine(1 / 4), 6: 0.55, 12: 0.1},
        steepest=0.9 * math.pi / 2 / 12,
        joins=(0, 12),
        of="composer.cosine",
    ),
    "composer.cosine_warm_restarts": Row(
        make=lambda: composer.cosine_warm_restarts(RUN, "4ba", t_mult=2.0, alpha_f=0.1),
        values={0: 1.0, 1: _half_cosine(1 / 4), 4: 1.0, 8: 0.55, 12: 1.0},
        steepest=0.9 * math.pi / 2 / 4,
        jumps=(4, 12, 28),
        ends=False,
        of="composer.cosine_warm_restarts",
    ),
    "composer.polynomial": Row(
        make=lambda: composer.polynomial(RUN, 2.0, alpha_f=0.2),
        values={0: 1.0, 6: 0.4, 9: 0.25, 12: 0.2},
        steepest=0.8 * 2 / 12,
        joins=(0, 12),
        of="composer.polynomial",
    ),
    "composer.exponential": Row(
        make=lambda: composer.exponential(RUN, 0.25),
        values={0: 1.0, 3: 0.5, 6: 0.25, 12: 1 / 16},
        steepest=math.log(4) / 6,
        ends=False,
        of="composer.exponential",
    ),
    "composer.step": Row(
        make=lambda: composer.step(RUN, "1ep", 0.5),
        values={0: 1.0, 5: 1.0, 6: 0.5, 12: 0.25},
        steepest=0.0,
        jumps=(6, 12, 18, 24, 30),
        ends=False,
        of="composer.step",
    ),
    "composer.multi_step": Row(
        make=lambda: composer.multi_step(RUN, ["0.25dur", "1ep", "9ba"], 0.5),
        values={0: 1.0, 3: 0.5, 6: 0.25, 9: 0.125},
        steepest=0.0,
        jumps=(3, 6, 9),
        of="composer.multi_step",
    ),
    "composer.constant_with_warmup": Row(
        make=lambda: composer.constant_with_warmup(RUN, "4ba", 0.8, t_max="1ep"),
        values={0: 0.0, 2: 0.4, 4: 0.8, 5: 0.8, 6: 1.0},
        steepest=0.2,
        joins=(0, 4),
        jumps=(6,),
        of="composer.constant_with_warmup",
    ),
    "composer.linear_with_warmup": Row(
        make=lambda: composer.linear_with_warmup(RUN, "2ba", 0.8, 0.3),
        values={0: 0.0, 1: 0.4, 2: 0.8, 4: 0.7, 7: 0.55, 12: 0.3},
        steepest=0.4,
        joins=(0, 2, 12),
        of="composer.linear_with_warmup",
    ),
    "composer.cosine_with_warmup": Row(
        make=lambda: composer.cosine_with_warmup(RUN, "4ba", alpha_f=0.1),
        values={0: 0.0, 1: 0.25, 4: 1.0, 6: _half_cosine(1 / 4), 8: 0.55, 12: 0.1},
        steepest=0.25,
        joins=(0, 4, 12),
        of="composer.cosine_with_warmup",
    ),
    "composer.polynomial_with_warmup": Row(
        make=lambda: composer.polynomial_with_warmup(RUN, "4ba", alpha_f=0.2),
        values={0: 0.0, 2: 0.5, 4: 1.0, 8: 0.4, 10: 0.25, 12: 0.2},
        steepest=0.25,
        joins=(0, 4, 12),
        of="composer.polynomial_with_warmup",
    ),
    "composer.multi_step_with_warmup": Row(
        make=lambda: composer.multi_step_with_warmup(RUN, "2ba", ["1ep", "9ba"], 0.5),
        values={0: 0.0, 1: 0.5, 2: 1.0, 5: 1.0, 6: 0.5, 9: 0.25},
        steepest=0.5,
        joins=(0, 2),
        jumps=(6, 9),
        of="composer.multi_step_with_warmup",
    ),
}

ROWS = PLAIN | MADE_OF_OTHERS | COMPOSER


def _by_calls() -> dt.typing.Schedule:
    calls = itertools.count()
    return lambda t: 1.0 / (1 + next(calls))


BROKEN: dict[str, tuple[str, Row]] = {
    "counts its calls": ("pure", Row(make=_by_calls, values={}, steepest=1.0)),
    "counts its calls, after a resume": ("resume", Row(make=_by_calls, values={}, steepest=1.0)),
    "warm-up that starts the decay anew": (
        "continuous",
        Row(
            make=lambda: lambda t: t / 4 if t < 4 else dt.schedules.linear(0.5, 0.0, 8)(t - 4),
            values={},
            steepest=0.25,
            joins=(4,),
        ),
    ),
    "steeper than it says": ("continuous", Row(make=lambda: dt.schedules.linear(1.0, 0.0, 4), values={}, steepest=0.1)),
    "jumps behind its milestone": (
        "continuous",
        Row(make=lambda: lambda t: 1.0 if t <= 4 else 0.5, values={}, steepest=0.0, jumps=(4,)),
    ),
    "does not jump": ("continuous", Row(make=lambda: lambda t: 1.0, values={}, steepest=0.0, jumps=(4,))),
    "no end": ("end", Row(make=lambda: lambda t: 1.0 - t / 8, values={8: 0.0}, steepest=0.125)),
    "undefined behind its end": ("end", Row(make=lambda: lambda t: math.nan if t > 8 else 1.0, values={8: 1.0}, steepest=0.0)),
    "off by one": (
        "values",
        Row(make=lambda: lambda t: dt.schedules.linear(1.0, 0.0, 8)(t + 1), values={0: 1.0, 4: 0.5}, steepest=0.125),
    ),
}


def row(name: str) -> Row:
    """A row, sound or broken."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]
