"""The meeting and the link of nodes, with real agents on loopback; faults are signals and foreign bytes."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import struct
import time
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from dtrain.launch.agent import describe_wait
from dtrain.launch.launch_plan import NodeLayout, NodeRendezvous
from dtrain.launch.node_messages import (
    Hello,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    NodeFailed,
    NodeStore,
    Notice,
    RanksExited,
    RanksFailed,
)
from hosts.agents import LONG_S, Node, Nodes
from jobs import wait_until

FAILED_RANK = RanksFailed(rank=1, code=1, line="failed")


def shout(port: int, data: bytes) -> socket.socket:
    """Connect to the hub, as anybody could, and send ``data``."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    sock.sendall(data)
    return sock


def joined(nodes, count, **settings):
    started = [nodes.start(rank, count, **settings) for rank in range(count)]
    nodes.wait_for(JoinAccepted, *started)
    return started


def test_nodes_receive_layout_and_exit_codes_of_all_ranks(nodes):
    first = nodes.start(0, 3, nproc=2, store_port=4321, run_name="2026-01-01")
    second, third = nodes.start(1, 3, nproc=1), nodes.start(2, 3, nproc=3)
    places = nodes.wait_for(JoinAccepted, first, second, third)
    shared = {"world_size": 6, "nodes": 3, "master_addr": "127.0.0.1"}
    assert [place.layout for place in places] == [
        NodeLayout(nproc=2, base_rank=0, node_rank=0, **shared),
        NodeLayout(nproc=1, base_rank=2, node_rank=1, **shared),
        NodeLayout(nproc=3, base_rank=3, node_rank=2, **shared),
    ]
    assert {(place.store_port, place.run_name, place.interface) for place in places} == {(4321, "2026-01-01", "lo")}
    first.agent.send(RanksExited(exit_codes={0: 0, 1: 75}))
    third.agent.send(RanksExited(exit_codes={3: 0, 4: 0, 5: 0}))
    nodes.read(0.2)
    assert not first.only(JobFinished)
    second.agent.send(RanksExited(exit_codes={2: 0}))
    over = nodes.wait_for(JobFinished, first, second, third)
    assert [dict(message.exit_codes) for message in over] == [{0: 0, 1: 75, 2: 0, 3: 0, 4: 0, 5: 0}] * 3
    assert not first.only(NodeFailed)


def test_join_completes_at_world_size_with_uneven_nodes(nodes):
    first = nodes.start(0, None, nproc=3, world_size=4, base_rank=0)
    second = nodes.start(1, None, nproc=1, world_size=4, base_rank=3)
    assert [place.layout.ranks for place in nodes.wait_for(JoinAccepted, first, second)] == [range(3), range(3, 4)]


def test_node_1_waits_for_late_node_0(nodes):
    second = nodes.start(1)
    nodes.read(0.5)
    assert not second.said
    nodes.wait_for(JoinAccepted, nodes.start(0), second)


def test_node_lost_before_start_can_rejoin(nodes):
    first, second = nodes.start(0, 3, silence_s=1.5), nodes.start(1, 3)
    nodes.wait(lambda: arrivals(nodes.port) == 2)
    os.kill(second.agent.pid, signal.SIGKILL)
    nodes.wait_for(JoinRefused, second)
    assert len(nodes.wait_for(JoinAccepted, first, nodes.start(1, 3), nodes.start(2, 3))) == 3


def test_join_timeout_names_missing_nodes(nodes):
    here = [nodes.start(rank, 4, timeout_s=1.5, hosts=("a", "b", "c", "d")) for rank in (0, 1, 3)]
    lines = {refusal.line for refusal in nodes.wait_for(JoinRefused, *here)}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("launch: 3 of 4 nodes joined in 2 s; missing: node 2 (c); ")
    for word in (
        f"127.0.0.1:{nodes.port} (interface lo)",
        "--master-addr",
        "--master-port",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ):
        assert word in line


def test_join_timeout_counts_missing_ranks_when_node_count_is_unknown(nodes):
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(0, None, nproc=3, world_size=8, base_rank=0, timeout_s=0.5))
    assert "3 of 8 ranks joined in 0 s, with node 0" in refusal.line


