"""JSON and text by lines. A line ends with ``\n`` or ``\r\n``, and with nothing else; the last one needs no end.

Writes JSON and text by lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    ByteSource,
    ColumnErrors,
    Sample,
    ShardEntry,
    check_options,
    check_sample,
    check_sample_bytes,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

_CHUNK_BYTES = 2**22
_MAX_LINES = 2**27  # of a file, of which each takes 8 bytes in memory, or 16
_BLANK = b" \t\r"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs put it before UTF-8


def _read_chunks(source: ByteSource) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for begin in range(0, source.size, _CHUNK_BYTES):
        data = source.read(begin, min(source.size, begin + _CHUNK_BYTES))
        if not len(data):
            return
        yield begin, np.frombuffer(data, np.uint8)


_IS_BLANK = np.zeros(256, np.bool_)
_IS_BLANK[list(_BLANK)] = True

OffsetArray = NDArray[np.unsignedinteger[Any]]


def _find_lines(source: ByteSource, *, skip_blank: bool) -> tuple[OffsetArray, OffsetArray]:
    """Find where lines begin, and where they end (without the line end).

    Raises:
        DataError: more lines than ``_MOST_LINES``.
    """
    dtype = np.uint32 if source.size < 2**32 else np.uint64
    starts, stops = [np.zeros(0, dtype)], [np.zeros(0, dtype)]
    begun, is_blank, kept = 0, True, 0  # of the line that goes on in the next piece
    for begin, data in _read_chunks(source):
        ends = np.flatnonzero(data == 10)
        first = data[: ends[0]] if ends.size else data
        is_blank = is_blank and _is_all_blank(first)
        if not ends.size:
            continue
        ours, theirs = np.concatenate(([begun], ends[:-1] + (begin + 1))), ends + begin
        if skip_blank:
            keep = np.concatenate(([not is_blank], _has_content(data, ends[:-1] + 1, ends[1:])))
            ours, theirs = ours[keep], theirs[keep]
        starts.append(ours.astype(dtype))
        stops.append(theirs.astype(dtype))
        if (kept := kept + ours.size) > _MAX_LINES:
            raise DataError(f"file: has more than {_MAX_LINES} lines; cut it into several files")
        begun, is_blank = begin + int(ends[-1]) + 1, _is_all_blank(data[ends[-1] + 1 :])
    if begun < source.size and not (skip_blank and is_blank):
        starts.append(np.array([begun], dtype))
        stops.append(np.array([source.size], dtype))
    return np.concatenate(starts), np.concatenate(stops)


def _is_all_blank(data: NDArray[np.uint8]) -> bool:
    return not data.size or bool(_IS_BLANK[data[0]] and _IS_BLANK[data].all())


def _has_content(data: NDArray[np.uint8], begins: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.bool_]:
    """Return False for the lines of nothing but blanks. Only lines that begin with a blank are looked at."""
    found = begins < ends
    doubtful = np.flatnonzero(found & _IS_BLANK[data[begins]])
    if doubtful.size:
        bounds = np.stack([begins[doubtful], ends[doubtful]], axis=1).reshape(-1)
        found[doubtful] = np.logical_or.reduceat(~_IS_BLANK[data], bounds)[::2]
    return found


def _is_blank_line(source: ByteSource, begin: int, end: int) -> bool:
    pieces = (source.read(at, min(end, at + _CHUNK_BYTES)) for at in range(begin, end, _CHUNK_BYTES))
    return not any(bytes(piece).strip(_BLANK) for piece in pieces)


class LineShard:
    """The lines of one file. Where they begin is found once."""

    def __init__(self, source: ByteSource, form: LineFormat, max_sample_bytes: int) -> None:
        self._source: ByteSource | None = source
        self._form, self._max_sample_bytes = form, max_sample_bytes
        starts, stops = form.bounds(source)
        self._starts, self._stops = starts.data, stops.data

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int, /) -> Any:
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        begin, end = self._starts[row], self._stops[row]
        check_sample_bytes(end - begin, self._max_sample_bytes)
        return self._form.decode(str(self._source.read(begin, end), "utf-8"))

    def close(self) -> None:
        """Let go of the source."""
        self._source = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """A format of one sample per line, without options.

    Args:
        name: of the format.
        suffixes: of names.
        decode: the sample of a line.
        skip_blank: whether lines of nothing but blanks are no samples; a byte order mark before the first is left out, too.
    """

    name: str
    suffixes: tuple[str, ...]
    decode: Callable[[str], Any]
    skip_blank: bool
    supports_ranges: bool = False
    options: tuple[str, ...] = ()

    def bounds(self, source: ByteSource) -> tuple[OffsetArray, OffsetArray]:
        """Where samples begin and end."""
        starts, stops = _find_lines(source, skip_blank=self.skip_blank)
        if self.skip_blank and starts.size and starts[0] == 0 and bytes(source.read(0, 3)) == _BYTE_ORDER_MARK:
            starts[0] = 3
            if _is_blank_line(source, 3, int(stops[0])):
                starts, stops = starts[1:], stops[1:]
        return starts, stops

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        if entry.details.get("newline", "\n") not in ("\n", "\r\n"):
            raise DataError(f"{entry.file.name}: lines end with {entry.details['newline']!r}; \\n and \\r\\n can be read")

    def open(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> LineShard:
        """See ``Format.open``. Reads the whole file once."""
        self.check(entry, options)
        shard = LineShard(source, self, max_sample_bytes)
        if len(shard) != entry.samples:
            raise DataError(
                f"{entry.file.name}: has {len(shard)} lines, its index says {entry.samples}; it is truncated, or changed"
            )
        return shard

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the whole file."""
        return len(self.bounds(source)[0]), {}


def _text_sample(line: str) -> dict[str, str]:
    return {"text": line.removesuffix("\r")}


JSONL = LineFormat(name="jsonl", suffixes=(".jsonl", ".ndjson"), decode=json.loads, skip_blank=True)
TEXT = LineFormat(name="text", suffixes=(".txt", ".text"), decode=_text_sample, skip_blank=False)


class LineWriter:
    """See ``Writer``."""

    sample_bytes = 0
    shard_bytes = 0

    def __init__(self, form: str, settings: dict[str, Plain]) -> None:
        self.suffix = ".jsonl" if form == "jsonl" else ".txt"
        self.details = settings
        self._line = _encode_json_line if form == "jsonl" else _encode_text_line

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """The line with its end."""
        check_sample(sample, number)
        return self._line(sample, number) + b"\n"

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The lines."""
        return b"".join(encoded)


def _encode_json_line(sample: Sample, number: int) -> bytes:
    try:
        text = json.dumps(dict(sample), ensure_ascii=False, allow_nan=False)
        return text.encode() if _is_unicode(text) else json.dumps(dict(sample)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"sample {number}: JSON cannot hold it: {error}") from error


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can hold only as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_text_line(sample: Sample, number: int) -> bytes:
    text = sample.get("text")
    if not isinstance(text, str) or len(sample) != 1:
        raise ConfigError(
            f"sample {number}: text by lines has the one column 'text', a str, got {', '.join(sample)}; use jsonl"
        )
    if "\n" in text or text.endswith("\r"):
        raise ConfigError(f"sample {number}: has a line end in its text; use jsonl")
    with ColumnErrors("text", number):
        return text.encode()
