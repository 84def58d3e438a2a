"""Read files of JSON lines: damaged lines are counted, and a growing file is continued."""

import json

import pytest

from dtrain.run import run_files as module
from dtrain.run.run_files import JsonlReader


def read(path):
    lines = JsonlReader(path)
    rows = [row for batch in lines.read_batches(whole_file=True) for row in batch]
    return rows, lines.unreadable


CASES = {
    "whole": (b'{"a": 1}\n{"a": 2}\n', [1, 2], 0),
    "no end": (b'{"a": 1}\n{"a": 2}', [1, 2], 0),
    "half a line at the end": (b'{"a": 1}\n{"a": 2', [1], 1),
    "half a line, ended by the next attempt": (b'{"a": 1}\n{"a": \n{"a": 3}\n', [1, 3], 1),
    "empty lines": (b'\n{"a": 1}\n\n\n{"a": 2}\n', [1, 2], 0),
    "empty": (b"", [], 0),
    "binary": (b'{"a": 1}\n\x00\xff\xfe\x80\n{"a": 2}\n', [1, 2], 1),
    "other values": (b'{"a": 1}\n7\n[1]\n"x"\nnull\n', [1], 4),
    "two halves that make a whole": (b'{"a": 1, "b": [1\n2]}\n{"a": 3}\n', [3], 2),
    "deep": (b'{"a": 1}\n' + b"[" * 100_000 + b"\n", [1], 1),
    "a number of ten thousand digits": (b'{"a": 1}\n{"a": ' + b"9" * 10_000 + b"}\n", [1], 1),
    "line ends of windows": (b'{"a": 1}\r\n{"a": 2}\r\n', [1, 2], 0),
}


@pytest.mark.parametrize(("content", "expected", "unreadable"), CASES.values(), ids=CASES)
def test_read_batches_reads_every_whole_line(tmp_path, content, expected, unreadable):
    path = tmp_path / "file"
    path.write_bytes(content)
    rows, wrong = read(path)
    assert ([row["a"] for row in rows], wrong) == (expected, unreadable)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 16])
def test_read_batches_is_independent_of_the_chunk_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk)
    expected = [{"a": number, "text": "x" * (number % 9)} for number in range(200)]
    path = tmp_path / "file"
    path.write_text("".join(json.dumps(row) + "\n" for row in expected))
    assert read(path) == (expected, 0)


def test_read_batches_drops_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 256)
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 10_000 + b'\n{"a": 2}\n' + b"y" * 1000)
    rows, wrong = read(path)
    assert ([row["a"] for row in rows], wrong) == ([1, 2], 2)


def test_read_batches_continues_a_growing_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n{"a"')
    lines = JsonlReader(path)
    assert list(lines.read_batches()) == [[{"a": 1}]]
    assert list(lines.read_batches()) == []
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert list(lines.read_batches()) == [[{"a": 2}]]
    path.write_bytes(b'{"a": 9}\n')
    assert list(lines.read_batches()) == [[{"a": 9}]]
    assert lines.unreadable == 0