@pytest.mark.parametrize(
    ("addr", "last"),
    [("127.0.0.1", "connection refused"), ("no-such-host.invalid", "does not resolve")],
    ids=["nobody", "no name"],
)
def test_unreachable_node_0_is_reported_with_address_and_variables(nodes, addr, last):
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(1, timeout_s=0.5, addr=addr))
    assert refusal.line.startswith("launch: node 1 (")
    for word in (f"{addr}:{nodes.port}", last, "--master-addr", "--master-port", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert word in refusal.line


def test_unresolvable_address_falls_back_to_scheduler_address(nodes):
    settings = {"addr": "no-such-host.invalid", "fallback_addr": "127.0.0.1"}
    first, second = nodes.start(0, **settings), nodes.start(1, **settings)
    places = nodes.wait_for(JoinAccepted, first, second)
    assert [place.layout.master_addr for place in places] == ["127.0.0.1", "127.0.0.1"]


def test_foreign_node_is_refused_and_reported_on_both_sides(nodes):
    first = nodes.start(0, token="mine")
    stranger = nodes.start(1, token="theirs")
    (refusal,) = nodes.wait_for(JoinRefused, stranger)
    (notice,) = nodes.wait_for(Notice, first)
    who = f"node 1 ({socket.gethostname()}), pid {os.getpid()} belongs to another job"
    assert who in refusal.line
    assert "run tokens differ" in refusal.line
    assert who in notice.line
    assert "theirs" not in refusal.line
    nodes.wait_for(JoinAccepted, first, nodes.start(1, token="mine"))
    nodes.wait_for(JoinRefused, nodes.start(1, token="theirs"))
    assert not first.only(NodeFailed)


def test_duplicate_node_rank_is_refused_and_named_on_join_timeout(nodes):
    first, second = nodes.start(0, 3, timeout_s=6), nodes.start(1, 3)
    nodes.wait(lambda: arrivals(nodes.port) == 2)
    twin = nodes.start(1, 3)
    (refusal,) = nodes.wait_for(JoinRefused, twin)
    assert "Give each node its own --node-rank" in refusal.line
    (refusal, _) = nodes.wait_for(JoinRefused, first, second)
    assert "missing: node 2; " in refusal.line
    assert "Turned away: node 1" in refusal.line


def test_second_node_0_at_same_endpoint_is_refused_by_name(nodes):
    first, second = joined(nodes, 2, token="mine")
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(0, token="theirs"))
    assert f"cannot listen at 127.0.0.1:{nodes.port}: address already in use by another launch: node 0" in refusal.line
    assert "run tokens differ" in refusal.line
    assert "another --master-port" in refusal.line
    assert not second.only(NodeFailed)
    assert not first.only(NodeFailed)


def test_node_0_in_the_place_of_a_lost_one_waits_for_its_port(nodes):
    # The agent of the lost launcher may listen until the other nodes know.
    with socket.create_server(("127.0.0.1", nodes.port)):
        first = nodes.start(0, max_restarts=1)
        nodes.read(3.0)
    nodes.wait_for(JoinAccepted, first, nodes.start(1, max_restarts=1, restarts=1))


def test_foreign_master_address_makes_node_0_listen_on_all_interfaces(nodes):
    (notice,) = nodes.wait_for(Notice, nodes.start(0, addr="192.0.2.77"))
    assert "192.0.2.77" in notice.line
    assert "listening on all interfaces" in notice.line
    nodes.wait_for(JoinAccepted, nodes.started[0], nodes.start(1))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        # The node that arrives second is named first.
        (
            [{"nodes": 2}, {"nodes": 3}],
            r"--nnodes (3, node 0 \(.*\) for 2|2, node 1 \(.*\) for 3)\. Pass the same --nnodes on every node",
        ),
        ([{"world_size": 2}, {"world_size": 4}], r"--world-size (4, node 0 \(.*\) for 2|2, node 1 \(.*\) for 4)"),
        ([{"world_size": 3}, {"world_size": 3}], r"run 2 ranks \(1 on node 0 \(.*\), 1 on node 1 \(.*\)\), not --world-size 3"),
        ([{"base_rank": 0}, {"base_rank": 2}], r"node 1 \(.*\) begins at --base-rank 2, but .* make it 1"),
        (
            [{"facts": {"torch": "2.13"}}, {"facts": {"torch": "2.11"}}],
            r"differ in torch: node 1 \(.*\) has 2.11, node 0 \(.*\) has 2.13",
        ),
        ([{"facts": {"data /d": "there"}}, {}], r"differ in data /d: node 1 \(.*\) has nothing, node 0"),
    ],
    ids=["number of nodes", "world size", "sum of ranks", "base ranks", "versions", "paths"],
)
def test_mismatched_nodes_all_report_same_reason(nodes, settings, line):
    started = [nodes.start(rank, **{"nodes": 2, **setting}) for rank, setting in enumerate(settings)]
    refusals = nodes.wait_for(JoinRefused, *started)
    assert len({refusal.line for refusal in refusals}) == 1
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(refusals[0].line)
    assert not any(node.only(JoinAccepted) for node in started)


