"""Files that a rank writes on request of its launcher while its main thread waits in a collective."""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.dist.collectives import all_gather_numbers, all_gather_single
from dtrain.dist.context import current_context
from dtrain.dist.flight_recorder import (
    COLLECTIVES_PER_GROUP,
    FlightRecorder,
    write_flight_record,
    write_stacks,
)
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.launch.hang_report import find_stalled
from dtrain.launch.rank_records import find_user_frame, parse_main_thread, parse_rank_record
from dtrain.testing import run_ranks
from jobs import wait_until


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one launcher; here each test has its own."""
    monkeypatch.setattr(current_context(), "flight_recorder", FlightRecorder(ignore_before_ns=time.time_ns()))


@pytest.fixture
def question() -> Iterator[tuple[int, int]]:
    """The launcher's pipe: the end that the ranks poll, and the end that takes the question."""
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # the test closed it
            os.close(fd)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "dtrain-flight-recorder"]


def environment(folder: Path, fd: int) -> dict[str, str]:
    return {launch_protocol.RUN_DIR: str(folder), launch_protocol.DUMP_REQUEST_FD: str(fd)}


def prepare(folder: Path) -> Path:
    path = launch_protocol.flight_record_file(folder, 0)
    path.parent.mkdir()
    return path


def tell_when_waiting(path: Path) -> None:
    """Make ``path`` when an exchange of this rank waits for other ranks."""
    plane = current_context().control_plane
    wait_until(lambda: plane["control"].waits)
    path.touch()


def test_records_of_two_ranks_show_the_missing_collective(forked, tmp_path, question):
    prepare(tmp_path)
    asked, ask = question
    paths = [launch_protocol.flight_record_file(tmp_path, rank) for rank in (0, 1)]

    def body(rank):
        os.environ.update(environment(tmp_path, asked))
        with init_dist(device="cpu"):
            dist.all_reduce(torch.ones(3))
            all_gather_numbers([1.0])
            if rank == 0:
                threading.Thread(target=tell_when_waiting, args=[tmp_path / "waits"]).start()
                all_gather_numbers([2.0])
            wait_until((tmp_path / "waits").exists)
            os.write(ask, b"?")
            wait_until(lambda: all(path.exists() for path in paths))
            os._exit(0)

    with pytest.raises(AssertionError, match="rank 1 died before it answered"):
        forked.run(body, 2, results_of=[1])
    records = {rank: parse_rank_record(path.read_text()) for rank, path in enumerate(paths)}
    assert {group.name for group in records[0].histories} == {"training", "control"}
    (stop,) = find_stalled(records)
    assert (stop.group.name, stop.group.ranks, str(stop.collective)) == ("control", (0, 1), "all_gather #2")
    assert (stop.waiting, stop.missing, stop.unknown, stop.mismatched) == ([0], [1], [], {})


def test_record_holds_recent_collectives_of_open_groups(tmp_path, question):
    path = prepare(tmp_path)
    told = environment(tmp_path, question[0])
    with init_dist(device="cpu") as info:
        current_context().flight_recorder.start(told, info)
        for _ in range(COLLECTIVES_PER_GROUP + 50):
            dist.all_reduce(torch.ones(3))
    with init_dist(device="cpu") as info:  # torch calls the new groups as it called the old ones
        current_context().flight_recorder.start(told, info)
        for _ in range(COLLECTIVES_PER_GROUP + 5):
            dist.all_reduce(torch.ones(3))
        all_gather_single(torch.ones(2), torch.ones(2))
        os.write(question[1], b"?")
        wait_until(path.exists)
    groups = {group["name"]: group for group in json.loads(path.read_text())["groups"]}
    training = groups["training"]
    assert (training["backend"], training["ranks"]) == ("gloo", [0])
    assert COLLECTIVES_PER_GROUP + 5 < training["last"] == training["collectives"][-1]["number"] < COLLECTIVES_PER_GROUP + 50
    assert len(training["collectives"]) == COLLECTIVES_PER_GROUP
    assert {"op": "all_reduce", "sizes": [[3]], "waits": False}.items() <= training["collectives"][-3].items()
    assert training["collectives"][-1]["op"].startswith("all_gather")


