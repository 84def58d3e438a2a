"""``scan_index``: read a large ``index.json`` in pieces, with bounded memory and without a Python object per value.

Entries of an index look alike: only names, numbers and digests differ. The scanner parses one entry as JSON, checks the entry,
and makes a regular expression of its text, in which each of these values is a group that accepts valid values only. A text that
matches has the same structure as the checked entry, so only its groups remain to be read. An entry that does not match is
parsed and checked on its own.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.stream.formats.shard_format import ShardEntry
from dtrain.data.stream.shard_table import ShardTable, ShardTableBuilder
from dtrain.errors import DtrainError

# White space of JSON, which is less than that of re.
_SPACE = r"[ \t\n\r]*"
_HEAD = re.compile(rf'{_SPACE}\{{{_SPACE}(?:"version"{_SPACE}:{_SPACE}[0-9]+{_SPACE},{_SPACE})?"shards"{_SPACE}:{_SPACE}\[')
_SKIP = re.compile(_SPACE)
_SCALAR = re.compile(rf'"([A-Za-z0-9_]+)"{_SPACE}:{_SPACE}(?:"([^"\\]*)"|([0-9]+))')
# Values that a group accepts; all of them are valid in an index. Eighteen digits are below MAX_COUNT.
_NAME_PART = r"[A-Za-z0-9_\-][A-Za-z0-9._+=\-]{0,254}"
_NAME = rf"({_NAME_PART}(?:/{_NAME_PART})*)"
_COUNT = r"(0|[1-9][0-9]{0,17})"
_META_VALUES = {"basename": r'[^"\\\x00-\x1f]*', "bytes": r"(?:0|[1-9][0-9]{0,17})"}
# Limits of the text before the list of shards, of the text of one entry, and of the number of patterns.
_MAX_HEAD_CHARS = 2**16
_MAX_ENTRY_CHARS = 2**26
_MAX_PATTERNS = 16
# Maximum of characters that are matched at once.
_MAX_SPAN = 2**18

ParseEntry = Callable[[Any, str], ShardEntry]


class _UnsupportedTextError(Exception):
    """The text is not an index, or an unusual one: the parser of whole texts decides."""


def scan_index(
    chunks: Iterable[bytes], parse_entry: ParseEntry, algorithms: frozenset[str]
) -> tuple[ShardTable, dict[str, Any]] | None:
    """Read the entries of an index.

    Args:
        chunks: bytes of the file, in order.
        parse_entry: function from the JSON of an entry, and a text for errors, to the checked entry.
        algorithms: names of known digests.

    Returns:
        The table, and the JSON of the index with an empty list of shards. None if the text needs the parser of whole texts: it
        is invalid, a file occurs twice, or the layout is unusual.
    """
    scanner = _Scanner(parse_entry, algorithms)
    try:
        for text in _decode(chunks):
            scanner.feed(text)
        content = scanner.finish()
        if scanner.builder.find_duplicate() is not None:
            return None
        return scanner.builder.finish(), content
    except (_UnsupportedTextError, DtrainError, ValueError, RecursionError):
        return None


def _decode(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A value that differs between entries: its key in the text, its value in the learned entry, and its column.

    ``column`` is ``samples``, or ``raw_data`` or ``zip_data`` with the key; None for a value that is not stored.
    """

    key: str
    value: str
    column: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Expressions of one entry and of adjacent entries, and the column of each value in them."""

    entry: re.Pattern[str]
    entries: re.Pattern[str]
    columns: tuple[str, ...]
    group: int
    is_compressed: bool
    digest_columns: tuple[str, ...]

    def match(self, text: str, begin: int, end: int) -> tuple[list[list[str]], int]:
        """Return the columns of adjacent entries from ``begin`` on, and the end of the last of them.

        The text must not be empty.
        """
        # Before each match, split returns an empty text; then the groups, of which the last is the text that does not match.
        values = self.entries.split(text[begin:end])
        stride = self.entries.groups + 1
        rest = values[-2] or ""
        stop = len(values) - (1 + stride if rest else 1)
        return [values[first:stop:stride] for first in range(1, stride - 1)], end - len(rest)

    def add_to(self, builder: ShardTableBuilder, columns: list[list[str]]) -> None:
        """Add the entries with these columns."""
        values = dict(zip(self.columns, columns, strict=True))
        stored = "zip_data" if self.is_compressed else "raw_data"
        sizes = _as_numbers(values[f"{stored} bytes"])
        builder.add_columns(
            self.group,
            names=values[f"{stored} basename"],
            raw_names=values["raw_data basename"] if self.is_compressed else (),
            sizes=sizes,
            raw_sizes=_as_numbers(values["raw_data bytes"]) if self.is_compressed else sizes,
            samples=_as_numbers(values["samples"]),
            digests=[values[column] for column in self.digest_columns],
        )


def _as_numbers(texts: Sequence[str]) -> NDArray[np.int64]:
    return np.fromstring(" ".join(texts), np.int64, sep=" ")


class _Scanner:
    """State of a scan: the text before and after the list of shards, and the text that is not yet read."""

    def __init__(self, parse_entry: ParseEntry, algorithms: frozenset[str]) -> None:
        self.builder = ShardTableBuilder()
        self._parse_entry, self._algorithms = parse_entry, algorithms
        self._json = json.JSONDecoder()
        self._patterns: list[_Pattern] = []
        self._head = self._text = ""
        self._has_ended = self._after_comma = False

    def feed(self, text: str) -> None:
        """Read as many entries as the text so far has."""
        self._text += text
        if not self._head:
            head = _HEAD.match(self._text)
            if head is None:
                if len(self._text) > _MAX_HEAD_CHARS:
                    raise _UnsupportedTextError
                return
            self._head, self._text = head[0], self._text[head.end() :]
        if not self._has_ended:
            self._read_entries()

    def finish(self) -> dict[str, Any]:
        """Return the JSON of the index without its shards, at the end of the text."""
        if not self._has_ended:
            raise _UnsupportedTextError
        pairs = json.loads(self._head + self._text, object_pairs_hook=list)
        # A second list of shards would replace the first.
        if [key for key, _ in pairs].count("shards") != 1:
            raise _UnsupportedTextError
        return dict(pairs)

    def _read_entries(self) -> None:
        at = 0
        while True:
            at = self._skip(at)
            if self._text.startswith("]", at):
                if self._after_comma:
                    raise _UnsupportedTextError
                self._has_ended = True
                break
            at = self._read_run(at)
            # The error for an incomplete entry counts the lines of the whole text, so the end of the text is parsed alone.
            if len(self._text) - at < _MAX_HEAD_CHARS:
                self._text, at = self._text[at:], 0
            end = self._read_entry(at)
            if end is None:
                break
            at = end
        self._text = self._text[at:]
        if not self._has_ended and len(self._text) > _MAX_ENTRY_CHARS:
            raise _UnsupportedTextError

    def _skip(self, at: int) -> int:
        space = _SKIP.match(self._text, at)
        assert space is not None, "the expression matches nothing, too"
        return space.end()

    def _read_run(self, at: int) -> int:
        """Read the entries that match a known pattern, and return their end."""
        while (found := self._find_pattern(at)) is not None:
            pattern, span = found
            while at < len(self._text):
                columns, end = pattern.match(self._text, at, min(len(self._text), at + span))
                if end == at:
                    break
                pattern.add_to(self.builder, columns)
                at, span = end, min(_MAX_SPAN, span * 4)
            self._after_comma = True
        return at

    def _find_pattern(self, at: int) -> tuple[_Pattern, int] | None:
        """Return the pattern of the next entry, and the characters of this entry."""
        for pattern in self._patterns:
            if (match := pattern.entry.match(self._text, at)) is not None:
                return pattern, match.end() - at
        return None

    def _read_entry(self, at: int) -> int | None:
        """Parse and check one entry, and return its end; None if the text ends before the entry does."""
        try:
            shard, end = self._json.raw_decode(self._text, at)
        except json.JSONDecodeError:
            return None
        after = self._skip(end)
        if after == len(self._text):
            return None
        separator = self._text[after]
        if separator not in ",]":
            raise _UnsupportedTextError
        entry = self._parse_entry(shard, f"shard {len(self.builder)}")
        group = self.builder.add(entry)
        if len(self._patterns) < _MAX_PATTERNS:
            pattern = self._learn(self._text[at:end], shard, entry, group)
            if pattern is not None:
                self._patterns.insert(0, pattern)
        self._after_comma = separator == ","
        return after + 1 if separator == "," else after

    def _learn(self, text: str, shard: Mapping[str, Any], entry: ShardEntry, group: int) -> _Pattern | None:
        """Return the pattern of an entry's text; None if a value's place in the text is not certain."""
        slots = list(_find_slots(shard))
        keys = {"basename", "bytes", "samples", *self._algorithms}
        found = [match for match in _SCALAR.finditer(text) if match[1] in keys]
        if [(match[1], match[match.lastindex or 0]) for match in found] != [(slot.key, slot.value) for slot in slots]:
            return None
        pieces, columns, begin = [], [], 0
        for match, slot in zip(found, slots, strict=True):
            accepted = _accepted_values(slot)
            if accepted is None:
                return None
            start, stop = match.span(match.lastindex or 0)
            pieces += [re.escape(text[begin:start]), accepted]
            begin = stop
            if slot.column is not None:
                columns.append(slot.column)
        expression = "".join(pieces) + re.escape(text[begin:]) + rf"{_SPACE},{_SPACE}"
        stored = self.builder.group(group)
        fields = [("zip_data" if entry.file.compression else "raw_data", field) for field in stored.digests]
        fields += [("raw_data", field) for field in stored.raw_digests or ()]
        digest_columns = tuple(f"{part} {field.algorithm}" for part, field in fields)
        if (
            not all(field.packed for _, field in fields)
            or len(set(columns)) != len(columns)
            or not {*digest_columns} <= {*columns}
        ):
            return None
        return _Pattern(
            entry=re.compile(expression),
            # Text that does not match is one last group, so that matches are adjacent.
            entries=re.compile(rf"(?:{expression})|([\s\S]+)"),
            columns=tuple(columns),
            group=group,
            is_compressed=entry.file.compression is not None,
            digest_columns=digest_columns,
        )


def _find_slots(shard: Mapping[str, Any]) -> Iterator[_Slot]:
    """Yield the values of an entry that differ between shards, in the order of the text."""
    for key, value in shard.items():
        if key == "samples":
            yield _Slot(key, str(value), key)
        elif key in ("raw_data", "zip_data", "raw_meta", "zip_meta") and isinstance(value, dict):
            is_stored = key in ("raw_data", "zip_data")
            for name, part in value.items():
                if name in ("basename", "bytes"):
                    yield _Slot(name, str(part), f"{key} {name}" if is_stored else None)
                elif name == "hashes" and isinstance(part, dict):
                    for algorithm, digest in part.items():
                        yield _Slot(algorithm, str(digest), f"{key} {algorithm}" if is_stored else None)


def _accepted_values(slot: _Slot) -> str | None:
    """Return the expression of a slot's valid values; None if the learned entry's value does not match it."""
    if slot.column is None:
        expression = _META_VALUES.get(slot.key, "[0-9a-zA-Z]*")
    elif slot.key == "basename":
        expression = _NAME
    elif slot.key in ("bytes", "samples"):
        expression = _COUNT
    else:
        expression = rf"([0-9a-f]{{{len(slot.value)}}})"
    return expression if re.fullmatch(expression, slot.value) else None
