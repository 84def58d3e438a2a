"""All streams of a job: the lines on the terminal, the lines in files, and the lines that a failure can quote."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from dtrain.launch.job_output import JobOutput
from dtrain.launch.launch_plan import NodeLayout, OutputPlan


class Job:
    """An ``Output`` whose own standard streams are files, and the write ends of its ranks' pipes."""

    def __init__(self, folder: Path, n: int = 2, **plan: object) -> None:
        self.run_dir = folder / "run"
        self.layout = NodeLayout.one_node(n)
        self.output = JobOutput(OutputPlan(**plan), self.layout, self.run_dir)  # type: ignore[arg-type]
        self.ranks: dict[int, list[int]] = {}

    def start(self, rank: int) -> None:
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        self.output.open(rank, out_read, err_read)
        self.ranks[rank] = [out_write, err_write]

    def write(self, rank: int, text: bytes, stream: int = 0) -> None:
        os.write(self.ranks[rank][stream], text)
        for fd in self.output.fds():
            assert self.output.relay(fd)

    def end(self, *last_words: str) -> None:
        for fds in self.ranks.values():
            for fd in fds:
                os.close(fd)
        self.ranks.clear()
        self.output.finish(last_words, timeout_s=60)

    def kept(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.run_dir / "logs").glob("*"))}


def open_files() -> set[tuple[str, str]]:
    """Return the number and the target of each open file; a target names one pipe, one socket or one file.

    Files without a name are those of ``capfd``, which opens new ones for the setup, the call and the teardown of a test. They
    have the old inode only if no other process has taken it meanwhile.
    """
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.endswith(" (deleted)"):
                files.add((number, target))
    return files


@pytest.fixture
def make(tmp_path, capfd):
    """Start ranks on pipes; afterwards nothing may be open that was not before. ``capfd`` is the launcher's terminal."""
    before = open_files()
    jobs = []

    def make_job(n: int = 2, **plan: object) -> Job:
        jobs.append(Job(tmp_path, n, **plan))
        for rank in range(n):
            jobs[-1].start(rank)
        return jobs[-1]

    yield make_job
    for job in jobs:
        job.end()
    assert open_files() - before == set()  # an earlier test's pipe may have closed since


def test_terminal_shows_rank_0_and_files_hold_all_ranks(make, capfd):
    job = make()
    job.write(0, b"zero\n")
    job.write(1, b"one\n")
    job.write(1, b"trouble\xff\n", stream=1)
    job.end()
    assert capfd.readouterr() == ("[rank 0] zero\n", "")
    assert job.kept() == {"rank-00000.stdout": b"zero\n", "rank-00001.stdout": b"one\n", "rank-00001.stderr": b"trouble\xff\n"}


def test_terminal_shows_selected_ranks(make, capfd):
    job = make(3, shown=frozenset({1, 2}), prefix="{host}:{rank}/{world_size}> ")
    for rank in range(3):
        job.write(rank, b"hello\n", stream=1)
    job.end()
    host = os.uname().nodename
    assert capfd.readouterr() == ("", f"{host}:1/3> hello\n{host}:2/3> hello\n")


def test_single_rank_output_is_passed_through_unchanged(make, capfd):
    job = make(1)
    job.write(0, b"\r 10%")
    assert capfd.readouterr().out == "\r 10%"
    job.end()
    assert capfd.readouterr().out == "\n"
    assert job.kept() == {"rank-00000.stdout": b"\r 10%"}


def test_tail_keeps_order_of_both_streams(make):
    job = make()
    for number in range(200):
        job.write(1, f"step {number}\n".encode())
    job.write(1, b"Traceback\nOSError: \x1b[2J\n", stream=1)
    job.write(1, b"\n  \ncleaning up")
    assert job.output.read_tail(1, 4) == ["step 199", "Traceback", r"OSError: \x1b[2J", "cleaning up"]
    assert len(job.output.read_tail(1, 1000)) == 48 + 2 + 1  # 50 ended lines of a stream at most, and two were empty
    assert job.output.read_tail(0, 4) == job.output.read_tail(7, 4) == job.output.read_tail(1, 0) == []