def test_single_differing_node_is_named(nodes):
    started = [nodes.start(rank, 4, facts={"script": "x" if rank == 2 else "y"}) for rank in range(4)]
    assert "differ in script: node 2" in nodes.wait_for(JoinRefused, *started)[0].line
    assert "the other 3 have y" in started[0].only(JoinRefused)[0].line


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_first_failure_ends_other_nodes_and_names_its_node(nodes, failing):
    started = joined(nodes, 3)
    started[failing].agent.send(RanksFailed(rank=failing, code=3, line=f"rank {failing} failed with exit code 3"))
    others = [node for rank, node in enumerate(started) if rank != failing]
    host = socket.gethostname()
    line = f"node {failing} ({host}): rank {failing} failed with exit code 3"
    assert nodes.wait_for(NodeFailed, *others) == [NodeFailed(line=line, code=3, node_rank=failing, is_final=True)] * 2
    others[0].agent.send(RanksFailed(rank=9, code=1, line="a consequence"))
    for rank, node in enumerate(started):
        node.agent.send(RanksExited(exit_codes={rank: 3}))
    nodes.wait_for(JobFinished, *started)
    assert [len(node.only(NodeFailed)) for node in started] == [0 if rank == failing else 1 for rank in range(3)]


def test_node_in_the_place_of_a_lost_one_joins_the_next_attempt(nodes):
    first, second = joined(nodes, 2, max_restarts=2, silence_s=1.5)
    os.kill(second.agent.pid, signal.SIGKILL)
    # Before node 0 knows of the loss.
    third = nodes.start(1, max_restarts=2)
    (loss,) = nodes.wait_for(NodeFailed, first)
    assert (loss.node_rank, loss.is_final, loss.is_lost) == (1, False, True)
    assert not third.said
    first.agent.close()
    again = nodes.start(0, max_restarts=2, restarts=1, fruitless_restarts=1)
    places = nodes.wait_for(JoinAccepted, again, third)
    assert [(place.restarts, place.fruitless_restarts) for place in places] == [(1, 1)] * 2


def test_the_others_know_a_launcher_that_has_ended_from_a_rank_that_has_failed(nodes):
    for end, is_lost in ((lambda node: node.agent.close(), True), (lambda node: node.agent.send(FAILED_RANK), False)):
        first, second = joined(nodes, 2, max_restarts=2)
        end(second)
        (failure,) = nodes.wait_for(NodeFailed, first)
        assert (failure.node_rank, failure.is_lost) == (1, is_lost)
        for node in (second, first):
            node.agent.close()
        nodes.wait_until_gone(first, second)
    first, second = joined(nodes, 2, max_restarts=2)
    os.kill(first.agent.pid, signal.SIGKILL)
    (failure,) = nodes.wait_for(NodeFailed, second)
    assert (failure.node_rank, failure.is_lost) == (0, True)


ENTRY = NodeRendezvous(node_rank=0, nodes=4, nproc=1, addr="a", port=1, restarts=1, members=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("entry", "lost", "line"),
    [
        ({}, None, ""),
        ({}, 1, "launch: waiting up to 300 s for node 1. Start its line again."),
        ({"min_nodes": 3}, 1, "launch: waiting up to 60 s for node 1, then going on with 3 nodes. Start its line again."),
        (
            {"min_nodes": 3, "members": (0, 1, 3)},
            1,
            "launch: 2 nodes are left, fewer than 3: waiting up to 300 s for another one. Start the line of node 1 again.",
        ),
        (
            {"min_nodes": 2, "members": (0, 1), "timeout_s": 30},
            1,
            "launch: 1 node is left, fewer than 2: waiting up to 30 s for another one. Start the line of node 1 again.",
        ),
        (
            {"min_nodes": 2, "node_rank": 1},
            0,
            "launch: waiting up to 300 s for node 0, where all meet. Start its line again, on a machine with its address.",
        ),
        # Node 0 tells of the others.
        ({"node_rank": 2}, 1, ""),
    ],
)
def test_the_wait_for_a_lost_node_is_told_at_its_begin(entry, lost, line):
    assert describe_wait(replace(ENTRY, **entry), lost) == line


