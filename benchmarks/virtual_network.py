"""Run the exchanges of the control plane and its reports of missing ranks on a virtual network, with a virtual clock.

The code of the ranks is the library's own (``dtrain.dist.control_protocol``, ``dtrain.dist.arrival_marks``). Only sockets, the
rendezvous store and the clock are simulated.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.dist.arrival_marks import Add, ArrivalReport, Read, Set, SetOnce, Sleep, StoreProtocol, StoreRequest
from dtrain.dist.control_protocol import Layout, Protocol


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
    found = Exchange()
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
                found.sent[rank] += 1
                found.bytes[rank] += len(transfer.data)
                found.peers[rank].add(transfer.to)
                if (blocked := waiting.pop((rank, transfer.to), None)) is not None:
                    ready.append(blocked)
            sent.add(rank)
            data = b""
            if transfer.source is not None:
                found.peers[rank].add(transfer.source)
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
                found.results[rank], found.seconds[rank] = stop.value, clock[rank]
                break
    return found


def run_reports(
    start: Callable[[int], StoreProtocol[ArrivalReport]],
    failed_at: Mapping[int, float],
    *,
    latency_s: float = 100e-6,
    service_s: float = 20e-6,
    notes: Mapping[int, str] | None = None,
) -> tuple[dict[int, ArrivalReport], int, float]:
    """Run the reports of the ranks whose collective failed, on one store that serves a request at a time.

    Args:
        start: makes the generator of a rank.
        failed_at: virtual time at which each rank's collective failed.
        latency_s: time of a request to the store, and of its answer.
        service_s: time that the store takes for a request.
        notes: errors of ranks that have left.

    Returns:
        Report of each rank, number of requests to the store, and virtual time of the last report.
    """
    keys: dict[str, Any] = {f"left/{rank}": note for rank, note in (notes or {}).items()}
    protocols = {rank: start(rank) for rank in failed_at}
    reports: dict[int, ArrivalReport] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    waits: dict[int, int] = defaultdict(int)
    free_at, requests, last, number = 0.0, 0, 0.0, 0
    # Time, order, kind, rank, request or answer.
    events: list[tuple[float, int, str, int, Any]] = []

    def push(at: float, kind: str, rank: int, value: Any) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, kind, rank, value))

    for rank, at in failed_at.items():
        push(at, "begin", rank, None)
    while events:
        now, _, kind, rank, value = heapq.heappop(events)
        if kind == "request":
            free_at = max(free_at, now) + service_s
            requests += 1
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
            request: StoreRequest = next(protocols[rank]) if kind == "begin" else protocols[rank].send(value)
        except StopIteration as stop:
            reports[rank], last = stop.value, now
            continue
        if isinstance(request, Sleep):
            push(now + request.seconds, "answer", rank, now + request.seconds)
        else:
            push(now + latency_s, "request", rank, request)
    return reports, requests, last


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
