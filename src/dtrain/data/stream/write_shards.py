"""``write_shards``: write samples to a new dataset in shards. The index is written last and marks a complete dataset."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dtrain.data.sample_lengths import LengthInKey, check_length
from dtrain.data.stream.formats.compression import (
    COMPRESSION_SUFFIXES,
    check_compression,
    compress,
    compute_digests,
    new_hash,
    parse_compression,
)
from dtrain.data.stream.formats.shard_format import Sample, ShardEntry, ShardFile, ShardWriter, get_format
from dtrain.data.stream.shard_index import INDEX_NAME, LENGTHS_NAME, UNFINISHED_NAME, write_index, write_lengths
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


def make_writer(
    form: str,
    first: Sample,
    columns: Mapping[str, str] | None,
    compression: str | None,
    hashes: Sequence[str],
    limit: int | None,
) -> ShardWriter:
    """Create the writer of a dataset with this first sample.

    Raises:
        ConfigError: the format is unknown, or cannot store such columns.
    """
    shard_format = get_format(form)
    if columns is not None and not columns:
        raise ConfigError("columns={} leaves nothing to write. Leave out columns to use the first sample's columns.")
    if columns is not None and not shard_format.has_typed_columns:
        raise ConfigError(f"format {form} has no typed columns, got columns={dict(columns)}. Leave out columns.")
    return shard_format.writer(first, columns, {"compression": compression, "hashes": [*hashes], "size_limit": limit})


_UPLOAD_PART_BYTES = 2**24
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShardsResult:
    """Result of ``write_shards``.

    Args:
        path: folder of the dataset.
        format: format of the shards.
        shards: number of shards.
        samples: number of samples in all shards.
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
    max_shard_bytes: int | None = 2**26,
    on_progress: Callable[[int, int], None] | None = None,
    lengths: str | None = None,
) -> WriteShardsResult:
    """Write samples to a new dataset for ``ShardedDataset``. mosaicml-streaming can read the format MDS, too.

    The writer keeps one shard at a time in memory. After an error, it removes the files written so far.

    Args:
        samples: mappings from column to value; the first sample determines the columns and their types.
        path: new or empty folder, or a URL.
        format: ``"mds"``, ``"parquet"``, ``"jsonl"``, ``"text"`` (with the single column ``text``), or ``"tar"`` (columns are
            named like file extensions: ``jpg``, ``tokens.npy``).
        columns: encoding of each column for MDS; type of each column for Parquet, as ``"int64"`` or ``"list<int32>"``.
        compression: ``"br"``, ``"bz2"``, ``"gz"``, ``"snappy"`` or ``"zstd"``, optionally with a level (``"zstd:7"``). Parquet
            compresses parts of a file. None stores raw bytes.
        hashes: algorithms of the digests of each shard, which readers check.
        max_shard_bytes: maximum of a shard's raw bytes, unless a single sample is larger; None writes one shard.
        on_progress: function of the numbers of samples and raw bytes so far, called after each sample.
        lengths: column whose lengths, or integers, are stored beside the index, 4 bytes per sample, so that
            ``build_loader(balance=, max_tokens=)`` knows the samples' lengths. None stores no lengths.

    Returns:
        Counts and sizes.

    Example:
        >>> import dtrain as dt
        >>> samples = ({"text": f"document {i}"} for i in range(1000))
        >>> result = dt.data.write_shards(
        ...     samples, "/tmp/corpus", format="mds", compression="zstd"
        ... )  # doctest: +SKIP
        >>> dataset = dt.data.ShardedDataset("/tmp/corpus")  # doctest: +SKIP

    Raises:
        ConfigError: the folder is not empty, there are no samples, or the format cannot store a sample, which is named.
        DataError: a file cannot be written.
    """
    hashes = sorted(set(hashes))
    for algorithm in hashes:
        new_hash(algorithm)
    check_compression(compression)
    if max_shard_bytes is not None and not 1 <= max_shard_bytes < 2**32:
        raise ConfigError(f"{max_shard_bytes=} must be at least 1 and below 4 GiB. Pass None to write one shard.")
    folder = resolve_path(path)
    remaining = iter(samples)
    first = next(remaining, None)
    if first is None:
        raise ConfigError(f"{folder}: samples must not be empty. Check the input; it gave no sample.")
    writer = make_writer(format, first, columns, compression, hashes, max_shard_bytes)
    dataset_writer = _DatasetWriter(folder, format, writer, compression, hashes)
    counted: Iterable[Sample] = chain([first], remaining)
    counts: array[int] | None = None
    if lengths is not None:
        counts = array("q")
        counted = _count_lengths(counted, LengthInKey(lengths), counts)
    try:
        with _wrap_write_errors(folder):
            dataset_writer.begin()
        for number, shard in _group_into_shards(counted, writer, max_shard_bytes, on_progress):
            with _wrap_write_errors(folder):
                dataset_writer.add(number, shard)
        with _wrap_write_errors(folder):
            return dataset_writer.finish(counts)
    except BaseException:
        dataset_writer.rollback()
        raise


