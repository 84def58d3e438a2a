"""Names of metrics as a place takes them: two that would become one are told apart."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection


class DistinctNames:
    """A function from a metric's name to the name it is written under, always the same for one name.

    Args:
        where: for the warning.
        clean: the name as it has to look there.
        reserved: names that mean something else there; a metric of such a name is written as ``metric/<name>``.

    Where two names become one, the later gets a number, ``a_b`` and ``a_b_2``, and there is one warning.
    """

    __slots__ = ("_clean", "_known", "_reserved", "_used", "_where")

    def __init__(self, where: str, clean: Callable[[str], str] = str, reserved: Collection[str] = ()) -> None:
        self._where, self._clean, self._reserved = where, clean, reserved
        self._known: dict[str, str] = {}
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        known = self._known.get(name)
        return known if known is not None else self._new(name)

    def _new(self, name: str) -> str:
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


_LONGEST = 240  # MLflow takes 250; with a number added


def for_mlflow(name: str) -> str:
    """Only letters, digits and ``_-. :/``, and a path that has one way to be written."""
    text = re.sub(r"[^\w\-. :/]", "_", name)
    text = "/".join(part if part.strip(".") else "_" * len(part) for part in text.split("/") if part)
    return text[:_LONGEST].rstrip("/") or "_"
