"""Convert metric values to plain data and metric names to valid, unique names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

# limit for nested lists; a list that contains itself would recurse forever
_MAX_DEPTH = 8
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain_value(value: Any, _depth: int = 0) -> Any:
    """Convert a value to plain JSON data: scalar tensors and NumPy scalars become numbers.

    Values without a JSON form become ``{"unloggable": "Tensor [2, 3]"}``. Non-finite numbers stay floats.

    Host sync: for a tensor on a device.
    """
    if value is None or type(value) in (float, int, bool, str):
        return value
    scalar = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not hasattr(value, "placements"):
        # A tensor without data raises. Reading a DTensor would need a collective, so DTensors are excluded above.
        with suppress(RuntimeError):
            scalar = value.item()
    # Subclasses such as enum members become plain values.
    for kind in (bool, int, float, str):
        if isinstance(scalar, kind):
            return kind(scalar)
    if _depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [to_plain_value(each, _depth + 1) for each in value]
    if _depth < _MAX_DEPTH and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: to_plain_value(each, _depth + 1) for name, each in value.items()}
    shape = getattr(value, "shape", None)
    return {"unloggable": type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) and shape else "")}


def encode_nonfinite(value: Any) -> Any:
    """Replace non-finite numbers by the texts ``nan``, ``inf`` and ``-inf``, so that every JSON reader accepts the value."""
    return _map_leaves(value, lambda leaf: str(leaf) if type(leaf) is float and not math.isfinite(leaf) else leaf)


def decode_nonfinite(value: Any) -> Any:
    """Replace the texts of ``encode_nonfinite`` by non-finite numbers."""
    return _map_leaves(value, lambda leaf: _NON_FINITE.get(leaf, leaf) if type(leaf) is str else leaf)


def _map_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    if type(value) is list:
        return [_map_leaves(item, convert) for item in value]
    if type(value) is dict:
        return {name: _map_leaves(item, convert) for name, item in value.items()}
    return convert(value)


class UniqueNames:
    """Function from the name of a metric to its written name, always the same for one name.

    If two names become equal, the later name gets a number, ``a_b`` and ``a_b_2``, with one warning.

    Args:
        caller: prefix of the warning.
        clean: function that replaces invalid characters.
        reserved: names with another meaning; a metric with a reserved name is written as ``metric/<name>``.
    """

    __slots__ = ("_caller", "_clean", "_known", "_reserved", "_used")

    def __init__(self, caller: str, clean: Callable[[str], str] = str, reserved: Collection[str] = ()) -> None:
        self._caller, self._clean, self._reserved = caller, clean, reserved
        self._known: dict[str, str] = {}
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        known = self._known.get(name)
        return known if known is not None else self._assign(name)

    def _assign(self, name: str) -> str:
        wanted = self._clean(name)
        wanted = f"metric/{wanted}" if wanted in self._reserved else wanted
        unique, count = wanted, 2
        while unique in self._used:
            unique, count = f"{wanted}_{count}", count + 1
        self._known[name] = unique
        self._used.add(unique)
        if unique != wanted:
            warnings.warn(
                f"{self._caller}: metric {name!r} is written as {unique!r}. Another metric is written as {wanted!r}.",
                stacklevel=4,
            )
        return unique