def test_lost_node_0_that_nobody_replaces_is_reported_with_what_to_do(nodes):
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(1, timeout_s=0.5, max_restarts=2, restarts=1))
    assert f"did not reach node 0 at 127.0.0.1:{nodes.port} in 0 s, last: connection refused" in refusal.line
    assert "Start the line of node 0 again, on a machine with its address" in refusal.line


ELASTIC = {"min_nodes": 2, "max_restarts": 3, "replace_timeout_s": 0.5}


def restarted(nodes: Nodes, *places: int, **settings: object) -> list[Node]:
    """Start the agents of the second attempt of a job of three nodes."""
    given = {**ELASTIC, "restarts": 1, "members": (0, 1, 2), **settings}
    return [nodes.start(place, 3, store_port=4322 if place == 0 else 0, **given) for place in places]


def test_nodes_go_on_without_a_lost_one_and_are_numbered_anew(nodes):
    started = restarted(nodes, 0, 2)
    places = nodes.wait_for(JoinAccepted, *started)
    shared = {"nproc": 1, "world_size": 2, "nodes": 2, "master_addr": "127.0.0.1"}
    assert [place.layout for place in places] == [
        NodeLayout(base_rank=0, node_rank=0, **shared),
        NodeLayout(base_rank=1, node_rank=1, **shared),
    ]
    assert {(place.members, place.restarts) for place in places} == {((0, 2), 1)}
    for rank, node in enumerate(started):
        node.agent.send(RanksExited(exit_codes={rank: 0}))
    assert [dict(over.exit_codes) for over in nodes.wait_for(JobFinished, *started)] == [{0: 0, 1: 0}] * 2


def test_a_replacement_is_awaited_before_nodes_go_on_without_it(nodes):
    started = restarted(nodes, 0, 2, replace_timeout_s=LONG_S)
    nodes.wait(lambda: arrivals(nodes.port) == 2)
    nodes.read(0.5)
    assert not any(node.said for node in started)
    started.insert(1, nodes.start(1, 3, **ELASTIC))
    assert {place.members for place in nodes.wait_for(JoinAccepted, *started)} == {(0, 1, 2)}


def test_a_smaller_job_restarts_without_another_wait(nodes):
    started = restarted(nodes, 0, 2, members=(0, 2), replace_timeout_s=LONG_S)
    assert {place.members for place in nodes.wait_for(JoinAccepted, *started)} == {(0, 2)}


def test_first_attempt_awaits_all_nodes_until_the_join_timeout(nodes):
    # Node 1 is there before node 0, whose time runs.
    started = [nodes.start(place, 3, **ELASTIC, timeout_s=LONG_S if place else 4) for place in (1, 0)]
    nodes.wait(lambda: arrivals(nodes.port) == 2)
    nodes.read(1)
    assert not any(node.said for node in started)
    assert {place.members for place in nodes.wait_for(JoinAccepted, *started)} == {(0, 1)}


def test_node_in_the_place_of_node_0_goes_on_with_enough_nodes(nodes):
    (third,) = restarted(nodes, 2)
    places = nodes.wait_for(JoinAccepted, nodes.start(0, 3, **ELASTIC), third)
    assert [(place.members, place.restarts) for place in places] == [((0, 2), 1)] * 2


def test_too_few_nodes_end_with_one_line(nodes):
    (refusal,) = nodes.wait_for(JoinRefused, *restarted(nodes, 0, timeout_s=1))
    assert refusal.line.startswith("launch: 1 of 3 nodes joined in 1 s, fewer than 2; missing: node 1, node 2; ")


def test_a_node_that_comes_back_waits_and_joins_the_next_attempt(nodes):
    first, third = restarted(nodes, 0, 2)
    nodes.wait_for(JoinAccepted, first, third)
    second = nodes.start(1, 3, timeout_s=2, **ELASTIC)
    (told,) = nodes.wait_for(Notice, second)
    (notice,) = nodes.wait_for(Notice, first)
    assert (notice.waiting, notice.line) == ((1,), told.line)
    assert "came after the start; it joins at the next restart" in told.line
    # It waits longer than its time-out.
    nodes.read(2.5)
    assert second.said == [told]
    third.agent.send(RanksFailed(rank=1, code=1, line="failed", is_final=False))
    nodes.wait_for(NodeFailed, first)
    third.agent.close()
    first.agent.close()
    nodes.wait_until_gone(first, third)
    again = restarted(nodes, 0, 2, members=(0, 1, 2), restarts=2, replace_timeout_s=LONG_S)
    places = nodes.wait_for(JoinAccepted, again[0], second, again[1])
    assert [(place.layout.base_rank, place.members, place.restarts) for place in places] == [
        (rank, (0, 1, 2), 2) for rank in range(3)
    ]


