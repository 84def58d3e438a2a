"""The mistakes that several ranks have made: each is shown once, however many ranks have made it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.wire import Failure

_MOST = 4  # tracebacks of one attempt; further mistakes are counted
_MOST_MESSAGES = 8  # of ranks whose message differs from that of the first rank
_LONGEST_MESSAGE = 300  # characters
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")  # differs from rank to rank
_PLACE = re.compile(r'^\s*File "(.*)", line ([0-9]+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One exception in one place of the script, and the ranks whose scripts it left; the earliest comes first."""

    failures: tuple[Failure, ...]

    @property
    def first(self) -> Failure:
        """The record of the rank that failed first."""
        return self.failures[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks that made this mistake, in order."""
        return sorted(failure.rank for failure in self.failures)

    def lines(self, *, full: bool) -> list[tuple[int, str]]:
        """Return the lines to show, each with its rank: the first traceback, and messages of other ranks that differ from it.

        Args:
            full: if True, with all frames of dtrain and torch.
        """
        first = self.first
        trace = ((full and first.frames) or first.folded or first.frames).rstrip("\n").splitlines()
        others = [failure for failure in self.failures[1:] if failure.message != first.message]
        lines = [(first.rank, line) for line in trace]
        lines += [(failure.rank, f"{failure.kind}: {_cut(failure.message)}") for failure in others[:_MOST_MESSAGES]]
        if len(others) > _MOST_MESSAGES:
            lines.append((first.rank, f"... and {len(others) - _MOST_MESSAGES} more ranks, each with a message of its own"))
        return lines


def find_mistakes(failures: Sequence[Failure], first: Failure | None) -> list[Mistake]:
    """Group the records of ranks by mistake; the mistake of ``first`` comes first, then in the order of time.

    Two ranks made the same mistake if kind and place of the exception are the same, and the message but for its numbers. An
    exception of a collective is left out unless it is the mistake of ``first``: the rank has lost a peer.

    Args:
        failures: records of ranks, of the attempt that has ended.
        first: the record of the rank that failed first; None if that rank left no record, or no rank is named.
    """
    groups: dict[tuple[str, ...], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: (failure != first, failure.at, failure.rank)):
        groups.setdefault(_signature(failure), []).append(failure)
    return [
        Mistake(failures=tuple(group))
        for group in groups.values()
        if group[0].kind != "SystemExit" and (group[0] == first or not group[0].in_collective)
    ]


def show_mistakes(mistakes: Sequence[Mistake], *, full: bool) -> list[tuple[int, str]]:
    """Return the lines to show, each with its rank; of many mistakes the first few.

    Args:
        mistakes: those that are to be shown, in order.
        full: if True, with all frames of dtrain and torch.
    """
    lines = [line for mistake in mistakes[:_MOST] for line in mistake.lines(full=full)]
    if more := mistakes[_MOST:]:
        lines.append((more[0].first.rank, f"... and {len(more)} more mistakes; the logs of the ranks have their tracebacks"))
    return lines


def _signature(failure: Failure) -> tuple[str, ...]:
    places = [f"{file}:{line}" for file, line in _PLACE.findall(failure.folded or failure.frames)]
    return failure.kind, _NUMBER.sub("#", failure.message), *places


def _cut(message: str) -> str:
    first = next(iter(message.strip().splitlines()), "")
    return first if len(first) <= _LONGEST_MESSAGE else first[:_LONGEST_MESSAGE] + "..."
