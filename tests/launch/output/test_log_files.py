"""Every stream is kept in a file; a disk that takes nothing costs lines, which are counted, and nothing else."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import pytest

from dtrain.launch import job_output as files_module
from dtrain.launch.job_output import LogFiles

FULL = Path("/dev/full")


@pytest.fixture
def files():
    files = LogFiles()
    yield files
    files.close()


def test_stream_with_own_file_is_written_unchanged(files, tmp_path):
    path = tmp_path / "new" / "folders" / "a.log"
    stream = files.stream(path, "a")
    for chunk, seen in ((b"\r 1%", b"\r 1%"), (b"\xff\x1b[2J", b"\r 1%\xff\x1b[2J")):
        stream.write(chunk)
        assert path.read_bytes() == seen
    stream.close()
    assert (path.read_bytes(), files.describe_lost()) == (b"\r 1%\xff\x1b[2J", [])


def test_silent_stream_creates_no_file(files, tmp_path):
    files.stream(tmp_path / "logs" / "a.log", "a").close()
    assert list(tmp_path.iterdir()) == []


def test_streams_sharing_a_file_keep_lines_whole(files, tmp_path):
    path = tmp_path / "all.log"
    a, b = files.stream(path, "a"), files.stream(path, "b")
    a.write(b"a1 ")
    b.write(b"b1\nb2 ")
    a.write(b"a1\na2")
    b.close()
    a.close()
    assert path.read_text().splitlines() == ["b1", "a1 a1", "b2 ", "a2"]


def test_existing_file_is_appended_to(files, tmp_path):
    path = tmp_path / "a.log"
    path.write_text("before\n")
    files.stream(path, "a").write(b"after\n")
    assert path.read_text() == "before\nafter\n"


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_full_disk_counts_lost_lines_and_retries(files, tmp_path):
    path = tmp_path / "a.log"
    path.symlink_to(FULL)
    stream = files.stream(path, "a")
    stream.write(b"1\n2\n")
    stream.write(b"3\n")
    path.unlink()  # room again
    stream.write(b"4\n")
    reason = "No space left on device"
    assert path.read_text().splitlines() == [f"dtrain: launch: 3 lines are missing here: {reason}", "4"]
    assert files.describe_lost() == [f"3 lines are missing in {str(path)!r}: {reason}"]


def test_file_size_limit_keeps_lines_that_fit(files, tmp_path):
    path = tmp_path / "a.log"
    stream = files.stream(path, "a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        stream.write(b"12345678\nabcdef\nend\n")
        stream.write(b"more\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"12345678\na"
    stream.write(b"and on\n")
    note = "dtrain: launch: 3 lines are missing here: File too large"
    assert path.read_text().splitlines() == ["12345678", "a", note, "and on"]


NOWHERE = {
    "below a file": lambda folder: folder / "file" / "a.log",
    "a folder": lambda folder: folder,
    "name too long": lambda folder: folder / ("x" * 300),
    "pipe without a reader": lambda folder: folder / "fifo",
}


@pytest.mark.parametrize("where", NOWHERE.values(), ids=NOWHERE)
def test_unopenable_file_is_reported_once_at_end(files, tmp_path, where):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    path = where(tmp_path)
    stream = files.stream(path, "a")
    for _ in range(3):
        stream.write(b"1\n2\n")
    (line,) = files.describe_lost()
    assert line.startswith(f"6 lines are missing in {str(path)!r}: ")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_lost_lines_of_many_files_are_reported_in_three_lines(files, tmp_path):
    for number in range(5):
        path = tmp_path / str(number)
        path.symlink_to(FULL)
        files.stream(path, number).write(b"1\n")
    first, second, rest = files.describe_lost()
    assert (first, second) == tuple(f"1 line is missing in {str(tmp_path / name)!r}: No space left on device" for name in "01")
    assert rest == "lines are missing in 3 more files; is the disk full?"


def test_open_files_are_limited_by_closing_least_recently_used(files, tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_OPEN_AT_ONCE", 3)
    before = len(os.listdir("/proc/self/fd"))
    streams = [files.stream(tmp_path / str(number), number) for number in range(8)]
    for turn in range(3):
        for stream in streams:
            stream.write(f"{turn}\n".encode())
        assert len(os.listdir("/proc/self/fd")) == before + 3
    assert {path.read_text() for path in tmp_path.iterdir()} == {"0\n1\n2\n"}
    assert files.describe_lost() == []


def test_descriptor_exhaustion_closes_another_file_without_losing_lines(files, tmp_path):
    first, second = files.stream(tmp_path / "a", "a"), files.stream(tmp_path / "b", "b")
    first.write(b"1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filler = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        with contextlib.suppress(OSError):  # too many open files
            while True:
                filler.append(os.open(os.devnull, os.O_RDONLY))
        second.write(b"2\n")
        first.write(b"3\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("1\n3\n", "2\n")
    assert files.describe_lost() == []
