"""Order the messages of the control plane: which rank sends which bytes to which rank, without any transport.

Each function is a generator. It yields a ``Transfer`` (bytes to send to one rank, and the rank to receive from) and gets the
received bytes. ``control_plane`` runs the generators on sockets. A simulation runs the same code on a virtual network.

The ranks of a node exchange over sockets of that node. The first rank of each node, its leader, exchanges with the leaders of
other nodes:

*One node.* In round *k* each rank sends all that it has to the rank ``2**k`` before, and receives from the rank ``2**k`` after.

*Several nodes.* The ranks of a node send their data up a binomial tree to the leader. The leaders exchange in rounds: in round
*k* with the leader whose index differs in bit *k*. If the number of nodes is not a power of two, some nodes join a neighbour
before. The result goes down the same trees.

So a result takes ``log2(nodes) + 2 * log2(ranks of a node)`` messages in sequence, and each rank is connected to a logarithmic
number of ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Transfer(NamedTuple):
    """One step of a rank: send ``data`` to rank ``to``, then receive one message of rank ``source``. None skips a half."""

    to: int | None
    data: bytes
    source: int | None


Protocol: TypeAlias = Generator[Transfer, bytes, T]
"""Steps of one rank in one exchange; returns the result of the exchange."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Place of a rank among nodes of ``node_size`` consecutive ranks. A ``node_size`` of 1 makes every rank a leader.

    Args:
        rank: index of the rank.
        world_size: number of ranks.
        node_size: number of ranks of each node.

    Attributes:
        num_nodes: number of nodes.
        node: index of the node.
        local: index of the rank on its node, 0 for the leader.
        leader: rank of the node's leader.
    """

    rank: int
    world_size: int
    node_size: int
    num_nodes: int = field(init=False)
    node: int = field(init=False)
    local: int = field(init=False)
    leader: int = field(init=False)

    def __post_init__(self) -> None:
        # Each exchange reads these numbers.
        object.__setattr__(self, "num_nodes", self.world_size // self.node_size)
        object.__setattr__(self, "node", self.rank // self.node_size)
        object.__setattr__(self, "local", self.rank % self.node_size)
        object.__setattr__(self, "leader", self.rank - self.local)

    def local_peers(self) -> set[int]:
        """Return the ranks of this node that this rank exchanges messages with."""
        steps = [1 << k for k in range((self.node_size - 1).bit_length())]
        return {self.leader + (self.local + sign * step) % self.node_size for step in steps for sign in (1, -1)}

    def remote_peers(self) -> set[int]:
        """Return the leaders of other nodes that this rank exchanges messages with; none unless this rank is a leader."""
        if self.local or self.num_nodes == 1:
            return set()
        place = _NodePlace.of(self.node, self.num_nodes)
        nodes = {node for node in (place.joins, place.joined_by) if node is not None}
        if place.joins is None:
            nodes.update(place.partner(k) for k in range(place.rounds))
        return {node * self.node_size for node in nodes}


class MessageRounds(NamedTuple):
    """Messages in sequence until every rank has the result of an exchange.

    Args:
        local: messages over sockets of a node.
        remote: messages between nodes.
    """

    local: int
    remote: int


def count_rounds(world_size: int, node_size: int) -> MessageRounds:
    """Return the messages in sequence of ``all_gather`` and ``reduce_rows``.

    The number is exact if a node's ranks and the nodes are powers of two. Otherwise it is an upper bound.
    """
    levels, nodes = (node_size - 1).bit_length(), world_size // node_size
    if nodes == 1:
        return MessageRounds(levels, 0)
    # Nodes beyond a power of two join a neighbour before, and get the result after.
    return MessageRounds(2 * levels, nodes.bit_length() - 1 + 2 * (nodes.bit_count() > 1))


class _NodePlace(NamedTuple):
    """Place of a node in the exchange between leaders.

    Args:
        position: index among the nodes that exchange in rounds; for a node that joins another, the index of that node.
        rounds: number of rounds.
        extra: number of nodes that join another node.
        joins: node that exchanges for this node, or None.
        joined_by: node that this node exchanges for, or None.
    """

    position: int
    rounds: int
    extra: int
    joins: int | None
    joined_by: int | None

    @classmethod
    def of(cls, node: int, num_nodes: int) -> _NodePlace:
        rounds = num_nodes.bit_length() - 1
        extra = num_nodes - (1 << rounds)
        if node >= 2 * extra:
            return cls(node - extra, rounds, extra, None, None)
        return cls(node // 2, rounds, extra, node - 1 if node % 2 else None, None if node % 2 else node + 1)

    def partner(self, k: int) -> int:
        """Return the node of round ``k``. Until then both have combined consecutive nodes, in the order of positions."""
        other = self.position ^ (1 << k)
        return 2 * other if other < self.extra else other + self.extra


def peers_of(layout: Layout) -> set[int]:
    """Return all ranks that this rank exchanges messages with."""
    return layout.local_peers() | layout.remote_peers()


def _children(local: int, node_size: int) -> list[int]:
    """Return the children of a rank in the binomial tree of its node, by local index, the one with most ranks below first."""
    steps = range(local.bit_length(), (node_size - 1).bit_length())
    return [local + (1 << k) for k in steps if local + (1 << k) < node_size]


def _parent(local: int) -> int:
    return local - (1 << (local.bit_length() - 1))


def _collect(layout: Layout, data: bytes) -> Protocol[bytes]:
    """Send the data of a node's ranks to the leader. Return the data of this rank and of the ranks below it."""
    parts = [data]
    for child in _children(layout.local, layout.node_size):
        parts.append((yield Transfer(None, b"", layout.leader + child)))
    joined = b"".join(parts) if len(parts) > 1 else data
    if layout.local:
        yield Transfer(layout.leader + _parent(layout.local), joined, None)
    return joined


