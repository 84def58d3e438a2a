"""The writer of each format.

A dataset from samples: shards one after the other, and the index last, so that a dataset is there whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dtrain.data.stream.formats.compression import check_compression, compress, parse_compression
from dtrain.data.stream.formats.json_lines import LineWriter
from dtrain.data.stream.formats.mds import MdsWriter
from dtrain.data.stream.formats.parquet import ParquetWriter
from dtrain.data.stream.formats.shard_format import Sample, ShardEntry, ShardFile, ShardWriter, get_format
from dtrain.data.stream.formats.tar import TarWriter
from dtrain.data.stream.shard_index import INDEX_NAME, UNFINISHED_NAME, compute_digests, new_hash, write_index
from dtrain.errors import ConfigError, DataError
from dtrain.storage import (
    AnyPath,
    create_file,
    is_folder,
    list_names,
    make_folders,
    remove_file,
    resolve_path,
    sync_folder,
    write_parts,
)
from dtrain.typing import Plain


def make_writer(
    form: str,
    first: Sample,
    columns: Mapping[str, str] | None,
    compression: str | None,
    hashes: Sequence[str],
    limit: int | None,
) -> ShardWriter:
    """The writer of a dataset whose first sample this is.

    Raises:
        ConfigError: there is no such format, or it cannot keep such columns.
    """
    get_format(form)
    if columns is not None and not columns:
        raise ConfigError("columns={} leaves nothing to write; leave it out to have the first sample's")
    if form in ("jsonl", "text", "tar") and columns is not None:
        raise ConfigError(f"format {form} has no columns with a type, got columns={dict(columns)}; leave it out")
    settings: dict[str, Plain] = {"compression": compression, "hashes": [*hashes], "size_limit": limit}
    if form == "mds":
        return MdsWriter(first, columns, settings)
    if form == "parquet":
        return ParquetWriter(first, columns, settings)
    return TarWriter(settings) if form == "tar" else LineWriter(form, settings)


_UPLOAD_PART_BYTES = 2**24
_THREADS = 4
_COMPRESSION_SUFFIX = {"br": ".br", "bz2": ".bz2", "gz": ".gz", "snappy": ".snappy", "zstd": ".zst"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShardsResult:
    """What ``write_shards`` has written.

    Args:
        path: the dataset's folder.
        format: of its shards.
        shards: how many there are.
        samples: in all of them.
        stored_bytes: bytes of all shards as stored.
        raw_bytes: bytes of all shards before compression.
    """

    path: str
    format: str
    shards: int
    samples: int
    stored_bytes: int
    raw_bytes: int


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    path: str | AnyPath,
    *,
    format: str,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] = ("xxh64",),
    size_limit: int | None = 2**26,
    progress: Callable[[int, int], None] | None = None,
) -> WriteShardsResult:
    """A dataset of these samples in a new folder, which ``ShardedDataset`` reads; of MDS, mosaicml-streaming, too.

    One shard at a time is held in memory. What was written is removed again when a sample, or the place, is at fault.

    Args:
        samples: mappings of column to value, of which the first one tells the columns and their types.
        path: a folder, or a URL; empty or not there yet.
        format: ``"mds"``, ``"parquet"``, ``"jsonl"``, ``"text"`` (the one column ``text``), or ``"tar"`` (columns are named as
            files are after the dot: ``jpg``, ``tokens.npy``).
        columns: of MDS, column to encoding; of Parquet, column to type, as ``"int64"`` or ``"list<int32>"``; others have none.
        compression: ``"br"``, ``"bz2"``, ``"gz"``, ``"snappy"`` or ``"zstd"``, with a level if wanted (``"zstd:7"``); in
            Parquet, that of the parts of a file. None: stored raw.
        hashes: digests to keep of each shard, and to check when it is read.
        size_limit: raw bytes that a shard has at most, unless one sample is larger; None makes one shard of all.
        progress: called after each sample with the samples and the raw bytes so far.

    Returns:
        Counts and sizes.

    Raises:
        ConfigError: the folder is not empty, there are no samples, or one that the format cannot keep, by its number.
        DataError: a file cannot be written.
    """
    hashes = sorted(set(hashes))
    for algorithm in hashes:
        new_hash(algorithm)
    check_compression(compression)
    if size_limit is not None and not 1 <= size_limit < 2**32:
        raise ConfigError(f"{size_limit=} is not from 1 to 4 GiB (without 4 GiB itself); None makes one shard")
    folder = resolve_path(path)
    rest = iter(samples)
    first = next(rest, None)
    if first is None:
        raise ConfigError(f"{folder}: there are no samples to write")
    writer = make_writer(format, first, columns, compression, hashes, size_limit)
    make = _DatasetWriter(folder, format, writer, compression, hashes)
    try:
        with _wrap_write_errors(folder):
            make.begin()
        for number, shard in _group_into_shards(chain([first], rest), writer, size_limit, progress):
            with _wrap_write_errors(folder):
                make.add(number, shard)
        with _wrap_write_errors(folder):
            return make.finish()
    except BaseException:
        make.rollback()
        raise


def _group_into_shards(
    samples: Iterable[Sample], writer: ShardWriter, limit: int | None, progress: Callable[[int, int], None] | None
) -> Iterable[tuple[int, list[Any]]]:
    """Numbered lists of encoded samples that make a shard each."""
    held: list[Any] = []
    number, size, total = 0, writer.shard_bytes, 0
    for count, sample in enumerate(samples):
        encoded = writer.encode(sample, count)
        more = writer.size(encoded) + writer.sample_bytes
        if held and limit is not None and size + more > limit:
            yield number, held
            number, held, size = number + 1, [], writer.shard_bytes
        held.append(encoded)
        size += more
        total += more
        if progress is not None:
            progress(count + 1, total)
    yield number, held


@contextlib.contextmanager
def _wrap_write_errors(folder: AnyPath) -> Any:
    try:
        yield
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error


class _DatasetWriter:
    """The files of a dataset that is being written."""

    def __init__(self, folder: AnyPath, form: str, writer: ShardWriter, compression: str | None, hashes: Sequence[str]) -> None:
        self._folder, self._form, self._writer, self._hashes = folder, form, writer, hashes
        self._compression = compression if form != "parquet" else None  # of whole files
        self._entries: list[ShardEntry] = []
        self._created: list[AnyPath] = []

    def begin(self) -> None:
        if is_folder(self._folder) and (names := list_names(self._folder)):
            what = "has a dataset already" if INDEX_NAME in names else f"is not empty (there is {names[0]!r})"
            if UNFINISHED_NAME in names and INDEX_NAME not in names:
                what = "has a dataset that is being written, or whose writer was killed"
            raise ConfigError(f"{self._folder}: {what}; name a new folder, or remove this one first")
        make_folders(self._folder)
        self._create_file(UNFINISHED_NAME, b"")  # shards without an index are not taken for a whole dataset

    def add(self, number: int, encoded: Sequence[Any]) -> None:
        raw = self._writer.pack(encoded)
        raw_name = name = f"shard.{number:05}{self._writer.suffix}"
        stored, kind = raw, None
        if self._compression is not None:
            stored, kind = compress(self._compression, raw), parse_compression(self._compression)[0]
            name += f".{kind}" if self._form == "mds" else _COMPRESSION_SUFFIX[kind]
        digests = compute_digests(stored, self._hashes)
        file = ShardFile(
            name=name,
            size=len(stored),
            raw_size=len(raw),
            raw_name=raw_name,
            compression=kind,
            digests=digests,
            raw_digests=digests if stored is raw else compute_digests(raw, self._hashes),
        )
        self._create_file(name, stored)
        self._entries.append(ShardEntry(file=file, samples=len(encoded), format=self._form, details=self._writer.details))

    def finish(self) -> WriteShardsResult:
        sync_folder(self._folder)
        self._create_file(INDEX_NAME, write_index(self._entries))
        remove_file(self._created.pop(0))
        return WriteShardsResult(
            path=str(self._folder),
            format=self._form,
            shards=len(self._entries),
            samples=sum(entry.samples for entry in self._entries),
            stored_bytes=sum(entry.file.size for entry in self._entries),
            raw_bytes=sum(entry.file.raw_size or 0 for entry in self._entries),
        )

    def _create_file(self, name: str, data: bytes) -> None:
        self._created.append(self._folder / name)
        try:
            _write_file(self._created[-1], data)
        except FileExistsError:
            del self._created[-1]  # somebody else writes there, too
            raise

    def rollback(self) -> None:
        """Remove what was written, the index first; what is left of that keeps its shards."""
        with contextlib.suppress(OSError):
            for path in reversed(self._created):
                with contextlib.suppress(FileNotFoundError):  # it was never finished
                    remove_file(path)


def _write_file(path: AnyPath, data: bytes) -> None:
    """Create a file, durably; of several that try, one succeeds."""
    if len(data) <= _UPLOAD_PART_BYTES:
        create_file(path, data)
        return
    view = memoryview(data)
    sizes = [min(_UPLOAD_PART_BYTES, len(view) - begin) for begin in range(0, len(view), _UPLOAD_PART_BYTES)]
    write_parts(
        path, sizes, lambda part: [view[part * _UPLOAD_PART_BYTES : part * _UPLOAD_PART_BYTES + sizes[part]]], threads=_THREADS
    )