def waiting(nodes: Nodes) -> list[Node]:
    """Start a job of two nodes of three, and a third one that comes too late."""
    members = restarted(nodes, 0, 2)
    nodes.wait_for(JoinAccepted, *members)
    late = nodes.start(1, 3, **ELASTIC)
    nodes.wait_for(Notice, late)
    return [*members, late]


def test_a_node_that_waits_ends_with_the_last_rank(nodes):
    first, third, late = waiting(nodes)
    for rank, node in enumerate((first, third)):
        node.agent.send(RanksExited(exit_codes={rank: 75}))
    (end,) = nodes.wait_for(JoinRefused, late)
    assert end.code == 75
    assert "has ended without a place for node 1" in end.line


def test_a_node_that_waits_ends_with_a_job_that_does_not_restart(nodes):
    _, third, late = waiting(nodes)
    third.agent.send(RanksFailed(rank=1, code=3, line="failed", is_final=True))
    (end,) = nodes.wait_for(JoinRefused, late)
    assert end == JoinRefused(line=f"launch: node 2 ({socket.gethostname()}): failed", code=3)


@pytest.mark.parametrize(
    ("nodes_count", "facts", "line"),
    [(3, {"torch": "2.11"}, "nodes differ in torch: node 1 "), (4, {}, "was started for --nnodes 2:4, node 0 ")],
    ids=["versions", "number"],
)
def test_a_node_that_does_not_fit_is_turned_away_without_harm(nodes, nodes_count, facts, line):
    first, third = restarted(nodes, 0, 2)
    nodes.wait_for(JoinAccepted, first, third)
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(1, nodes_count, facts=facts, **ELASTIC))
    assert line in refusal.line
    nodes.read(0.5)
    assert not first.only(NodeFailed)
    assert not first.only(JoinRefused)


def test_a_node_that_left_is_not_awaited_any_more(nodes):
    first, _, late = waiting(nodes)
    late.agent.close()
    nodes.wait(lambda: len(first.only(Notice)) == 2)
    notice = first.only(Notice)[1]
    assert notice.waiting == ()
    assert notice.line.endswith("waited for the next restart, and has left")


def test_nodes_must_agree_on_the_smallest_number(nodes):
    started = [nodes.start(0, 3, **ELASTIC), nodes.start(1, 3, max_restarts=3)]
    for refusal in nodes.wait_for(JoinRefused, *started):
        assert "--nnodes " in refusal.line
        assert "2:3" in refusal.line


def test_store_of_an_ending_attempt_answers_no_node_of_the_next_one(nodes):
    first, second = joined(nodes, 2, max_restarts=2, store_port=4321)
    second.agent.send(RanksFailed(rank=1, code=1, line="failed", is_final=False))
    nodes.wait_for(NodeFailed, first)
    second.agent.close()
    nodes.wait_until_gone(second)
    # The store still has the answers and the failure of the attempt.
    early = nodes.start(1, max_restarts=2, restarts=1)
    nodes.wait(lambda: arrivals(nodes.port) == 3)
    nodes.read(1)
    assert not early.said
    first.agent.close()
    again = nodes.start(0, max_restarts=2, restarts=1, store_port=4322)
    assert {(place.store_port, place.restarts) for place in nodes.wait_for(JoinAccepted, again, early)} == {(4322, 1)}
    assert not early.only(NodeFailed)


def test_second_node_of_a_rank_is_turned_away_from_a_job_with_restarts(nodes):
    joined(nodes, 2, max_restarts=2, silence_s=1.5)
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(1, max_restarts=2))
    assert "is already. Give each node its own --node-rank" in refusal.line


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_sent_before_supervisor_closes_is_delivered(nodes, failing):
    started = joined(nodes, 2)
    started[failing].agent.send(RanksFailed(rank=failing, code=143, line="terminated"))
    started[failing].agent.close()
    (end,) = nodes.wait_for(NodeFailed, started[1 - failing])
    assert (end.code, end.line.endswith(": terminated")) == (143, True)


