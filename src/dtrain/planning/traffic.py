"""``CollectiveTraffic``: the collectives of a step by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.testing.collective_counter import CollectiveCall


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """Collectives of one kind in a step of one rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``permute`` and so on, as in ``count_collectives``.
        group_size: number of ranks in each.
        count: number of collectives.
        bytes: logical size: of the whole gathered parameters, of the whole reduced gradients.
        stride: distance between the global ranks of neighbours in the group; 1 for neighbours on a node.
        bytes_sent: bytes sent by this rank in a ring: (n - 1) / n of the bytes, twice that for an all-reduce, and all of them
            for a permute.
    """

    op: str
    group_size: int
    count: int
    bytes: int
    stride: int = 1

    @property
    def bytes_sent(self) -> int:
        if self.op == "permute":
            return self.bytes
        passes = 2 if self.op == "all_reduce" else 1
        return round(passes * self.bytes * (self.group_size - 1) / self.group_size)


def sum_traffic(calls: Sequence[CollectiveCall], strides: Mapping[str, int]) -> tuple[CollectiveTraffic, ...]:
    """Return the collectives by kind, sorted by the bytes sent; collectives of one rank are left out.

    ``strides`` has the stride of each mesh axis; other groups have stride 1."""
    rows: dict[tuple[str, int, int], tuple[int, int]] = {}
    for call in calls:
        key = call.op, call.group_size, strides.get(call.group, 1)
        count, size = rows.get(key, (0, 0))
        if call.group_size > 1:
            rows[key] = count + 1, size + call.bytes
    traffic = [
        CollectiveTraffic(op=op, group_size=ranks, count=count, bytes=size, stride=stride)
        for (op, ranks, stride), (count, size) in rows.items()
    ]
    return tuple(sorted(traffic, key=lambda t: -t.bytes_sent))


def extrapolate_traffic(
    two: Sequence[CollectiveTraffic], three: Sequence[CollectiveTraffic], microbatches: int
) -> tuple[CollectiveTraffic, ...]:
    """Extrapolate the traffic of ``microbatches`` microbatches from that of two and of three."""
    by_kind = {(t.op, t.group_size, t.stride): t for t in two}
    traffic = []
    for t in three:
        base = by_kind.get((t.op, t.group_size, t.stride))
        more = microbatches - 3
        count = t.count + more * (t.count - (base.count if base else 0))
        size = t.bytes + more * (t.bytes - (base.bytes if base else 0))
        traffic.append(replace(t, count=count, bytes=size))
    return tuple(traffic)
