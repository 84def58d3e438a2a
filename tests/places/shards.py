"""Small datasets for these tests, and the bytes that their cache has, seen from outside."""

import threading
from pathlib import Path

from dtrain.data.stream.write_shards import write_shards
from dtrain.storage import LockableFile


def samples(count, size=100):
    """Samples that tell themselves apart, of so many bytes."""
    return ({"id": index, "data": bytes([index % 251]) * size} for index in range(count))


def written(folder, count=100, *, size=100, limit=2000, **options):
    """Return the folder, with a dataset in it: MDS by default."""
    write_shards(samples(count, size), str(folder), **{"format": "mds", "max_shard_bytes": limit, **options})
    return folder


def ids(samples):
    """Return the ids of samples. A loader's worker that is spawned can import this module, but no file of tests."""
    return [sample["id"] for sample in samples]


class Watch:
    """The most bytes that the files of a cache had together, by a thread that looks again and again. A context manager.

    It looks under the cache's own lock, or a removed shard and a new shard could both be counted.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.most, self.looks = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._end.wait(0.001):
            if (self.folder / ".lock").exists():
                with LockableFile(self.folder / ".lock", "lock") as lock:
                    lock.lock(wait=True)
                    entries = [entry.stat() for entry in self.folder.iterdir()]
                    self.most = max(self.most, sum(about.st_size for about in entries))
                    self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._end.set()
        self._thread.join(90)