@pytest.mark.parametrize("killed", [0, 1], ids=["hub", "other"])
def test_killed_node_ends_others_and_is_named(nodes, killed):
    started = joined(nodes, 3, silence_s=2)
    os.kill(started[killed].agent.pid, signal.SIGKILL)
    ends = nodes.wait_for(NodeFailed, *started)
    host = socket.gethostname()
    assert {end.node_rank for end in ends} == {killed}
    loss = "is lost: it closed the connection" if killed == 0 else "is gone (rank 1): it was silent for 2 s"
    assert {end.line for rank, end in enumerate(ends) if rank != killed} == {f"node {killed} ({host}) {loss}"}
    assert f"(pid {started[killed].agent.pid}) has ended" in ends[killed].line


def test_finished_node_can_close_before_others(nodes):
    started = joined(nodes, 2)
    started[1].agent.send(RanksExited(exit_codes={1: 0}))
    nodes.read(0.2)
    started[1].agent.close()
    nodes.read(0.3)
    started[0].agent.send(RanksExited(exit_codes={0: 0}))
    (over,) = nodes.wait_for(JobFinished, started[0])
    assert dict(over.exit_codes) == {0: 0, 1: 0}
    assert not started[0].only(NodeFailed)


def test_node_whose_launcher_ends_without_a_word_is_lost_at_once(nodes):
    started = joined(nodes, 3)
    started[1].agent.close()
    ends = nodes.wait_for(NodeFailed, started[0], started[2])
    assert {end.line for end in ends} == {f"node 1 ({socket.gethostname()}) is lost: its launcher has ended"}


def test_node_that_leaves_before_start_can_rejoin(nodes):
    first, second = nodes.start(0, 3), nodes.start(1, 3)
    nodes.wait(lambda: arrivals(nodes.port) == 2)
    second.agent.close()
    nodes.wait_for(JoinAccepted, first, nodes.start(1, 3), nodes.start(2, 3))


def test_node_0_serves_until_others_have_read_the_end(nodes):
    started = joined(nodes, 3)
    for node in started[1:]:
        os.kill(node.agent.pid, signal.SIGSTOP)
    for rank, node in enumerate(started):
        node.agent.send(RanksExited(exit_codes={rank: 0}))
    started[0].agent.close()
    for node in started[1:]:
        os.kill(node.agent.pid, signal.SIGCONT)
    nodes.wait_for(JobFinished, *started[1:])
    assert not any(node.only(NodeFailed) for node in started)


def test_suspended_node_0_is_named_on_other_nodes(nodes):
    started = joined(nodes, 3, silence_s=2)
    os.kill(started[0].agent.pid, signal.SIGSTOP)
    ends = nodes.wait_for(NodeFailed, *started[1:])
    assert {end.line for end in ends} == {f"node 0 ({socket.gethostname()}) was silent for 2 s"}


@pytest.mark.slow
def test_silent_node_is_lost_but_short_pause_is_tolerated(nodes):
    started = joined(nodes, 3, silence_s=4)
    os.kill(started[2].agent.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(started[2].agent.pid, signal.SIGCONT)
    nodes.read(1)
    assert not any(node.only(NodeFailed) for node in started)
    os.kill(started[1].agent.pid, signal.SIGSTOP)
    ends = nodes.wait_for(NodeFailed, started[0], started[2])
    assert {end.line for end in ends} == {f"node 1 ({socket.gethostname()}) is gone (rank 1): it was silent for 4 s"}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95 pickled \n",
        b"[" * 100_000 + b"\n",
        struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 1 << 60),
        b"",
    ],
    ids=["http", "pickle", "long", "a client of the store with a key of 2**60 bytes", "nothing"],
)
def test_garbage_data_does_not_disturb_join_or_job(nodes, data):
    first = nodes.start(0)
    before = shout(nodes.port, data)
    second = nodes.start(1)
    nodes.wait_for(JoinAccepted, first, second)
    after = shout(nodes.port, data)
    nodes.read(0.5)
    assert not first.only(NodeFailed)
    before.close()
    after.close()


def test_idle_connections_do_not_block_join(nodes):
    first = nodes.start(0)
    idle = [shout(nodes.port, b"") for _ in range(200)]
    nodes.wait_for(JoinAccepted, first, nodes.start(1))
    for sock in idle:
        sock.close()
    nodes.read(0.2)
    assert not first.only(NodeFailed)


