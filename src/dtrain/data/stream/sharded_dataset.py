"""``ShardedDataset``: samples of a dataset that lies in shards, here or on a server, by index."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import xxhash

from dtrain import storage
from dtrain.data.stream.find_shards import find_shards
from dtrain.data.stream.fork_safety import FORK_REGISTRY
from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    Shard,
    ShardEntry,
    ShardFormat,
    get_format,
    one_line,
    wrap_shard_errors,
)
from dtrain.data.stream.open_shards import OpenShardCache, ShardPrefetcher
from dtrain.data.stream.shard_cache import ShardCache
from dtrain.data.stream.shard_index import guess_format
from dtrain.data.stream.shard_store import (
    MAX_SHARD_BYTES,
    ShardStore,
    bytes_to_reserve,
    default_cache_bytes,
    default_cache_folder,
)
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, RemotePath
from dtrain.storage.parallel_parts import for_each_part
from dtrain.typing import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.data.sampling.block_shuffle import BlockShuffle
    from dtrain.data.sampling.sample_order import SampleOrder

DownloadMode = Literal["whole", "ranged"]

_MAX_REQUESTS = 16  # for samples, side by side
_REQUEST_AGAIN_S = 2.0  # for so long a shard that was asked for is not asked for again
_CACHE_FRACTION = 8  # a process keeps at most this part of the cache in use: others are to find room


class ShardedDataset:
    """A dataset in shards: MDS, Parquet, JSON lines, text, or tar, in a folder or at a URL.

    ``dataset[i]``, ``len(dataset)`` and ``build_loader(dataset, ...)`` as of any other. Shards on a server, and compressed
    ones, come whole into a cache on this machine, which all its processes share; other files of this machine are read in place.

    Args:
        path: of the folder with the shards: a path, or ``s3://``, ``gs://``, ``az://``, ``oci://``, ``sftp://``, ``http(s)://``.
            A folder without an ``index.json`` is listed, and its samples are counted once. One file of data is fine, too.
        format: of the shards; None to go by the index, or by their names.
        cache: folder on a disk of this machine. By default ``dtrain-cache-UID/HASH-OF-URL`` where temporary files are.
        cache_bytes: that it has at most, with what is being downloaded; the same in all processes that share it. None is 64
            GiB, or three quarters of what the disk has for it if that is less.
        download: ``"whole"`` shards, or ``"ranged"``: of a file on a server only the bytes of the samples, and nothing is kept.
            That costs a request for each sample, and digests cannot be checked; not for compressed shards.
        prefetch_shards: shards that are downloaded at a time before they are needed; 0 for none.
        max_open_shards: that a process keeps open.
        verify: if False, digests are checked while a shard is downloaded, and not of files in place or in the cache. If True, a
            process checks each file when it first opens it; a damaged one in the cache is fetched again.
        follow_links: if True, symbolic links may lead out of a folder of this machine; if False, they are refused.
        max_sample_bytes: of a decoded sample; one that would have more is refused before it is decoded.
        max_shard_bytes: of a compressed shard after decompression, which stops there.
        options: of the format, as ``columns=[...]``, or ``allow_pickle=True`` for MDS with pickled columns.

    Raises:
        ConfigError: no data at the URL, an unknown format, option or digest, a shard larger than the cache, or ranges of what
            has none.
        DataError: the index cannot be read; later, a sample cannot be decoded. ShardError: a shard is missing or damaged.
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
        _check_options(
            cache_bytes=cache_bytes, download=download, prefetch_shards=prefetch_shards, max_open_shards=max_open_shards
        )
        _check_positive(max_sample_bytes=max_sample_bytes, max_shard_bytes=max_shard_bytes)
        self._max_sample_bytes, self._max_shard_bytes = max_sample_bytes, max_shard_bytes
        if not (text := str(path)):
            raise ConfigError("ShardedDataset: the URL is empty; name the folder that shards are in")
        self.path = text
        self.root, only = _split_file(storage.resolve_path(path))
        self._follow_links = follow_links or only is not None  # the user has named that file
        self._options, self._verify = options, verify
        self._ranged, self._read_ahead, self._open_most = download == "ranged", prefetch_shards, max_open_shards
        self._folder = _cache_folder(cache, self.root)
        self._limit = default_cache_bytes(self._folder) if cache_bytes is None else cache_bytes
        self._open_store()
        entries = find_shards(self._store, format=format, only=only)
        with wrap_shard_errors(str(self.root)):
            self._set_entries(entries)
            self._check_entries()
        self._start_process_state()
        FORK_REGISTRY.register(self)

    def _set_entries(self, entries: tuple[ShardEntry, ...]) -> None:
        self.entries = entries
        """The shards, in the order of the index."""
        self.shard_sizes = [entry.samples for entry in entries]
        """Samples of each shard."""
        self._bounds = list(accumulate(self.shard_sizes, initial=0))
        self._size = self._bounds[-1]
        self._begins, self._ends = np.array(self._bounds[:-1]), np.array(self._bounds[1:])

    def _open_store(self) -> None:
        release = weakref.WeakMethod(self._release_shards)  # what ends with the dataset must not keep it alive
        private = self._folder.parent if self._folder == default_cache_folder(self.root) else None
        cache = ShardCache(self._folder, self._limit, lambda: (method := release()) and method(), private=private)
        self._store = ShardStore(
            self.root,
            cache,
            ranged=self._ranged,
            verify=self._verify,
            follow_links=self._follow_links,
            max_shard_bytes=self._max_shard_bytes,
        )

    def _start_process_state(self) -> None:
        """What a process has of its own, and a child of a fork anew."""
        access, entries, options = self._store, self.entries, self._options  # nothing here keeps the dataset itself alive
        most = self._max_sample_bytes
        self._opened = OpenShardCache(
            lambda number: _open_shard(access, entries[number], options, most),
            lambda number: str(access.root / entries[number].file.name),
            max_open=self._open_most,
            max_bytes=self._limit // _CACHE_FRACTION,
        )
        self._prefetcher = ShardPrefetcher(
            lambda number, stopped: access.prefetch(entries[number].file, stopped), self._read_ahead
        )
        self._requested_at: dict[int, float] = {}
        self._request_lock = threading.Lock()
        self._end = weakref.finalize(self, self._prefetcher.close)  # before the interpreter goes

    def after_fork(self) -> None:
        """In a child: shards that the parent has open are let go of, so that they can be removed from the cache."""
        self._end.detach()
        self._start_process_state()

    def _release_shards(self) -> None:
        if "_opened" in self.__dict__:  # not while it counts
            self._opened.close()

    def _check_entries(self) -> None:
        seen: set[int] = set()
        for entry in self.entries:
            form = get_format(entry.format)
            if id(entry.details) not in seen:
                seen.add(id(entry.details))
                _check_entry(form, entry, self._options)
            if self._ranged and (entry.file.compression is not None or not form.supports_ranges):
                what = f"compressed ({entry.file.compression})" if entry.file.compression else f"of format {entry.format}"
                raise ConfigError(f"{self.root / entry.file.name}: is {what}, which has no ranges; use download='whole'")
            size = bytes_to_reserve(entry.file)
            if entry.file.compression is not None and size > self._max_shard_bytes:
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes after decompression, more than max_shard_bytes="
                    f"{self._max_shard_bytes}; allow more if you trust the data"
                )
            if size > self._limit and self._store.uses_cache(entry.file):
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes, more than cache_bytes={self._limit}; give the cache more"
                )

    def __getstate__(self) -> dict[str, Any]:
        stored = ["path", "root", "entries", "_options", "_verify", "_ranged", "_read_ahead", "_open_most", "_folder", "_limit"]
        stored += ["_follow_links", "_max_sample_bytes", "_max_shard_bytes"]
        return {name: self.__dict__[name] for name in stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_store()
        self._set_entries(self.entries)
        self._start_process_state()
        FORK_REGISTRY.register(self)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Any:
        """Sample ``index``, decoded.

        Raises:
            IndexError: there is none.
            ShardError: its shard cannot be had. DataError: it cannot be decoded.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{self.path}: has {self._size} samples, there is none with index {index}")
        number = bisect_right(self._bounds, index) - 1  # of one number, far faster than with an array
        return self._opened.read(number, (index - self._bounds[number],))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these indices, in this order; those of one shard are read together."""
        numbers, rows = self._locate(indices)
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        samples: list[Any] = [None] * len(numbers)
        parts = list(self._read_tasks(places))

        def read(part: int) -> None:
            number, chosen = parts[part]
            for place, sample in zip(chosen, self._opened.read(number, [rows[place] for place in chosen]), strict=True):
                samples[place] = sample

        for_each_part(len(parts), read, threads=_MAX_REQUESTS if self._uses_range_requests else 1, name="dtrain-read")
        return samples

    def _read_tasks(self, places: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
        """What is read by one thread: a shard's samples, or where each is a request one sample."""
        if self._uses_range_requests:
            return [(number, [place]) for number, chosen in places.items() for place in chosen]
        away = [n for n in places if n not in self._opened and not self._store.is_available(self.entries[n].file)]
        if len(away) > 1:
            self._prefetcher.request(away[1:])  # while the first is fetched by whoever reads it
        late = set(away)  # those that are here are read before they may have to make room
        return sorted(places.items(), key=lambda part: part[0] in late)

    @property
    def _uses_range_requests(self) -> bool:
        return self._ranged and isinstance(self.root, RemotePath)

    def _locate(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Shard, and row in it, of each sample."""
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= self._size):
            raise IndexError(
                f"{self.path}: has {self._size} samples, there is none with index {wanted.min()} or {wanted.max()}"
            )
        numbers = self._ends.searchsorted(wanted, side="right")
        return numbers.tolist(), (wanted - self._begins[numbers]).tolist()

    def prefetch(self, indices: Tensor) -> None:
        """Download the shards of these samples in the background, in the order in which they come. Returns at once.

        Args:
            indices: ``[k]`` int64, what this rank reads soon.
        """
        if not self._read_ahead or not len(indices):
            return
        numbers, first = np.unique(self._ends.searchsorted(np.asarray(indices), side="right"), return_index=True)
        now = time.monotonic()
        with self._request_lock:
            wanted = [
                n
                for n in numbers[first.argsort()].tolist()
                if now - self._requested_at.get(n, -_REQUEST_AGAIN_S) >= _REQUEST_AGAIN_S
            ]
            wanted = [n for n in wanted if n < len(self.entries) and self._store.uses_cache(self.entries[n].file)]
            self._requested_at.update(dict.fromkeys(wanted, now))
        if wanted:
            self._prefetcher.request(wanted)

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
        """The order of an epoch: shards as they come or at random, and samples of a few of them mixed; see ``BlockShuffle``."""
        from dtrain.data.sampling.block_shuffle import shard_order

        return shard_order(self.shard_sizes, seed=seed, shuffle=shuffle)

    def fingerprint(self) -> dict[str, Plain]:
        """What the data are, by the index: equal for the same data at another place."""
        digest = xxhash.xxh3_128()
        for entry in self.entries:
            file = entry.file
            digests = sorted({**file.digests, **file.raw_digests}.items())
            digest.update(repr((file.name, file.size, file.raw_size, entry.samples, entry.format, digests)).encode())
        return {
            "format": ",".join(sorted({entry.format for entry in self.entries})),
            "shards": len(self.entries),
            "samples": self._size,
            "bytes": sum(entry.file.size for entry in self.entries),
            "digest": digest.hexdigest(),
        }

    def close(self) -> None:
        """Let go of open shards, and end the downloads in the background. The next use opens them again."""
        self._end()
        self._opened.close()
        self._start_process_state()

    def __repr__(self) -> str:
        return f"ShardedDataset({self.path!r}, samples={self._size}, shards={len(self.entries)})"


def _check_options(*, cache_bytes: int | None, download: str, prefetch_shards: int, max_open_shards: int) -> None:
    for name, value, least in (
        ("cache_bytes", cache_bytes, 1),
        ("prefetch_shards", prefetch_shards, 0),
        ("max_open_shards", max_open_shards, 1),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"ShardedDataset: {name} must be a whole number of at least {least}, got {value!r}")
    if download not in get_args(DownloadMode):
        raise ConfigError(f"ShardedDataset: download must be 'whole' or 'ranged', got {download!r}")


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"ShardedDataset: {name} must be a whole number of at least 1, got {value!r}")


def _check_entry(form: ShardFormat, entry: ShardEntry, options: Mapping[str, Any]) -> None:
    try:
        form.check(entry, options)
    except DtrainError as error:
        raise type(error)(one_line(error)) from error


def _open_shard(access: ShardStore, entry: ShardEntry, options: Mapping[str, Any], most: int) -> tuple[Shard, int]:
    """The shard, and how many bytes of the cache it keeps in use."""
    with wrap_shard_errors(str(access.root / entry.file.name)):
        reached = access.open(entry)
        try:
            return get_format(entry.format).open(reached.source, entry, options, max_sample_bytes=most), reached.cached_bytes
        except DataError as error:
            raise DataError(f"{access.root}/{error}") from error


def _split_file(place: AnyPath) -> tuple[AnyPath, str | None]:
    """The dataset's folder; and the file's name, where the URL is that of one file with data."""
    if guess_format(place.name) is not None and storage.file_size(place) is not None:
        return place.parent, place.name
    return place, None


def _cache_folder(cache: str | Path | None, root: AnyPath) -> Path:
    if cache is None:
        return default_cache_folder(root)
    folder = storage.resolve_path(cache)
    if isinstance(folder, RemotePath):
        raise ConfigError(f"ShardedDataset: cache must be a folder of this machine, got {folder}")
    return folder
