"""``ParquetFormat``: read and write Parquet with pyarrow. A row is a sample; a list of numbers becomes an array.

The writer uses small row groups, so that a reader can fetch a sample at low cost."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dtrain.arguments import single_line
from dtrain.data.stream.formats.compression import parse_compression
from dtrain.data.stream.formats.shard_format import (
    ByteSource,
    ByteSourceFile,
    Sample,
    Shard,
    ShardEntry,
    ShardFormat,
    ShardWriter,
    check_columns,
    check_sample,
    name_column,
    select_columns,
    to_numpy,
)
from dtrain.data.stream.open_shards import ByteLRU
from dtrain.errors import ConfigError, DataError
from dtrain.packages import missing_extra_error
from dtrain.typing import Plain

_CACHE_BYTES = 2**28
_MAX_GROUP_BYTES = 2**28
# Limit of the ratio of decoded to stored bytes. A larger ratio means values that are repeated on purpose.
_MAX_EXPANSION = 16
_BATCH_ROWS = 2**12
# Upper bounds of the bytes of a value in memory.
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 8, "INT64": 8, "INT96": 16, "FLOAT": 4, "DOUBLE": 8}


def import_pyarrow() -> Any:
    """Import pyarrow and its Parquet module.

    Raises:
        ConfigError: pyarrow is not installed.
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
        raise DataError(f"{name}: is not a Parquet file, or truncated: {single_line(error)}") from error


