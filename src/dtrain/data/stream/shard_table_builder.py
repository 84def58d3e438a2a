"""``ShardTableBuilder``: build a ``ShardTable`` from entries, or from columns of many similar entries."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dtrain.data.stream.formats.shard_format import ShardEntry
from dtrain.data.stream.shard_table import NAME_ERRORS, DigestField, Origin, ShardGroup, ShardTable
from dtrain.errors import DataError

MAX_COUNT = 2**62
"""Limit of samples and bytes, which int64 can count."""


class ShardTableBuilder:
    """Builder of a ``ShardTable``: add entries one by one, or columns of many entries of one group."""

    def __init__(self) -> None:
        self._groups: list[ShardGroup] = []
        self._number_of: dict[str, int] = {}
        self._last: ShardEntry | None = None
        self._last_group = 0
        self._group_column, self._lengths = array("I"), array("I")
        self._sizes, self._raw_sizes, self._samples, self._name_hashes = array("q"), array("q"), array("q"), array("q")
        self._has_raw_sizes = False
        self._text = bytearray()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, entry: ShardEntry) -> int:
        """Add an entry, and return the number of its group."""
        file, number = entry.file, self._find_group(entry)
        group = self._groups[number]
        texts = [*file.digests.values(), *(() if group.raw_digests is None else file.raw_digests.values())]
        record = b"".join(
            bytes.fromhex(text) if field.packed else text.encode("ascii")
            for field, text in zip(group.fields, texts, strict=True)
        )
        name = file.name.encode(errors=NAME_ERRORS)
        record += _encode_names(name, (file.raw_name or "").encode(errors=NAME_ERRORS)) if group.raw_name == "own" else name
        counts = np.array([[file.size], [file.raw_size or 0], [entry.samples]], np.int64)
        self._append(number, record, np.array([len(record)], np.uint32), [file.name], *counts)
        return number

    def add_columns(
        self,
        number: int,
        *,
        names: Sequence[str],
        raw_names: Sequence[str],
        sizes: NDArray[np.int64],
        raw_sizes: NDArray[np.int64],
        samples: NDArray[np.int64],
        digests: Sequence[Sequence[str]],
    ) -> None:
        """Add many entries of group ``number``, all of whose digests are packed.

        Args:
            number: number of a group that ``add`` has returned.
            names: names of the files, ASCII without quotes and backslashes.
            raw_names: names of the raw files, if the group has names of its own.
            sizes: stored bytes.
            raw_sizes: raw bytes; the stored ones if the files are not compressed.
            samples: samples.
            digests: a column for each digest of the group.
        """
        group, count = self._groups[number], len(names)
        if group.raw_name == "own":
            encoded = [
                _encode_names(name.encode("ascii"), raw.encode("ascii")) for name, raw in zip(names, raw_names, strict=True)
            ]
            text, lengths = b"".join(encoded), np.fromiter(map(len, encoded), np.uint32, count)
        else:
            text, lengths = "".join(names).encode("ascii"), np.fromiter(map(len, names), np.uint32, count)
        if digests:
            packed = np.hstack([_as_rows(bytes.fromhex("".join(column)), count) for column in digests])
            text, lengths = _prefix_rows(packed, text, lengths), lengths + np.uint32(packed.shape[1])
        self._append(number, text, lengths, names, sizes, raw_sizes, samples)

    def _append(
        self,
        number: int,
        text: bytes,
        lengths: NDArray[np.uint32],
        names: Sequence[str],
        sizes: NDArray[np.int64],
        raw_sizes: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        self._text += text
        self._group_column.extend(array("I", [number]) * len(names))
        self._lengths.frombytes(lengths.tobytes())
        self._name_hashes.frombytes(np.fromiter(map(hash, names), np.int64, len(names)).tobytes())
        if self._groups[number].raw_size == "own" and not self._has_raw_sizes:
            self._has_raw_sizes = True
            self._raw_sizes.extend(array("q", [0]) * len(self))
        if self._has_raw_sizes:
            self._raw_sizes.frombytes(raw_sizes.tobytes())
        self._sizes.frombytes(sizes.tobytes())
        self._samples.frombytes(samples.tobytes())

    def _find_group(self, entry: ShardEntry) -> int:
        group = _group_of(entry)
        if self._groups and group == replace(self._groups[self._last_group], first=0):
            return self._last_group
        key = repr(group)
        if key not in self._number_of:
            self._number_of[key] = len(self._groups)
            self._groups.append(replace(group, first=len(self)))
        self._last_group = self._number_of[key]
        return self._last_group

    def group(self, number: int) -> ShardGroup:
        """Return a group by its number."""
        return self._groups[number]

    def find_duplicate(self) -> int | None:
        """Return the number of the first shard whose name an earlier shard has; None if all names differ."""
        hashes = np.frombuffer(self._name_hashes, dtype=np.int64) if len(self) else np.empty(0, np.int64)
        ordered = np.sort(hashes)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if not repeated.size:
            return None
        # Different names may have equal hashes.
        table, seen = self._build(), set()
        for number in np.flatnonzero(np.isin(hashes, repeated)).tolist():
            if (name := table.name(number)) in seen:
                return int(number)
            seen.add(name)
        return None

    def finish(self) -> ShardTable:
        """Return the table.

        Raises:
            DataError: there are more samples than int64 can count.
        """
        total = _exact_sum(_as_array(self._samples, np.int64))
        if total > MAX_COUNT:
            raise DataError(f"the shards have an impossible total of {total:.3g} samples")
        return self._build()

    def _build(self) -> ShardTable:
        sizes, samples = _as_array(self._sizes, np.int64), _as_array(self._samples, np.int64)
        columns = {
            "groups": _smallest(_as_array(self._group_column, np.uint32)),
            "sizes": _smallest(sizes),
            "raw_sizes": _smallest(_as_array(self._raw_sizes, np.int64)),
            "samples": samples,
            "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum(samples)]),
            "ends": _smallest(np.cumsum(_as_array(self._lengths, np.uint32), dtype=np.int64)),
            "text": _as_array(self._text, np.uint8),
        }
        fingerprint = _hash_shards(self._groups, columns)
        return ShardTable(self._groups, columns, fingerprint=fingerprint, bytes_total=_exact_sum(sizes))


def _hash_shards(groups: Sequence[ShardGroup], columns: Mapping[str, NDArray[Any]]) -> str:
    state = xxhash.xxh3_128(json.dumps([asdict(group) for group in groups], sort_keys=True).encode())
    for name in ("groups", "sizes", "raw_sizes", "samples", "ends", "text"):
        state.update(f"{name} {columns[name].dtype.str} {len(columns[name])}".encode())
        state.update(columns[name].data)
    return state.hexdigest()


def _as_rows(data: bytes, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(count, -1)


def _prefix_rows(rows: NDArray[np.uint8], text: bytes, lengths: NDArray[np.uint32]) -> bytes:
    """Return the text with a row before each of its pieces."""
    if (lengths == lengths[0]).all():
        return np.hstack([rows, _as_rows(text, len(rows))]).tobytes()
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return b"".join(row.tobytes() + text[begin:end] for row, begin, end in zip(rows, [0, *ends], ends, strict=False))


def _encode_names(name: bytes, raw_name: bytes) -> bytes:
    return len(name).to_bytes(4, "little") + name + raw_name


def _as_array(values: array[int] | bytearray, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(values, dtype=dtype) if len(values) else np.empty(0, dtype)


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
        details=entry.details,
        digests=_digest_fields(file.digests),
        raw_digests=None if same_digests else _digest_fields(file.raw_digests),
        raw_name=origin(file.raw_name, file.name),
        raw_size=origin(file.raw_size, file.size),
    )


def _digest_fields(digests: Mapping[str, str]) -> tuple[DigestField, ...]:
    fields = []
    for algorithm, text in digests.items():
        packed = _is_packable(text)
        fields.append(DigestField(algorithm=algorithm, width=len(text) // 2 if packed else len(text), packed=packed))
    return tuple(fields)


def _is_packable(digest: str) -> bool:
    """Return True for lowercase hexadecimal digits of whole bytes, which ``bytes.hex`` restores."""
    return len(digest) % 2 == 0 and not digest.strip("0123456789abcdef")
