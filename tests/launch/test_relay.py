"""Chunks to lines, whatever the chunks are; and an outlet that takes no more than there is room for."""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from dtrain.launch import relay
from dtrain.launch.relay import LineMarker, Outlet, PlainText


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", b""),
        (b"a\nb\n", b"> a\n> b\n"),
        (b"a", b"> a\n"),
        (b"\n\na", b"> \n> \n> a\n"),
        (b"a\r\nb\r\n\r\n", b"> a\n> b\n> \n"),
        (b"\r 1%\r 2%\r100%\n", b">  1%\n>  2%\n> 100%\n"),
        (b"a\r", b"> a\n"),
        ("ü\n€".encode(), "> ü\n> €\n".encode()),
        (b"\xff\xfe\n\xc3", b"> \\xff\\xfe\n> \\xc3\n"),
        (b"\x00\x1b[1m\n", b"> \x00\x1b[1m\n"),
    ],
)
def test_lines_do_not_depend_on_how_the_stream_was_cut(data, expected):
    rng = random.Random(0)
    for _ in range(50):
        lines = LineMarker("> ")
        assert b"".join(map(lines.feed, cut(data, rng))) + lines.close() == expected


def test_line_without_end_is_cut_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(relay, "_LONGEST_LINE", 10)
    lines = LineMarker("> ")
    assert lines.feed(b"x" * 8) == b""
    assert lines.feed(b"x" * 8) == b"> " + b"x" * 16 + b"\n"
    assert lines.close() == b""


@pytest.mark.parametrize("data", [b"a\nb", b"\r 1%\r 2%", "ü€\n".encode(), b""])
def test_plain_text_is_passed_on_and_ends_its_last_line(data):
    rng = random.Random(0)
    for _ in range(50):
        text = PlainText()
        expected = data if not data or data.endswith(b"\n") else data + b"\n"
        assert b"".join(map(text.feed, cut(data, rng))) + text.close() == expected


def test_plain_text_escapes_what_is_not_utf8():
    text = PlainText()
    assert text.feed(b"\xff\xc3") + text.close() == b"\\xff\\xc3\n"


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # some tests close one themselves
            os.close(fd)


def test_outlet_never_blocks_and_drops_what_is_too_much(pipe, monkeypatch):
    monkeypatch.setattr(relay, "_MOST_PENDING", 1 << 20)
    read, write = pipe
    outlet = Outlet(write)
    line = b"x" * 999 + b"\n"
    for _ in range(3000):
        outlet.put(line)  # would block for good, were it to write more than the pipe takes
    assert outlet.waiting
    os.set_blocking(read, False)
    seen = b""
    while True:
        try:
            seen += os.read(read, 1 << 16)
        except BlockingIOError:
            if not outlet.waiting:
                break
        outlet.pump()
    outlet.put(b"more\n")
    seen += os.read(read, 1 << 16)
    *whole, note, last = seen.splitlines(keepends=True)
    assert set(whole) == {line}
    dropped = (3000 - len(whole)) * len(line)
    assert dropped > 0
    assert str(dropped) in note.decode()
    assert last == b"more\n"


def test_outlet_gives_up_at_the_end_when_nobody_reads(pipe):
    outlet = Outlet(pipe[1])
    outlet.put(b"x" * (1 << 20) + b"\n")
    assert outlet.waiting
    outlet.flush(patience_s=0.1)
    assert not outlet.waiting


def test_outlet_whose_reader_is_gone_drops_everything(pipe):
    read, write = pipe
    outlet = Outlet(write)
    os.close(read)
    outlet.put(b"a\n")
    outlet.put(b"b\n")
    assert not outlet.waiting


def test_outlet_of_a_closed_descriptor_drops_everything(pipe):
    os.close(pipe[1])
    outlet = Outlet(pipe[1])
    outlet.put(b"a\n")
    assert not outlet.waiting