def foreign_store(port: int) -> NodeStore:
    """Connect to the nodes' store, as a program without a launcher could."""
    shout(port, b"").close()
    store = NodeStore(TCPStore)
    store.connect(NodeRendezvous(node_rank=1, nodes=2, nproc=1, addr="127.0.0.1", port=port))
    return store


def arrivals(port: int) -> int:
    return foreign_store(port).add("arrivals", 0)


HELLO = Hello(
    node_rank=1,
    nodes=2,
    nproc=1,
    base_rank=None,
    world_size=None,
    token=hashlib.sha256().hexdigest(),
    host="b",
    pid=1,
    facts={},
    run_name="",
    store_port=0,
)


def post_hello(store: NodeStore, hello: Hello) -> int:
    """Post a record, and say at once that no agent here will read the end of the job."""
    number = store.add("arrivals")
    store.post(f"hello/{number}", hello)
    store.add("readers_done")
    return number


def arrive(nodes: Nodes, store: NodeStore, hello: Hello) -> JoinRefused:
    """Post a record as a node would, and return the answer."""
    number = post_hello(store, hello)
    nodes.wait(lambda: store.exists(f"answer/{number}"))
    answer = store.find(f"answer/{number}")
    assert isinstance(answer, JoinRefused)
    return answer


def test_control_characters_in_foreign_host_name_are_escaped(nodes):
    first = nodes.start(0, token="mine")
    arrive(nodes, foreign_store(nodes.port), replace(HELLO, host="\x1b[2Jb"))
    (notice,) = nodes.wait_for(Notice, first)
    assert "\\x1b[2Jb" in notice.line
    assert "\x1b" not in notice.line


@pytest.mark.parametrize("changed", [{"token": "\u00e9"}, {"protocol": 1}, {"nproc": "1"}], ids=["token", "protocol", "type"])
def test_invalid_hello_is_refused_and_job_starts(nodes, changed):
    first = nodes.start(0)
    refusal = arrive(nodes, foreign_store(nodes.port), replace(HELLO, **changed))
    assert "run tokens differ" in refusal.line if "token" in changed else "Install the same dtrain" in refusal.line
    nodes.wait_for(JoinAccepted, first, nodes.start(1))


def test_notices_about_foreign_nodes_are_limited(nodes):
    first = nodes.start(0, token="mine")
    store = foreign_store(nodes.port)
    for pid in range(50):
        post_hello(store, replace(HELLO, pid=pid))
    nodes.wait_for(JoinAccepted, first, nodes.start(1, token="mine"))
    assert 1 <= len(first.only(Notice)) <= 20


def test_store_of_another_program_is_no_launcher(nodes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    (refusal,) = nodes.wait_for(JoinRefused, nodes.start(1, port=port, timeout_s=1))
    assert "last: the program that answers is not a launcher of dtrain: it " in refusal.line
    assert server.num_keys() <= 1


@pytest.mark.parametrize("node_rank", [0, 1])
def test_program_that_never_answers_is_no_launcher(nodes, node_rank):
    with socket.create_server(("127.0.0.1", nodes.port)):
        (refusal,) = nodes.wait_for(JoinRefused, nodes.start(node_rank, timeout_s=1))
    words = "the program that answers is not a launcher of dtrain" if node_rank else "address already in use. Choose another"
    assert words in refusal.line


@pytest.mark.costly
def test_agent_program_joins(nodes):
    places = nodes.wait_for(JoinAccepted, nodes.start(0, program=True), nodes.start(1, program=True))
    assert [place.layout.node_rank for place in places] == [0, 1]


@pytest.mark.costly
def test_agent_ends_with_its_supervisor(nodes):
    told, tell = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.write(tell, str(nodes.start(0, program=True).agent.pid).encode())
        signal.pause()
    pid = int(os.read(told, 100))
    shout(nodes.port, b"").close()  # it serves
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    wait_until(lambda: not _alive(pid))
    os.close(told)
    os.close(tell)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_agent_holds_no_descriptors_of_supervisor(nodes):
    read, write = os.pipe()
    node = nodes.start(0, program=True)
    shout(nodes.port, b"").close()  # it is past its start
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(node.agent.pid, number)
    nodes.wait_for(JoinAccepted, node, nodes.start(1))
    assert not node.only(NodeFailed)
