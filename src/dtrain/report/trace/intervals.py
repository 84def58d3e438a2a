"""Stretches of time, as sorted lists of (start, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Stretches: TypeAlias = list[tuple[float, float]]


def union(parts: Iterable[tuple[float, float]]) -> Stretches:
    """All time that is in one of ``parts`` at least.

    >>> union([(5, 6), (0, 2), (1, 3), (4, 4)])
    [(0, 3), (5, 6)]
    """
    found: Stretches = []
    for start, end in sorted(part for part in parts if part[1] > part[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(these: Stretches, those: Stretches) -> Stretches:
    """What is in ``these`` and not in ``those``; both as ``union`` returns them.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    found: Stretches = []
    at = 0
    for start, end in these:
        while at < len(those) and those[at][1] <= start:
            at += 1
        here = at
        while here < len(those) and those[here][0] < end:
            if those[here][0] > start:
                found.append((start, those[here][0]))
            start = max(start, those[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found


def within(these: Stretches, those: Stretches) -> Stretches:
    """What is in both.

    >>> within([(0, 10)], [(2, 3), (9, 12)])
    [(2, 3), (9, 10)]
    """
    return without(these, without(these, those))


def length(these: Stretches) -> float:
    """How long they are together."""
    return sum(end - start for start, end in these)
