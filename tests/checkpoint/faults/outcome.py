"""Outcome of one fault, and the sum of outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_KEPT = 20  # a thousand equal complaints would only hide the first
_EMPTY_DRAWS = 100  # in a row: there is nothing left to draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault.

    Args:
        fault: its kind, as a row of a table would name it.
        came: the outcome in a word or two ("resumed", "refused", "harmless").
        wrong: a forbidden effect that did happen; empty when all is well.
        numbers: figures whose largest is reported, by name.
    """

    fault: str
    came: str
    wrong: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


Draw = Callable[[int, int], list[Outcome]]
"""``draw(seed, k)``: the outcomes of the ``k``-th draw, the same for the same two numbers as far as the faults go."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """The sum of many outcomes. Plain data, so that a program can be interrupted and resume."""

    count: int = 0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    wrong_count: int = 0
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome, *, where: str = "") -> None:
        """Count one outcome. Mutates: this tally."""
        self.count += 1
        came = self.kinds.setdefault(outcome.fault, {})
        came[outcome.came] = came.get(outcome.came, 0) + 1
        for name, value in outcome.numbers.items():
            self.largest[name] = max(value, self.largest.get(name, value))
        if outcome.wrong:
            self.wrong_count += 1
            if len(self.wrong) < _KEPT:
                self.wrong.append(f"{where}{outcome.fault}: {outcome.wrong}")

    @property
    def bound(self) -> float:
        """Return an upper bound of the error rate with 95% confidence when no error occurred: 3/N (the rule of three)."""
        return min(1.0, 3 / self.count) if self.count else 1.0


def tally(draw: Draw, *, seed: int, count: int) -> Tally:
    """At least ``count`` outcomes, from the first draw on; fewer when draws stay empty."""
    total, k, empty = Tally(), 0, 0
    while total.count < count and empty < _EMPTY_DRAWS:
        outcomes = draw(seed, k)
        empty = 0 if outcomes else empty + 1
        for outcome in outcomes:
            total.add(outcome, where=f"seed {seed}, draw {k}: ")
        k += 1
    return total


def plain(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Return outcomes in the form in which processes exchange them."""
    return [asdict(outcome) for outcome in outcomes]
