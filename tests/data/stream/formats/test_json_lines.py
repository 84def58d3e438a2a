"""Samples in lines of JSON or text."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.data.stream.formats import json_lines as lines_module
from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format
from dtrain.errors import ConfigError, DataError
from places.opened import Held, entry_for, opened, rows


def texts(data: bytes) -> list[str]:
    return [sample["text"] for sample in rows(opened(data, "text"))]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\ntwo", ["one", "two"]),
        (b"\none\n\n\ntwo\n\n", ["", "one", "", "", "two", ""]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\ntwo\r", ["one", "two"]),
        (b"a\rb\r\nc\r\r\n", ["a\rb", "c\r"]),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\n".encode(), ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"]),
        ("\ufeffmarked\n".encode(), ["\ufeffmarked"]),
        (b" \t\n x \n", [" \t", " x "]),
    ],
    ids=[
        "empty",
        "line-end",
        "no-end",
        "end",
        "no-last-end",
        "blank",
        "crlf",
        "crlf-no-end",
        "cr",
        "unicode",
        "mark",
        "spaces",
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 3, 2**22])
def test_text_is_split_at_newlines_only(data: bytes, expected: list[str], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", piece)
    assert texts(data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n\n \t \r\n", []),
        (b"1\n\n2\n", [1, 2]),
        (b"  \n1", [1]),
        (b"1\r\n2\r\n\r\n", [1, 2]),
        (b' {"a": 1}\n\t[2]\n', [{"a": 1}, [2]]),
        ('"a\u2028b"\n"\x85"\n'.encode(), ["a\u2028b", "\x85"]),
        (b"\xef\xbb\xbf1\n2\n", [1, 2]),
        (b"\xef\xbb\xbf\n1\n", [1]),
        (b"\xef\xbb\xbf", []),
        (b'{"a": null, "b": 1e3, "c": 12345678901234567890123}', [{"a": None, "b": 1000.0, "c": 12345678901234567890123}]),
    ],
    ids=["empty", "blank", "between", "before", "crlf", "spaces", "unicode", "mark", "mark-alone", "mark-only", "object"],
)
@pytest.mark.parametrize("piece", [1, 2, 3, 2**22])
def test_json_skips_blank_lines(data: bytes, expected: list[Any], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", piece)
    assert rows(opened(data, "jsonl")) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([b"", b"x", b" ", b"\r", b"\t\r", b"long line", b"\xc3\xa9"]), max_size=8), st.integers(1, 9))
def test_lines_equal_those_of_a_reference_reader(parts: list[bytes], piece: int) -> None:
    data = b"\n".join(parts)
    kept = parts if data.endswith(b"\n") is False and data else parts[:-1]
    before = lines_module._CHUNK_BYTES
    lines_module._CHUNK_BYTES = piece  # hypothesis runs the body many times within one fixture
    try:
        assert texts(data) == [line.decode().removesuffix("\r") for line in kept]
        starts, stops = get_format("jsonl").bounds(Held(data))
    finally:
        lines_module._CHUNK_BYTES = before
    assert [data[start:stop] for start, stop in zip(starts, stops, strict=True)] == [
        line for line in kept if line.strip(b" \t\r")
    ]


def test_single_line_is_read_after_line_ends_are_indexed() -> None:
    data = b"".join(b'{"n": %d}\n' % number for number in range(1000))
    source = Held(data)
    shard = get_format("jsonl").open(source, entry_for(data, "jsonl"), {})
    source.reads = source.most = 0
    assert shard[500] == {"n": 500}
    assert (source.reads, source.most) == (1, 10)


def test_invalid_json_line_does_not_affect_other_lines() -> None:
    shard = opened(b'{"a": 1}\n{"a": \n"\xff"\n3\n', "jsonl")
    assert (shard[0], shard[3]) == ({"a": 1}, 3)
    with pytest.raises(json.JSONDecodeError):
        shard[1]
    with pytest.raises(UnicodeDecodeError):
        shard[2]


@pytest.mark.parametrize("form", ["jsonl", "text"])
def test_line_count_that_differs_from_the_index_is_refused(form: str) -> None:
    entry = ShardEntry(file=ShardFile(name="s", size=0), samples=3, format=form)
    with pytest.raises(DataError, match=r"has 2 lines, but the index has 3\. It is truncated or changed"):
        get_format(form).open(Held(b"1\n2\n"), entry, {})


def test_unsupported_options_and_line_ends_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"format text has no option 'columns'\. Remove all options"):
        opened(b"x", "text", columns=["text"])
    entry = ShardEntry(file=ShardFile(name="s", size=0), samples=0, format="jsonl", details={"newline": ";"})
    with pytest.raises(DataError, match=r"newline must be .*, got ';'"):
        get_format("jsonl").check(entry, {})


@pytest.mark.parametrize("row", [-1, 2])
def test_row_out_of_range_and_closed_shard_are_refused(row: int) -> None:
    shard = opened(b"1\n2\n", "jsonl")
    with pytest.raises(IndexError, match=f"row {row} of 2, open"):
        shard[row]
    shard.close()
    with pytest.raises(IndexError, match="row 0 of 2, closed"):
        shard[0]
