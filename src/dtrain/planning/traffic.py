"""What a step sends: its collectives by kind, and the bytes that a rank puts on the wire for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.testing.collectives import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in a step of one rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` and so on, as in ``count_collectives``.
        ranks: how many ranks take part in each.
        count: how many there are.
        bytes: their logical size: of the whole parameters that are gathered, of the whole gradients that are reduced.
        sent: what this rank sends for them when they run in a ring: (n - 1) / n of the bytes, twice that for an all-reduce.
    """

    op: str
    ranks: int
    count: int
    bytes: int

    @property
    def sent(self) -> int:
        turns = 2 if self.op == "all_reduce" else 1
        return round(turns * self.bytes * (self.ranks - 1) / self.ranks)


def summed(found: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Collectives by kind, those that send most first; those of one rank are left out."""
    rows: dict[tuple[str, int], tuple[int, int]] = {}
    for each in found:
        count, size = rows.get((each.op, each.group_size), (0, 0))
        if each.group_size > 1:
            rows[each.op, each.group_size] = count + 1, size + each.bytes
    made = [Traffic(op=op, ranks=ranks, count=count, bytes=size) for (op, ranks), (count, size) in rows.items()]
    return tuple(sorted(made, key=lambda t: -t.sent))


def continued(two: Sequence[Traffic], three: Sequence[Traffic], microbatches: int) -> tuple[Traffic, ...]:
    """The traffic of a step of more microbatches, from those of two and of three."""
    before = {(t.op, t.ranks): t for t in two}
    made = []
    for t in three:
        was = before.get((t.op, t.ranks), Traffic(op=t.op, ranks=t.ranks, count=0, bytes=0))
        more = microbatches - 3
        count, size = t.count + more * (t.count - was.count), t.bytes + more * (t.bytes - was.bytes)
        made.append(Traffic(op=t.op, ranks=t.ranks, count=count, bytes=size))
    return tuple(made)