def test_stacks_of_running_threads_are_written(tmp_path):
    """The signal's handler takes no lock, so it must not look at threads that run: a rank that can answer does it itself."""
    path, end = tmp_path / "stacks", threading.Event()

    def runs() -> None:
        while not end.is_set():
            json.loads(json.dumps({"a": [1, {"b": 2}]}))

    thread = threading.Thread(target=runs)
    thread.start()
    path.write_text("before\n")
    writer = threading.Thread(target=lambda: [write_stacks(path) for _ in range(200)])
    writer.start()
    writer.join()
    end.set()
    thread.join()
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.count("in runs\n") == 200
    assert "in write_stacks" not in text
    assert find_user_frame(text, libraries=[sysconfig.get_path("stdlib")]).startswith(f"{__file__}:")
    assert parse_main_thread(text)[-1][2] in ("<module>", "_run_module_as_main")  # the second under python -m


def names_of_groups(folder: str) -> list[str]:
    mesh, path = build_mesh(dp_replicate=2, dp_shard=1), Path(folder) / f"{dist.get_rank()}.json"
    for group in (mesh.get_group("dp_replicate"), mesh.get_group("dp_shard"), dist.new_group(group_desc="mine")):
        dist.barrier(group=group)
    write_flight_record(path, get_dist_info())
    return [group["name"] for group in json.loads(path.read_text())["groups"]]


def test_groups_have_documented_names(tmp_path):
    assert run_ranks(names_of_groups, 2, str(tmp_path)) == [["training", "dp_shard", "mine"]] * 2


def test_closed_block_leaves_no_record_and_no_thread(tmp_path, question, monkeypatch):
    path = prepare(tmp_path)
    for name, value in environment(tmp_path, question[0]).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # the second opening finds the pipe again
        with init_dist(device="cpu"):
            assert threads()
        assert not threads()
    assert launch_protocol.DUMP_REQUEST_FD not in os.environ
    assert not os.get_inheritable(question[0])
    assert not path.exists()


def test_each_dump_request_is_answered_once_across_reopened_blocks(tmp_path, question):
    path = prepare(tmp_path)
    told = environment(tmp_path, question[0])
    with init_dist(device="cpu") as info:
        current_context().flight_recorder.start(told, info)
        for _ in range(3):
            os.write(question[1], b"?")
            wait_until(path.exists)
            path.unlink()
    with init_dist(device="cpu") as info:
        current_context().flight_recorder.start(told, info)
        time.sleep(0.5)  # the old questions can still be seen
        assert not path.exists()
        os.write(question[1], b"?")
        wait_until(path.exists)
    assert not threads()


def test_no_record_is_written_after_launcher_death(tmp_path, question):
    path = prepare(tmp_path)
    with init_dist(device="cpu") as info:
        current_context().flight_recorder.start(environment(tmp_path, question[0]), info)
        os.close(question[1])
        wait_until(lambda: not threads())
        current_context().flight_recorder.stop()
    assert not path.exists()


@pytest.mark.parametrize("number", ["", "x", "99999", "file"])
def test_dump_request_variable_without_a_pipe_is_ignored(tmp_path, number):
    with open(tmp_path / "file", "w") as file, init_dist(device="cpu") as info:
        told = {
            launch_protocol.RUN_DIR: str(tmp_path),
            launch_protocol.DUMP_REQUEST_FD: str(file.fileno()) if number == "file" else number,
        }
        current_context().flight_recorder.start(told, info)
        assert not threads()
    assert launch_protocol.DUMP_REQUEST_FD not in told


def test_record_write_error_does_not_stop_the_rank(tmp_path, question, capfd):
    with init_dist(device="cpu") as info:
        current_context().flight_recorder.start(environment(tmp_path / "gone", question[0]), info)
        os.write(question[1], b"?")
        wait_until(lambda: not threads())
        current_context().flight_recorder.stop()
    assert "rank 0 could not write its last collectives" in capfd.readouterr().err
