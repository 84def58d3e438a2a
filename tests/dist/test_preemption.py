"""Stop signals: handlers, forks, late and repeated signals, and reports of a rank to its launcher."""

import os
import signal
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain import launch_protocol
from dtrain.dist import context
from dtrain.dist.context import current_context
from dtrain.launch import heartbeats
from dtrain.launch.heartbeats import ProgressKind
from step.ending import endings, say

BATCH = torch.ones(2, 3)


def squared(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def begin(**objects):
    model = nn.Linear(3, 1)
    step = dt.compose_step(squared)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), **objects)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def twice_at_once(rank):
    with dt.init_dist():
        begin()
        send()
        send()
        return current_context().preemption.pending_signal()


def test_duplicate_stop_signals_count_as_one_request(tmp_path):
    assert endings(twice_at_once, 1, tmp_path) == ([0], [signal.SIGTERM])


def second_after_the_first(rank, *, folder):
    with dt.init_dist():
        begin()
        send()
        say(folder, rank, "the first")
        context.DUPLICATE_SIGNAL_S = -1.0
        send()
        say(folder, rank, "the second")


def test_second_signal_terminates_the_rank_immediately(tmp_path):
    codes, said = endings(partial(second_after_the_first, folder=tmp_path), 1, tmp_path)
    assert (codes, said) == ([-signal.SIGTERM], ["the first"])


def fork_that_is_told(rank):
    with dt.init_dist():
        begin()
        pid = os.fork()
        if pid == 0:
            send()
            os._exit(0)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), current_context().preemption.pending_signal()]


def test_forked_child_is_terminated_by_the_stop_signal(tmp_path):
    assert endings(fork_that_is_told, 1, tmp_path) == ([0], [[-signal.SIGTERM, 0]])


class Ones:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


def with_workers(rank, *, folder):
    with dt.init_dist():
        loader = dt.build_loader(Ones(), global_batch_size=2, seed=0, num_workers=2)
        step, state = begin(loader=loader)
        for batch in loader.until("9ba"):
            if state.step == 1:
                send()
            state, _ = step(state, batch)
            if dt.should_stop(state):
                dt.save_sharded(folder / "ckpt", state)
                return state.step
    return None


def test_loader_workers_ignore_the_stop_signal(tmp_path):
    assert endings(partial(with_workers, folder=tmp_path), 1, tmp_path) == ([75], [None])
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps(tmp_path / "ckpt")] == [2]


def saved_and_once_more(rank, *, folder, mode):
    """The loop of the examples: the step of the stop is saved in the loop, and the final save is of the same step."""
    with dt.init_dist():
        mesh, step = dt.build_mesh(), dt.compose_step(squared)
        loader = dt.build_loader(Ones(), mesh=mesh, global_batch_size=2, seed=0)
        model = dt.shard_model(nn.Linear(3, 1), mesh, blocks=(nn.Linear,))
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), loader=loader)
        results = []
        for batch in loader.until("9ba"):
            if state.step == 1:
                send()
            state, _ = step(state, batch)
            results.append(dt.save_sharded(folder / mode, state, mode=mode))
            if dt.should_stop(state):
                break
        results.append(dt.save_sharded(folder / mode, state, mode=mode))
        say(folder, rank, [(save.result().step, save.result().written) for save in results])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_final_save_of_a_saved_step_writes_nothing_and_ends_with_75(tmp_path, mode):
    codes, said = endings(partial(saved_and_once_more, folder=tmp_path, mode=mode), 2, tmp_path)
    assert (codes, said) == ([75, 75], [[[1, True], [2, True], [2, False]]] * 2)


def save_and_stop(folder):
    with dt.init_dist():
        step, state = begin()
        send()
        state, _ = step(state, BATCH)
        dt.save_sharded(folder / "ckpt", state)


def late(rank, *, folder):
    """Send the signal after the block, as to the last rank."""
    with pytest.raises(SystemExit, match="75"):
        save_and_stop(folder)
    send()
    say(folder, rank, "alive")
    context.DUPLICATE_SIGNAL_S = -1.0
    send()
    say(folder, rank, "still alive")


def test_late_signal_is_ignored_after_saving_until_a_second_one(tmp_path):
    assert endings(partial(late, folder=tmp_path), 1, tmp_path) == ([-signal.SIGTERM], ["alive"])


def of_the_users_own(rank):
    got = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    with dt.init_dist():
        begin()
        send()
        wanted = current_context().preemption.pending_signal()
    send()
    return [got, wanted]


def on_top(rank):
    """As the page says: the user's own handler calls the handler that it replaced."""
    got = []
    with dt.init_dist():
        step, state = begin()
        before = signal.getsignal(signal.SIGTERM)

        def handler(number, frame):
            got.append(number)
            before(number, frame)

        signal.signal(signal.SIGTERM, handler)
        send()
        state, _ = step(state, BATCH)
        stop = dt.should_stop(state)
    return [got, stop, signal.getsignal(signal.SIGTERM) is handler]


def put_back(rank):
    seen = [signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]
    for _ in range(2):
        with dt.init_dist():
            seen.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            begin()
            begin()
            seen.append(callable(signal.getsignal(signal.SIGTERM)))
        seen.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    return seen


