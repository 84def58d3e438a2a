"""Summarize rows of numbers of consecutive ranks in a size that does not depend on the number of ranks: ``RowSummary``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import NamedTuple


class RowSummary(NamedTuple):
    """Summary of the rows of numbers of consecutive ranks. Its size does not depend on the number of ranks.

    Args:
        first_rank: first of the ranks.
        ranks: number of ranks.
        changes: for each comparison of the ``RowSpec``, the first rank that differs from the rank before; -1 without one.
        first: row of the first rank.
        last: row of the last rank.
        sums: sum of each column.
        minima: minimum of each column.
        maxima: maximum of each column.
    """

    first_rank: float
    ranks: float
    changes: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    sums: tuple[float, ...]
    minima: tuple[float, ...]
    maxima: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Form of the rows of a reduction, equal on all ranks.

    Args:
        columns: numbers in a row.
        compared: columns that must be equal on the ranks of a block; each tuple is one comparison.
        block: number of consecutive ranks in a block.
    """

    columns: int
    compared: tuple[tuple[int, ...], ...] = ()
    block: int = 1

    def summarize(self, rows: Sequence[tuple[float, ...]], first_rank: int = 0) -> RowSummary:
        """Return the summary of the rows of consecutive ranks."""
        if self.block == 1:
            changes = (-1.0,) * len(self.compared)
        else:
            changes = tuple(self._first_change(rows, first_rank, compared) for compared in self.compared)
        # Of one row each number is its own sum, minimum and maximum. Two rows need no list of columns.
        if len(rows) == 1:
            sums = minima = maxima = rows[0]
        elif len(rows) == 2:
            sums, minima, maxima = tuple(map(add, *rows)), tuple(map(min, *rows)), tuple(map(max, *rows))
        else:
            sums = tuple(map(sum, zip(*rows, strict=True)))
            minima, maxima = tuple(map(min, *rows)), tuple(map(max, *rows))
        return RowSummary(first_rank, len(rows), changes, rows[0], rows[-1], sums, minima, maxima)

    def _first_change(self, rows: Sequence[tuple[float, ...]], first_rank: int, compared: tuple[int, ...]) -> float:
        for rank, (before, row) in enumerate(pairwise(rows), first_rank + 1):
            if rank % self.block and any(row[column] != before[column] for column in compared):
                return rank
        return -1.0

    def combine(self, low: RowSummary, high: RowSummary) -> RowSummary:
        """Return the summary of the ranks of both; the ranks of ``high`` follow those of ``low``."""
        changes = [found if found >= 0 else later for found, later in zip(low.changes, high.changes, strict=True)]
        if self.block > 1 and high.first_rank % self.block:
            for index, compared in enumerate(self.compared):
                if low.changes[index] < 0 and any(high.first[column] != low.last[column] for column in compared):
                    changes[index] = high.first_rank
        return RowSummary(
            low.first_rank,
            low.ranks + high.ranks,
            tuple(changes),
            low.first,
            high.last,
            tuple(map(add, low.sums, high.sums)),
            tuple(map(min, low.minima, high.minima)),
            tuple(map(max, low.maxima, high.maxima)),
        )

    def encode(self, summary: RowSummary) -> bytes:
        """Return the bytes of ``summary``."""
        numbers = [summary.first_rank, summary.ranks, *summary.changes]
        for row in summary[3:]:
            numbers += row
        return number_struct(len(numbers)).pack(*numbers)

    def decode(self, data: bytes) -> RowSummary:
        """Return the summary of ``encode``."""
        changes, size = len(self.compared), self.columns
        numbers = number_struct(2 + changes + 5 * size).unpack(data)
        rows = [numbers[at : at + size] for at in range(2 + changes, len(numbers), size)] if size else [()] * 5
        return RowSummary(numbers[0], numbers[1], numbers[2 : 2 + changes], *rows)


@lru_cache(maxsize=16)
def number_struct(count: int) -> struct.Struct:
    """Return the format of ``count`` float64 numbers."""
    return struct.Struct(f"={count}d")
