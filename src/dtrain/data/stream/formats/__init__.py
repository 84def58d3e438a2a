"""Formats of shards, by name. A format's own module, and the package that it reads with, are imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import cast

from dtrain.data.stream.formats.base import Format, Shard, ShardEntry, ShardFile, Source
from dtrain.errors import ConfigError

_MODULES = {"mds": "mds", "parquet": "parquet", "jsonl": "lines", "text": "lines", "tar": "tar"}


class _Formats(Mapping[str, Format]):
    def __getitem__(self, name: str) -> Format:
        if name not in _MODULES:
            raise KeyError(name)
        module = importlib.import_module(f"dtrain.data.stream.formats.{_MODULES[name]}")
        return cast(Format, getattr(module, name.upper()))

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


FORMATS: Mapping[str, Format] = _Formats()
"""Every format of shards that can be read."""


def format_named(name: str) -> Format:
    """
    Raises:
        ConfigError: there is no format of that name.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is not known; known: {', '.join(FORMATS)}")
    return FORMATS[name]


__all__ = ["FORMATS", "Format", "Shard", "ShardEntry", "ShardFile", "Source", "format_named"]
