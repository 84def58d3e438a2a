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
from dtrain.data.stream.access import MAX_SHARD_BYTES, Access, bytes_of, default_folder, default_limit
from dtrain.data.stream.ahead import Ahead
from dtrain.data.stream.cache import Cache
from dtrain.data.stream.forks import FORKS
from dtrain.data.stream.formats import format_named
from dtrain.data.stream.formats.base import MAX_SAMPLE_BYTES, Format, Shard, ShardEntry, one_line, only_shard_errors
from dtrain.data.stream.formats.index import recognised
from dtrain.data.stream.listing import find_shards
from dtrain.data.stream.opened import OpenShards
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import Place, RemotePath
from dtrain.storage.parts import for_each_part
from dtrain.types import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.data.order.base import Order
    from dtrain.data.order.blocks import BlockShuffle

Download = Literal["whole", "ranged"]

_REQUESTS = 16  # for samples, side by side
_TOLD_S = 2.0  # for so long a shard that was asked for is not asked for again
_SHARE = 8  # a process keeps at most this part of the cache in use: others are to find room


class ShardedDataset:
    """A dataset in shards: MDS, Parquet, JSON lines, text, or tar, in a folder or at a URL.

    ``dataset[i]``, ``len(dataset)`` and ``build_loader(dataset, ...)`` as of any other. Shards on a server, and compressed
    ones, come whole into a cache on this machine, which all its processes share; other files of this machine are read in place.

    Args:
        url: of the folder with the shards: a path, or ``s3://``, ``gs://``, ``az://``, ``oci://``, ``sftp://``, ``http(s)://``.
            A folder without an ``index.json`` is listed, and its samples are counted once. One file of data is fine, too.
        format: of the shards; None to go by the index, or by their names.
        cache: folder on a disk of this machine. By default ``dtrain-cache-UID/HASH-OF-URL`` where temporary files are.
        cache_bytes: that it has at most, with what is being downloaded; the same in all processes that share it. None is 64
            GiB, or three quarters of what the disk has for it if that is less.
        download: ``"whole"`` shards, or ``"ranged"``: of a file on a server only the bytes of the samples, and nothing is kept.
            That costs a request for each sample, and digests cannot be checked; not for compressed shards.
        read_ahead: shards that are downloaded at a time before they are needed; 0 for none.
        open_shards: that a process keeps open.
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
        url: str | Place,
        *,
        format: str | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        download: Download = "whole",
        read_ahead: int = 4,
        open_shards: int = 64,
        verify: bool = True,
        follow_links: bool = False,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        **options: Any,
    ) -> None:
        _check(cache_bytes=cache_bytes, download=download, read_ahead=read_ahead, open_shards=open_shards)
        _check_counts(max_sample_bytes=max_sample_bytes, max_shard_bytes=max_shard_bytes)
        self._max_sample_bytes, self._max_shard_bytes = max_sample_bytes, max_shard_bytes
        if not (text := str(url)):
            raise ConfigError("ShardedDataset: the URL is empty; name the folder that shards are in")
        self.url = text
        self.root, only = _root(storage.place(url))
        self._follow_links = follow_links or only is not None  # the user has named that file
        self._options, self._verify = options, verify
        self._ranged, self._read_ahead, self._open_most = download == "ranged", read_ahead, open_shards
        self._folder = _folder(cache, self.root)
        self._limit = default_limit(self._folder) if cache_bytes is None else cache_bytes
        self._reach()
        entries = find_shards(self._access, format=format, only=only)
        with only_shard_errors(str(self.root)):
            self._take(entries)
            self._check_entries()
        self._start()
        FORKS.tell(self)

    def _take(self, entries: tuple[ShardEntry, ...]) -> None:
        self.entries = entries
        """The shards, in the order of the index."""
        self.blocks = [entry.samples for entry in entries]
        """Samples of each shard."""
        self._bounds = list(accumulate(self.blocks, initial=0))
        self._size = self._bounds[-1]
        self._begins, self._ends = np.array(self._bounds[:-1]), np.array(self._bounds[1:])

    def _reach(self) -> None:
        release = weakref.WeakMethod(self._release)  # what ends with the dataset must not keep it alive
        private = self._folder.parent if self._folder == default_folder(self.root) else None
        cache = Cache(self._folder, self._limit, lambda: (method := release()) and method(), private=private)
        self._access = Access(
            self.root,
            cache,
            ranged=self._ranged,
            verify=self._verify,
            follow_links=self._follow_links,
            max_shard_bytes=self._max_shard_bytes,
        )

    def _start(self) -> None:
        """What a process has of its own, and a child of a fork anew."""
        access, entries, options = self._access, self.entries, self._options  # nothing here keeps the dataset itself alive
        most = self._max_sample_bytes
        self._opened = OpenShards(
            lambda number: _opened(access, entries[number], options, most),
            lambda number: str(access.root / entries[number].file.name),
            most=self._open_most,
            most_bytes=self._limit // _SHARE,
        )
        self._ahead = Ahead(lambda number, stopped: access.fill(entries[number].file, stopped), self._read_ahead)
        self._told: dict[int, float] = {}
        self._telling = threading.Lock()
        self._end = weakref.finalize(self, self._ahead.close)  # before the interpreter goes

    def after_fork(self) -> None:
        """In a child: shards that the parent has open are let go of, so that they can be removed from the cache."""
        self._end.detach()
        self._start()

    def _release(self) -> None:
        if "_opened" in self.__dict__:  # not while it counts
            self._opened.close()

    def _check_entries(self) -> None:
        seen: set[int] = set()
        for entry in self.entries:
            form = format_named(entry.format)
            if id(entry.details) not in seen:
                seen.add(id(entry.details))
                _checked(form, entry, self._options)
            if self._ranged and (entry.file.compression is not None or not form.ranged):
                what = f"compressed ({entry.file.compression})" if entry.file.compression else f"of format {entry.format}"
                raise ConfigError(f"{self.root / entry.file.name}: is {what}, which has no ranges; use download='whole'")
            size = bytes_of(entry.file)
            if entry.file.compression is not None and size > self._max_shard_bytes:
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes after decompression, more than max_shard_bytes="
                    f"{self._max_shard_bytes}; allow more if you trust the data"
                )
            if size > self._limit and self._access.uses_cache(entry.file):
                raise ConfigError(
                    f"{self.root / entry.file.name}: has {size} bytes, more than cache_bytes={self._limit}; give the cache more"
                )

    def __getstate__(self) -> dict[str, Any]:
        kept = ["url", "root", "entries", "_options", "_verify", "_ranged", "_read_ahead", "_open_most", "_folder", "_limit"]
        kept += ["_follow_links", "_max_sample_bytes", "_max_shard_bytes"]
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reach()
        self._take(self.entries)
        self._start()
        FORKS.tell(self)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Any:
        """Sample ``index``, decoded.

        Raises:
            IndexError: there is none.
            ShardError: its shard cannot be had. DataError: it cannot be decoded.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{self.url}: has {self._size} samples, there is none with index {index}")
        number = bisect_right(self._bounds, index) - 1  # of one number, far faster than with an array
        return self._opened.read(number, (index - self._bounds[number],))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these indices, in this order; those of one shard are read together."""
        numbers, rows = self._find(indices)
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        samples: list[Any] = [None] * len(numbers)
        parts = list(self._parts(places))

        def read(part: int) -> None:
            number, chosen = parts[part]
            for place, sample in zip(chosen, self._opened.read(number, [rows[place] for place in chosen]), strict=True):
                samples[place] = sample

        for_each_part(len(parts), read, threads=_REQUESTS if self._is_by_ranges else 1, name="dtrain-read")
        return samples

    def _parts(self, places: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
        """What is read by one thread: a shard's samples, or where each is a request one sample."""
        if self._is_by_ranges:
            return [(number, [place]) for number, chosen in places.items() for place in chosen]
        away = [n for n in places if n not in self._opened and not self._access.is_there(self.entries[n].file)]
        if len(away) > 1:
            self._ahead.want(away[1:])  # while the first is fetched by whoever reads it
        late = set(away)  # those that are here are read before they may have to make room
        return sorted(places.items(), key=lambda part: part[0] in late)

    @property
    def _is_by_ranges(self) -> bool:
        return self._ranged and isinstance(self.root, RemotePath)

    def _find(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Shard, and row in it, of each sample."""
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= self._size):
            raise IndexError(f"{self.url}: has {self._size} samples, there is none with index {wanted.min()} or {wanted.max()}")
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
        with self._telling:
            wanted = [n for n in numbers[first.argsort()].tolist() if now - self._told.get(n, -_TOLD_S) >= _TOLD_S]
            wanted = [n for n in wanted if n < len(self.entries) and self._access.uses_cache(self.entries[n].file)]
            self._told.update(dict.fromkeys(wanted, now))
        if wanted:
            self._ahead.want(wanted)

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> Order:
        """The order of an epoch: shards as they come or at random, and samples of a few of them mixed; see ``BlockShuffle``."""
        from dtrain.data.order.blocks import order_of_shards

        return order_of_shards(self.blocks, seed=seed, shuffle=shuffle)

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
        self._start()

    def __repr__(self) -> str:
        return f"ShardedDataset({self.url!r}, samples={self._size}, shards={len(self.entries)})"


def _check(*, cache_bytes: int | None, download: str, read_ahead: int, open_shards: int) -> None:
    for name, value, least in (("cache_bytes", cache_bytes, 1), ("read_ahead", read_ahead, 0), ("open_shards", open_shards, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"ShardedDataset: {name} must be a whole number of at least {least}, got {value!r}")
    if download not in get_args(Download):
        raise ConfigError(f"ShardedDataset: download must be 'whole' or 'ranged', got {download!r}")


def _check_counts(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"ShardedDataset: {name} must be a whole number of at least 1, got {value!r}")


def _checked(form: Format, entry: ShardEntry, options: Mapping[str, Any]) -> None:
    try:
        form.check(entry, options)
    except DtrainError as error:
        raise type(error)(one_line(error)) from error


def _opened(access: Access, entry: ShardEntry, options: Mapping[str, Any], most: int) -> tuple[Shard, int]:
    """The shard, and how many bytes of the cache it keeps in use."""
    with only_shard_errors(str(access.root / entry.file.name)):
        reached = access.reach(entry)
        try:
            return format_named(entry.format).open(reached.source, entry, options, max_sample_bytes=most), reached.held
        except DataError as error:
            raise DataError(f"{access.root}/{error}") from error


def _root(place: Place) -> tuple[Place, str | None]:
    """The dataset's folder; and the file's name, where the URL is that of one file with data."""
    if recognised(place.name) is not None and storage.file_size(place) is not None:
        return place.parent, place.name
    return place, None


def _folder(cache: str | Path | None, root: Place) -> Path:
    if cache is None:
        return default_folder(root)
    folder = storage.place(cache)
    if isinstance(folder, RemotePath):
        raise ConfigError(f"ShardedDataset: cache must be a folder of this machine, got {folder}")
    return folder