class ParquetShard(Shard):
    """Rows of one file. The most recently used row groups are cached; see ``ByteLRU``."""

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], decoded: ByteLRU) -> None:
        super().__init__(source)
        self._file: Any = _open_file(source, entry.file.name)
        names = self._file.schema_arrow.names
        if len(set(names)) != len(names):
            raise DataError(f"{entry.file.name}: column names must be unique, got {', '.join(names)}")
        self._names = select_columns(entry, options, names)
        self._value_of = {name: _value_decoder(self._file.schema_arrow.field(name).type) for name in self._names}
        meta = self._file.metadata
        self._starts: list[int] = list(
            accumulate((meta.row_group(group).num_rows for group in range(meta.num_row_groups)), initial=0)
        )
        # The cache keeps the owner alive, which therefore must not be the shard.
        self._decoded, self._owner = decoded, object()
        self._group_bytes: int = options.get("group_bytes", _MAX_GROUP_BYTES)
        self._cache_bytes: int = options.get("row_group_cache_bytes", _CACHE_BYTES)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, row: int, source: ByteSource) -> dict[str, Any]:
        """Read a row; see ``Shard.read``."""
        group = bisect_right(self._starts, row) - 1
        columns = self._decoded.get(self._owner, group, lambda: self._read_group(group), max_bytes=self._cache_bytes)
        offset = row - self._starts[group]
        return {name: self._value_of[name](column[offset]) for name, column in zip(self._names, columns, strict=True)}

    def _read_group(self, number: int) -> tuple[list[Any], int]:
        """Read the columns of a row group, and their bytes. A repeated value is stored once, but takes memory for each row.

        Raises:
            ValueError: the row group has more than ``group_bytes``.
        """
        group = self._file.metadata.row_group(number)
        compressed, stored, upper_bound = _column_bytes(group, self._names)
        limit = max(self._group_bytes, _MAX_EXPANSION * compressed)
        _check_group_bytes(number, stored, limit)
        if upper_bound <= limit:
            # Threads of pyarrow do not survive a fork, and a worker may be a fork.
            table = self._file.read_row_group(number, columns=self._names, use_threads=False)
        else:
            batches, byte_count = [], 0
            # In the worst case, each row repeats all stored bytes.
            rows = max(1, min(_BATCH_ROWS, limit // max(1, stored)))
            for batch in self._file.iter_batches(rows, row_groups=[number], columns=self._names, use_threads=False):
                byte_count += batch.nbytes
                _check_group_bytes(number, byte_count, limit)
                batches.append(batch)
            table = import_pyarrow().Table.from_batches(batches)
        return [table.column(name).combine_chunks() for name in self._names], table.nbytes

    def close(self) -> None:
        """Release the source and the cached row groups."""
        super().close()
        self._decoded.drop_owner(self._owner)
        self._file = None


def _check_group_bytes(number: int, size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"row group {number} has {size} bytes or more, above group_bytes={limit}. Raise it to trust the data")


def _column_bytes(group: Any, names: list[str]) -> tuple[int, int, int]:
    """Return the bytes of a row group's columns: compressed, uncompressed, and an upper bound in memory."""
    compressed = stored = upper_bound = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.split(".")[0] in names:
            compressed += column.total_compressed_size
            stored += column.total_uncompressed_size
            upper_bound += column.num_values * _VALUE_BYTES.get(column.physical_type, column.total_uncompressed_size)
    return compressed, stored, upper_bound


def _value_decoder(kind: Any) -> Callable[[Any], Any]:
    types = import_pyarrow().types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return _decode_array
    return lambda scalar: scalar.as_py()


def _decode_array(scalar: Any) -> Any:
    values = scalar.values
    if values is None or values.null_count:
        # An array cannot hold a missing value.
        return scalar.as_py()
    # The copy is writable.
    return np.array(values.to_numpy(zero_copy_only=False))


class ParquetFormat(ShardFormat):
    """Parquet; see the module.

    Options:

    - ``columns``: names of the columns to read.
    - ``row_group_cache_bytes``: maximum of decoded row groups that a dataset caches in a process (256 MiB). The most recent
      row group is always cached.
    - ``group_bytes``: maximum of a decoded row group (256 MiB), at least 16 times its bytes in the file.
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    supports_ranges = True
    noun = "rows"
    options = ("columns", "row_group_cache_bytes", "group_bytes")
    has_typed_columns = True

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options; see ``ShardFormat.check``."""
        super().check(entry, options)
        import_pyarrow()

    def open_unchecked(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int, decoded: ByteLRU | None
    ) -> ParquetShard:
        """Open a shard from the end of the file."""
        return ParquetShard(source, entry, options, ByteLRU() if decoded is None else decoded)

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Count the samples; see ``ShardFormat.count``. Reads the end of the file."""
        return int(_open_file(source, "file").metadata.num_rows), {}

    def writer(self, first: Sample, columns: Mapping[str, str] | None, details: dict[str, Plain]) -> ParquetWriter:
        """Make the writer; see ``ShardFormat.writer``."""
        return ParquetWriter(first, columns, details)


PARQUET = ParquetFormat()


_WRITE_GROUP_BYTES = 2**22


class ParquetWriter(ShardWriter):
    """Writer of Parquet; see ``ShardWriter``."""

    suffix = ".parquet"

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        super().__init__(settings)
        self._arrow = import_pyarrow()
        fields = []
        if columns is None:
            check_sample(first, 0)
        for name in first if columns is None else columns:
            with name_column(name, 0 if columns is None else None):
                kind = self._infer_type(to_numpy(first[name])) if columns is None else self._parse_type(columns[name])
                fields.append((name, kind))
        self._schema = self._arrow.schema(fields)
        self._codec = _codec_options(settings["compression"])

    def _infer_type(self, value: Any) -> Any:
        """Infer the type of a value."""
        inferred = self._arrow.array([value]).type
        if self._arrow.types.is_null(inferred) or "null" in str(inferred):
            raise TypeError(f"{value!r} has no definite type. Pass columns={{name: type}}")
        return inferred

    def _parse_type(self, text: str) -> Any:
        if text.startswith("list<") and text.endswith(">"):
            return self._arrow.list_(self._parse_type(text[5:-1]))
        return self._arrow.type_for_alias(text)

    def encode(self, sample: Sample, number: int, /) -> tuple[dict[str, Any], int]:
        """Check a sample, and estimate its bytes."""
        check_columns(sample, number, self._schema.names)
        row = {name: to_numpy(sample[name]) for name in self._schema.names}
        for field in self._schema:
            with name_column(field.name, number):
                self._check(row[field.name], field.type)
        return row, sum(map(_estimate_bytes, row.values()))

    def _check(self, value: Any, kind: Any) -> None:
        """Refuse values that pyarrow would convert or drop without an error."""
        types = self._arrow.types
        if value is None:
            return
        if types.is_struct(kind):
            names = [field.name for field in kind]
            if not isinstance(value, Mapping) or value.keys() != set(names):
                raise TypeError(f"must be a mapping of {', '.join(names)}, got {str(value)[:60]!r}")
            for field in kind:
                self._check(value[field.name], field.type)
        elif types.is_list(kind):
            self._check_items(value, kind.value_type)
        elif not types.is_nested(kind) and not self._converts_exactly(type(value), kind):
            raise TypeError(f"must be of type {kind}, got {type(value).__name__}")

    def _check_items(self, values: Any, kind: Any) -> None:
        """Refuse a list whose values ``_check`` refuses. An array and a long list are checked by their types alone."""
        # pyarrow compares the types of its own arrays, and returns a text as a list of letters.
        if isinstance(values, self._arrow.Array):
            return
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise TypeError(f"must be a list of {kind}, got {type(values).__name__}")
        if self._arrow.types.is_nested(kind):
            for item in values:
                self._check(item, kind)
            return
        if isinstance(values, np.ndarray) and values.dtype != object:
            kinds: set[type] = {values.dtype.type}
        else:
            kinds = set(map(type, values)) - {type(None)}
        if all(self._converts_exactly(found, kind) for found in kinds):
            return
        for item in map(to_numpy, values):
            found = item.dtype.type if isinstance(item, np.ndarray) and item.ndim == 0 else type(item)
            if item is not None and not issubclass(found, self._arrow.Scalar) and not self._converts_exactly(found, kind):
                raise TypeError(
                    f"must be a list of {kind}, got {found.__name__} in it. Convert the values, or pass columns={{name: type}}"
                )

    def _converts_exactly(self, found: type, kind: Any) -> bool:
        """Return True if pyarrow keeps the value, or raises, when it converts a value of type ``found`` to ``kind``."""
        types = self._arrow.types
        expected = next((expected for test, expected in _PYTHON_TYPES.items() if getattr(types, test)(kind)), (object,))
        return issubclass(found, expected) and (not issubclass(found, bool) or bool in expected or object in expected)

    def size(self, encoded: tuple[dict[str, Any], int], /) -> int:
        """Return the estimated bytes of a row."""
        return encoded[1]

    def pack(self, encoded: Sequence[tuple[dict[str, Any], int]], /) -> bytes:
        """Encode a file."""
        columns = []
        for field in self._schema:
            with name_column(field.name):
                columns.append(self._arrow.array([row[field.name] for row, _ in encoded], field.type))
        table = self._arrow.Table.from_arrays(columns, schema=self._schema)
        row_bytes = max(1, sum(size for _, size in encoded) // len(encoded))
        out = io.BytesIO()
        self._arrow.parquet.write_table(table, out, row_group_size=max(1, _WRITE_GROUP_BYTES // row_bytes), **self._codec)
        return out.getvalue()


_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "is_boolean": (bool, np.bool_),
    "is_integer": (int, np.integer),
    "is_floating": (float, int, np.floating, np.integer),
    "is_string": (str,),
    "is_binary": (bytes,),
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
    """Return pyarrow's options for a compression. It applies to parts of a file, so that ranges can be read."""
    if compression is None:
        return {"compression": "none"}
    name, level = parse_compression(compression)
    if name == "bz2":
        raise ConfigError("Parquet does not support bz2. Use zstd, gz, br or snappy.")
    kind = {"gz": "gzip", "br": "brotli"}.get(name, name)
    return {"compression": kind} if name == "snappy" else {"compression": kind, "compression_level": level}
