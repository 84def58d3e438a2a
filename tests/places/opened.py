"""Shards without a cache or a server: their bytes in memory, and the samples of a folder in its order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.data.stream.formats.compression import compute_digests, decompress
from dtrain.data.stream.formats.shard_format import Shard, ShardEntry, ShardFile, get_format
from dtrain.data.stream.shard_index import read_index


class Held:
    """A source that counts how often it is read, and how many bytes at most at a time."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.reads = 0
        self.most = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, begin: int, end: int) -> memoryview:
        assert 0 <= begin <= end, (begin, end)
        self.reads += 1
        self.most = max(self.most, end - begin)
        return self.data[begin:end]


def entry_for(data: bytes, form: str, **details: Any) -> ShardEntry:
    """An entry of these bytes, as of a folder without an index."""
    samples, counted = get_format(form).count(Held(data))
    file = ShardFile(name="shard", size=len(data))
    return ShardEntry(file=file, samples=samples, format=form, details={**counted, **details})


def opened(data: bytes, form: str, **options: Any) -> Shard:
    """The shard of these bytes."""
    return get_format(form).open(Held(data), entry_for(data, form), options)


def rows(shard: Shard) -> list[Any]:
    """All samples of a shard."""
    return [shard[row] for row in range(len(shard))]


def shards_of(folder: Path, **options: Any) -> Iterator[Shard]:
    """Open the shards of a dataset in a folder; check sizes and digests against its index."""
    for entry in read_index((folder / "index.json").read_bytes()):
        stored = raw = (folder / entry.file.name).read_bytes()
        if entry.file.compression:
            raw = b"".join(decompress(entry.file.compression, [stored], limit=entry.file.raw_size))
        assert (len(stored), len(raw)) == (entry.file.size, entry.file.raw_size)
        assert compute_digests(stored, entry.file.digests) == entry.file.digests
        assert compute_digests(raw, entry.file.raw_digests) == entry.file.raw_digests
        yield get_format(entry.format).open(Held(raw), entry, options)


def samples_of(folder: Path, **options: Any) -> list[Any]:
    """All samples of a dataset in a folder, in its order."""
    return [sample for shard in shards_of(folder, **options) for sample in rows(shard)]
