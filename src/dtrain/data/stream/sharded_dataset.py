"""``ShardedDataset``: read samples of a dataset in shards by index, from local disk or from a server."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from dtrain import storage
from dtrain.arguments import check_choice, check_int
from dtrain.data.sample_lengths import LengthTable
from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    Shard,
    get_format,
    one_line,
    wrap_shard_errors,
)
from dtrain.data.stream.open_shards import ByteLRU, OpenShardCache, ShardPrefetcher
from dtrain.data.stream.shard_cache import FORK_REGISTRY, ShardCache
from dtrain.data.stream.shard_index import find_shards, guess_format, read_lengths
from dtrain.data.stream.shard_store import (
    MAX_SHARD_BYTES,
    ShardStore,
    bytes_to_reserve,
    default_cache_bytes,
    default_cache_folder,
)
from dtrain.data.stream.shard_table import ShardTable
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, RemotePath
from dtrain.storage.parallel_parts import for_each_part
from dtrain.typing import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.data.sample_order import BlockShuffle, SampleOrder

DownloadMode = Literal["whole", "ranged"]

# Number of parallel requests for samples.
_MAX_REQUESTS = 16
# Time in which a shard is not requested again.
_REQUEST_AGAIN_S = 2.0
_MAX_REQUEST_TIMES = 4096
# A process uses at most 1 / _CACHE_FRACTION of the cache, so that other processes have room.
_CACHE_FRACTION = 8
# A pickled dataset has the table of up to this many shards, which is about a megabyte.
_MAX_PICKLED_SHARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Arguments of ``ShardedDataset``, which a pickled dataset carries.

    Args:
        format: format of the shards; None uses the index or the names of the files.
        only: name of the file, if the dataset is a single file.
        cache_folder: folder of the cache.
        cache_bytes: maximum of the cache's bytes.
        ranged: if True, only the bytes of the samples are downloaded.
        prefetch_shards, max_open_shards, verify, follow_links, max_sample_bytes, max_shard_bytes, options: as in
            ``ShardedDataset``.
    """

    format: str | None
    only: str | None
    cache_folder: Path
    cache_bytes: int
    ranged: bool
    prefetch_shards: int
    max_open_shards: int
    verify: bool
    follow_links: bool
    max_sample_bytes: int
    max_shard_bytes: int
    options: Mapping[str, Any]


