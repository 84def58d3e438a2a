"""Records of a step over the sockets of one node: order, faults, interrupts, forks, and the collectives that replace them."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from dtrain.dist import record_exchange
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.context import current_context
from dtrain.dist.flight_recorder import write_flight_record
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.record_exchange import RecordExchange, open_record_exchange
from dtrain.dist.step_sync import sync_after_backward, sync_before_forward
from dtrain.launch.hang.explain import find_stalled
from dtrain.launch.hang.rank_records import parse_rank_record
from dtrain.testing import count_collectives

TIMEOUT_S = 2.0
NEVER_S = 600


def exchange() -> RecordExchange:
    opened = current_context().record_exchange
    assert opened is not None
    return opened


def begin(samples: int = 2) -> list:
    """Return what the ranks agree on in the record before forward."""
    counts = sync_before_forward(samples=samples, tokens=0, microbatches=samples, zero_weight_seen=False)
    return [counts.samples, counts.microbatches]


def end() -> None:
    sync_after_backward(unit_order=[], params_without_grad=[], changed_buffers=[], weights_mismatch=False)


def several_rows() -> list:
    rank, found = get_dist_info().rank, []
    for length in (1, 3, 11):
        found.append(exchange().all_gather([rank + column / 3 for column in range(length)]))
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_rows_arrive_exactly_and_in_the_order_of_ranks(ranks, world):
    expected = [[[rank + column / 3 for column in range(length)] for rank in range(world)] for length in (1, 3, 11)]
    assert ranks(world).run(several_rows) == [expected] * world


def traffic() -> list:
    before = exchange().count
    with count_collectives() as seen:
        agreed = begin(get_dist_info().rank)
        end()
    return [agreed, exchange().count - before, seen.counts()]


def test_a_step_has_two_records_and_no_collective(ranks):
    assert ranks(3).run(traffic) == [[[3, 2], 2, {}]] * 3


def on_two_nodes() -> list:
    context = current_context()
    opened, sockets = context.info, context.record_exchange
    context.info = replace(opened, local_world_size=1)
    try:
        context.record_exchange = open_record_exchange(context.info)
        with count_collectives() as seen:
            agreed = begin()
            end()
        return [context.record_exchange is None, agreed, seen.counts()]
    finally:
        context.info, context.record_exchange = opened, sockets


def test_records_are_collectives_between_nodes(ranks):
    assert ranks(2).run(on_two_nodes) == [[True, [4, 2], {"control": {"all_gather": 2}}]] * 2


@pytest.mark.parametrize("broken", ["folder", "long name", "bind", "connect"])
def test_records_are_collectives_if_a_rank_cannot_connect(forked, monkeypatch, broken):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not here")

    def body(rank: int) -> list:
        if broken == "folder":
            monkeypatch.setattr(record_exchange.tempfile, "mkdtemp", refuse)
        elif broken == "long name":
            real = record_exchange.tempfile.mkdtemp
            monkeypatch.setattr(record_exchange.tempfile, "mkdtemp", lambda prefix: real(prefix=prefix + "x" * 100))
        elif rank == 1:
            monkeypatch.setattr(socket.socket, broken, refuse)
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return [current_context().record_exchange is None, begin()]

    assert forked.run(body, 3, results_of=[0, 1, 2]) == {rank: [True, [6, 2]] for rank in range(3)}


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
        assert text.startswith("StepError: step: ranks must exchange the same record, got another record"), text


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
                os._exit(0 if current_context().record_exchange is None else 1)
            return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), begin()]

    assert forked.run(body, 2, results_of=[0, 1]) == {rank: [0, [4, 2]] for rank in range(2)}


def test_closing_leaves_no_socket_and_no_file(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(record_exchange.tempfile, "tempdir", str(tmp_path))

    def body(rank: int) -> list:
        found = []
        with init_dist(device="cpu"):
            opened = exchange()
            found.append(os.listdir(tmp_path))
        found.append([connection.fileno() for pair in opened._rounds for connection in pair])
        return [*found, current_context().record_exchange is None]

    answers = forked.run(body, 2, results_of=[0, 1])
    assert [answer[1:] for answer in answers.values()] == [[[-1, -1], True]] * 2
    assert os.listdir(tmp_path) == []


def test_hang_report_shows_the_missing_record(forked, tmp_path):
    def body(rank: int) -> list:
        with init_dist(device="cpu") as info:
            begin()
            all_gather_numbers([1.0])
            if rank == 0:
                threading.Thread(target=begin, daemon=True).start()
                while not exchange().waits:
                    time.sleep(0.01)
            write_flight_record(tmp_path / f"{rank}.json", info, exchange())
            all_gather_numbers([1.0])
            if rank == 1:
                begin()
            time.sleep(0.2)
        return json.loads((tmp_path / f"{rank}.json").read_text())["groups"]

    forked.run(body, 2, results_of=[0, 1])
    records = {rank: parse_rank_record((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)}
    (stop,) = [stop for stop in find_stalled(records) if stop.group.name == "records"]
    assert (stop.waiting, stop.missing, str(stop.collective)) == ([0], [1], "all_gather #2")