def _spread(layout: Layout, data: bytes) -> Protocol[bytes]:
    """Send the leader's ``data`` to the ranks of its node, and return it."""
    if layout.local:
        data = yield Transfer(None, b"", layout.leader + _parent(layout.local))
    for child in _children(layout.local, layout.node_size):
        yield Transfer(layout.leader + child, data, None)
    return data


def _exchange_leaders(layout: Layout, data: bytes, combine: Callable[[bytes, bytes], bytes]) -> Protocol[bytes]:
    """Combine the data of all leaders, in the order of nodes; called on leaders only."""
    place, size = _NodePlace.of(layout.node, layout.num_nodes), layout.node_size
    if place.joins is not None:
        yield Transfer(place.joins * size, data, None)
        return (yield Transfer(None, b"", place.joins * size))
    if place.joined_by is not None:
        data = combine(data, (yield Transfer(None, b"", place.joined_by * size)))
    for k in range(place.rounds):
        partner = place.partner(k) * size
        other = yield Transfer(partner, data, partner)
        data = combine(data, other) if partner > layout.rank else combine(other, data)
    if place.joined_by is not None:
        yield Transfer(place.joined_by * size, data, None)
    return data


def _disseminate(layout: Layout, data: bytes, cut: Callable[[bytes, int], bytes]) -> Protocol[bytes]:
    """Return the data of all ranks of the node, this rank's first, then in the cyclic order of ranks.

    ``cut`` returns the part of joined data that belongs to its first ranks.
    """
    size, local, joined = layout.node_size, layout.local, 1
    while joined < size:
        number = min(joined, size - joined)
        sent = data if number == joined else cut(data, number)
        before, after = (local - joined) % size, (local + joined) % size
        data += yield Transfer(layout.leader + before, sent, layout.leader + after)
        joined += number
    return data


# Rank and length of the following bytes.
_BLOCK = struct.Struct("=iq")


def _block(rank: int, payload: bytes) -> bytes:
    return _BLOCK.pack(rank, len(payload)) + payload


def _cut_blocks(blocks: bytes, number: int) -> bytes:
    end = 0
    for _ in range(number):
        end += _BLOCK.size + _BLOCK.unpack_from(blocks, end)[1]
    return blocks[:end]


def _payloads(blocks: bytes, world_size: int) -> list[bytes]:
    """Return the payloads by rank."""
    payloads, offset = [b""] * world_size, 0
    while offset < len(blocks):
        rank, length = _BLOCK.unpack_from(blocks, offset)
        offset += _BLOCK.size
        payloads[rank] = blocks[offset : offset + length]
        offset += length
    return payloads


def all_gather(layout: Layout, payload: bytes) -> Protocol[list[bytes]]:
    """Return the payloads of all ranks on every rank, by rank. Payloads may have any length."""
    blocks = _block(layout.rank, payload)
    if layout.num_nodes == 1:
        blocks = yield from _disseminate(layout, blocks, _cut_blocks)
    else:
        blocks = yield from _collect(layout, blocks)
        if layout.local == 0:
            blocks = yield from _exchange_leaders(layout, blocks, add)
        blocks = yield from _spread(layout, blocks)
    return _payloads(blocks, layout.world_size)


