"""The same over real links: three network namespaces with an interface each, joined by a switch in a fourth."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from dtrain.launch.node_messages import (
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    NodeFailed,
    Notice,
    RanksExited,
    RanksFailed,
    decode,
    encode,
)
from dtrain.launch.processes import fork_process
from hosts.agents import LONG_S
from hosts.network import ADDRS, ADDRS6, Network, network
from hosts.speaker import speak

PORT = 29400


@dataclass(kw_only=True)
class Host:
    """A supervisor with its agent, in a namespace of its own: a fork of this process, with the pipes to and from it."""

    pid: int
    stdin: int
    stdout: int
    said: list[Message] = field(default_factory=list)
    rest: bytes = b""

    def wait_for(self, kind: type[Message]) -> Message:
        """The first message of this kind, reading until it has come."""
        deadline = time.monotonic() + LONG_S
        while not (messages := [message for message in self.said if isinstance(message, kind)]):
            assert time.monotonic() < deadline, self.said
            if not select.select([self.stdout], [], [], 1)[0]:
                continue
            data = os.read(self.stdout, 65536)
            assert data, f"ended after {self.said}"
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.said += map(decode, lines)
        return messages[0]

    def send(self, message: Message) -> None:
        os.write(self.stdin, encode(message))


@dataclass(kw_only=True)
class Hosts:
    network: Network
    started: list[Host] = field(default_factory=list)

    def start(self, place: int, node_rank: int, nodes: int, **settings: object) -> Host:
        """An agent on host ``place``."""
        given = {"node_rank": node_rank, "nodes": nodes, "nproc": 2, "addr": ADDRS[0], "port": PORT, "timeout_s": LONG_S}
        (stdin, to_host), (from_host, stdout) = os.pipe(), os.pipe()
        others = [end for host in self.started for end in (host.stdin, host.stdout)]
        pid = fork_process(lambda: self._run(place, {**given, **settings}, (stdin, stdout), (to_host, from_host, *others)))
        os.close(stdin)
        os.close(stdout)
        self.started.append(Host(pid=pid, stdin=to_host, stdout=from_host))
        return self.started[-1]

    def _run(self, place: int, meeting: dict[str, object], own: tuple[int, int], others: tuple[int, ...]) -> int:
        for fd in others:
            os.close(fd)
        self.network.enter(place)
        speak(meeting, *own)
        return 0


@pytest.fixture(scope="module")
def built() -> Iterator[Network]:
    with network() as built:
        yield built


@pytest.fixture
def hosts(built: Network) -> Iterator[Hosts]:
    """All cables are plugged in, and at the end no process is left."""
    for place in range(len(ADDRS)):
        built.plug(place, "up")
    hosts = Hosts(network=built)
    yield hosts
    for host in hosts.started:
        os.close(host.stdin)
    codes = [os.waitstatus_to_exitcode(os.waitpid(host.pid, 0)[1]) for host in hosts.started]
    for host in hosts.started:
        os.close(host.stdout)
    assert set(codes) <= {0}


def start_all(hosts: Network, **settings: object) -> list[Host]:
    nodes = [hosts.start(rank, rank, 3, **settings) for rank in range(3)]
    for node in nodes:
        node.wait_for(JoinAccepted)
    return nodes


@pytest.mark.parametrize("addr", [ADDRS[0], ADDRS6[0]], ids=["ipv4", "ipv6"])
def test_three_hosts_join_fail_and_end_together(hosts, addr):
    nodes = start_all(hosts, addr=addr)
    places = [node.wait_for(JoinAccepted) for node in nodes]
    assert [(place.layout.base_rank, place.layout.world_size) for place in places] == [(0, 6), (2, 6), (4, 6)]
    assert {(place.layout.master_addr, place.interface) for place in places} == {(addr, "eth0")}
    nodes[1].send(RanksFailed(rank=3, code=3, line="rank 3 failed with exit code 3"))
    end = NodeFailed(line="node 1 (host1): rank 3 failed with exit code 3", code=3, node_rank=1, is_final=True)
    assert [nodes[0].wait_for(NodeFailed), nodes[2].wait_for(NodeFailed)] == [end, end]
    for rank, node in enumerate(nodes):
        node.send(RanksExited(exit_codes={2 * rank: 3, 2 * rank + 1: 143}))
    assert {len(node.wait_for(JobFinished).exit_codes) for node in nodes} == {6}


def test_hub_listens_only_on_master_address(hosts):
    nodes = start_all(hosts)
    listed = hosts.network.on(0, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    rows = [row.split() for row in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()]
    listening = [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]
    assert listening == [f"01004D0A:{PORT:04X}"]
    assert not any(isinstance(message, Notice) for node in nodes for message in node.said)


def test_cut_link_ends_nodes_on_both_sides(hosts):
    nodes = start_all(hosts, silence_s=4)
    hosts.network.plug(2, "down")
    assert [node.wait_for(NodeFailed).line for node in nodes[:2]] == [
        "node 2 (host2) is gone (ranks 4-5): it was silent for 4 s"
    ] * 2
    assert nodes[2].wait_for(NodeFailed).line == "node 0 (host0) was silent for 4 s"


def test_host_with_late_network_still_joins(hosts):
    hosts.network.plug(2, "down")
    nodes = [hosts.start(rank, rank, 3) for rank in range(3)]
    time.sleep(1)
    assert os.waitpid(nodes[2].pid, os.WNOHANG) == (0, 0)
    hosts.network.plug(2, "up")
    assert {node.wait_for(JoinAccepted).layout.nodes for node in nodes} == {3}


def test_join_timeout_names_missing_node_and_address(hosts):
    hosts.network.plug(2, "down")
    nodes = [hosts.start(rank, rank, 3, timeout_s=2, hosts=["a", "b", "c"]) for rank in range(3)]
    here = f"launch: 2 of 3 nodes joined in 2 s; missing: node 2 (c); node 0 waited at {ADDRS[0]}:{PORT} (interface eth0)"
    assert all(node.wait_for(JoinRefused).line.startswith(here) for node in nodes[:2])
    there = nodes[2].wait_for(JoinRefused).line
    assert there.startswith(f"launch: node 2 (host2) did not reach node 0 at {ADDRS[0]}:{PORT} in 2 s, last: ")
    assert "by interface eth0" in there


def test_wrong_node_count_is_reported_with_host(hosts):
    nodes = [hosts.start(0, 0, 3), hosts.start(1, 1, 2)]
    assert {"--nnodes 2, node 0 (host0) for 3" in node.wait_for(JoinRefused).line for node in nodes} == {True}


def test_two_jobs_at_one_endpoint_stay_separate(hosts):
    first = hosts.start(0, 0, 2, token="one", run_name="first")
    stranger = hosts.start(1, 1, 2, token="two")
    refused = stranger.wait_for(JoinRefused).line
    assert "node 1 (host1), pid " in refused
    assert f"belongs to another job than the one at {ADDRS[0]}:{PORT} (host0, pid " in refused
    assert "node 1 (host1)" in first.wait_for(Notice).line
    second = hosts.start(2, 1, 2, token="one")
    assert {node.wait_for(JoinAccepted).layout.world_size for node in (first, second)} == {4}
