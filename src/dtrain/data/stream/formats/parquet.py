"""Parquet, by pyarrow: one row is one sample. A list of numbers comes as an array, all else as plain Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from dtrain.data.stream.formats.base import MAX_SAMPLE_BYTES, ShardEntry, Source, check_options
from dtrain.data.stream.formats.kept import KEPT
from dtrain.data.stream.formats.source_file import SourceFile
from dtrain.errors import ConfigError, DataError
from dtrain.extras import missing
from dtrain.types import Plain

_KEPT_BYTES = 2**28
_GROUP_BYTES = 2**28
_GROWTH = 16  # times the bytes in the file: above that, values are repeated on purpose
_BATCH_ROWS = 2**12
_FIXED = {"BOOLEAN": 1, "INT32": 8, "INT64": 8, "INT96": 16, "FLOAT": 4, "DOUBLE": 8}  # bytes of a value in memory, at most


def package() -> Any:
    """pyarrow, with its part for this format.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing("Parquet files need the package pyarrow", "parquet") from None
    return pyarrow


def _opened(source: Source, name: str) -> Any:
    arrow = package()
    try:
        return arrow.parquet.ParquetFile(arrow.PythonFile(SourceFile(source), mode="r"), pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: is no Parquet file, or truncated: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class ParquetShard:
    """The rows of one file. Of row groups, those that were read last are kept; see ``Kept``."""

    def __init__(self, source: Source, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        self._file: Any = _opened(source, entry.file.name)
        wanted = options.get("columns")
        names = self._file.schema_arrow.names
        if len(set(names)) != len(names):
            raise DataError(f"{entry.file.name}: two columns have one name: {', '.join(names)}")
        if wanted is not None and (missing := [name for name in wanted if name not in names]):
            raise ConfigError(f"{entry.file.name}: no column {missing[0]!r}; there are {', '.join(names)}")
        self._names = names if wanted is None else [name for name in names if name in wanted]
        self._value_of = {name: _reader(self._file.schema_arrow.field(name).type) for name in self._names}
        meta = self._file.metadata
        self._starts: list[int] = list(
            accumulate((meta.row_group(group).num_rows for group in range(meta.num_row_groups)), initial=0)
        )
        self.kept: dict[int, list[Any]] = {}
        self._group_bytes: int = options.get("group_bytes", _GROUP_BYTES)
        self._most_bytes: int = options.get("kept_bytes", _KEPT_BYTES)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        if not 0 <= row < len(self) or self._file is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._file is None else 'open'}")
        group = bisect_right(self._starts, row) - 1
        columns = KEPT.get(self, group, lambda: self._group(group), most_bytes=self._most_bytes)
        at = row - self._starts[group]
        return {name: self._value_of[name](column[at]) for name, column in zip(self._names, columns, strict=True)}

    def _group(self, number: int) -> tuple[list[Any], int]:
        """The columns of a row group and their bytes. Values that repeat lie once in a file, and so many times in memory.

        Raises:
            ValueError: more than ``group_bytes``.
        """
        group = self._file.metadata.row_group(number)
        packed, stored, most = _bytes_of(group, self._names)
        limit = max(self._group_bytes, _GROWTH * packed)
        _check_group(number, stored, limit)
        if most <= limit:
            table = self._file.read_row_group(number, columns=self._names, use_threads=False)  # no threads: a worker is a fork
        else:
            batches, taken = [], 0
            rows = max(1, min(_BATCH_ROWS, limit // max(1, stored)))  # each row may repeat all that is stored
            for batch in self._file.iter_batches(rows, row_groups=[number], columns=self._names, use_threads=False):
                taken += batch.nbytes
                _check_group(number, taken, limit)
                batches.append(batch)
            table = package().Table.from_batches(batches)
        return [table.column(name).combine_chunks() for name in self._names], table.nbytes

    def close(self) -> None:
        """Let go of the source and of what was read."""
        KEPT.forget(self)
        self._file = None


def _check_group(number: int, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"row group {number} has {size} bytes or more, above group_bytes={limit}; allow more if trusted")


def _bytes_of(group: Any, names: list[str]) -> tuple[int, int, int]:
    """Bytes of a row group's columns in the file, before they are decoded, and the most that they may have in memory."""
    packed = stored = most = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.split(".")[0] in names:
            packed += column.total_compressed_size
            stored += column.total_uncompressed_size
            most += column.num_values * _FIXED.get(column.physical_type, column.total_uncompressed_size)
    return packed, stored, most


def _reader(kind: Any) -> Callable[[Any], Any]:
    types = package().types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return _array
    return _plain


def _array(scalar: Any) -> Any:
    values = scalar.values
    if values is None or values.null_count:
        return scalar.as_py()  # an array has no place for a value that is not there
    return np.array(values.to_numpy(zero_copy_only=False))  # a copy, which may be written to


def _plain(scalar: Any) -> Any:
    return scalar.as_py()


class Parquet:
    """The format; see the module.

    Options: ``columns`` (names; others are not read), and ``kept_bytes`` (of row groups that a process keeps unpacked, of all
    shards together: 256 MiB, and always the last one), and ``group_bytes`` (of a row group in memory: 256 MiB; always
    16 times its bytes in the file).
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    ranged = True
    options = ("columns", "kept_bytes", "group_bytes")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        package()

    def open(
        self, source: Source, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> ParquetShard:
        """See ``Format.open``. Reads the end of the file."""
        self.check(entry, options)
        shard = ParquetShard(source, entry, options)
        if len(shard) != entry.samples:
            raise DataError(f"{entry.file.name}: has {len(shard)} rows, its index says {entry.samples}")
        return shard

    def count(self, source: Source) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the end of the file."""
        return int(_opened(source, "file").metadata.num_rows), {}


PARQUET = Parquet()