def _count_lengths(samples: Iterable[Sample], length_fn: LengthInKey, counts: array[int]) -> Iterator[Sample]:
    """Yield the samples, and append their lengths to ``counts``.

    Raises:
        ConfigError: a sample has no such column, or a value that is not a length.
    """
    for number, sample in enumerate(samples):
        if length_fn.key not in sample:
            raise ConfigError(
                f"write_shards: lengths must name a column of each sample, but sample {number} has no {length_fn.key!r}, only "
                f"{sorted(map(str, sample))[:8]}. Name a column with tokens or with their number."
            )
        counts.append(check_length("write_shards", length_fn(sample), number))
        yield sample


def _group_into_shards(
    samples: Iterable[Sample], writer: ShardWriter, limit: int | None, progress: Callable[[int, int], None] | None
) -> Iterable[tuple[int, list[Any]]]:
    """Group encoded samples to shards, and yield the number and the samples of each shard."""
    shard: list[Any] = []
    number, size, total = 0, writer.shard_bytes, 0
    for count, sample in enumerate(samples):
        encoded = writer.encode(sample, count)
        sample_bytes = writer.size(encoded) + writer.sample_bytes
        if shard and limit is not None and size + sample_bytes > limit:
            yield number, shard
            number, shard, size = number + 1, [], writer.shard_bytes
        shard.append(encoded)
        size += sample_bytes
        total += sample_bytes
        if progress is not None:
            progress(count + 1, total)
    yield number, shard


@contextlib.contextmanager
def _wrap_write_errors(folder: AnyPath) -> Any:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written: {error}. Check the permissions and the free space of the folder."
        ) from error


class _DatasetWriter:
    """Writer of a dataset's files."""

    def __init__(self, folder: AnyPath, form: str, writer: ShardWriter, compression: str | None, hashes: Sequence[str]) -> None:
        self._folder, self._form, self._writer, self._hashes = folder, form, writer, hashes
        # Parquet compresses parts of a file, not whole files.
        self._compression = compression if form != "parquet" else None
        self._entries: list[ShardEntry] = []
        self._created: list[AnyPath] = []

    def begin(self) -> None:
        if is_folder(self._folder) and (names := list_names(self._folder)):
            reason = "has a dataset already" if INDEX_NAME in names else f"is not empty (there is {names[0]!r})"
            if UNFINISHED_NAME in names and INDEX_NAME not in names:
                reason = "has a dataset that is incomplete, because its writer still runs or was killed"
            raise ConfigError(f"{self._folder}: {reason}. Name a new folder, or remove this folder first.")
        make_folders(self._folder)
        # The marker keeps readers from using shards without an index as a complete dataset.
        self._create_file(UNFINISHED_NAME, b"")

    def add(self, number: int, encoded: Sequence[Any]) -> None:
        raw = self._writer.pack(encoded)
        raw_name = name = f"shard.{number:05}{self._writer.suffix}"
        stored, algorithm = raw, None
        if self._compression is not None:
            stored, algorithm = compress(self._compression, raw), parse_compression(self._compression)[0]
            # The first suffix of an algorithm is the usual one. mosaicml-streaming appends the name.
            suffix = next(suffix for suffix, kind in COMPRESSION_SUFFIXES.items() if kind == algorithm)
            name += f".{algorithm}" if self._form == "mds" else suffix
        digests = compute_digests(stored, self._hashes)
        file = ShardFile(
            name=name,
            size=len(stored),
            raw_size=len(raw),
            raw_name=raw_name,
            compression=algorithm,
            digests=digests,
            raw_digests=digests if stored is raw else compute_digests(raw, self._hashes),
        )
        self._create_file(name, stored)
        self._entries.append(ShardEntry(file=file, samples=len(encoded), format=self._form, details=self._writer.details))

    def finish(self, lengths: Sequence[int] | None) -> WriteShardsResult:
        if lengths is not None:
            self._create_file(LENGTHS_NAME, write_lengths(lengths))
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
        """Create a file durably. If several processes try to create it, one succeeds."""
        path, view, step = self._folder / name, memoryview(data), _UPLOAD_PART_BYTES
        self._created.append(path)
        try:
            if len(data) <= step:
                create_file(path, data)
            else:
                sizes = [min(step, len(view) - begin) for begin in range(0, len(view), step)]
                write_parts(path, sizes, lambda number: [view[number * step : (number + 1) * step]], threads=_THREADS)
        except FileExistsError:
            # Another process writes to the folder, too, so its file must not be removed.
            del self._created[-1]
            raise

    def rollback(self) -> None:
        """Remove the written files, the index first, so that a remaining index always has its shards."""
        with contextlib.suppress(OSError):
            for path in reversed(self._created):
                # The last file may never have been created.
                with contextlib.suppress(FileNotFoundError):
                    remove_file(path)
