"""The writer of each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrain.data.stream.formats import format_named
from dtrain.data.stream.formats.lines_writer import LinesWriter
from dtrain.data.stream.formats.mds_writer import MdsWriter
from dtrain.data.stream.formats.parquet_writer import ParquetWriter
from dtrain.data.stream.formats.samples import Sample, Writer
from dtrain.data.stream.formats.tar_writer import TarWriter
from dtrain.errors import ConfigError
from dtrain.types import Plain


def writer_for(
    form: str,
    first: Sample,
    columns: Mapping[str, str] | None,
    compression: str | None,
    hashes: Sequence[str],
    limit: int | None,
) -> Writer:
    """The writer of a dataset whose first sample this is.

    Raises:
        ConfigError: there is no such format, or it cannot keep such columns.
    """
    format_named(form)
    if columns is not None and not columns:
        raise ConfigError("columns={} leaves nothing to write; leave it out to have the first sample's")
    if form in ("jsonl", "text", "tar") and columns is not None:
        raise ConfigError(f"format {form} has no columns with a type, got columns={dict(columns)}; leave it out")
    settings: dict[str, Plain] = {"compression": compression, "hashes": [*hashes], "size_limit": limit}
    if form == "mds":
        return MdsWriter(first, columns, settings)
    if form == "parquet":
        return ParquetWriter(first, columns, settings)
    return TarWriter(settings) if form == "tar" else LinesWriter(form, settings)
