"""Store files in the memory of this process, for trials with one rank."""

from __future__ import annotations

import threading
from typing import Any

from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {}
# fsspec checks for an existing file before creating the file, which is not atomic.
_CREATE_LOCK = threading.Lock()


class MemoryStore(ObjectStore):
    """Store of all ``memory://`` files of the process."""

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        with _CREATE_LOCK:
            self.fs.pipe_file(key, data, mode="overwrite" if mark is None else "create")

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        # No answer is ever lost.
        return False

    def upload(self, key: str, count: int) -> Upload:
        return _MemoryUpload(self, key)


class _MemoryUpload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key = store, key
        self._parts: dict[int, bytes] = {}

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        self._parts[number] = data

    def finish(self) -> None:
        self._store.put(self._key, b"".join(self._parts[number] for number in sorted(self._parts)), mark="")

    def is_committed(self) -> bool:
        return False

    def clean_up(self, *, finished: bool) -> None:
        self._parts.clear()
