"""An outlet takes no more than there is room for, and says what it had to drop."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from dtrain.launch.output import outlet as outlet_module
from dtrain.launch.output.outlet import Outlet


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # some tests close one themselves
            os.close(fd)


def read_all(read: int, outlet: Outlet) -> bytes:
    os.set_blocking(read, False)
    seen = b""
    while True:
        try:
            seen += os.read(read, 1 << 16)
        except BlockingIOError:
            if not outlet.waiting:
                return seen
        outlet.pump()


def test_outlet_never_blocks_and_counts_the_lines_that_were_too_much(pipe, monkeypatch):
    monkeypatch.setattr(outlet_module, "_MOST_PENDING", 1 << 20)
    read, write = pipe
    outlet = Outlet(write)
    line = b"x" * 999 + b"\n"
    for _ in range(3000):
        outlet.put(line)  # would block for good, were it to write more than the pipe takes
    assert outlet.waiting
    dropped = outlet.dropped
    seen = read_all(read, outlet)
    outlet.put(b"more\n")
    seen += os.read(read, 1 << 16)
    *whole, note, last = seen.splitlines(keepends=True)
    assert set(whole) == {line}
    assert dropped == 3000 - len(whole) > 0
    assert note.startswith(f"dtrain: launch: {dropped} lines of output were dropped here: ".encode())
    assert last == b"more\n"
    assert outlet.dropped == 0  # the stream tells of them itself


def test_outlet_gives_up_at_the_end_when_nobody_reads(pipe):
    outlet = Outlet(pipe[1])
    outlet.put((b"x" * 99 + b"\n") * 10_000)
    assert outlet.waiting
    outlet.flush(patience_s=0.1)
    assert not outlet.waiting
    assert (outlet.dropped, outlet.reason) == (10_000 - lines_in(pipe[0]), "nobody read them")


def lines_in(read: int) -> int:
    """Whole lines that a pipe holds."""
    return os.read(read, 1 << 20).count(b"\n")


def test_note_that_nobody_reads_counts_for_the_lines_it_is_about(pipe, monkeypatch):
    monkeypatch.setattr(outlet_module, "_MOST_PENDING", 1 << 17)
    outlet = Outlet(pipe[1])
    for _ in range(300):
        outlet.put(b"x" * 1023 + b"\n")
    outlet.flush(patience_s=0.1)
    assert outlet.dropped == 300 - lines_in(pipe[0])


def test_outlet_whose_reader_is_gone_drops_and_counts_everything(pipe):
    read, write = pipe
    outlet = Outlet(write)
    os.close(read)
    outlet.put(b"a\n")
    outlet.put(b"b\nc\n")
    assert not outlet.waiting
    assert (outlet.dropped, outlet.reason) == (3, "Broken pipe")


def test_outlet_of_a_closed_descriptor_drops_everything(pipe):
    os.close(pipe[1])
    outlet = Outlet(pipe[1])
    outlet.put(b"a\n")
    assert not outlet.waiting
    assert (outlet.dropped, outlet.reason) == (1, "Bad file descriptor")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_outlet_on_a_full_disk_tells_when_there_is_room_again(tmp_path):
    room = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    fd = os.dup(room)
    try:
        outlet = Outlet(fd)
        outlet.put(b"half a line")
        os.dup2(full, fd)
        outlet.put(b"a\n")
        outlet.put(b"b\n")
        assert (outlet.dropped, outlet.reason) == (2, "No space left on device")
        os.dup2(room, fd)  # as if somebody had made room
        outlet.put(b"c\n")
    finally:
        for opened in (fd, room, full):
            os.close(opened)
    note = "dtrain: launch: 2 lines of output were dropped here: No space left on device"
    assert (tmp_path / "out").read_text().splitlines() == ["half a line", note, "c"]
    assert outlet.dropped == 0


def test_closed_descriptors_are_occupied_before_a_pipe_or_socket_takes_their_place(tmp_path):
    code = """
import os, sys
from dtrain.launch.output.outlet import occupy_standard_streams
before = os.listdir("/proc/self/fd")
occupy_standard_streams()
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
more = len(os.listdir("/proc/self/fd")) - len(before)
open(sys.argv[1], "w").write(f"{links} {more}")
"""
    closed = [sys.executable, "-c", code, str(tmp_path / "seen")]
    subprocess.run(closed, preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)], timeout=90, check=True)
    assert (tmp_path / "seen").read_text() == "['/dev/null', '/dev/null', '/dev/null'] 3"
