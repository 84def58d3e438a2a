"""Access Azure Blob Storage. A file is created by an upload with ``overwrite=False`` (``If-None-Match: *``)."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {"use_listings_cache": False, "connection_timeout": 10, "read_timeout": 60}
_MARK_KEY = "dtrain_upload"


class AzStore(ObjectStore):
    """Store of a container."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
        if policy is not None:
            # The first delay of the SDK's own retries is 15 seconds.
            policy.total_retries = 0

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        metadata = {} if mark is None else {_MARK_KEY: mark}
        _call(
            self.fs,
            key,
            lambda client: client.upload_blob(data, overwrite=mark is None, metadata=metadata, **self.fs._timeout_kwargs),
        )

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        return _mark_of(self.fs, key) == mark

    def copy(self, old: str, new: str) -> None:
        super().copy(old, new)
        while (copied := _call(self.fs, new, lambda client: client.get_blob_properties()).copy).status == "pending":
            time.sleep(0.5)
        if copied.status not in (None, "success"):
            raise OSError(errno.EIO, f"the server must copy {old}, got copy status {copied.status}", new)

    def upload(self, key: str, count: int) -> Upload:
        return _AzUpload(self.fs, key)


def _call(fs: Any, key: str, do: Callable[[Any], Awaitable[Any]]) -> Any:
    """Call ``do`` with the SDK's client of the blob."""
    from azure.core.exceptions import ResourceExistsError
    from fsspec.asyn import sync

    container, name = key.split("/", 1)

    async def with_client() -> Any:
        async with fs.service_client.get_blob_client(container=container, blob=name) as client:
            return await do(client)

    try:
        return sync(fs.loop, with_client)
    except ResourceExistsError as error:
        raise FileExistsError(key) from error


def _mark_of(fs: Any, key: str) -> str | None:
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return str(_call(fs, key, lambda client: client.get_blob_properties()).metadata.get(_MARK_KEY))
    except ResourceNotFoundError:
        return None


class _AzUpload:
    def __init__(self, fs: Any, key: str) -> None:
        self._fs = fs
        self._key = key
        self._mark = secrets.token_hex(16)
        self._ids: dict[int, str] = {}

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        # All block ids of a blob must have one length.
        block = f"{self._mark}-{number:06d}"
        _call(self._fs, self._key, lambda client: client.stage_block(block, data, length=len(data), **self._fs._timeout_kwargs))
        self._ids[number] = block

    def finish(self) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=self._ids[number]) for number in sorted(self._ids)]
        _call(
            self._fs,
            self._key,
            lambda client: client.commit_block_list(
                blocks, metadata={_MARK_KEY: self._mark}, match_condition=MatchConditions.IfMissing, **self._fs._timeout_kwargs
            ),
        )

    def is_committed(self) -> bool:
        return _mark_of(self._fs, self._key) == self._mark

    def clean_up(self, *, finished: bool) -> None:
        """Do nothing: the service discards uncommitted blocks after a week."""
