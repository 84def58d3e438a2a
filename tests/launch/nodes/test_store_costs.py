"""The requests that nodes make to their store, counted: a constant number per node, for any number of nodes."""

from __future__ import annotations

import queue
import socket
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
from torch.distributed import TCPStore

from dtrain.launch.agent_main import NodeSession, SessionEnded, make_hello
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.node_messages import JobFinished, JoinAccepted, NodeStore, RanksExited

LONG_S = 300  # no promise: how long a busy test machine may take
WATCHED_S = 1.5


class CountingStore:
    """A ``TCPStore`` that counts the requests of a node."""

    def __init__(self, counts: Counter[int], rank: int, *args: Any, **options: Any) -> None:
        self._store, self._counts, self._rank = TCPStore(*args, **options), counts, rank

    def __getattr__(self, name: str) -> Any:
        self._counts[self._rank] += 1
        return getattr(self._store, name)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize("nodes", [2, 12])
def test_requests_of_a_node_do_not_grow_with_the_number_of_nodes(port, nodes):
    counts: Counter[int] = Counter()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wait_for(kind: type, missing: int) -> None:
        while missing:
            _, event = events.get(timeout=LONG_S)
            missing -= isinstance(event, kind)
            assert isinstance(event, kind) or not isinstance(event, SessionEnded), event

    def start(rank: int) -> NodeSession:
        config = NodeRendezvous(node_rank=rank, nodes=nodes, nproc=1, addr="127.0.0.1", port=port, timeout_s=LONG_S)
        store = NodeStore(partial(CountingStore, counts, rank))
        session = NodeSession(config, make_hello(config), store, serves=rank == 0, notify=lambda *event: events.put(event))
        session.start()
        return session

    sessions = [start(0)]
    events.get(timeout=LONG_S)  # node 0 serves
    sessions += [start(rank) for rank in range(1, nodes)]
    wait_for(JoinAccepted, nodes)
    before, begun = dict(counts), time.monotonic()
    time.sleep(WATCHED_S)
    after, passed = dict(counts), time.monotonic() - begun
    polls, beats = passed / 0.2 + 1, passed + 1
    for rank in range(nodes):
        # Node 0 also reads the arrivals and the exits in each poll, and all heartbeats at once.
        bound = polls + beats if rank else 3 * polls + 2 * beats
        assert after[rank] - before[rank] <= bound
    for rank, session in enumerate(sessions):
        session.send(RanksExited(exit_codes={rank: 0}))
    wait_for(JobFinished, nodes)
    for session in sessions:
        session.leave()
    wait_for(SessionEnded, nodes)
