"""``in_memory``: metrics that stay in the process, for notebooks and tests."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any

from dtrain.observe.sinks.ranks import Ranks, writes
from dtrain.observe.sinks.values import plain


class InMemory:
    """A sink that keeps its records, as plain data: see ``in_memory``."""

    __slots__ = ("_here", "records")

    def __init__(self, here: bool) -> None:
        self._here = here
        self.records: list[dict[str, Any]] = []
        """In order: ``{"step": 10, "time": 1700000000.5, "metrics": {"loss": 2.1}}``."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._here:
            metrics = {str(name): plain(value) for name, value in numbers.items()}
            self.records.append({"step": int(step), "time": time(), "metrics": metrics})

    def column(self, name: str) -> dict[int, Any]:
        """One metric by step, of each step the last value; empty for a name that never came."""
        found = {record["step"]: record["metrics"][name] for record in self.records if name in record["metrics"]}
        return dict(sorted(found.items()))

    @property
    def names(self) -> list[str]:
        """Of all metrics so far, in the order in which they came."""
        return list(dict.fromkeys(name for record in self.records for name in record["metrics"]))


def in_memory(*, ranks: Ranks = 0) -> InMemory:
    """A sink that keeps what it is given: ``.records``, ``.names`` and ``.column(name)``.

    Values are plain data, as in ``jsonl``, but non-finite numbers stay numbers. It grows with every record.

    Args:
        ranks: 0, or "all"; on other ranks it stays empty.

    Raises:
        ConfigError: other ``ranks``.

    Example:
        >>> kept = in_memory()
        >>> kept(1, {"loss": torch.tensor(0.5)})
        >>> kept(2, {"loss": 0.25, "lr": 0.1})
        >>> kept.column("loss"), kept.names
        ({1: 0.5, 2: 0.25}, ['loss', 'lr'])
    """
    return InMemory(writes(ranks, "in_memory"))
