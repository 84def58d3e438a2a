"""Exchanges of the control plane over real sockets: order, faults, interrupts, forks, several nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager

import pytest

from dtrain.dist import control_plane
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, broadcast_json, gather_json
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import Channel
from dtrain.dist.flight_recorder import write_flight_record
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.step_sync import ForwardRecord, sync_after_backward, sync_before_forward
from dtrain.launch.hang_report import find_stalled
from dtrain.launch.rank_records import parse_rank_record
from dtrain.testing import count_collectives

TIMEOUT_S = 2.0
NEVER_S = 600


def channel() -> Channel:
    plane = current_context().control_plane
    assert plane is not None
    return plane["control"]


def begin(samples: int = 2) -> list:
    """Return the values that the ranks agree on in the record before forward."""
    counts = sync_before_forward(ForwardRecord(samples=samples, tokens=0, microbatches=samples))
    return [counts.samples, counts.microbatches]


def end() -> None:
    sync_after_backward(unit_order=[], params_without_grad=[], changed_buffers=[], weights_mismatch=False)


def several_payloads() -> list:
    rank, gathered = get_dist_info().rank, []
    for length in (0, 1, 3, 100_000):
        gathered.append([text.decode() for text in channel().all_gather(str(rank).encode() * length, caller="test")])
    return [[len(text), set(text) == {str(rank)} or not text] for texts in gathered for rank, text in enumerate(texts)]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_payloads_arrive_in_the_order_of_ranks(ranks, world):
    expected = [[length, True] for length in (0, 1, 3, 100_000) for _ in range(world)]
    assert ranks(world).run(several_payloads) == [expected] * world


def large_payloads() -> int:
    """Payloads that no buffer of a socket holds, which all ranks send at once."""
    return sum(map(len, channel().all_gather(bytes(20_000_000), caller="test")))


def test_large_payloads_do_not_block(ranks):
    assert ranks(3).run(large_payloads) == [60_000_000] * 3


def traffic() -> list:
    before = channel().count
    with count_collectives() as seen:
        agreed = begin(get_dist_info().rank)
        end()
    return [agreed, channel().count - before, seen.counts()]


def test_a_step_has_two_records_and_no_collective(ranks):
    assert ranks(3).run(traffic) == [[[3, 2], 2, {}]] * 3


def pretend_nodes(rank: int, node_size: int) -> None:
    """Set the environment of a launcher that has started ``node_size`` ranks on each node."""
    os.environ.update(LOCAL_RANK=str(rank % node_size), LOCAL_WORLD_SIZE=str(node_size), GROUP_RANK=str(rank // node_size))


def several_exchanges() -> list:
    info = get_dist_info()
    results = [begin(info.rank), all_gather_json({"rank": info.rank}), gather_json(info.rank, dst=info.world_size - 1)]
    end()
    return [*results, broadcast_json(["from", info.rank], src=1), all_gather_numbers([info.rank, 0.5])]


@pytest.mark.parametrize(("world", "node_size"), [(4, 2), (6, 2), (3, 1), (6, 3)])
def test_ranks_of_several_nodes_exchange_over_tcp(forked, world, node_size):
    def body(rank: int) -> list:
        pretend_nodes(rank, node_size)
        with init_dist(device="cpu"):
            plane = current_context().control_plane
            tcp = sum(connection.family != socket.AF_UNIX for connection in channel()._connections.values())
            return [plane.layout.num_nodes, tcp > 0, several_exchanges()]

    answers = forked.run(body, world, results_of=range(world))
    for rank, (num_nodes, over_tcp, results) in answers.items():
        assert (num_nodes, over_tcp) == (world // node_size, rank % node_size == 0)
        everyone = [{"rank": peer} for peer in range(world)]
        gathered = list(range(world)) if rank == world - 1 else None
        record = [world * (world - 1) // 2, world - 1]
        assert results == [record, everyone, gathered, ["from", 1], [[peer, 0.5] for peer in range(world)]]


def test_nodes_of_different_sizes_connect_every_rank_over_tcp(forked):
    def body(rank: int) -> list:
        first, size = (0, 2) if rank < 2 else (2, 1)
        os.environ.update(LOCAL_RANK=str(rank - first), LOCAL_WORLD_SIZE=str(size), GROUP_RANK=str(rank // 2))
        with init_dist(device="cpu"):
            return [current_context().control_plane.layout.node_size, begin()]

    assert forked.run(body, 3, results_of=range(3)) == {rank: [1, [6, 2]] for rank in range(3)}


@pytest.mark.parametrize("broken", ["bind", "connect"])
def test_ranks_that_cannot_use_unix_sockets_connect_over_tcp(forked, monkeypatch, broken):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not here")

    def body(rank: int) -> list:
        if rank == 1:
            original = getattr(socket.socket, broken)

            def only_tcp(self: socket.socket, target: object) -> None:
                refuse() if self.family == socket.AF_UNIX else original(self, target)

            monkeypatch.setattr(socket.socket, broken, only_tcp)
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return [current_context().control_plane.layout.node_size, begin()]

    assert forked.run(body, 3, results_of=[0, 1, 2]) == {rank: [1, [6, 2]] for rank in range(3)}


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_cannot_connect_at_all_raises_on_all_ranks(forked, monkeypatch, late):
    """Rank 0 serves the store, and ends with its error."""
    connect_all = control_plane._connect_all

    def refuse(*_: object) -> None:
        raise OSError("not here")

    def connect_late(*args: object) -> object:
        outcome = connect_all(*args)
        time.sleep(0.3)
        return outcome

    def body(rank: int) -> list:
        if rank == late:
            monkeypatch.setattr(control_plane, "_connect_all", connect_late)
        if rank == 1:
            monkeypatch.setattr(socket.socket, "connect", refuse)
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return ["opened"]

    for text in forked.run(body, 2, results_of=[0, 1]).values():
        assert text.startswith("DistError: init_dist: rank 1 cannot connect to rank 0 ("), text
        assert text.endswith("). Set GLOO_SOCKET_IFNAME to the network interface that reaches the other nodes."), text


def test_stranger_on_the_port_of_a_leader_is_turned_away(forked, monkeypatch):
    real = control_plane._report_outcome

    def body(rank: int) -> list:
        pretend_nodes(rank, 1)
        if rank == 0:

            def with_stranger(store, layout, problem):
                port = json.loads(store.get("address/0"))["tcp"][0][1]
                stranger = socket.create_connection(("127.0.0.1", port))
                stranger.sendall(bytes(24))
                return real(store, layout, problem)

            monkeypatch.setattr(control_plane, "_report_outcome", with_stranger)
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return begin()

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [4, 2], 1: [4, 2]}


def as_first_visitor(visit):
    """Return ``control_plane._listen`` that lets ``visit(address)`` come before this rank publishes its address."""
    real = control_plane._listen

    @contextmanager
    def listen(layout):
        with real(layout) as (listeners, address):
            visit(address)
            yield listeners, address

    return listen


@pytest.mark.parametrize("over_tcp", [False, True])
def test_silent_strangers_delay_no_rank(forked, monkeypatch, over_tcp):
    """Each of them had five seconds, in turn."""
    strangers = []

    def visit(address: dict) -> None:
        for _ in range(40):
            strangers.append(socket.socket(socket.AF_INET if over_tcp else socket.AF_UNIX))
            strangers[-1].connect(tuple(address["tcp"][0]) if over_tcp else address["path"])
            strangers[-1].sendall(b"hello"[: len(strangers) % 3])

    def body(rank: int) -> list:
        if over_tcp:
            pretend_nodes(rank, 1)
        if rank == 0:
            monkeypatch.setattr(control_plane, "_listen", as_first_visitor(visit))
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return [begin(), len(strangers)]

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [[4, 2], 40], 1: [[4, 2], 0]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_take_the_place_of_a_rank(forked, monkeypatch):
    """All keys of the store are readable on the host, so the visitor knows as much as a rank."""
    ends = []

    def visit(address: dict) -> None:
        ready, done = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.setgroups([])
            os.setuid(65534)
            connections = []
            for channel in range(2):
                connections.append(socket.socket(socket.AF_UNIX))
                connections[-1].connect(address["path"])
                proof = control_plane._proof(address["nonce"], 1, channel)
                connections[-1].sendall(control_plane._HELLO.pack(proof, 1, channel))
            os.write(ready[1], b"r")
            os.close(done[1])
            os.read(done[0], 1)
            os._exit(0)
        os.close(ready[1])
        os.read(ready[0], 1)
        ends.append(done[1])

    def body(rank: int) -> list:
        if rank == 0:
            monkeypatch.setattr(control_plane, "_listen", as_first_visitor(visit))
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            counts = begin()
        for end in ends:
            os.close(end)
            os.wait()
        return counts

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [4, 2], 1: [4, 2]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_rank_refuses_an_address_at_which_another_user_listens(forked, monkeypatch):
    """A stranger who can write to the store could name its own socket."""

    def body(rank: int) -> list:
        if rank == 0:
            ready = os.pipe()
            path = f"\0dtrain-test-{os.getpid()}"
            child = os.fork()
            if child == 0:
                os.setgroups([])
                os.setuid(65534)
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(path)
                listener.listen()
                os.write(ready[1], b"r")
                signal.pause()
            os.read(ready[0], 1)
            monkeypatch.setattr(control_plane, "_listen", as_first_visitor(lambda address: address.update(path=path)))
            try:
                with init_dist(device="cpu", timeout_s=TIMEOUT_S):
                    return [current_context().control_plane.layout.node_size]
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return [current_context().control_plane.layout.node_size]

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [1], 1: [1]}, "the ranks connect over TCP instead"


def test_secret_of_a_job_keeps_others_out_over_tcp(forked, monkeypatch):
    def visit(address: dict) -> None:
        with monkeypatch.context() as patch:
            patch.delenv("DTRAIN_JOB_SECRET")
            for channel in range(2):
                stranger = socket.create_connection(tuple(address["tcp"][0]))
                stranger.sendall(control_plane._HELLO.pack(control_plane._proof(address["nonce"], 1, channel), 1, channel))
                kept.append(stranger)

    kept: list = []

    def body(rank: int) -> list:
        monkeypatch.setenv("DTRAIN_JOB_SECRET", "known to the job")
        pretend_nodes(rank, 1)
        if rank == 0:
            monkeypatch.setattr(control_plane, "_listen", as_first_visitor(visit))
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return begin()

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [4, 2], 1: [4, 2]}


def meet(rank: int, victim: int, fate) -> list:
    """A first record that succeeds, and one in which ``victim`` meets its ``fate`` before it comes."""
    with init_dist(device="cpu", timeout_s=TIMEOUT_S):
        begin()
        if rank == victim:
            fate()
        return begin()


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_rank_is_named_at_once(forked, victim):
    others = [rank for rank in range(3) if rank != victim]
    started = time.monotonic()
    answers = forked.run(lambda rank: meet(rank, victim, lambda: os.kill(os.getpid(), signal.SIGKILL)), 3, results_of=others)
    for text in answers.values():
        assert text.startswith(f"DistError: step: ranks [{victim}] of 3 did not arrive, connection lost after"), text
    assert time.monotonic() - started < NEVER_S / 2


@pytest.mark.parametrize("fate", ["sleeps", "is stopped"])
def test_silent_rank_is_named_after_the_timeout(forked, fate):
    def wait() -> None:
        if fate == "sleeps":
            time.sleep(NEVER_S)
        os.kill(os.getpid(), signal.SIGSTOP)

    answers = forked.run(lambda rank: meet(rank, 1, wait), 3, results_of=[0, 2])
    for text in answers.values():
        assert text.startswith("DistError: step: ranks [1] of 3 did not arrive within 2"), text


def test_error_of_a_departed_rank_reaches_the_waiting_ranks(forked):
    def fail() -> None:
        raise ValueError("disk full")

    first, second = forked.run(lambda rank: meet(rank, 1, fail), 2, results_of=[0, 1]).values()
    assert second == "ValueError: disk full"
    assert first.startswith("DistError: step: ranks [1] of 2 did not arrive, connection lost")
    assert ". Rank 1 left with ValueError: disk full. Look" in first


def test_different_records_raise_at_once(forked):
    def body(rank: int) -> str:
        with init_dist(device="cpu", timeout_s=NEVER_S):
            end() if rank == 1 else begin()
        return "no error"

    for text in forked.run(body, 2, results_of=[0, 1]).values():
        assert text.startswith("StepError: step: ranks must run the same exchange, got another record from rank"), text


def test_interrupt_waits_for_the_end_of_the_record(forked):
    def body(rank: int) -> list:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with init_dist(device="cpu", timeout_s=NEVER_S):
            begin()
            if rank == 0:
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                try:
                    begin()
                except KeyboardInterrupt:
                    return ["interrupted", begin()]
            time.sleep(1.0)
            return [begin(), begin()]

    first, second = forked.run(body, 2, results_of=[0, 1]).values()
    assert first == ["interrupted", [4, 2]]
    assert second == [[4, 2], [4, 2]]


def test_second_interrupt_ends_the_wait_and_the_other_ranks_learn_of_it(forked):
    def body(rank: int) -> list:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with init_dist(device="cpu", timeout_s=NEVER_S):
            begin()
            if rank == 0:
                for delay in (0.3, 0.6):
                    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            else:
                time.sleep(1.5)
            return begin()

    first, second = forked.run(body, 2, results_of=[0, 1]).values()
    assert first == "KeyboardInterrupt: "
    assert second.startswith("DistError: step: ranks [0] of 2 did not arrive, connection lost"), second


def test_fork_of_a_dead_rank_keeps_no_connection_open(forked):
    def die_with_a_worker() -> None:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    (text,) = forked.run(lambda rank: meet(rank, 1, die_with_a_worker), 2, results_of=[0]).values()
    assert text.startswith("DistError: step: ranks [1] of 2 did not arrive, connection lost after"), text


def test_fork_has_no_exchange(forked):
    def body(rank: int) -> list:
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if current_context().control_plane is None else 1)
            return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), begin()]

    assert forked.run(body, 2, results_of=[0, 1]) == {rank: [0, [4, 2]] for rank in range(2)}


def test_closing_leaves_no_socket_and_no_file(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def body(rank: int) -> list:
        left = []
        with init_dist(device="cpu"):
            opened = channel()
            left.append(os.listdir(tmp_path))
        left.append([connection.fileno() for connection in opened._connections.values()])
        return [*left, current_context().control_plane is None]

    answers = forked.run(body, 2, results_of=[0, 1])
    assert [answer[1:] for answer in answers.values()] == [[[-1], True]] * 2
    assert os.listdir(tmp_path) == []


def test_hang_report_shows_the_missing_record(forked, tmp_path):
    def body(rank: int) -> list:
        with init_dist(device="cpu") as info:
            begin()
            all_gather_numbers([1.0])
            if rank == 0:
                threading.Thread(target=begin, daemon=True).start()
                while not channel().waits:
                    time.sleep(0.01)
            write_flight_record(tmp_path / f"{rank}.json", info, current_context().control_plane)
            all_gather_numbers([1.0], group="background")
            if rank == 1:
                begin()
            time.sleep(0.2)
        return json.loads((tmp_path / f"{rank}.json").read_text())["groups"]

    forked.run(body, 2, results_of=[0, 1])
    records = {rank: parse_rank_record((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)}
    (stop,) = [stop for stop in find_stalled(records) if stop.group.name == "control"]
    assert (stop.waiting, stop.missing, str(stop.collective)) == ([0], [1], "record #3")