class ShardedDataset:
    """Dataset in shards: MDS, Parquet, JSON lines, text, or tar, in a folder or at a URL.

    Use it as any indexed dataset: ``dataset[i]``, ``len(dataset)``, ``build_loader(dataset, ...)``. Remote and compressed
    shards are stored in a cache on this machine, which all its processes share. Other local files are read in place.

    Args:
        path: folder of the shards: a path, or ``s3://``, ``gs://``, ``az://``, ``oci://``, ``sftp://``, ``http(s)://``. Without
            an ``index.json`` the folder is listed, and its samples are counted once. Or a single file with data.
        format: format of the shards; None uses the index or the names of the files.
        cache: folder on a disk of this machine; None uses ``dtrain-cache-UID/HASH-OF-URL`` in the folder for temporary files.
        cache_bytes: maximum of the cache's bytes, including downloads; equal in all processes that share the cache. None uses
            64 GiB, or three quarters of the disk space for the cache if that is less.
        download: ``"whole"`` shards, or ``"ranged"``: only the bytes of the samples, without cache. A ranged read costs a
            request per sample, cannot check digests, and does not support compressed shards.
        prefetch_shards: shards that are downloaded ahead in parallel; 0 disables the prefetch.
        max_open_shards: shards that a process keeps open.
        verify: if True, a process checks the digests of each file on first use, and fetches a damaged file of the cache again.
            If False, digests are checked during downloads only.
        follow_links: if True, symbolic links may lead out of a local folder; if False, such links are refused.
        max_sample_bytes: maximum of a decoded sample; a larger sample is refused before it is decoded.
        max_shard_bytes: maximum of a compressed shard after decompression, which stops at that size.
        options: options of the format, as ``columns=[...]``, or ``allow_pickle=True`` for MDS with pickled columns.

    Example:
        >>> import dtrain as dt
        >>> dataset = dt.data.ShardedDataset(
        ...     "s3://bucket/c4", cache="/tmp/cache"
        ... )  # doctest: +SKIP
        >>> loader = dt.build_loader(
        ...     dataset, mesh=mesh, global_batch_size=256, seed=1
        ... )  # doctest: +SKIP

    Raises:
        ConfigError: the path has no data, a format, option or digest is unknown, a shard is larger than the cache, or ranged
            reads are impossible.
        DataError: the index cannot be read; on a read, a sample cannot be decoded.
        ShardError: on a read, a shard is missing or damaged.
    """

    def __init__(
        self,
        path: str | AnyPath,
        *,
        format: str | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        download: DownloadMode = "whole",
        prefetch_shards: int = 4,
        max_open_shards: int = 64,
        verify: bool = True,
        follow_links: bool = False,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        **options: Any,
    ) -> None:
        if cache_bytes is not None:
            check_int("ShardedDataset", "cache_bytes", cache_bytes)
        check_choice("ShardedDataset", "download", download, get_args(DownloadMode))
        prefetch_shards = check_int("ShardedDataset", "prefetch_shards", prefetch_shards, minimum=0)
        max_open_shards = check_int("ShardedDataset", "max_open_shards", max_open_shards)
        max_sample_bytes = check_int("ShardedDataset", "max_sample_bytes", max_sample_bytes)
        max_shard_bytes = check_int("ShardedDataset", "max_shard_bytes", max_shard_bytes)
        if not (text := str(path)):
            raise ConfigError("ShardedDataset: path must not be empty. Pass the folder of the shards.")
        self.path = text
        self.root, only = storage.resolve_path(path), None
        if guess_format(self.root.name) is not None and storage.file_size(self.root) is not None:
            self.root, only = self.root.parent, self.root.name
        folder = default_cache_folder(self.root) if cache is None else storage.resolve_path(cache)
        if isinstance(folder, RemotePath):
            raise ConfigError(
                f"ShardedDataset: cache must be a folder of this machine, got {folder}. "
                "Pass a local path, such as cache='shard_cache'."
            )
        self._settings = _Settings(
            format=format,
            only=only,
            cache_folder=folder,
            cache_bytes=default_cache_bytes(folder) if cache_bytes is None else cache_bytes,
            ranged=download == "ranged",
            prefetch_shards=prefetch_shards,
            max_open_shards=max_open_shards,
            verify=verify,
            # The user has named the file, so a link is trusted.
            follow_links=follow_links or only is not None,
            max_sample_bytes=max_sample_bytes,
            max_shard_bytes=max_shard_bytes,
            options=options,
        )
        self._open_store()
        entries = self._find_shards()
        with wrap_shard_errors(str(self.root)):
            self._set_entries(entries)
            self._check_entries()
        self._start_process_state()
        FORK_REGISTRY.register(self)

    def _find_shards(self) -> ShardTable:
        return find_shards(self._store, format=self._settings.format, only=self._settings.only)

    def _set_entries(self, entries: ShardTable) -> None:
        self.entries = entries
        """Shards in the order of the index. An entry is made when it is asked for."""
        self.shard_sizes: Sequence[int] = entries.samples.data
        """Samples of each shard."""
        # A memoryview gives Python integers without a copy of the column.
        self._bounds: Sequence[int] = entries.bounds.data

    def _open_store(self) -> None:
        # A weak reference, so that the cache does not keep the dataset alive.
        release = weakref.WeakMethod(self._release_shards)
        settings = self._settings
        folder = settings.cache_folder
        private = folder.parent if folder == default_cache_folder(self.root) else None
        cache = ShardCache(folder, settings.cache_bytes, lambda: (method := release()) and method(), private=private)
        self._store = ShardStore(
            self.root,
            cache,
            ranged=settings.ranged,
            verify=settings.verify,
            follow_links=settings.follow_links,
            max_shard_bytes=settings.max_shard_bytes,
        )

    def _start_process_state(self) -> None:
        """Initialize the state of this process. A forked child initializes its own state."""
        # The closures hold these locals, not self, so that they do not keep the dataset alive.
        store, entries, settings = self._store, self.entries, self._settings
        self._decoded = decoded = ByteLRU()

        def open_shard(number: int) -> tuple[Shard, int]:
            entry = entries[number]
            with wrap_shard_errors(str(store.root / entry.file.name)):
                source, cached_bytes = store.open(entry)
                try:
                    shard_format = get_format(entry.format)
                    limit = settings.max_sample_bytes
                    shard = shard_format.open(source, entry, settings.options, max_sample_bytes=limit, decoded=decoded)
                except DataError as error:
                    raise DataError(f"{store.root}/{error}") from error
                return shard, cached_bytes

        self._opened = OpenShardCache(
            open_shard,
            lambda number: str(store.root / entries[number].file.name),
            max_open=settings.max_open_shards,
            max_bytes=settings.cache_bytes // _CACHE_FRACTION,
        )
        self._prefetcher = ShardPrefetcher(
            lambda number, stopped: store.prefetch(entries[number].file, stopped), settings.prefetch_shards
        )
        self._recent_requests = _RecentRequests()
        # A finalizer also runs before the interpreter exits.
        self._end = weakref.finalize(self, self._prefetcher.close)

    def after_fork(self) -> None:
        """Reset the state in a forked child, so that the shards that the parent has open can be removed from the cache."""
        self._end.detach()
        self._start_process_state()

    def _release_shards(self) -> None:
        # The attribute is missing while the constructor counts samples.
        if "_opened" in self.__dict__:
            self._opened.close()

    def _check_entries(self) -> None:
        # A check may refuse the first shard of each group, and shards that are too large.
        settings, first = self._settings, {group.first for group in self.entries.groups}
        for number in sorted({*first, *self.entries.shards_above(min(settings.cache_bytes, settings.max_shard_bytes))}):
            entry = self.entries[number]
            shard_format = get_format(entry.format)
            try:
                shard_format.check(entry, settings.options)
            except DtrainError as error:
                raise type(error)(one_line(error)) from error
            if settings.ranged and (entry.file.compression is not None or not shard_format.supports_ranges):
                description = f"compressed ({kind})" if (kind := entry.file.compression) else f"of format {entry.format}"
                raise ConfigError(
                    f"{self.root / entry.file.name}: is {description}, without range reads. Use download='whole'."
                )
            size = bytes_to_reserve(entry.file)
            if entry.file.compression is not None and size > settings.max_shard_bytes:
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes after decompression, more than max_shard_bytes="
                    f"{settings.max_shard_bytes}. Raise it to trust the data."
                )
            if size > settings.cache_bytes and self._store.uses_cache(entry.file):
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes, more than cache_bytes={settings.cache_bytes}. "
                    "Raise cache_bytes."
                )

    def __getstate__(self) -> dict[str, Any]:
        # The other process maps the table of a large index. A small table travels.
        table = self.entries if len(self.entries) <= _MAX_PICKLED_SHARDS else None
        stored = {name: self.__dict__[name] for name in ("path", "root", "_settings")}
        return {"table": table, "fingerprint": self.entries.fingerprint, **stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table, fingerprint = state.pop("table"), state.pop("fingerprint")
        self.__dict__.update(state)
        self._open_store()
        if table is None:
            table = self._find_shards()
            if table.fingerprint != fingerprint:
                raise DataError(f"{self.root}: the shards have changed since the dataset was opened. Start the job again")
        self._set_entries(table)
        self._start_process_state()
        FORK_REGISTRY.register(self)

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, index: int, /) -> Any:
        """Read and decode sample ``index``.

        Raises:
            IndexError: ``index`` is out of range.
            ShardError: the shard cannot be read.
            DataError: the sample cannot be decoded.
        """
        if not 0 <= index < self._bounds[-1]:
            raise IndexError(f"{self.path}: index must be in 0 to {len(self) - 1}, got {index}")
        # For a single index, bisect is far faster than NumPy.
        number = bisect_right(self._bounds, index) - 1
        return self._opened.read(number, (index - self._bounds[number],))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read samples in the order of ``indices``. Samples of one shard are read together."""
        requested = np.asarray(indices, dtype=np.int64)
        if requested.size and (int(requested.min()) < 0 or int(requested.max()) >= len(self)):
            raise IndexError(
                f"{self.path}: indices must be in 0 to {len(self) - 1}, got {requested.min()} to {requested.max()}"
            )
        bounds = self.entries.bounds
        shards = bounds.searchsorted(requested, side="right") - 1
        numbers, rows = shards.tolist(), (requested - bounds[shards]).tolist()
        positions_by_shard: dict[int, list[int]] = {}
        for position, number in enumerate(numbers):
            positions_by_shard.setdefault(number, []).append(position)
        samples: list[Any] = [None] * len(numbers)
        tasks = self._read_tasks(positions_by_shard)

        def read(task: int) -> None:
            number, positions = tasks[task]
            shard_samples = self._opened.read(number, [rows[position] for position in positions])
            for position, sample in zip(positions, shard_samples, strict=True):
                samples[position] = sample

        for_each_part(len(tasks), read, threads=_MAX_REQUESTS if self._uses_range_requests else 1, name="dtrain-read")
        return samples

    def _read_tasks(self, positions_by_shard: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
        """Return the reads per thread: the samples of a shard, or a single sample if a sample is a request."""
        if self._uses_range_requests:
            return [(number, [position]) for number, positions in positions_by_shard.items() for position in positions]
        unavailable = [
            n for n in positions_by_shard if n not in self._opened and not self._store.is_available(self.entries[n].file)
        ]
        # The reader fetches the first shard itself.
        self._prefetcher.request(unavailable[1:])
        # Available shards are read first, before they may be removed to make room.
        return sorted(positions_by_shard.items(), key=lambda task: task[0] in unavailable)

    @property
    def _uses_range_requests(self) -> bool:
        return self._settings.ranged and isinstance(self.root, RemotePath)

    def prefetch(self, indices: Tensor) -> None:
        """Download the shards of these samples in the background, in order. Return at once.

        Args:
            indices: ``[k]`` int64, the samples that this rank reads soon.
        """
        if not self._settings.prefetch_shards or not len(indices):
            return
        numbers, first = np.unique(self.entries.bounds.searchsorted(np.asarray(indices), side="right") - 1, return_index=True)
        new = self._recent_requests.add(n for n in numbers[first.argsort()].tolist() if n < len(self.entries))
        self._prefetcher.request([n for n in new if self._store.uses_cache(self.entries[n].file)])

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
        """Return the order of an epoch, with a block shuffle over the shards; see ``BlockShuffle``."""
        from dtrain.data.sample_order import shard_order

        return shard_order(self.shard_sizes, seed=seed, shuffle=shuffle)

    def sample_lengths(self, column: str | None = None) -> LengthTable:
        """Return the samples' lengths that ``write_shards(lengths=)`` has stored; ``column`` must be None.

        Raises:
            ConfigError: the dataset has no lengths, or ``column`` is not None.
            DataError: the file of the lengths is damaged.
        """
        if column is not None:
            raise ConfigError(
                f"{self.root}: lengths must be None, got {column!r}, because shards have lengths of one column. "
                "Leave lengths out."
            )
        return LengthTable(read_lengths(self._store, len(self)).astype(np.int64))

    def fingerprint(self) -> dict[str, Plain]:
        """Return properties of the data from the index. A copy of the data has an equal fingerprint."""
        return {
            "format": ",".join(sorted({group.format for group in self.entries.groups})),
            "shards": len(self.entries),
            "samples": len(self),
            "bytes": self.entries.bytes_total,
            "digest": self.entries.fingerprint,
        }

    def close(self) -> None:
        """Close open shards, and end background downloads. The next use opens the shards again."""
        self._end()
        self._opened.close()
        self._start_process_state()

    def __repr__(self) -> str:
        return f"ShardedDataset({self.path!r}, samples={len(self)}, shards={len(self.entries)})"


class _RecentRequests:
    """Times of the last requests of shards, by number. Any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times: dict[int, float] = {}

    def add(self, numbers: Iterable[int]) -> list[int]:
        """Record requests of these shards now, and return the shards that were not requested a short time ago."""
        now = time.monotonic()
        with self._lock:
            new = [n for n in numbers if now - self.times.get(n, -_REQUEST_AGAIN_S) >= _REQUEST_AGAIN_S]
            # Old requests have no effect, and a long run would collect one of each shard.
            if len(self.times) > _MAX_REQUEST_TIMES:
                self.times = {n: time_s for n, time_s in self.times.items() if now - time_s < _REQUEST_AGAIN_S}
            self.times.update(dict.fromkeys(new, now))
        return new
