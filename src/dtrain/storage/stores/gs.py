"""Access Google Cloud Storage. A file is created with generation 0; parts are objects that the server composes."""

from __future__ import annotations

import contextlib
import json
import secrets
import types
from typing import Any

from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {"use_listings_cache": False}
_MARK_KEY = "dtrain-upload"
# Limit of objects that one call composes.
_MAX_COMPOSE = 32


class GsStore(ObjectStore):
    """Store of a bucket."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        once = getattr(type(fs)._request, "__wrapped__", None)
        if once is not None:
            # The wrapped function has no retries; gcsfs makes six attempts.
            fs._request = types.MethodType(once, fs)
        if fs.requests_timeout is None:
            import aiohttp

            fs.requests_timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=60)

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        from fsspec.asyn import sync
        from gcsfs.core import simple_upload

        bucket, name = key.split("/", 1)
        options = {} if mark is None else {"mode": "create", "metadatain": {_MARK_KEY: mark}}
        sync(self.fs.loop, simple_upload, self.fs, bucket, name, data, **options)

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        return self.mark_of(key) == mark

    def mark_of(self, key: str) -> str | None:
        """Return the mark that the file was created with."""
        try:
            _, answer = self.fs.call("GET", "b/{}/o/{}", *key.split("/", 1))
        except FileNotFoundError:
            return None
        return str(json.loads(answer).get("metadata", {}).get(_MARK_KEY))

    def upload(self, key: str, count: int) -> Upload:
        return _GsUpload(self, key)


class _GsUpload:
    def __init__(self, store: GsStore, key: str) -> None:
        self._store = store
        self._bucket, self._name = key.split("/", 1)
        self._mark = secrets.token_hex(16)
        self._sent: dict[int, str] = {}
        self._joined: list[str] = []

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        name = f"{self._name}.{self._mark}-{number:06d}"
        self._store.put(f"{self._bucket}/{name}", data)
        self._sent[number] = name

    def finish(self) -> None:
        names = [self._sent[number] for number in sorted(self._sent)]
        level = 0
        while len(names) > _MAX_COMPOSE:
            groups = [names[begin : begin + _MAX_COMPOSE] for begin in range(0, len(names), _MAX_COMPOSE)]
            names = [f"{self._name}.{self._mark}-{level}-{number:06d}" for number in range(len(groups))]
            for name, group in zip(names, groups, strict=True):
                self._join(group, name)
            self._joined += names
            level += 1
        self._join(names, self._name, ifGenerationMatch="0")

    def _join(self, names: list[str], into: str, **options: str) -> None:
        body = {
            "sourceObjects": [{"name": name} for name in names],
            "destination": {"contentType": "application/octet-stream", "metadata": {_MARK_KEY: self._mark}},
        }
        self._store.fs.call("POST", "b/{}/o/{}/compose", self._bucket, into, json=body, **options)

    def is_committed(self) -> bool:
        return self._store.mark_of(f"{self._bucket}/{self._name}") == self._mark

    def clean_up(self, *, finished: bool) -> None:
        for name in {*self._sent.values(), *self._joined}:
            with contextlib.suppress(FileNotFoundError):
                self._store.remove(f"{self._bucket}/{name}")
