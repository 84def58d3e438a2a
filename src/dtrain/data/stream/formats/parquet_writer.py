"""Writes Parquet, by pyarrow. Row groups are small, so that a sample somewhere in the middle can be had for little."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.data.stream.formats.compression import compression_named
from dtrain.data.stream.formats.parquet import package
from dtrain.data.stream.formats.samples import Naming, Sample, check_columns, check_mapping, plain
from dtrain.errors import ConfigError
from dtrain.types import Plain

_GROUP_BYTES = 2**22


class ParquetWriter:
    """See ``Writer``."""

    suffix = ".parquet"
    sample_bytes = 0
    shard_bytes = 0

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        self._arrow = package()
        fields = []
        if columns is None:
            check_mapping(first, 0)
        for name in first if columns is None else columns:
            with Naming(name, 0 if columns is None else None):
                kind = self._type_of(plain(first[name])) if columns is None else self._type_named(columns[name])
                fields.append((name, kind))
        self._schema = self._arrow.schema(fields)
        self._codec = _codec(settings["compression"])
        self.details = settings

    def _type_of(self, value: Any) -> Any:
        """The type of one value."""
        found = self._arrow.array([value]).type
        if self._arrow.types.is_null(found) or "null" in str(found):
            raise TypeError(f"{value!r} does not tell a type; give columns={{name: type}}")
        return found

    def _type_named(self, text: str) -> Any:
        if text.startswith("list<") and text.endswith(">"):
            return self._arrow.list_(self._type_named(text[5:-1]))
        return self._arrow.type_for_alias(text)

    def encode(self, sample: Sample, number: int, /) -> tuple[dict[str, Any], int]:
        """The row, and about how many bytes it has."""
        check_columns(sample, number, self._schema.names)
        row = {name: plain(sample[name]) for name in self._schema.names}
        with Naming(number=number) as at:
            for field in self._schema:
                at.column = field.name
                self._check(row[field.name], field.type)
        return row, sum(map(_about_bytes, row.values()))

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
            wanted = next((wanted for test, wanted in _PYTHON.items() if getattr(types, test)(kind)), object)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted not in (bool, object)):
                raise TypeError(f"{kind} wanted, got {type(value).__name__}")

    def size(self, encoded: tuple[dict[str, Any], int], /) -> int:
        """About its bytes."""
        return encoded[1]

    def pack(self, encoded: Sequence[tuple[dict[str, Any], int]], /) -> bytes:
        """The file."""
        columns = []
        for field in self._schema:
            with Naming(field.name):
                columns.append(self._arrow.array([row[field.name] for row, _ in encoded], field.type))
        table = self._arrow.Table.from_arrays(columns, schema=self._schema)
        each = max(1, sum(size for _, size in encoded) // len(encoded))
        out = io.BytesIO()
        self._arrow.parquet.write_table(table, out, row_group_size=max(1, _GROUP_BYTES // each), **self._codec)
        return out.getvalue()


_PYTHON: Mapping[str, Any] = {
    "is_boolean": bool,
    "is_integer": (int, np.integer),
    "is_floating": (float, int, np.floating, np.integer),
    "is_string": str,
    "is_binary": bytes,
}


def _about_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_about_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_about_bytes, value))
    return int(getattr(value, "nbytes", 8))


def _codec(compression: Any) -> dict[str, Any]:
    """What the library calls it. It is of the parts of a file: as a whole, ranges of it could not be read."""
    if compression is None:
        return {"compression": "none"}
    name, level = compression_named(compression)
    if name == "bz2":
        raise ConfigError("parquet knows no bz2; zstd, gz, br and snappy can be had")
    kind = {"gz": "gzip", "br": "brotli"}.get(name, name)
    return {"compression": kind} if name == "snappy" else {"compression": kind, "compression_level": level}
