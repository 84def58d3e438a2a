"""A shard against what its index says: size, every digest, and that every sample can be decoded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.cli.checkpoints.output import one_line
from dtrain.errors import DataError
from dtrain.storage import Buffer, Place, RemotePath, SharedFile, real_path

if TYPE_CHECKING:
    from dtrain.data.stream.formats import ShardEntry


def problem_of(root: Place, entry: ShardEntry, options: Mapping[str, Any], advance: Callable[[int], None]) -> str | None:
    """What is wrong with a shard, the first thing found; None when nothing is.

    Args:
        root: the dataset's folder.
        entry: what its index says.
        options: of the format.
        advance: told about raw bytes as they are read.

    Raises:
        ConfigError: it cannot be read here: a package is missing, or a column would run code.
        OSError: no room for a copy of the shard.
    """
    place = _resolved(root, entry.file.name)
    if place is None:
        return "is a link out of the dataset's folder"
    with tempfile.TemporaryDirectory(prefix="dtrain-inspect-") as folder, SharedFile(Path(folder) / "raw", "new") as copy:
        # What is here and not compressed is read where it is; all else is copied, one shard at a time.
        in_place = entry.file.compression is None and not isinstance(place, RemotePath)

        def write(data: Buffer) -> None:
            advance(memoryview(data).nbytes)
            if not in_place:
                copy.write(data)

        try:
            _fetch(place, entry, write, copy.clear)
            if in_place:
                with SharedFile(_local(place)) as stored:
                    _decode(stored.mapped(), entry, options)
            else:
                _decode(copy.mapped(), entry, options)
        except DataError as error:
            return one_line(error).replace(f"{place}: ", "").removeprefix(f"{entry.file.name}: ")
    return None


def _resolved(root: Place, name: str) -> Place | None:
    """Where a file is, with links of this machine resolved; None outside of the folder."""
    if isinstance(root, RemotePath):
        return root / name
    real = real_path(root / name)
    return real if real.is_relative_to(real_path(root)) else None


def _local(place: Place) -> Path:
    assert isinstance(place, Path)
    return place


def _fetch(place: Place, entry: ShardEntry, write: Callable[[Buffer], None], clear: Callable[[], None]) -> None:
    """Hand the raw bytes to ``write``, held against size and digests."""
    from dtrain.data.stream.download import download

    download(place, entry.file, write, clear=clear)


def _decode(raw: memoryview, entry: ShardEntry, options: Mapping[str, Any]) -> None:
    from dtrain.data.stream.formats import format_named
    from dtrain.data.stream.sources import MemorySource

    shard = format_named(entry.format).open(MemorySource(raw), entry, options)
    try:
        for row in range(len(shard)):
            try:
                shard[row]
            except Exception as error:  # of which class, depends on what the bytes are
                raise DataError(f"sample {row} cannot be decoded: {type(error).__name__}: {one_line(error)}") from error
    finally:
        shard.close()
