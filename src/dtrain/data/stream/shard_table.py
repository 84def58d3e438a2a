"""``ShardTable``: the entries of a dataset's shards as flat columns, in memory or in a memory-mapped file.

A ``ShardEntry`` with its names and digests is about 2 KB of Python objects. A table stores a shard in tens of bytes, and makes
the entry when somebody asks for it. All shards with the same format, details and algorithms of digests form a group, which is
stored once. The processes of a node map the same file, so the table is in memory once.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile
from dtrain.errors import DataError
from dtrain.storage import Buffer

# A file has the magic bytes, a digest, the length of the header, the header as JSON, and the columns.
_MAGIC = b"dtrain shards 1\n"
_DIGEST_BYTES = 16
_HEADER_BEGIN = len(_MAGIC) + _DIGEST_BYTES + 8
# Sections of the file begin at multiples of this number, so that NumPy reads aligned numbers.
_ALIGNMENT = 64
# A file of this machine may have a name that is not UTF-8, which Python shows with lone surrogates.
_NAME_ERRORS = "surrogatepass"
_COLUMN_NAMES = ("groups", "sizes", "raw_sizes", "samples", "bounds", "ends", "text")

MAX_COUNT = 2**62
"""Limit of samples and bytes, which int64 can count."""

Origin: TypeAlias = Literal["none", "same", "own"]
"""A value of the raw file: unknown, equal to the value of the stored file, or a value of its own."""


class DigestField(msgspec.Struct, frozen=True):
    """Digest in a shard's record: ``width`` bytes, which are the binary digest if ``packed``, else its text."""

    algorithm: str
    width: int
    packed: bool

    def decode(self, data: bytes) -> str:
        """Return the digest as it was in the index."""
        return data.hex() if self.packed else data.decode("ascii")


class ShardGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that many shards share.

    Args:
        format: format of the shards.
        compression: compression of the files; None for raw files.
        details: details of the entries.
        digests: digests of the stored bytes, in the order of the record.
        raw_digests: digests of the raw bytes; None if they are those of the stored bytes.
        raw_name: origin of ``ShardFile.raw_name``.
        raw_size: origin of ``ShardFile.raw_size``.
        first: number of the first shard of the group.
    """

    format: str
    compression: str | None
    details: dict[str, Any]
    digests: tuple[DigestField, ...]
    raw_digests: tuple[DigestField, ...] | None
    raw_name: Origin
    raw_size: Origin
    first: int = 0

    @property
    def fields(self) -> tuple[DigestField, ...]:
        """All digests of a record."""
        return self.digests + (self.raw_digests or ())


class ShardTable:
    """Entries of a dataset's shards, in order. ``table[number]`` makes the entry of a shard.

    Args:
        groups: groups of shards.
        columns: arrays by name. ``groups``: number of the group; ``sizes``, ``raw_sizes``: bytes; ``samples``: samples;
            ``bounds``: samples before each shard, and in total; ``text``, ``ends``: records, and the end of each record.
        fingerprint: hex digest of all groups and columns.
        bytes_total: bytes of all files.
    """

    def __init__(
        self, groups: Sequence[ShardGroup], columns: Mapping[str, NDArray[Any]], *, fingerprint: str, bytes_total: int
    ) -> None:
        self.groups, self.columns, self.fingerprint, self.bytes_total = tuple(groups), columns, fingerprint, bytes_total

    @property
    def samples(self) -> NDArray[np.int64]:
        """Samples of each shard: ``[shards]``."""
        return self.columns["samples"]

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Samples before each shard, and the total: ``[shards + 1]``."""
        return self.columns["bounds"]

    def shards_above(self, limit: int) -> list[int]:
        """Return the shards that have more than ``limit`` bytes, stored or after decompression."""
        columns = (self.columns[name] for name in ("sizes", "raw_sizes"))
        # A maximum needs no memory. Most datasets have no such shard.
        numbers = [np.flatnonzero(column > limit) for column in columns if len(column) and column.max() > limit]
        return np.unique(np.concatenate(numbers)).tolist() if numbers else []

    def __len__(self) -> int:
        return len(self.columns["samples"])

    def __getitem__(self, number: int, /) -> ShardEntry:
        if not 0 <= number < len(self):
            raise IndexError(f"shard must be in 0 to {len(self) - 1}, got {number}")
        columns = self.columns
        group, ends = self.groups[int(columns["groups"][number])], columns["ends"]
        record = columns["text"][int(ends[number - 1]) if number else 0 : int(ends[number])].tobytes()
        digests, begin = _read_digests(record, group.digests, 0)
        raw_digests = digests
        if group.raw_digests is not None:
            raw_digests, begin = _read_digests(record, group.raw_digests, begin)
        if group.raw_name == "own":
            begin, end = begin + 4, begin + 4 + int.from_bytes(record[begin : begin + 4], "little")
        else:
            end = len(record)
        name, size = record[begin:end].decode(errors=_NAME_ERRORS), int(columns["sizes"][number])
        file = ShardFile(
            name=name,
            size=size,
            raw_size=_raw_value(group.raw_size, size, lambda: int(columns["raw_sizes"][number])),
            raw_name=_raw_value(group.raw_name, name, lambda: record[end:].decode(errors=_NAME_ERRORS)),
            compression=group.compression,
            digests=digests,
            raw_digests=raw_digests,
        )
        return ShardEntry(file=file, samples=int(columns["samples"][number]), format=group.format, details=group.details)

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"ShardTable(shards={len(self)}, samples={int(self.bounds[-1])})"

    def to_bytes(self) -> bytes:
        """Return the table as a file that ``from_memory`` reads."""
        sections = [np.ascontiguousarray(self.columns[name]) for name in _COLUMN_NAMES]
        header = _Header(
            columns=[(section.dtype.str, len(section)) for section in sections],
            groups=self.groups,
            fingerprint=self.fingerprint,
            bytes_total=self.bytes_total,
        )
        # A text of an index may have lone surrogates, which UTF-8 cannot encode.
        text = json.dumps(msgspec.to_builtins(header)).encode()
        content: list[Buffer] = [_MAGIC, _hash_file(text, sections), len(text).to_bytes(8, "little"), text]
        content.append(bytes(-(_HEADER_BEGIN + len(text)) % _ALIGNMENT))
        for section in sections:
            content += [section.view(np.uint8).data, bytes(-section.nbytes % _ALIGNMENT)]
        return b"".join(content)

    @staticmethod
    def from_memory(view: memoryview) -> ShardTable | None:
        """Return the table in the bytes of a file, without a copy; None if the bytes are incomplete or damaged."""
        if len(view) < _HEADER_BEGIN or bytes(view[: len(_MAGIC)]) != _MAGIC:
            return None
        end = _HEADER_BEGIN + int.from_bytes(view[_HEADER_BEGIN - 8 : _HEADER_BEGIN], "little")
        text = bytes(view[_HEADER_BEGIN:end])
        try:
            header = msgspec.convert(json.loads(text), _Header)
            sections, begin = [], end + -end % _ALIGNMENT
            for dtype, count in header.columns:
                section: NDArray[Any] = np.frombuffer(view, dtype=np.dtype(dtype), count=count, offset=begin)
                sections.append(section)
                begin += section.nbytes + -section.nbytes % _ALIGNMENT
        # Any error means that the file is not whole. Its reader makes the table again.
        except (ValueError, TypeError):
            return None
        if bytes(view[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]) != _hash_file(text, sections):
            return None
        columns = dict(zip(_COLUMN_NAMES, sections, strict=True))
        return ShardTable(header.groups, columns, fingerprint=header.fingerprint, bytes_total=header.bytes_total)


class _Header(msgspec.Struct):
    columns: list[tuple[str, int]]
    groups: tuple[ShardGroup, ...]
    fingerprint: str
    bytes_total: int


def _hash_file(header: bytes, sections: Iterable[NDArray[Any]]) -> bytes:
    digest = xxhash.xxh3_128(header)
    for section in sections:
        digest.update(section.view(np.uint8).data)
    return digest.digest()


def _read_digests(record: bytes, fields: Sequence[DigestField], begin: int) -> tuple[dict[str, str], int]:
    digests = {}
    for field in fields:
        digests[field.algorithm] = field.decode(record[begin : begin + field.width])
        begin += field.width
    return digests, begin


def _raw_value(origin: Origin, stored: Any, own: Callable[[], Any]) -> Any:
    return own() if origin == "own" else stored if origin == "same" else None


