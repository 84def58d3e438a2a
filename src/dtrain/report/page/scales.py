"""Compute ticks and labels of axes. ``page.js`` has the same functions, and a test compares both."""

from __future__ import annotations

import math
from typing import Literal

AxisKind = Literal["number", "seconds", "bytes", "percent"]
"""Unit of an axis: numbers, seconds, bytes, or fractions of 1."""

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
# tick distances of a time axis, in seconds
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
# upper limit in spite of rounding
_MAX_TICKS = 12


def ticks(low: float, high: float, kind: AxisKind, count: int = 7) -> list[float]:
    """Return about ``count`` round values from ``low`` to ``high``, which are finite and in order."""
    step = tick_step(high - low, kind, count)
    if step <= 0 or not math.isfinite(step):
        return [low]
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, min(last, first + _MAX_TICKS) + 1)]


def tick_step(span: float, kind: AxisKind, count: int) -> float:
    """Return a round tick distance for about ``count`` ticks in ``span``."""
    rough = span / count
    if rough <= 0:
        return 0.0
    if kind == "seconds" and rough > 0.5:
        fit = [step for step in _TIME_STEPS if step >= rough]
        return float(fit[0]) if fit else 86400.0 * _round_up(rough / 86400)
    if kind == "bytes" and rough >= 1:
        scale = next(scale for scale, _ in _BINARY if rough >= scale)
        return scale * next((step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if step >= rough / scale), 1024)
    return _round_up(rough)


def _round_up(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next((step for step in (1.0, 2.0, 2.5, 5.0) if step >= rough / power - 1e-9), 10.0)


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from ``low`` to ``high``, both above 0; for a short range, also multiples."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    parts: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 7) if high <= 10 * low else ((1, 2, 5) if high <= 100 * low else (1,))
    values = [part * 10.0**power for power in range(first, last + 1, every) for part in parts]
    values = [tick for tick in values if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    return values if len(values) >= 2 else ticks(low, high, "number", 4)


def tick_labels(positions: list[float], kind: AxisKind) -> list[str]:
    """Label ticks in one unit, with enough digits to distinguish the ticks."""
    if kind == "seconds":
        return [format_axis_duration(tick) for tick in positions]
    if kind == "percent":
        return [f"{tick * 100:g}\N{NARROW NO-BREAK SPACE}%" for tick in [round(tick, 6) for tick in positions]]
    largest = max((abs(tick) for tick in positions), default=0.0)
    if kind == "number" and 1e4 <= largest < 1e15:
        return [_with_prefix(tick) for tick in positions]
    if kind == "number" and (largest < 1e-3 or largest >= 1e15) and largest > 0:
        return [_scientific(tick) for tick in positions]
    if kind == "number":
        return [f"{round(tick, 9):.10g}" for tick in positions]
    scale, unit = next(((scale, unit) for scale, unit in _BINARY if largest >= scale), _BINARY[-1])
    return [f"{round(tick / scale, 9):.10g}\N{NARROW NO-BREAK SPACE}{unit}" if tick else "0" for tick in positions]


def format_value(number: float, kind: AxisKind) -> str:
    """Format a single value with about four digits."""
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else ("+inf" if number > 0 else "-inf")
    if kind == "seconds":
        return format_axis_duration(number)
    if kind == "percent":
        return f"{number * 100:.1f}\N{NARROW NO-BREAK SPACE}%"
    size = abs(number)
    if kind == "number":
        if number == int(number) and size < 1e5:
            return f"{int(number)}"
        if size < 1e-3 or size >= 1e15:
            return _scientific(number)
    units = _BINARY if kind == "bytes" else (_PREFIXES if size >= 1e5 else _PREFIXES[-1:])
    scale, unit = next(((scale, unit) for scale, unit in units if size >= scale), units[-1])
    digits = max(0, 3 - math.floor(math.log10(size / scale))) if size else 0
    text = f"{number / scale:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text}\N{NARROW NO-BREAK SPACE}{unit}" if kind == "bytes" else f"{text}{unit}"


def format_axis_duration(seconds: float) -> str:
    """Format a duration with at most two units: ``2 h 05 m``, ``3 m 20 s``, ``1.5 s`` or ``12 ms``."""
    if seconds < 0:
        return f"-{format_axis_duration(-seconds)}"
    gap = "\N{NARROW NO-BREAK SPACE}"
    if seconds == 0:
        return "0"
    if seconds < 0.9995:
        scale, unit = (1e3, "ms") if seconds >= 1e-3 else (1e6, "\N{MICRO SIGN}s")
        return f"{float(f'{seconds * scale:.3g}'):g}{gap}{unit}"
    if seconds < 59.95:
        return f"{float(f'{seconds:.3g}'):g}{gap}s"
    for large, name, small, below in ((60, "m", 1, "s"), (3600, "h", 60, "m"), (86400, "d", 3600, "h")):
        whole = math.floor(seconds / small + 0.5)
        if name == "d" or (whole < 86400 // small and whole * small < (3600 if name == "m" else 86400)):
            many, rest = divmod(whole, large // small)
            return f"{many}{gap}{name} {rest:02d}{gap}{below}" if rest else f"{many}{gap}{name}"
    raise AssertionError("a day is the largest unit")


def _with_prefix(number: float) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _PREFIXES if abs(number) >= scale), _PREFIXES[-1])
    return f"{round(number / scale, 9):.10g}{unit}" if number else "0"


def _scientific(number: float) -> str:
    if number == 0:
        return "0"
    mantissa, power = f"{number:.3e}".split("e")
    return f"{float(mantissa):g}e{int(power)}"
