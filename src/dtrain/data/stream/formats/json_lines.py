"""``LineFormat``: read and write a sample per line, as JSON or text. Only ``\n`` and ``\r\n`` end a line.

The last line may lack a line end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.stream.formats.shard_format import (
    ByteSource,
    Sample,
    Shard,
    ShardEntry,
    ShardFormat,
    ShardWriter,
    check_sample,
    check_sample_bytes,
    name_column,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.stream.open_shards import ByteLRU

_CHUNK_BYTES = 2**22
# Limit of lines per file. A line takes 8 or 16 bytes of memory.
_MAX_LINES = 2**27
_BLANK = b" \t\r"
# Some programs write it before UTF-8.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_IS_BLANK = np.zeros(256, np.bool_)
_IS_BLANK[list(_BLANK)] = True

OffsetArray = NDArray[np.unsignedinteger[Any]]


def _find_lines(source: ByteSource, *, skip_blank: bool) -> tuple[OffsetArray, OffsetArray]:
    """Return the starts and the ends of lines, without the line ends.

    Raises:
        DataError: the file has more than ``_MAX_LINES`` lines.
    """
    dtype = np.uint32 if source.size < 2**32 else np.uint64
    starts, stops = [np.zeros(0, dtype)], [np.zeros(0, dtype)]
    # Start of the line that continues in the next chunk, whether it is blank so far, and the number of lines.
    start, is_blank, line_count = 0, True, 0
    for begin in range(0, source.size, _CHUNK_BYTES):
        chunk = source.read(begin, min(source.size, begin + _CHUNK_BYTES))
        if not len(chunk):
            break
        data = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(data == 10)
        first = data[: ends[0]] if ends.size else data
        is_blank = is_blank and _is_all_blank(first)
        if not ends.size:
            continue
        line_starts, line_ends = np.concatenate(([start], ends[:-1] + (begin + 1))), ends + begin
        if skip_blank:
            has_content = np.concatenate(([not is_blank], _has_content(data, ends[:-1] + 1, ends[1:])))
            line_starts, line_ends = line_starts[has_content], line_ends[has_content]
        starts.append(line_starts.astype(dtype))
        stops.append(line_ends.astype(dtype))
        if (line_count := line_count + line_starts.size) > _MAX_LINES:
            raise DataError(f"file: has more than {_MAX_LINES} lines. Split it into several files.")
        start, is_blank = begin + int(ends[-1]) + 1, _is_all_blank(data[ends[-1] + 1 :])
    if start < source.size and not (skip_blank and is_blank):
        starts.append(np.array([start], dtype))
        stops.append(np.array([source.size], dtype))
    return np.concatenate(starts), np.concatenate(stops)


def _is_all_blank(data: NDArray[np.uint8]) -> bool:
    return not data.size or bool(_IS_BLANK[data[0]] and _IS_BLANK[data].all())


def _has_content(data: NDArray[np.uint8], begins: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask that is False for blank lines. Only lines that begin with a blank are examined."""
    has_content = begins < ends
    candidates = np.flatnonzero(has_content & _IS_BLANK[data[begins]])
    if candidates.size:
        bounds = np.stack([begins[candidates], ends[candidates]], axis=1).reshape(-1)
        has_content[candidates] = np.logical_or.reduceat(~_IS_BLANK[data], bounds)[::2]
    return has_content


class LineShard(Shard):
    """Lines of one file. The constructor finds the starts of the lines."""

    def __init__(self, source: ByteSource, line_format: LineFormat, max_sample_bytes: int) -> None:
        super().__init__(source, max_sample_bytes)
        self._line_format = line_format
        starts, stops = line_format.bounds(source)
        self._starts, self._stops = starts.data, stops.data

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, row: int, source: ByteSource) -> Any:
        """Read a line; see ``Shard.read``."""
        begin, end = self._starts[row], self._stops[row]
        check_sample_bytes(end - begin, self._max_sample_bytes)
        return self._line_format.decode(str(source.read(begin, end), "utf-8"))


class LineFormat(ShardFormat):
    """Format of one sample per line, without options.

    Args:
        name: name of the format.
        suffixes: suffixes of file names.
        decode: function from a line to a sample.
        skip_blank: if True, blank lines are not samples, and a byte order mark at the start is dropped.
    """

    noun = "lines"

    def __init__(self, *, name: str, suffixes: tuple[str, ...], decode: Callable[[str], Any], skip_blank: bool) -> None:
        self.name, self.suffixes, self.decode, self.skip_blank = name, suffixes, decode, skip_blank

    def bounds(self, source: ByteSource) -> tuple[OffsetArray, OffsetArray]:
        """Return the starts and the ends of samples."""
        starts, stops = _find_lines(source, skip_blank=self.skip_blank)
        if self.skip_blank and starts.size and starts[0] == 0 and bytes(source.read(0, 3)) == _BYTE_ORDER_MARK:
            starts[0] = 3
            end = int(stops[0])
            first_line = (source.read(begin, min(end, begin + _CHUNK_BYTES)) for begin in range(3, end, _CHUNK_BYTES))
            if not any(bytes(chunk).strip(_BLANK) for chunk in first_line):
                starts, stops = starts[1:], stops[1:]
        return starts, stops

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options and the line ends; see ``ShardFormat.check``."""
        super().check(entry, options)
        if entry.details.get("newline", "\n") not in ("\n", "\r\n"):
            raise DataError(
                f"{entry.file.name}: newline must be \\n or \\r\\n, got {entry.details['newline']!r}. Write the dataset again."
            )

    def open_unchecked(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int, decoded: ByteLRU | None
    ) -> LineShard:
        """Open a shard, which reads the whole file once."""
        return LineShard(source, self, max_sample_bytes)

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Count the samples; see ``ShardFormat.count``. Reads the whole file."""
        return len(self.bounds(source)[0]), {}

    def writer(self, first: Sample, columns: Mapping[str, str] | None, details: dict[str, Plain]) -> LineWriter:
        """Make the writer; see ``ShardFormat.writer``."""
        return LineWriter(self.name, details)


JSONL = LineFormat(name="jsonl", suffixes=(".jsonl", ".ndjson"), decode=json.loads, skip_blank=True)
TEXT = LineFormat(
    name="text", suffixes=(".txt", ".text"), decode=lambda line: {"text": line.removesuffix("\r")}, skip_blank=False
)


class LineWriter(ShardWriter):
    """Writer of lines; see ``ShardWriter``."""

    def __init__(self, line_format: str, settings: dict[str, Plain]) -> None:
        super().__init__(settings)
        self.suffix = ".jsonl" if line_format == "jsonl" else ".txt"
        self._encode_line = _encode_json_line if line_format == "jsonl" else _encode_text_line

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """Encode a sample as a line with its line end."""
        check_sample(sample, number)
        return self._encode_line(sample, number) + b"\n"


def _encode_json_line(sample: Sample, number: int) -> bytes:
    try:
        try:
            return json.dumps(dict(sample), ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            # JSON can contain lone surrogates only as escapes.
            return json.dumps(dict(sample)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"sample {number}: JSON cannot store it: {error}. Pass text, numbers, booleans, None, lists and dicts only."
        ) from error


def _encode_text_line(sample: Sample, number: int) -> bytes:
    text = sample.get("text")
    if not isinstance(text, str) or len(sample) != 1:
        raise ConfigError(f"sample {number}: text must have one column 'text' of type str, got {', '.join(sample)}. Use jsonl.")
    if "\n" in text or text.endswith("\r"):
        raise ConfigError(f"sample {number}: the text contains a line end. Use jsonl.")
    with name_column("text", number):
        return text.encode()