def put_back_after_an_exception(rank):
    with suppress(KeyError), dt.init_dist():
        begin()
        send()
        raise KeyError
    return [signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, current_context().preemption.pending_signal()]


def in_a_thread(rank):
    with dt.init_dist():
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


HANDLERS = {
    "the user's own is left alone": (of_the_users_own, [[signal.SIGTERM] * 2, 0]),
    "the user's own on top of it": (on_top, [[signal.SIGTERM], True, True]),
    "put back at the end of the block": (put_back, [True] * 7),
    "put back after an exception": (put_back_after_an_exception, [True, 0]),
    "a state that is made in a thread": (in_a_thread, True),
}


@pytest.mark.parametrize(("body", "expected"), HANDLERS.values(), ids=HANDLERS)
def test_signal_handlers_are_installed_only_inside_the_block(tmp_path, body, expected):
    assert endings(body, 1, tmp_path) == ([0], [expected])


@pytest.mark.parametrize("text", ["x", "", "-1", "9", "19", "0", "4096", "USR1", "²"])
def test_invalid_stop_signal_variable_is_refused(monkeypatch, text):
    monkeypatch.setenv(launch_protocol.STOP_SIGNAL, text)
    with pytest.raises(
        dt.errors.ConfigError, match=r"DTRAIN_STOP_SIGNAL must be the number of a signal that a process can handle"
    ):
        dt.init_dist()


def reporting(rank, *, folder):
    with dt.init_dist() as info:
        mesh = dt.build_mesh()
        step = dt.compose_step(squared)
        model = dt.shard_model(nn.Linear(3, 1), mesh, blocks=(nn.Linear,))
        loader = dt.build_loader(Ones(), mesh=mesh, global_batch_size=2, seed=0)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), loader=loader)
        for batch in loader.until("2ba"):
            state, metrics = step(state, batch)
        said = [heartbeats.last_progress()[1]]
        dt.reduce_metrics(metrics)
        said.append(heartbeats.last_progress()[1])
        dt.dist.reduce_max(1.0)
        said.append(heartbeats.last_progress()[1])
        dt.save_sharded(folder / "ckpt", state)
        dt.evaluate(model, loader, squared)
        assert launch_protocol.HEARTBEAT_FD not in os.environ
        return [info.rank, os.getpid(), said]


def test_ranks_report_their_activities(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "_MIN_INTERVAL_S", 0.0)
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        codes, said = endings(partial(reporting, folder=tmp_path), 2, tmp_path, **{launch_protocol.HEARTBEAT_FD: str(write)})
        pulses = heartbeats.ProgressDecoder().feed(os.read(read, 1 << 16))
    finally:
        os.close(read)
        os.close(write)
    assert codes == [0, 0]
    pid = {rank: number for rank, number, _ in said}
    for _, _, at_each_point in said:  # after the last batch a rank that stops in a collective does not wait for data
        assert at_each_point == ["in the loop", "reduce_metrics", "reduce_max"]
    for rank in (0, 1):
        mine = [p for p in pulses if p.rank == rank]
        kinds = [p.kind for p in mine if p.kind != ProgressKind.PROGRESS]
        commit = [ProgressKind.COMMITTED] if rank == 0 else []
        assert kinds == [ProgressKind.OPENED, *commit, ProgressKind.LEAVING, ProgressKind.CLOSED]
        assert [p.value for p in mine if p.kind in (ProgressKind.OPENED, ProgressKind.CLOSED)] == [pid[rank]] * 2
        assert [p.value for p in mine if p.kind == ProgressKind.COMMITTED] == [2] * len(commit)
        assert {p.activity for p in mine if p.kind == ProgressKind.PROGRESS} == {
            "waiting for data",
            "in the loop",
            "step",
            "reduce_metrics",
            "reduce_max",
            "save",
            "evaluate",
        }


def test_failed_rank_does_not_report_a_normal_exit(tmp_path):
    read, write = os.pipe()
    try:
        codes, _ = endings(put_back_after_an_exception, 1, tmp_path, **{launch_protocol.HEARTBEAT_FD: str(write)})
        pulses = heartbeats.ProgressDecoder().feed(os.read(read, 1 << 16))
    finally:
        os.close(read)
        os.close(write)
    assert codes == [0]
    assert [p.kind for p in pulses] == [ProgressKind.OPENED, ProgressKind.CLOSED]


def stale(rank, *, what, folder):
    """A variable of another launch, whose number is closed here, or a file of this process."""
    number = "x"
    if what != "text":
        file = (folder / "mine").open("wb")
        number = str(file.fileno())
        if what == "closed":
            file.close()
    os.environ[launch_protocol.HEARTBEAT_FD] = number
    with dt.init_dist():
        step, state = begin()
        step(state, BATCH)
    return heartbeats._STATE.fd


@pytest.mark.parametrize("what", ["closed", "a file", "text"])
def test_stale_heartbeat_variable_is_ignored(tmp_path, what):
    assert endings(partial(stale, what=what, folder=tmp_path), 1, tmp_path) == ([0], [None])
    assert what == "text" or (tmp_path / "mine").read_bytes() == b""
