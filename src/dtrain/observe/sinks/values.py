"""What a metric's value becomes: a plain number where it is one, and else something that says what it was."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_DEEPEST = 8  # lists within lists: what holds itself would go on for ever
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any, _depth: int = 0) -> Any:
    """``value`` as JSON knows it: scalar tensors and NumPy's scalars as numbers, what JSON can hold as it is.

    What it cannot hold becomes ``{"unloggable": "Tensor [2, 3]"}``. Non-finite numbers stay.

    Host sync: for a tensor on a device.
    """
    if value is None or type(value) in (float, int, bool, str):
        return value
    scalar = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not hasattr(value, "placements"):
        with suppress(RuntimeError):  # a tensor without content. A DTensor's content is a collective's: others are not here
            scalar = value.item()
    for kind in (bool, int, float, str):  # of a subclass, such as an enum's member, the plain value
        if isinstance(scalar, kind):
            return kind(scalar)
    if _depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(each, _depth + 1) for each in value]
    if _depth < _DEEPEST and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: plain(each, _depth + 1) for name, each in value.items()}
    return {"unloggable": _told(value)}


def _told(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) and shape else "")


def encoded(value: Any) -> Any:
    """A plain value with the texts ``nan``, ``inf`` and ``-inf`` for non-finite numbers, so that every JSON reader takes it."""
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is list:
        return [encoded(each) for each in value]
    if type(value) is dict:
        return {name: encoded(each) for name, each in value.items()}
    return value


def decoded(value: Any) -> Any:
    """What ``encoded`` was given."""
    if type(value) is str:
        return _NON_FINITE.get(value, value)
    if type(value) is list:
        return [decoded(each) for each in value]
    if type(value) is dict:
        return {name: decoded(each) for name, each in value.items()}
    return value


class NumbersOnly:
    """Of a record, what is a number, as floats; the rest is left out, with one warning a name."""

    __slots__ = ("_said", "_where")

    def __init__(self, where: str) -> None:
        self._where = where
        self._said: set[str] = set()

    def __call__(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        kept = {}
        for name, value in numbers.items():
            number = plain(value)
            if isinstance(number, int | float):
                kept[str(name)] = _as_float(number)
            else:
                self._leave_out(str(name), number)
        return kept

    def _leave_out(self, name: str, value: Any) -> None:
        if name not in self._said:
            self._said.add(name)
            what = value["unloggable"] if isinstance(value, dict) and "unloggable" in value else repr(value)[:40]
            warnings.warn(f"{self._where}: takes numbers only, {name!r} is left out ({what})", stacklevel=4)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number beyond floats
        return math.inf if number > 0 else -math.inf
