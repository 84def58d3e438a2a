"""Chunks of any size become lines, with nothing in them that a terminal would obey."""

from __future__ import annotations

import random

import pytest

from dtrain.launch import terminal as lines_module
from dtrain.launch.terminal import LinePrefixer, PlainStream, escape_controls


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
        (b"\x00\x1b[1m\n", b"> \\x00\x1b[1m\x1b[0m\n"),
        (b"\x1b[2J\n", b"> \\x1b[2J\n"),
        (b"a\nb\xc2\x9b2J\nc", b"> a\n> b\\x9b2J\n> c\n"),
        (b"a\nb\xff\nc\r\n\rd\ne", b"> a\n> b\\xff\n> c\n> d\n> e\n"),
    ],
)
def test_lines_are_independent_of_chunk_boundaries(data, expected):
    rng = random.Random(0)
    for _ in range(50):
        lines = LinePrefixer("> ")
        assert b"".join(map(lines.feed, cut(data, rng))) + lines.close() == expected


CONTROLS = {
    "text": ("plain, tab\t, ü € 😀", "plain, tab\t, ü € 😀"),
    "colour is reset at the end": ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
    "colour that ends itself": ("\x1b[1;38;5;9mred\x1b[0m!", "\x1b[1;38;5;9mred\x1b[0m!"),
    "short reset": ("\x1b[1mx\x1b[m", "\x1b[1mx\x1b[m"),
    "cursor up": ("\x1b[1Aup", r"\x1b[1Aup"),
    "window title": ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    "half a colour": ("\x1b[31", r"\x1b[31"),
    "bell, backspace, form feed, delete": ("\a\b\f\x7f", r"\x07\x08\x0c\x7f"),
    "control sequence in one character": ("\x9b2J\x85", r"\x9b2J\x85"),
    "letters that share a byte with C1": ("Â \u00a0Ā", "Â \u00a0Ā"),
    "every other C0": ("".join(map(chr, range(1, 9))), "".join(f"\\x{code:02x}" for code in range(1, 9))),
}


@pytest.mark.parametrize(("text", "expected"), CONTROLS.values(), ids=CONTROLS)
def test_terminal_control_characters_are_escaped(text, expected):
    assert escape_controls(text.encode()).decode() == expected


def test_overlong_line_is_split_before_memory_grows(monkeypatch):
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 10)
    lines = LinePrefixer("> ")
    assert lines.feed(b"x" * 8) == b""
    assert lines.feed(b"x" * 8) == b"> " + b"x" * 16 + b"\n"
    assert lines.close() == b""


@pytest.mark.parametrize("data", [b"a\nb", b"\r 1%\r 2%", "ü€\n".encode(), b"", b"\x1b[2J\n"])
def test_plain_stream_passes_text_and_ends_last_line(data):
    rng = random.Random(0)
    for _ in range(50):
        text = PlainStream()
        expected = data if not data or data.endswith(b"\n") else data + b"\n"
        assert b"".join(map(text.feed, cut(data, rng))) + text.close() == expected


def test_plain_stream_escapes_invalid_utf8():
    text = PlainStream()
    assert text.feed(b"\xff\xc3") + text.close() == b"\\xff\\xc3\n"
