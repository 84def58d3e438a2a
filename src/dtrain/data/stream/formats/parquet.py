"""Parquet, by pyarrow: one row is one sample. A list of numbers comes as an array, all else as plain Python.

Writes Parquet, by pyarrow. Row groups are small, so that a sample somewhere in the middle can be had for little."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dtrain.data.stream.formats.byte_lru import BYTE_LRU
from dtrain.data.stream.formats.compression import parse_compression
from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    ByteSource,
    ByteSourceFile,
    ColumnErrors,
    Sample,
    ShardEntry,
    check_columns,
    check_options,
    check_sample,
    to_numpy,
)
from dtrain.errors import ConfigError, DataError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.typing import Plain

_CACHE_BYTES = 2**28
_MAX_GROUP_BYTES = 2**28
_MAX_EXPANSION = 16  # times the bytes in the file: above that, values are repeated on purpose
_BATCH_ROWS = 2**12
_VALUE_BYTES = {
    "BOOLEAN": 1,
    "INT32": 8,
    "INT64": 8,
    "INT96": 16,
    "FLOAT": 4,
    "DOUBLE": 8,
}  # bytes of a value in memory, at most


def import_pyarrow() -> Any:
    """pyarrow, with its part for this format.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_extra_error("Parquet files need the package pyarrow", "parquet") from None
    return pyarrow


