"""Run the exchanges of the control plane and its reports of missing ranks on a virtual network, with a virtual clock.

The code of the ranks is the library's own (``dtrain.dist.control_protocol``, ``dtrain.dist.incident_protocol``). Only sockets,
the rendezvous store and the clock are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.dist.control_protocol import Layout, Protocol
from dtrain.dist.incident_protocol import (
    FAILED,
    Add,
    ArrivalReport,
    Read,
    Set,
    SetOnce,
    Sign,
    Sleep,
    Spread,
    StoreProtocol,
    StoreRequest,
    find_report,
    give_sign,
)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Costs of a message.

    Args:
        latency_s: time between two nodes.
        local_latency_s: time between two ranks of a node.
        cpu_s: time of a rank for sending or receiving one message, Python included.
        bytes_per_s: bandwidth between nodes.
    """

    latency_s: float = 25e-6
    local_latency_s: float = 10e-6
    cpu_s: float = 15e-6
    bytes_per_s: float = 1.25e9


@dataclass(kw_only=True)
class Exchange:
    """Result of an exchange.

    Args:
        results: result by rank; ranks that wait for a missing rank have none.
        seconds: virtual time at which each rank had its result.
        sent: messages that each rank sent.
        peers: ranks that each rank sent messages to or received messages from.
        bytes: bytes that each rank sent.
    """

    results: dict[int, Any] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    peers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def run_exchange(
    start: Callable[[Layout], Protocol[Any]],
    world_size: int,
    node_size: int,
    *,
    network: Network = Network(),
    missing: Collection[int] = (),
) -> Exchange:
    """Run one exchange of all ranks except the ``missing`` ones. All ranks start at time 0.

    A rank waits for a message of one rank at a time, so the result does not depend on the order in which ranks are simulated.
    """
    exchange = Exchange()
    clock: dict[int, float] = defaultdict(float)
    messages: dict[tuple[int, int], deque[tuple[float, bytes]]] = defaultdict(deque)
    waiting: dict[tuple[int, int], int] = {}
    layouts = {rank: Layout(rank, world_size, node_size) for rank in range(world_size) if rank not in missing}
    protocols = {rank: start(layout) for rank, layout in layouts.items()}
    state = {rank: next(protocol, None) for rank, protocol in protocols.items() if world_size > 1}
    ready = deque(state)
    sent: set[int] = set()
    while ready:
        rank = ready.popleft()
        while True:
            transfer = state[rank]
            assert transfer is not None
            if transfer.to is not None and rank not in sent:
                clock[rank] += network.cpu_s
                local = transfer.to // node_size == rank // node_size
                delay = network.local_latency_s if local else network.latency_s + len(transfer.data) / network.bytes_per_s
                messages[rank, transfer.to].append((clock[rank] + delay, transfer.data))
                exchange.sent[rank] += 1
                exchange.bytes[rank] += len(transfer.data)
                exchange.peers[rank].add(transfer.to)
                if (blocked := waiting.pop((rank, transfer.to), None)) is not None:
                    ready.append(blocked)
            sent.add(rank)
            data = b""
            if transfer.source is not None:
                exchange.peers[rank].add(transfer.source)
                queue = messages[transfer.source, rank]
                if not queue:
                    waiting[transfer.source, rank] = rank
                    break
                arrival, data = queue.popleft()
                clock[rank] = max(clock[rank], arrival) + network.cpu_s
            sent.discard(rank)
            try:
                state[rank] = protocols[rank].send(data)
            except StopIteration as stop:
                exchange.results[rank], exchange.seconds[rank] = stop.value, clock[rank]
                break
    return exchange


@dataclass(kw_only=True)
class Reports:
    """Result of an incident.

    Args:
        reports: report by rank; ranks that have failed by themselves have none.
        requests: number of requests to the store.
        last: virtual time of the last report.
    """

    reports: dict[int, ArrivalReport] = field(default_factory=dict)
    requests: int = 0
    last: float = 0.0


def report_incident(
    board: str, rank: int, world_size: int, sign: Sign, *, grace_s: float, settle_s: float = 0.0
) -> StoreProtocol[ArrivalReport | None]:
    """Give the sign of ``rank``, close its connections, and return the report; None if the rank has failed by itself."""
    if (yield from give_sign(board, rank, sign)) == FAILED:
        yield Spread()
        return None
    return (yield from find_report(board, rank, world_size, grace_s=grace_s, settle_s=settle_s))


