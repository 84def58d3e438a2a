"""Parquet, by pyarrow: one row is one sample. A list of numbers comes as an array, all else as plain Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from dtrain.data.stream.formats.base import ShardEntry, Source, check_options
from dtrain.data.stream.formats.kept import KEPT
from dtrain.data.stream.formats.source_file import SourceFile
from dtrain.errors import ConfigError, DataError
from dtrain.extras import missing
from dtrain.types import Plain

_KEPT_BYTES = 2**28


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
        table = self._file.read_row_group(
            number, columns=self._names, use_threads=False
        )  # a worker is a fork: no threads there
        return [table.column(name).combine_chunks() for name in self._names], table.nbytes

    def close(self) -> None:
        """Let go of the source and of what was read."""
        KEPT.forget(self)
        self._file = None


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
    shards together: 256 MiB, and always the last one).
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    ranged = True
    options = ("columns", "kept_bytes")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        package()

    def open(self, source: Source, entry: ShardEntry, options: Mapping[str, Any]) -> ParquetShard:
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
