"""What a metric's value becomes: a plain number where it is one, and else something that says what it was.

Names of metrics as a place takes them: two that would become one are told apart."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

_MAX_DEPTH = 8  # lists within lists: what holds itself would go on for ever
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain_value(value: Any, _depth: int = 0) -> Any:
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
    if _depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [to_plain_value(each, _depth + 1) for each in value]
    if _depth < _MAX_DEPTH and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: to_plain_value(each, _depth + 1) for name, each in value.items()}
    return {"unloggable": _describe_type(value)}


def _describe_type(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) and shape else "")


def encode_nonfinite(value: Any) -> Any:
    """A plain value with the texts ``nan``, ``inf`` and ``-inf`` for non-finite numbers, so that every JSON reader takes it."""
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is list:
        return [encode_nonfinite(each) for each in value]
    if type(value) is dict:
        return {name: encode_nonfinite(each) for name, each in value.items()}
    return value


def decode_nonfinite(value: Any) -> Any:
    """What ``encoded`` was given."""
    if type(value) is str:
        return _NON_FINITE.get(value, value)
    if type(value) is list:
        return [decode_nonfinite(each) for each in value]
    if type(value) is dict:
        return {name: decode_nonfinite(each) for name, each in value.items()}
    return value


class NumericFilter:
    """Of a record, what is a number, as floats; the rest is left out, with one warning a name."""

    __slots__ = ("_said", "_where")

    def __init__(self, caller: str) -> None:
        self._where = caller
        self._said: set[str] = set()

    def __call__(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        kept = {}
        for name, value in numbers.items():
            number = to_plain_value(value)
            if isinstance(number, int | float):
                kept[str(name)] = _to_float(number)
            else:
                self._warn_skipped(str(name), number)
        return kept

    def _warn_skipped(self, name: str, value: Any) -> None:
        if name not in self._said:
            self._said.add(name)
            what = value["unloggable"] if isinstance(value, dict) and "unloggable" in value else repr(value)[:40]
            warnings.warn(f"{self._where}: takes numbers only, {name!r} is left out ({what})", stacklevel=4)


def _to_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number beyond floats
        return math.inf if number > 0 else -math.inf


class UniqueNames:
    """A function from a metric's name to the name it is written under, always the same for one name.

    Args:
        caller: for the warning.
        clean: the name as it has to look there.
        reserved: names that mean something else there; a metric of such a name is written as ``metric/<name>``.

    Where two names become one, the later gets a number, ``a_b`` and ``a_b_2``, and there is one warning.
    """

    __slots__ = ("_clean", "_known", "_reserved", "_used", "_where")

    def __init__(self, caller: str, clean: Callable[[str], str] = str, reserved: Collection[str] = ()) -> None:
        self._where, self._clean, self._reserved = caller, clean, reserved
        self._known: dict[str, str] = {}
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        known = self._known.get(name)
        return known if known is not None else self._assign(name)

    def _assign(self, name: str) -> str:
        wanted = self._clean(name)
        wanted = f"metric/{wanted}" if wanted in self._reserved else wanted
        found, count = wanted, 2
        while found in self._used:
            found, count = f"{wanted}_{count}", count + 1
        self._known[name] = found
        self._used.add(found)
        if found != wanted:
            warnings.warn(f"{self._where}: {name!r} is written as {found!r}, since another metric is {wanted!r}", stacklevel=4)
        return found


_MAX_NAME_LENGTH = 240  # MLflow takes 250; with a number added


def mlflow_name(name: str) -> str:
    """Only letters, digits and ``_-. :/``, and a path that has one way to be written."""
    text = re.sub(r"[^\w\-. :/]", "_", name)
    text = "/".join(part if part.strip(".") else "_" * len(part) for part in text.split("/") if part)
    return text[:_MAX_NAME_LENGTH].rstrip("/") or "_"