class ShardTableBuilder:
    """Builder of a ``ShardTable`` from entries."""

    def __init__(self) -> None:
        self._groups: list[ShardGroup] = []
        self._number_of: dict[str, int] = {}
        # Most shards have the group of the shard before.
        self._latest: ShardGroup | None = None
        self._number = 0
        self._group_column, self._ends = array("I"), array("q")
        self._sizes, self._raw_sizes, self._samples, self._name_hashes = array("q"), array("q"), array("q"), array("q")
        self._has_raw_sizes = False
        self._text = bytearray()

    def add(self, entry: ShardEntry) -> None:
        """Add an entry."""
        file, group = entry.file, _group_of(entry)
        if group != self._latest:
            self._latest, self._number = group, self._number_of.setdefault(repr(group), len(self._groups))
            if self._number == len(self._groups):
                self._groups.append(msgspec.structs.replace(group, first=len(self._samples)))
        texts = [*file.digests.values(), *(() if group.raw_digests is None else file.raw_digests.values())]
        for field, text in zip(group.fields, texts, strict=True):
            self._text += bytes.fromhex(text) if field.packed else text.encode("ascii")
        name = file.name.encode(errors=_NAME_ERRORS)
        if group.raw_name == "own":
            self._text += len(name).to_bytes(4, "little") + name + (file.raw_name or "").encode(errors=_NAME_ERRORS)
        else:
            self._text += name
        self._group_column.append(self._number)
        self._ends.append(len(self._text))
        self._name_hashes.append(hash(file.name))
        self._sizes.append(file.size)
        self._has_raw_sizes = self._has_raw_sizes or group.raw_size == "own"
        self._raw_sizes.append((file.raw_size or 0) if self._has_raw_sizes else 0)
        self._samples.append(entry.samples)

    def find_duplicate(self) -> int | None:
        """Return the number of the first shard whose name an earlier shard has; None if all names differ."""
        # Different names may have equal hashes.
        if len(np.unique(np.frombuffer(self._name_hashes, np.int64))) == len(self._name_hashes):
            return None
        seen: set[str] = set()
        for number, entry in enumerate(self._build()):
            if entry.file.name in seen:
                return number
            seen.add(entry.file.name)
        return None

    def finish(self, context: str) -> ShardTable:
        """Return the table.

        Raises:
            DataError: there are more samples than int64 can count. The message begins with ``context``.
        """
        total = _exact_sum(np.frombuffer(self._samples, np.int64))
        if total > MAX_COUNT:
            raise DataError(f"{context}: the shards have an impossible total of {total:.3g} samples")
        return self._build()

    def _build(self) -> ShardTable:
        sizes, samples = np.frombuffer(self._sizes, np.int64), np.frombuffer(self._samples, np.int64)
        columns = {
            "groups": _smallest(np.frombuffer(self._group_column, np.uint32)),
            "sizes": _smallest(sizes),
            "raw_sizes": _smallest(np.frombuffer(self._raw_sizes if self._has_raw_sizes else b"", np.int64)),
            "samples": samples,
            "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum(samples)]),
            "ends": _smallest(np.frombuffer(self._ends, np.int64)),
            "text": np.frombuffer(self._text, np.uint8),
        }
        # Checkpoints contain the fingerprint.
        state = xxhash.xxh3_128(json.dumps(msgspec.to_builtins(self._groups), sort_keys=True).encode())
        for name in ("groups", "sizes", "raw_sizes", "samples", "ends", "text"):
            state.update(f"{name} {columns[name].dtype.str} {len(columns[name])}".encode())
            state.update(columns[name].data)
        return ShardTable(self._groups, columns, fingerprint=state.hexdigest(), bytes_total=_exact_sum(sizes))


def _exact_sum(values: NDArray[np.int64]) -> int:
    """Return the sum, which may be too large for int64."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def _smallest(values: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers, which are not negative, in the smallest dtype that can hold them."""
    return values.astype(np.min_scalar_type(int(values.max()))) if len(values) else values.astype(np.uint8)


def _group_of(entry: ShardEntry) -> ShardGroup:
    file, is_raw = entry.file, entry.file.compression is None

    def origin(raw: object, stored: object) -> Origin:
        return "none" if raw is None else "same" if is_raw and raw == stored else "own"

    same_digests = is_raw and file.raw_digests == file.digests
    return ShardGroup(
        format=entry.format,
        compression=file.compression,
        details=cast("dict[str, Any]", entry.details),
        digests=_digest_fields(file.digests),
        raw_digests=None if same_digests else _digest_fields(file.raw_digests),
        raw_name=origin(file.raw_name, file.name),
        raw_size=origin(file.raw_size, file.size),
    )


def _digest_fields(digests: Mapping[str, str]) -> tuple[DigestField, ...]:
    fields = []
    for algorithm, text in digests.items():
        # bytes.hex restores lowercase hexadecimal digits of whole bytes.
        packed = len(text) % 2 == 0 and not text.strip("0123456789abcdef")
        fields.append(DigestField(algorithm, len(text) // 2 if packed else len(text), packed))
    return tuple(fields)
