"""Azure Blob Storage. Creating is an upload that does not overwrite, which the SDK makes ``If-None-Match: *``."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {"use_listings_cache": False, "connection_timeout": 10, "read_timeout": 60}
_MARK = "dtrain_upload"


class AzStore(ObjectStore):
    """A container."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
        if policy is not None:
            policy.total_retries = 0  # its own first pause is a quarter of a minute

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        self.fs.pipe_file(key, data, overwrite=not create)

    def upload(self, key: str, count: int) -> Upload:
        return _Blocks(self.fs, key)


class _Blocks:
    def __init__(self, fs: Any, key: str) -> None:
        self._fs = fs
        self._container, self._name = key.split("/", 1)
        self._mark = secrets.token_hex(16)
        self._ids: dict[int, str] = {}

    def _do(self, do: Callable[[Any], Awaitable[Any]]) -> Any:
        from azure.core.exceptions import ResourceExistsError
        from fsspec.asyn import sync

        async def with_client() -> Any:
            async with self._fs.service_client.get_blob_client(container=self._container, blob=self._name) as client:
                return await do(client)

        try:
            return sync(self._fs.loop, with_client)
        except ResourceExistsError as error:
            raise FileExistsError(self._name) from error

    def part(self, number: int, begin: int, data: bytes) -> None:
        block = f"{self._mark}-{number:06d}"  # all ids of a blob must have one length
        self._do(lambda client: client.stage_block(block, data, length=len(data), **self._fs._timeout_kwargs))
        self._ids[number] = block

    def finish(self) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=self._ids[number]) for number in sorted(self._ids)]
        self._do(
            lambda client: client.commit_block_list(
                blocks, metadata={_MARK: self._mark}, match_condition=MatchConditions.IfMissing, **self._fs._timeout_kwargs
            )
        )

    def is_there(self) -> bool:
        found = self._do(lambda client: client.get_blob_properties())
        return bool(found.metadata.get(_MARK) == self._mark)

    def clear(self, *, finished: bool) -> None:
        """Nothing: the service forgets blocks that no list names after a week."""
