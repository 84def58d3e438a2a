"""JSON and text by lines. A line ends with ``\\n`` or ``\\r\\n``, and with nothing else; the last one needs no end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.stream.formats.base import ShardEntry, Source, check_options
from dtrain.errors import DataError
from dtrain.types import Plain

_PIECE_BYTES = 2**22
_BLANK = b" \t\r"
_MARK = b"\xef\xbb\xbf"  # some programs put it before UTF-8


def _pieces(source: Source) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for begin in range(0, source.size, _PIECE_BYTES):
        data = source.read(begin, min(source.size, begin + _PIECE_BYTES))
        if not len(data):
            return
        yield begin, np.frombuffer(data, np.uint8)


def _lines(source: Source, *, skip_blank: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where lines begin, and where they end (without the line end)."""
    ends: list[NDArray[np.int64]] = [np.full(1, -1, np.int64)]
    doubtful: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]  # by line, whether its first byte is blank
    begins_here = True
    blank = np.zeros(256, np.bool_)
    blank[list(_BLANK + b"\n")] = True
    for begin, data in _pieces(source):
        found = np.flatnonzero(data == 10)
        ends.append(found.astype(np.int64) + begin)
        firsts = found + 1
        if begins_here:
            firsts = np.concatenate(([0], firsts))
        begins_here = bool(firsts.size) and bool(firsts[-1] == data.size)
        doubtful.append(blank[data[firsts[:-1] if begins_here else firsts]])
    bounds = np.concatenate(ends)
    if source.size and bounds[-1] != source.size - 1:
        bounds = np.append(bounds, source.size)
    starts, stops = bounds[:-1] + 1, bounds[1:]
    if skip_blank:
        keep = np.ones(starts.size, np.bool_)
        for line in np.flatnonzero(np.concatenate(doubtful)).tolist():
            keep[line] = not _is_blank(source, int(starts[line]), int(stops[line]))
        starts, stops = starts[keep], stops[keep]
    return starts, stops


def _is_blank(source: Source, begin: int, end: int) -> bool:
    pieces = (source.read(at, min(end, at + _PIECE_BYTES)) for at in range(begin, end, _PIECE_BYTES))
    return not any(bytes(piece).strip(_BLANK) for piece in pieces)


class LineShard:
    """The lines of one file. Where they begin is found once."""

    def __init__(self, source: Source, form: Lines, name: str) -> None:
        self._source: Source | None = source
        self._form = form
        starts, stops = form.bounds(source)
        self._starts, self._stops = starts.data, stops.data

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int, /) -> Any:
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        return self._form.decode(str(self._source.read(self._starts[row], self._stops[row]), "utf-8"))

    def close(self) -> None:
        """Let go of the source."""
        self._source = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
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
    ranged: bool = False
    options: tuple[str, ...] = ()

    def bounds(self, source: Source) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where samples begin and end."""
        starts, stops = _lines(source, skip_blank=self.skip_blank)
        if self.skip_blank and starts.size and starts[0] == 0 and bytes(source.read(0, 3)) == _MARK:
            starts[0] = 3
            if _is_blank(source, 3, int(stops[0])):
                starts, stops = starts[1:], stops[1:]
        return starts, stops

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        if entry.details.get("newline", "\n") not in ("\n", "\r\n"):
            raise DataError(f"{entry.file.name}: lines end with {entry.details['newline']!r}; \\n and \\r\\n can be read")

    def open(self, source: Source, entry: ShardEntry, options: Mapping[str, Any]) -> LineShard:
        """See ``Format.open``. Reads the whole file once."""
        self.check(entry, options)
        shard = LineShard(source, self, entry.file.name)
        if len(shard) != entry.samples:
            raise DataError(
                f"{entry.file.name}: has {len(shard)} lines, its index says {entry.samples}; it is truncated, or changed"
            )
        return shard

    def count(self, source: Source) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the whole file."""
        return len(self.bounds(source)[0]), {}


def _text(line: str) -> dict[str, str]:
    return {"text": line.removesuffix("\r")}


JSONL = Lines(name="jsonl", suffixes=(".jsonl", ".ndjson"), decode=json.loads, skip_blank=True)
TEXT = Lines(name="text", suffixes=(".txt", ".text"), decode=_text, skip_blank=False)
