"""An outlet takes no more than there is room for, and counts the dropped lines."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest

from dtrain.launch import terminal as outlet_module
from dtrain.launch.terminal import NonBlockingWriter, flush_writers


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # some tests close one themselves
            os.close(fd)


def read_all(read: int, outlet: NonBlockingWriter) -> bytes:
    os.set_blocking(read, False)
    seen = b""
    while True:
        try:
            seen += os.read(read, 1 << 16)
        except BlockingIOError:
            if not outlet.has_pending:
                return seen
        outlet.flush_some()


def test_writer_never_blocks_and_counts_dropped_lines(pipe, monkeypatch):
    monkeypatch.setattr(outlet_module, "_MOST_PENDING", 1 << 20)
    read, write = pipe
    outlet = NonBlockingWriter(write)
    line = b"x" * 999 + b"\n"
    for _ in range(3000):
        outlet.write(line)  # would block for good, were it to write more than the pipe takes
    assert outlet.has_pending
    dropped = outlet.dropped_lines
    seen = read_all(read, outlet)
    outlet.write(b"more\n")
    seen += os.read(read, 1 << 16)
    *whole, note, last = seen.splitlines(keepends=True)
    assert set(whole) == {line}
    assert dropped == 3000 - len(whole) > 0
    assert note.startswith(f"dtrain: launch: {dropped:,} lines of output were dropped here: ".encode())
    assert last == b"more\n"
    assert outlet.dropped_lines == 0  # the stream reports them itself


def test_flush_times_out_without_reader(pipe):
    outlet = NonBlockingWriter(pipe[1])
    outlet.write((b"x" * 99 + b"\n") * 10_000)
    assert outlet.has_pending
    flush_writers([outlet], timeout_s=0.1)
    assert not outlet.has_pending
    assert (outlet.dropped_lines, outlet.reason) == (10_000 - lines_in(pipe[0]), "nobody read them")


def lines_in(read: int) -> int:
    """Whole lines that a pipe holds."""
    return os.read(read, 1 << 20).count(b"\n")


def test_unread_drop_notice_counts_its_lines_as_dropped(pipe, monkeypatch):
    monkeypatch.setattr(outlet_module, "_MOST_PENDING", 1 << 17)
    outlet = NonBlockingWriter(pipe[1])
    for _ in range(300):
        outlet.write(b"x" * 1023 + b"\n")
    flush_writers([outlet], timeout_s=0.1)
    assert outlet.dropped_lines == 300 - lines_in(pipe[0])


def test_writer_with_broken_pipe_drops_and_counts_lines(pipe):
    read, write = pipe
    outlet = NonBlockingWriter(write)
    os.close(read)
    outlet.write(b"a\n")
    outlet.write(b"b\nc\n")
    assert not outlet.has_pending
    assert (outlet.dropped_lines, outlet.reason) == (3, "Broken pipe")


def test_writer_on_closed_descriptor_drops_lines(pipe):
    os.close(pipe[1])
    outlet = NonBlockingWriter(pipe[1])
    outlet.write(b"a\n")
    assert not outlet.has_pending
    assert (outlet.dropped_lines, outlet.reason) == (1, "Bad file descriptor")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_writer_reports_drops_when_disk_has_space_again(tmp_path):
    room = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    fd = os.dup(room)
    try:
        outlet = NonBlockingWriter(fd)
        outlet.write(b"half a line")
        os.dup2(full, fd)
        outlet.write(b"a\n")
        outlet.write(b"b\n")
        assert (outlet.dropped_lines, outlet.reason) == (2, "No space left on device")
        os.dup2(room, fd)  # as if a reader had made room
        outlet.write(b"c\n")
    finally:
        for opened in (fd, room, full):
            os.close(opened)
    note = "dtrain: launch: 2 lines of output were dropped here: No space left on device"
    assert (tmp_path / "out").read_text().splitlines() == ["half a line", note, "c"]
    assert outlet.dropped_lines == 0


def test_closed_standard_descriptors_are_occupied_at_start(tmp_path):
    code = """
import os, sys
from dtrain.launch.terminal import occupy_standard_streams
before = os.listdir("/proc/self/fd")
occupy_standard_streams()
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
more = len(os.listdir("/proc/self/fd")) - len(before)
open(sys.argv[1], "w").write(f"{links} {more}")
"""
    closed = [sys.executable, "-c", code, str(tmp_path / "seen")]
    subprocess.run(closed, preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)], timeout=90, check=True)
    assert (tmp_path / "seen").read_text() == "['/dev/null', '/dev/null', '/dev/null'] 3"


@pytest.fixture
def terminal():
    """Yield a terminal, as the descriptors of its reader and its writer, and an alarm for a write that blocks."""
    reader, writer = pty.openpty()
    handled = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a write waited for a reader"))
    signal.alarm(60)
    yield reader, writer
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handled)
    os.close(reader)
    os.close(writer)


def test_unread_terminal_does_not_block_and_loses_nothing_when_read(terminal):
    reader, writer = terminal
    outlet = NonBlockingWriter(writer)
    for number in range(2000):
        outlet.write(b"%0999d\n" % number)
    assert outlet.has_pending
    os.set_blocking(reader, False)
    seen = b""
    while outlet.has_pending or seen.count(b"\n") < 2000:
        outlet.flush_some()
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reader, 1 << 16)
    assert [int(line) for line in seen.split(b"\r\n") if line] == list(range(2000))
    outlet.close()


def test_blocking_mode_of_shared_descriptor_is_unchanged(pipe):
    outlet = NonBlockingWriter(pipe[1])
    assert os.get_blocking(pipe[1])
    assert not os.get_blocking(outlet.fd)
    outlet.close()


def test_closed_writer_frees_descriptor_and_counts_dropped_lines(pipe):
    before = os.listdir("/proc/self/fd")
    outlet = NonBlockingWriter(pipe[1])
    outlet.write(b"a\n")
    outlet.close()
    outlet.close()
    assert os.listdir("/proc/self/fd") == before
    outlet.write(b"b\n")
    assert (outlet.has_pending, outlet.dropped_lines) == (False, 1)
    os.close(pipe[1])
    assert os.read(pipe[0], 100) == b"a\n"
    assert os.read(pipe[0], 100) == b""  # its readers see the end of it


def test_flush_ends_on_give_up(pipe):
    outlet = NonBlockingWriter(pipe[1])
    outlet.write(b"x\n" * 100_000)
    looks = iter([False, False, True])
    flush_writers([outlet], timeout_s=3600, give_up=lambda: next(looks))
    assert (outlet.has_pending, next(looks, "none left")) == (False, "none left")
    outlet.close()


def test_slow_reader_gets_everything_while_other_stream_is_unread(pipe):
    read, write = os.pipe()
    unread, slow = NonBlockingWriter(pipe[1]), NonBlockingWriter(write)
    for outlet in (unread, slow):
        outlet.write(b"x\n" * 100_000)
    os.set_blocking(read, False)
    seen = []

    def read_some_or_have_enough() -> bool:
        with contextlib.suppress(BlockingIOError):
            seen.append(os.read(read, 1 << 14))
        return sum(map(len, seen)) == 200_000

    flush_writers([unread, slow], timeout_s=3600, give_up=read_some_or_have_enough)
    assert unread.dropped_lines > 0
    assert (slow.dropped_lines, sum(map(len, seen))) == (0, 200_000)
    for fd in (read, write):
        os.close(fd)
    unread.close()
    slow.close()
