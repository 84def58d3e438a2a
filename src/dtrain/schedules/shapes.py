"""The ways from one value to another that decays, warm-ups and cycles are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_finite


def curve(where: str, shape: str, start: float, end: float, shapes: Sequence[str]) -> Callable[[float], float]:
    """The way from ``start`` to ``end`` by the share of it that is done; exactly these two at and beyond its ends.

    Raises:
        ConfigError: a shape that is not one of ``shapes``, a value that is not finite, or an exponential from or to 0.
    """
    check_finite(where, start=start, end=end)
    if shape not in shapes:
        raise ConfigError(f"{where}: shape must be one of {', '.join(shapes)}, got {shape!r}")
    if shape == "exponential" and not (start > 0 and end > 0):
        raise ConfigError(f"{where}: an exponential needs values above 0, got {start=} and {end=}; it never comes to 0")
    inner = {"linear": _linear, "cosine": _cosine, "1-sqrt": _one_minus_root, "exponential": _exponential}[shape]

    def at(share: float) -> float:
        if share <= 0:
            return start
        return inner(start, end, share) if share < 1 else end

    return at


def _linear(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def _one_minus_root(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 - math.sqrt(share))


def _exponential(start: float, end: float, share: float) -> float:
    return float(start * (end / start) ** share)