def gather(layout: Layout, payload: bytes, dst: int) -> Protocol[list[bytes] | None]:
    """Return the payloads of all ranks on rank ``dst``, by rank; None on the other ranks, which hold only what they pass on."""
    blocks = yield from _collect(layout, _block(layout.rank, payload))
    if layout.local == 0:
        blocks = yield from _gather_leaders(layout, blocks, dst // layout.node_size)
    if layout.node == dst // layout.node_size:
        blocks = yield from _pass_down(layout, blocks, dst % layout.node_size)
    return _payloads(blocks, layout.world_size) if layout.rank == dst else None


def _gather_leaders(layout: Layout, blocks: bytes, dst_node: int) -> Protocol[bytes]:
    """Send the data of all leaders to the leader of ``dst_node``, over the connections of ``_exchange_leaders``."""
    place, size = _NodePlace.of(layout.node, layout.num_nodes), layout.node_size
    if place.joins is not None:
        yield Transfer(place.joins * size, blocks, None)
        return (yield Transfer(None, b"", place.joins * size)) if layout.node == dst_node else b""
    if place.joined_by is not None:
        blocks += yield Transfer(None, b"", place.joined_by * size)
    distance = place.position ^ _NodePlace.of(dst_node, layout.num_nodes).position
    for k in range(place.rounds):
        partner = place.partner(k) * size
        if distance & (1 << k):
            yield Transfer(partner, blocks, None)
            return b""
        blocks += yield Transfer(None, b"", partner)
    if place.joined_by is not None and place.joined_by == dst_node:
        yield Transfer(place.joined_by * size, blocks, None)
    return blocks


def _pass_down(layout: Layout, blocks: bytes, dst: int) -> Protocol[bytes]:
    """Send the leader's data down its tree to the rank with local index ``dst``."""
    path = [dst]
    while path[-1]:
        path.append(_parent(path[-1]))
    if layout.local not in path:
        return b""
    depth = path.index(layout.local)
    if layout.local:
        blocks = yield Transfer(None, b"", layout.leader + path[depth + 1])
    if depth:
        yield Transfer(layout.leader + path[depth - 1], blocks, None)
    return blocks


def reduce_rows(
    layout: Layout, row: Sequence[float], spec: RowSpec
) -> Protocol[tuple[RowSummary, list[tuple[float, ...]] | None]]:
    """Return the summary of all rows on every rank; on one node also the rows, by rank."""
    pack, size = number_struct(spec.columns), layout.node_size
    data = pack.pack(*row)
    if layout.num_nodes == 1:
        data = yield from _disseminate(layout, data, lambda joined, number: joined[: number * pack.size])
        # The first row is that of this rank.
        cyclic_rows = list(pack.iter_unpack(data))
        rows = cyclic_rows[size - layout.local :] + cyclic_rows[: size - layout.local]
        return spec.summarize(rows), rows
    data = yield from _collect(layout, data)
    if layout.local == 0:
        rows_of_node = list(pack.iter_unpack(data))
        node = spec.summarize([rows_of_node[position] for position in _tree_positions(size)], layout.rank)
        data = yield from _exchange_leaders(
            layout, spec.encode(node), lambda low, high: spec.encode(spec.combine(spec.decode(low), spec.decode(high)))
        )
    return spec.decode((yield from _spread(layout, data))), None


@lru_cache(maxsize=16)
def _tree_positions(node_size: int) -> tuple[int, ...]:
    """Return, by local index, the position of each rank in the data that ``_collect`` joins on the leader."""

    def below(local: int) -> list[int]:
        return [local, *(rank for child in _children(local, node_size) for rank in below(child))]

    order = below(0)
    return tuple(order.index(local) for local in range(node_size))


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
        changes = [earlier if earlier >= 0 else later for earlier, later in zip(low.changes, high.changes, strict=True)]
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
        rows = [numbers[start : start + size] for start in range(2 + changes, len(numbers), size)] if size else [()] * 5
        return RowSummary(numbers[0], numbers[1], numbers[2 : 2 + changes], *rows)


@lru_cache(maxsize=16)
def number_struct(count: int) -> struct.Struct:
    """Return the format of ``count`` float64 numbers."""
    return struct.Struct(f"={count}d")