def run_reports(
    start: Callable[[int, int | None], StoreProtocol[ArrivalReport | None]],
    failed_at: Mapping[int, float],
    *,
    peers: Callable[[int], Collection[int]] = lambda rank: (),
    stopped: Collection[int] = (),
    dead: Mapping[int, float] | None = None,
    broken: Mapping[tuple[int, int], float] | None = None,
    latency_s: float = 100e-6,
    service_s: float = 20e-6,
) -> Reports:
    """Run an incident on one store that serves a request at a time.

    A rank learns of it when its own collective fails, or when a rank closes their connection. The kernel closes the
    connections of a dead rank.

    Args:
        start: makes the generator of a rank; the second argument is the rank whose connection was closed, None if the own
            collective of the rank failed.
        failed_at: virtual time at which a rank's own collective failed, or at which the rank raised an exception.
        peers: ranks that a rank is connected to.
        stopped: ranks that do nothing, and keep their connections open.
        dead: virtual time at which a rank died.
        broken: virtual time at which the connection of two living ranks broke.
        latency_s: time of a message.
        service_s: time that the store takes for a request.
    """
    reports, keys, dead = Reports(), dict[str, Any](), dict(dead or {})
    protocols: dict[int, StoreProtocol[ArrivalReport | None]] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    waits: dict[int, int] = defaultdict(int)
    free_at, number = 0.0, 0
    # Time, order, kind, rank, request or answer.
    events: list[tuple[float, int, str, int, Any]] = []

    def push(time_s: float, kind: str, rank: int, value: Any) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time_s, number, kind, rank, value))

    def close_connections(time_s: float, rank: int) -> None:
        for peer in peers(rank):
            push(time_s + latency_s, "begin", peer, rank)

    for rank, time_s in failed_at.items():
        push(time_s, "begin", rank, None)
    for rank, time_s in dead.items():
        close_connections(time_s, rank)
    for (rank, peer), time_s in (broken or {}).items():
        push(time_s, "begin", rank, peer)
        push(time_s, "begin", peer, rank)
    while events:
        now, _, kind, rank, value = heapq.heappop(events)
        if rank in stopped or now >= dead.get(rank, math.inf) or (kind == "begin" and rank in protocols):
            continue
        if kind == "request":
            free_at = max(free_at, now) + service_s
            reports.requests += 1
            answer = _serve(keys, value)
            if isinstance(value, Read) and answer is None and value.timeout_s > 0:
                readers[value.key].append(rank)
                waits[rank] += 1
                push(now + value.timeout_s, "give up", rank, (value.key, waits[rank]))
                continue
            push(free_at + latency_s, "answer", rank, answer)
            if isinstance(value, Set):
                for reader in readers.pop(value.key, []):
                    waits[reader] += 1
                    free_at += service_s
                    push(free_at + latency_s, "answer", reader, value.text)
            continue
        if kind == "give up":
            if waits[rank] != value[1]:
                continue
            readers[value[0]].remove(rank)
            value = None
        try:
            if kind == "begin":
                protocols[rank] = start(rank, value)
                request: StoreRequest = next(protocols[rank])
            else:
                request = protocols[rank].send(value)
            while isinstance(request, Spread):
                close_connections(now, rank)
                request = protocols[rank].send(None)
        except StopIteration as stop:
            if stop.value is not None:
                reports.reports[rank], reports.last = stop.value, now
            continue
        if isinstance(request, Sleep):
            push(now + request.seconds, "answer", rank, now + request.seconds)
        else:
            push(now + latency_s, "request", rank, request)
    return reports


def _serve(keys: dict[str, Any], request: StoreRequest) -> Any:
    if isinstance(request, Add):
        keys[request.key] = keys.get(request.key, 0) + request.value
        return keys[request.key]
    if isinstance(request, SetOnce):
        return keys.setdefault(request.key, request.text)
    if isinstance(request, Set):
        keys[request.key] = request.text
        return None
    assert isinstance(request, Read)
    return keys.get(request.key)
