"""Files written in parts by several threads."""

import errno
import os
import threading
from itertools import accumulate

import pytest

from dtrain import storage
from dtrain.storage.parallel_parts import for_each_part

SIZES = [5000, 0, 1, 70_000, 3, 12_345]
CONTENT = os.urandom(sum(SIZES))
BEGINS = list(accumulate(SIZES, initial=0))


def part_of(part):
    """A part in three buffers of kinds that a caller may have, one of them empty."""
    data = CONTENT[BEGINS[part] : BEGINS[part + 1]]
    half = len(data) // 2
    return [data[:half], bytearray(), memoryview(data[half:])]


class FaultyOs:
    """Stands in for ``os``: ``pwritev`` is ``instead``, other calls are recorded by name."""

    def __init__(self, instead):
        self.instead, self.calls = instead, []

    def __getattr__(self, name):
        if name == "pwritev":
            return self.instead
        self.calls.append(name)
        return getattr(os, name)


def write_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dtrain-write")]


@pytest.mark.parametrize("threads", [1, 3, 99])
def test_parts_are_consecutive_and_requested_once(tmp_path, threads):
    asked = []

    def asked_part(part):
        asked.append((part, threading.current_thread() is threading.main_thread()))
        return part_of(part)

    storage.write_parts(tmp_path / "file", SIZES, asked_part, threads=threads)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert sorted(asked) == [(part, threads == 1) for part in range(len(SIZES))]
    assert write_threads() == []


def test_file_without_parts_is_empty(tmp_path):
    storage.write_parts(tmp_path / "file", [], part_of, threads=4)
    assert (tmp_path / "file").read_bytes() == b""


def test_many_buffers_are_written_in_several_calls(tmp_path):
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    storage.write_parts(tmp_path / "file", [sum(map(len, pieces))], lambda part: pieces, threads=1)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("threads", [1, 2])
def test_short_writes_are_completed(tmp_path, monkeypatch, threads):
    def short(handle, buffers, begin):
        return os.pwritev(handle, [next(view for view in buffers if view)[:999]], begin)

    monkeypatch.setattr(storage.local, "os", FaultyOs(short))
    storage.write_parts(tmp_path / "file", SIZES, part_of, threads=threads)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("threads", [1, 2])
def test_error_ends_all_threads_and_closes_the_file(tmp_path, monkeypatch, threads):
    failed = threading.Event()

    def full(handle, buffers, begin):
        if begin >= BEGINS[3]:
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(handle, buffers, begin)

    faulty = FaultyOs(full)
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(storage.local, "os", faulty)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        storage.write_parts(tmp_path / "file", SIZES, part_of, threads=threads)
    assert failed.is_set()
    assert write_threads() == []
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert "fsync" not in faulty.calls


def test_first_error_is_raised():
    both, first = threading.Barrier(2, timeout=90), []

    def fail(part):
        if part == 1:
            first.append(threading.current_thread())
        both.wait()
        if part == 1:
            raise ValueError("first")
        first[0].join(90)
        raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        for_each_part(5, fail, threads=2, name="test")


def test_interrupt_waits_for_running_parts_only(monkeypatch):
    begun, done = threading.Event(), []

    class Interrupted(threading.Thread):
        def join(self, timeout=None):
            begun.wait(90)
            if not done:
                done.append("asked")
                raise KeyboardInterrupt
            super().join(timeout)
            done.append("joined")

    def work(part):
        begun.set()
        threading.Event().wait(0.05)

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        for_each_part(1000, work, threads=2, name="test")
    assert done == ["asked", "joined", "joined"]


def test_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        storage.write_parts(tmp_path / "file", SIZES, part_of, threads=2)
    assert (tmp_path / "file").read_bytes() == b"old"
