"""Formats of shards, by name. A format's own module, and the package that it reads with, are imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import cast

from dtrain.data.stream.formats.shard_format import ByteSource, Shard, ShardEntry, ShardFile, ShardFormat
from dtrain.errors import ConfigError

_FORMAT_MODULES = {"mds": "mds", "parquet": "parquet", "jsonl": "lines", "text": "lines", "tar": "tar"}


class _FormatRegistry(Mapping[str, ShardFormat]):
    def __getitem__(self, name: str) -> ShardFormat:
        if name not in _FORMAT_MODULES:
            raise KeyError(name)
        module = importlib.import_module(f"dtrain.data.stream.formats.{_FORMAT_MODULES[name]}")
        return cast(ShardFormat, getattr(module, name.upper()))

    def __iter__(self) -> Iterator[str]:
        return iter(_FORMAT_MODULES)

    def __len__(self) -> int:
        return len(_FORMAT_MODULES)


FORMATS: Mapping[str, ShardFormat] = _FormatRegistry()
"""Every format of shards that can be read."""


def get_format(name: str) -> ShardFormat:
    """
    Raises:
        ConfigError: there is no format of that name.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is not known; known: {', '.join(FORMATS)}")
    return FORMATS[name]


__all__ = ["FORMATS", "ByteSource", "Shard", "ShardEntry", "ShardFile", "ShardFormat", "get_format"]