def _open_file(source: ByteSource, name: str) -> Any:
    arrow = import_pyarrow()
    try:
        return arrow.parquet.ParquetFile(arrow.PythonFile(ByteSourceFile(source), mode="r"), pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: is no Parquet file, or truncated: {_error_line(error)}") from error


def _error_line(error: Exception) -> str:
    return " ".join(str(error).split())


class ParquetShard:
    """The rows of one file. Of row groups, those that were read last are kept; see ``Kept``."""

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        self._file: Any = _open_file(source, entry.file.name)
        wanted = options.get("columns")
        names = self._file.schema_arrow.names
        if len(set(names)) != len(names):
            raise DataError(f"{entry.file.name}: two columns have one name: {', '.join(names)}")
        if wanted is not None and (missing := [name for name in wanted if name not in names]):
            raise ConfigError(f"{entry.file.name}: no column {missing[0]!r}; there are {', '.join(names)}")
        self._names = names if wanted is None else [name for name in names if name in wanted]
        self._value_of = {name: _value_decoder(self._file.schema_arrow.field(name).type) for name in self._names}
        meta = self._file.metadata
        self._starts: list[int] = list(
            accumulate((meta.row_group(group).num_rows for group in range(meta.num_row_groups)), initial=0)
        )
        self.cached: dict[int, list[Any]] = {}
        self._group_bytes: int = options.get("group_bytes", _MAX_GROUP_BYTES)
        self._most_bytes: int = options.get("row_group_cache_bytes", _CACHE_BYTES)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        if not 0 <= row < len(self) or self._file is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._file is None else 'open'}")
        group = bisect_right(self._starts, row) - 1
        columns = BYTE_LRU.get(self, group, lambda: self._read_group(group), max_bytes=self._most_bytes)
        at = row - self._starts[group]
        return {name: self._value_of[name](column[at]) for name, column in zip(self._names, columns, strict=True)}

    def _read_group(self, number: int) -> tuple[list[Any], int]:
        """The columns of a row group and their bytes. Values that repeat lie once in a file, and so many times in memory.

        Raises:
            ValueError: more than ``group_bytes``.
        """
        group = self._file.metadata.row_group(number)
        packed, stored, most = _column_bytes(group, self._names)
        limit = max(self._group_bytes, _MAX_EXPANSION * packed)
        _check_group_bytes(number, stored, limit)
        if most <= limit:
            table = self._file.read_row_group(number, columns=self._names, use_threads=False)  # no threads: a worker is a fork
        else:
            batches, taken = [], 0
            rows = max(1, min(_BATCH_ROWS, limit // max(1, stored)))  # each row may repeat all that is stored
            for batch in self._file.iter_batches(rows, row_groups=[number], columns=self._names, use_threads=False):
                taken += batch.nbytes
                _check_group_bytes(number, taken, limit)
                batches.append(batch)
            table = import_pyarrow().Table.from_batches(batches)
        return [table.column(name).combine_chunks() for name in self._names], table.nbytes

    def close(self) -> None:
        """Let go of the source and of what was read."""
        BYTE_LRU.drop_owner(self)
        self._file = None


def _check_group_bytes(number: int, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"row group {number} has {size} bytes or more, above group_bytes={limit}; allow more if trusted")


def _column_bytes(group: Any, names: list[str]) -> tuple[int, int, int]:
    """Bytes of a row group's columns in the file, before they are decoded, and the most that they may have in memory."""
    packed = stored = most = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.split(".")[0] in names:
            packed += column.total_compressed_size
            stored += column.total_uncompressed_size
            most += column.num_values * _VALUE_BYTES.get(column.physical_type, column.total_uncompressed_size)
    return packed, stored, most


def _value_decoder(kind: Any) -> Callable[[Any], Any]:
    types = import_pyarrow().types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return _decode_array
    return _decode_value


def _decode_array(scalar: Any) -> Any:
    values = scalar.values
    if values is None or values.null_count:
        return scalar.as_py()  # an array has no place for a value that is not there
    return np.array(values.to_numpy(zero_copy_only=False))  # a copy, which may be written to


def _decode_value(scalar: Any) -> Any:
    return scalar.as_py()


class ParquetFormat:
    """The format; see the module.

    Options: ``columns`` (names; others are not read), and ``row_group_cache_bytes`` (of row groups that a process keeps unpacked, of all
    shards together: 256 MiB, and always the last one), and ``group_bytes`` (of a row group in memory: 256 MiB; always
    16 times its bytes in the file).
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    supports_ranges = True
    options = ("columns", "row_group_cache_bytes", "group_bytes")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        import_pyarrow()

    def open(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> ParquetShard:
        """See ``Format.open``. Reads the end of the file."""
        self.check(entry, options)
        shard = ParquetShard(source, entry, options)
        if len(shard) != entry.samples:
            raise DataError(f"{entry.file.name}: has {len(shard)} rows, its index says {entry.samples}")
        return shard

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the end of the file."""
        return int(_open_file(source, "file").metadata.num_rows), {}


PARQUET = ParquetFormat()


_WRITE_GROUP_BYTES = 2**22


class ParquetWriter:
    """See ``Writer``."""

    suffix = ".parquet"
    sample_bytes = 0
    shard_bytes = 0

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        self._arrow = import_pyarrow()
        fields = []
        if columns is None:
            check_sample(first, 0)
        for name in first if columns is None else columns:
            with ColumnErrors(name, 0 if columns is None else None):
                kind = self._infer_type(to_numpy(first[name])) if columns is None else self._parse_type(columns[name])
                fields.append((name, kind))
        self._schema = self._arrow.schema(fields)
        self._codec = _codec_options(settings["compression"])
        self.details = settings

    def _infer_type(self, value: Any) -> Any:
        """The type of one value."""
        found = self._arrow.array([value]).type
        if self._arrow.types.is_null(found) or "null" in str(found):
            raise TypeError(f"{value!r} does not tell a type; give columns={{name: type}}")
        return found

    def _parse_type(self, text: str) -> Any:
        if text.startswith("list<") and text.endswith(">"):
            return self._arrow.list_(self._parse_type(text[5:-1]))
        return self._arrow.type_for_alias(text)

    def encode(self, sample: Sample, number: int, /) -> tuple[dict[str, Any], int]:
        """The row, and about how many bytes it has."""
        check_columns(sample, number, self._schema.names)
        row = {name: to_numpy(sample[name]) for name in self._schema.names}
        with ColumnErrors(number=number) as at:
            for field in self._schema:
                at.column = field.name
                self._check(row[field.name], field.type)
        return row, sum(map(_estimate_bytes, row.values()))

    def _check(self, value: Any, kind: Any) -> None:
        """Refuse what the library would make something else of, or leave out, and not say so."""
        types = self._arrow.types
        if value is None:
            return
        if types.is_struct(kind):
            names = [field.name for field in kind]
            if not isinstance(value, Mapping) or value.keys() != set(names):
                raise TypeError(f"mapping of {', '.join(names)} wanted, got {str(value)[:60]!r}")
            for field in kind:
                self._check(value[field.name], field.type)
        elif types.is_list(kind) and types.is_nested(kind.value_type):
            for item in value:
                self._check(item, kind.value_type)
        elif not types.is_nested(kind):
            wanted = next((wanted for test, wanted in _PYTHON_TYPES.items() if getattr(types, test)(kind)), object)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted not in (bool, object)):
                raise TypeError(f"{kind} wanted, got {type(value).__name__}")

    def size(self, encoded: tuple[dict[str, Any], int], /) -> int:
        """About its bytes."""
        return encoded[1]

    def pack(self, encoded: Sequence[tuple[dict[str, Any], int]], /) -> bytes:
        """The file."""
        columns = []
        for field in self._schema:
            with ColumnErrors(field.name):
                columns.append(self._arrow.array([row[field.name] for row, _ in encoded], field.type))
        table = self._arrow.Table.from_arrays(columns, schema=self._schema)
        each = max(1, sum(size for _, size in encoded) // len(encoded))
        out = io.BytesIO()
        self._arrow.parquet.write_table(table, out, row_group_size=max(1, _WRITE_GROUP_BYTES // each), **self._codec)
        return out.getvalue()


_PYTHON_TYPES: Mapping[str, Any] = {
    "is_boolean": bool,
    "is_integer": (int, np.integer),
    "is_floating": (float, int, np.floating, np.integer),
    "is_string": str,
    "is_binary": bytes,
}


def _estimate_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_estimate_bytes, value))
    return int(getattr(value, "nbytes", 8))


def _codec_options(compression: Any) -> dict[str, Any]:
    """What the library calls it. It is of the parts of a file: as a whole, ranges of it could not be read."""
    if compression is None:
        return {"compression": "none"}
    name, level = parse_compression(compression)
    if name == "bz2":
        raise ConfigError("parquet knows no bz2; zstd, gz, br and snappy can be had")
    kind = {"gz": "gzip", "br": "brotli"}.get(name, name)
    return {"compression": kind} if name == "snappy" else {"compression": kind, "compression_level": level}