def test_tail_includes_stderr_when_stdout_is_read_later(make):
    job = make()
    job.write(1, b"a\nb\nc\nOSError\n", stream=1)
    job.write(1, b"printed\n" * 100)
    assert job.output.read_tail(1, 4) == ["c", "OSError", "printed", "printed"]
    assert job.output.read_tail(1, 1) == ["printed"]


def test_tail_keeps_end_of_long_chunk_and_progress_bar(make):
    job = make()
    job.write(1, b"".join(b"%d\n" % number for number in range(5000)) + b"\r 1%\r 2%\r")
    assert job.output.read_tail(1, 3) == ["4998", "4999", " 2%"]
    assert len(job.output.read_tail(1, 1000)) == 51
    job.write(1, b"x" * 60_000)
    assert job.output.read_tail(1, 1) == ["x" * 2000]


def test_restarted_rank_appends_to_files_and_starts_new_tail(make):
    job = make()
    job.write(1, b"first try\n")
    for fd in job.ranks.pop(1):
        os.close(fd)
    assert [job.output.relay(fd) for fd in job.output.fds()] == [True, True, False, False]
    assert job.output.read_tail(1, 9) == ["first try"]
    job.start(1)
    assert job.output.read_tail(1, 9) == []
    job.write(1, b"second")
    assert job.kept()["rank-00001.stdout"] == b"first try\nsecond"  # still as it comes: no other process writes to it


def test_closed_stream_ends_its_partial_line(make, capfd):
    job = make()
    job.write(0, b"half a line")
    for fd in job.ranks.pop(0):
        os.close(fd)
    fds = job.output.fds()
    assert [job.output.relay(fd) for fd in fds[:2]] == [False, False]
    assert job.output.fds() == fds[2:]
    assert capfd.readouterr().out == "[rank 0] half a line\n"


def test_drain_does_not_wait_for_other_holder_of_pipe(make, capfd):
    job = make()
    os.write(job.ranks[0][0], b"the last thing it said\n")
    job.output.drain()  # the write ends are open
    assert job.output.fds() == []
    assert capfd.readouterr().out == "[rank 0] the last thing it said\n"


def test_is_shown_returns_displayed_ranks(make):
    assert [make().output.is_shown(rank) for rank in (0, 1)] == [True, False]
    assert [make(shown=frozenset({1})).output.is_shown(rank) for rank in (0, 1)] == [False, True]


def test_streams_of_all_ranks_can_share_one_file(make):
    job = make(stdout="all.log", stderr="all.log")
    for rank in (0, 1):
        for stream in (0, 1):
            job.write(rank, b"%d%d " % (rank, stream), stream)
    for rank in (0, 1):
        for stream in (0, 1):
            job.write(rank, b"end\n", stream)
    assert (job.run_dir / "all.log").read_text().splitlines() == ["00 end", "01 end", "10 end", "11 end"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_log_device_prints_one_line_and_keeps_terminal_output(make, capfd):
    job = make(stdout="/dev/full")
    job.write(0, b"a\nb\n")
    job.write(1, b"c\n")
    job.end("dtrain: launch: rank 1 failed")
    out, err = capfd.readouterr()
    assert out == "[rank 0] a\n[rank 0] b\n"
    assert err == "dtrain: launch: 3 lines are missing in '/dev/full': No space left on device\ndtrain: launch: rank 1 failed\n"


def test_broken_stdout_is_reported_on_stderr(make, capfd):
    read, write = os.pipe()
    stdout = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    try:
        job = make()
        os.close(read)
        job.write(0, b"a\nb\n")
        job.end()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert capfd.readouterr().err == "dtrain: launch: 2 lines of standard output were dropped: Broken pipe\n"


def test_launcher_line_escapes_invalid_text(make, capfd):
    make().output.write_line("cannot run \udcff\x1b[2J\n!")
    assert capfd.readouterr().err == r"cannot run \udcff\x1b[2J\x0a!" + "\n"


def test_finish_stops_waiting_for_reader_on_give_up(make):
    read, write = os.pipe()
    stdout = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    try:
        job = make()
        for _ in range(3):
            job.write(0, b"x\n" * 30_000)
        assert any(outlet.has_pending for outlet in job.output.writers)
        job.output.finish(["the last words"], timeout_s=3600, give_up=lambda: True)
        assert not any(outlet.has_pending for outlet in job.output.writers)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(read)
