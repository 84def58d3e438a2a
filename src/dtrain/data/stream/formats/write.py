"""A dataset from samples: shards one after the other, and the index last, so that a dataset is there whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dtrain.data.stream.formats.base import ShardEntry, ShardFile
from dtrain.data.stream.formats.compression import check_compression, compress, compression_named
from dtrain.data.stream.formats.hashes import digests_of, new_hash
from dtrain.data.stream.formats.index import INDEX, UNFINISHED, write_index
from dtrain.data.stream.formats.samples import Sample, Writer
from dtrain.data.stream.formats.writers import writer_for
from dtrain.errors import ConfigError, DataError
from dtrain.storage import (
    Place,
    create_file,
    is_folder,
    list_names,
    make_folders,
    place,
    remove_file,
    sync_folder,
    write_parts,
)

_PART_BYTES = 2**24
_THREADS = 4
_SUFFIX_OF = {"br": ".br", "bz2": ".bz2", "gz": ".gz", "snappy": ".snappy", "zstd": ".zst"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShards:
    """What ``write_shards`` has written.

    Args:
        place: the dataset's folder.
        format: of its shards.
        shards: how many there are.
        samples: in all of them.
        size: bytes of all shards as stored.
        raw_size: bytes of all shards before compression.
    """

    place: str
    format: str
    shards: int
    samples: int
    size: int
    raw_size: int


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    out: str | Place,
    *,
    format: str,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] = ("xxh64",),
    size_limit: int | None = 2**26,
    progress: Callable[[int, int], None] | None = None,
) -> WrittenShards:
    """A dataset of these samples in a new folder, which ``ShardedDataset`` reads; of MDS, mosaicml-streaming, too.

    One shard at a time is held in memory. What was written is removed again when a sample, or the place, is at fault.

    Args:
        samples: mappings of column to value, of which the first one tells the columns and their types.
        out: a folder, or a URL; empty or not there yet.
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
    folder = place(out)
    rest = iter(samples)
    first = next(rest, None)
    if first is None:
        raise ConfigError(f"{folder}: there are no samples to write")
    writer = writer_for(format, first, columns, compression, hashes, size_limit)
    make = _Dataset(folder, format, writer, compression, hashes)
    try:
        with _storing(folder):
            make.begin()
        for number, shard in _shards(chain([first], rest), writer, size_limit, progress):
            with _storing(folder):
                make.add(number, shard)
        with _storing(folder):
            return make.finish()
    except BaseException:
        make.undo()
        raise


def _shards(
    samples: Iterable[Sample], writer: Writer, limit: int | None, progress: Callable[[int, int], None] | None
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
def _storing(folder: Place) -> Any:
    try:
        yield
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error


class _Dataset:
    """The files of a dataset that is being written."""

    def __init__(self, folder: Place, form: str, writer: Writer, compression: str | None, hashes: Sequence[str]) -> None:
        self._folder, self._form, self._writer, self._hashes = folder, form, writer, hashes
        self._text = compression if form != "parquet" else None  # of whole files
        self._entries: list[ShardEntry] = []
        self._ours: list[Place] = []

    def begin(self) -> None:
        if is_folder(self._folder) and (names := list_names(self._folder)):
            what = "has a dataset already" if INDEX in names else f"is not empty (there is {names[0]!r})"
            if UNFINISHED in names and INDEX not in names:
                what = "has a dataset that is being written, or whose writer was killed"
            raise ConfigError(f"{self._folder}: {what}; name a new folder, or remove this one first")
        make_folders(self._folder)
        self._create(UNFINISHED, b"")  # shards without an index are not taken for a whole dataset

    def add(self, number: int, encoded: Sequence[Any]) -> None:
        raw = self._writer.pack(encoded)
        raw_name = name = f"shard.{number:05}{self._writer.suffix}"
        stored, kind = raw, None
        if self._text is not None:
            stored, kind = compress(self._text, raw), compression_named(self._text)[0]
            name += f".{kind}" if self._form == "mds" else _SUFFIX_OF[kind]
        digests = digests_of(stored, self._hashes)
        file = ShardFile(
            name=name,
            size=len(stored),
            raw_size=len(raw),
            raw_name=raw_name,
            compression=kind,
            digests=digests,
            raw_digests=digests if stored is raw else digests_of(raw, self._hashes),
        )
        self._create(name, stored)
        self._entries.append(ShardEntry(file=file, samples=len(encoded), format=self._form, details=self._writer.details))

    def finish(self) -> WrittenShards:
        sync_folder(self._folder)
        self._create(INDEX, write_index(self._entries))
        remove_file(self._ours.pop(0))
        return WrittenShards(
            place=str(self._folder),
            format=self._form,
            shards=len(self._entries),
            samples=sum(entry.samples for entry in self._entries),
            size=sum(entry.file.size for entry in self._entries),
            raw_size=sum(entry.file.raw_size or 0 for entry in self._entries),
        )

    def _create(self, name: str, data: bytes) -> None:
        self._ours.append(self._folder / name)
        try:
            _write(self._ours[-1], data)
        except FileExistsError:
            del self._ours[-1]  # somebody else writes there, too
            raise

    def undo(self) -> None:
        """Remove what was written, the index first; what is left of that keeps its shards."""
        with contextlib.suppress(OSError):
            for path in reversed(self._ours):
                with contextlib.suppress(FileNotFoundError):  # it was never finished
                    remove_file(path)


def _write(path: Place, data: bytes) -> None:
    """Create a file, durably; of several that try, one succeeds."""
    if len(data) <= _PART_BYTES:
        create_file(path, data)
        return
    view = memoryview(data)
    sizes = [min(_PART_BYTES, len(view) - begin) for begin in range(0, len(view), _PART_BYTES)]
    write_parts(path, sizes, lambda part: [view[part * _PART_BYTES : part * _PART_BYTES + sizes[part]]], threads=_THREADS)
