"""Read and write objects: one class per provider, with the requests in which the providers differ, and web servers.

A file is created with a condition (``If-None-Match: *`` or generation 0). fsspec cannot pass a condition and a mark together,
nor finish an upload of parts with a condition, so these requests use the client of each library. Web servers are read only: the
request for the first byte of a file shows if the server supports ranges.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import threading
import time
import types
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, NoReturn
from urllib.parse import unquote

from dtrain.errors import ConfigError
from dtrain.storage.remote_store import FileStat, RemoteStore, Upload


def _split_key(key: str) -> tuple[str, str]:
    """Return the bucket and the name of an object."""
    bucket, _, name = key.partition("/")
    return bucket, name


_MARK_KEY = "dtrain-upload"


class S3Store(RemoteStore):
    """Amazon S3 and compatible servers."""

    options: ClassVar[dict[str, Any]] = {
        "use_listings_cache": False,
        "config_kwargs": {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": 32,
        },
    }

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        # Attempts of s3fs for each request.
        fs.retries = 1

    def _call(self, method: str, key: str, **options: Any) -> Any:
        bucket, name = _split_key(key)
        return self.fs.call_s3(method, Bucket=bucket, Key=name, **options)

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        condition = {} if mark is None else {"IfNoneMatch": "*", "Metadata": {_MARK_KEY: mark}}
        self._call("put_object", key, Body=data, **condition)

    def mark_of(self, key: str) -> str | None:
        try:
            return str(self._call("head_object", key).get("Metadata", {}).get(_MARK_KEY))
        except FileNotFoundError:
            return None

    def begin_upload(self, upload: Upload) -> Any:
        return self._call("create_multipart_upload", upload.key, Metadata={_MARK_KEY: upload.mark})["UploadId"]

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        return self._call("upload_part", upload.key, UploadId=upload.id, PartNumber=number + 1, Body=data)["ETag"]

    def finish_upload(self, upload: Upload) -> None:
        parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(upload.tags, 1)]}
        self._call("complete_multipart_upload", upload.key, UploadId=upload.id, MultipartUpload=parts, IfNoneMatch="*")

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        if not finished:
            self._call("abort_multipart_upload", upload.key, UploadId=upload.id)


# Limit of objects that one call of Google composes.
_MAX_COMPOSE = 32


class GsStore(RemoteStore):
    """Google Cloud Storage. The parts of an upload are objects, which the server composes."""

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
        bucket, name = _split_key(key)
        metadata = {"name": name} | ({} if mark is None else {"metadata": {_MARK_KEY: mark}})
        # gcsfs ends lines with a bare newline and has one boundary for all uploads, so content that ends in "\r" loses a byte,
        # and content with the boundary is cut.
        boundary = secrets.token_hex(16)
        header = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        self.fs.call(
            "POST",
            self.fs._location + "/upload/storage/v1/b/{}/o",
            bucket,
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=b"".join((header.encode(), data, f"\r\n--{boundary}--\r\n".encode())),
            **({} if mark is None else {"ifGenerationMatch": "0"}),
        )

    def mark_of(self, key: str) -> str | None:
        try:
            _, answer = self.fs.call("GET", "b/{}/o/{}", *_split_key(key))
        except FileNotFoundError:
            return None
        return str(json.loads(answer).get("metadata", {}).get(_MARK_KEY))

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        part_key = f"{upload.key}.{upload.mark}-{number:06d}"
        self.put(part_key, data)
        return part_key

    def finish_upload(self, upload: Upload) -> None:
        levels = _compose_levels(upload)
        for composed in levels[:-1]:
            for into, parts in composed:
                self._compose(upload, parts, into)
        self._compose(upload, levels[-1][0][1], upload.key, ifGenerationMatch="0")

    def _compose(self, upload: Upload, parts: list[str], into: str, **condition: str) -> None:
        body = {
            "sourceObjects": [{"name": _split_key(name)[1]} for name in parts],
            "destination": {"contentType": "application/octet-stream", "metadata": {_MARK_KEY: upload.mark}},
        }
        self.fs.call("POST", "b/{}/o/{}/compose", *_split_key(into), json=body, **condition)

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        composed = [into for level in _compose_levels(upload)[:-1] for into, _ in level]
        for key in [*upload.tags, *composed]:
            with contextlib.suppress(FileNotFoundError):
                self.remove(key)


def _compose_levels(upload: Upload) -> list[list[tuple[str, list[str]]]]:
    """Group the parts of an upload by 32, then the groups by 32, until one group is left: (name, parts) of each group."""
    levels: list[list[tuple[str, list[str]]]] = []
    names = upload.tags
    while not levels or len(names) > 1:
        groups = [names[begin : begin + _MAX_COMPOSE] for begin in range(0, len(names), _MAX_COMPOSE)] or [[]]
        names = [f"{upload.key}.{upload.mark}-{len(levels)}-{number:06d}" for number in range(len(groups))]
        levels.append(list(zip(names, groups, strict=True)))
    return levels


# Names of metadata must be identifiers.
_AZ_MARK_KEY = "dtrain_upload"


class AzStore(RemoteStore):
    """Azure Blob Storage. The service discards uncommitted blocks after a week."""

    options: ClassVar[dict[str, Any]] = {"use_listings_cache": False, "connection_timeout": 10, "read_timeout": 60}

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
        if policy is not None:
            # The first delay of the SDK's own retries is 15 seconds.
            policy.total_retries = 0

    def _call(self, key: str, do: Callable[[Any], Awaitable[Any]]) -> Any:
        """Call ``do`` with the SDK's client of the blob."""
        from azure.core.exceptions import ResourceExistsError
        from fsspec.asyn import sync

        container, name = _split_key(key)

        async def with_client() -> Any:
            async with self.fs.service_client.get_blob_client(container=container, blob=name) as client:
                return await do(client)

        try:
            return sync(self.fs.loop, with_client)
        except ResourceExistsError as error:
            raise FileExistsError(key) from error

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        options = {"overwrite": mark is None, "metadata": {} if mark is None else {_AZ_MARK_KEY: mark}}
        self._call(key, lambda client: client.upload_blob(data, **options, **self.fs._timeout_kwargs))

    def mark_of(self, key: str) -> str | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return str(self._call(key, lambda client: client.get_blob_properties()).metadata.get(_AZ_MARK_KEY))
        except ResourceNotFoundError:
            return None

    def copy(self, old: str, new: str) -> None:
        super().copy(old, new)
        while (copied := self._call(new, lambda client: client.get_blob_properties()).copy).status == "pending":
            time.sleep(0.5)
        if copied.status not in (None, "success"):
            raise OSError(errno.EIO, f"the server must copy {old}, got copy status {copied.status}", new)

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        # All block ids of a blob must have one length.
        block, options = f"{upload.mark}-{number:06d}", {"length": len(data), **self.fs._timeout_kwargs}
        self._call(upload.key, lambda client: client.stage_block(block, data, **options))
        return block

    def finish_upload(self, upload: Upload) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=block) for block in upload.tags]
        options = {"metadata": {_AZ_MARK_KEY: upload.mark}, "match_condition": MatchConditions.IfMissing}
        self._call(upload.key, lambda client: client.commit_block_list(blocks, **options, **self.fs._timeout_kwargs))


class OciStore(RemoteStore):
    """Oracle's object storage, ``bucket@namespace`` in the URL, through the SDK client of ocifs."""

    def _object(self, key: str) -> tuple[str, str, str]:
        bucket, namespace, name = self.fs.split_path(key)
        return namespace, bucket, name

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        condition = {} if mark is None else {"if_none_match": "*", "opc_meta": {_MARK_KEY: mark}}
        self.fs.oci_client.put_object(*self._object(key), data, **condition)

    def mark_of(self, key: str) -> str | None:
        from oci.exceptions import ServiceError

        try:
            return str(self.fs.oci_client.head_object(*self._object(key)).headers.get(f"opc-meta-{_MARK_KEY}"))
        except ServiceError as error:
            if error.status == 404:
                return None
            raise

    def _read(self, key: str, begin: int, end: int) -> bytes:
        answer = self.fs.oci_client.get_object(*self._object(key), range=f"bytes={begin}-{end - 1}")
        return bytes(answer.data.content)

    def remove(self, key: str) -> None:
        self.fs.oci_client.delete_object(*self._object(key))

    def copy(self, old: str, new: str) -> None:
        raise OSError(errno.EOPNOTSUPP, "the server copies some time later, and dtrain does not wait for such copies")

    def begin_upload(self, upload: Upload) -> Any:
        from oci.object_storage.models import CreateMultipartUploadDetails

        namespace, bucket, name = self._object(upload.key)
        details = CreateMultipartUploadDetails(object=name, metadata={f"opc-meta-{_MARK_KEY}": upload.mark})
        return self.fs.oci_client.create_multipart_upload(namespace, bucket, details, if_none_match="*").data.upload_id

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        return self.fs.oci_client.upload_part(*self._object(upload.key), upload.id, number + 1, data).headers["etag"]

    def finish_upload(self, upload: Upload) -> None:
        from oci.object_storage.models import CommitMultipartUploadDetails, CommitMultipartUploadPartDetails

        parts = [CommitMultipartUploadPartDetails(part_num=number, etag=tag) for number, tag in enumerate(upload.tags, 1)]
        details = CommitMultipartUploadDetails(parts_to_commit=parts)
        self.fs.oci_client.commit_multipart_upload(*self._object(upload.key), upload.id, details, if_none_match="*")

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        if not finished:
            self.fs.oci_client.abort_multipart_upload(*self._object(upload.key), upload.id)


class MemoryStore(RemoteStore):
    """All ``memory://`` files of this process, for trials with one rank. No answer is ever lost, so files have no mark."""

    options: ClassVar[dict[str, Any]] = {}
    # fsspec checks for an existing file before it creates the file, which is not atomic.
    _create_lock = threading.Lock()

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        with self._create_lock:
            self.fs.pipe_file(key, data, mode="overwrite" if mark is None else "create")

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        return data

    def finish_upload(self, upload: Upload) -> None:
        self.put(upload.key, b"".join(upload.tags), mark=upload.mark)


# Sizes and ranges must be of the file, not of a compressed transfer.
_HEADERS = {"Accept-Encoding": "identity"}
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HttpStore(RemoteStore):
    """Store of a web server. Keys are whole URLs with unquoted names."""

    # A server may send whole files only, which its answers tell.
    has_ranges = False

    options: ClassVar[dict[str, Any]] = {"simple_links": False, "client_kwargs": {"auto_decompress": False}}

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        import aiohttp

        fs.kwargs.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=10, sock_read=60))

    def stat(self, key: str) -> FileStat | None:
        """Return the status of a name. ``FileStat.ranges`` is True if the server sends ranges of this file."""
        from fsspec.asyn import sync

        status: FileStat | None = sync(self.fs.loop, self._first_byte, key)
        return status

    async def _first_byte(self, key: str) -> FileStat | None:
        async with await self._get(key, {"Range": "bytes=0-0"}) as answer:
            if answer.status in (404, 410):
                return None
            if answer.status in (206, 416):
                text = answer.headers.get("Content-Range", "")
                if (match := _RANGE.fullmatch(text.strip())) is None:
                    raise OSError(
                        errno.ENOTSUP, f"the server does not send the size of the file (Content-Range: {text!r})", key
                    )
                return FileStat(size=int(match[3]), version=answer.headers.get("ETag"))
            answer.raise_for_status()
            if (length := answer.headers.get("Content-Length")) is None:
                raise OSError(errno.ENOTSUP, "the server does not send the size of the file", key)
            return FileStat(size=int(length), ranges=False, version=answer.headers.get("ETag"))

    async def _get(self, key: str, headers: dict[str, str]) -> Any:
        import yarl

        session = await self.fs.set_session()
        options = {**self.fs.kwargs, "headers": {**self.fs.kwargs.get("headers", {}), **_HEADERS, **headers}}
        return session.get(yarl.URL(key.replace("?", "%3F").replace("#", "%23")), **options)

    def _read(self, key: str, begin: int, end: int) -> bytes:
        from fsspec.asyn import sync

        data: bytes = sync(self.fs.loop, self._get_range, key, begin, end) if begin < end else b""
        return data

    async def _get_range(self, key: str, begin: int, end: int) -> bytes:
        async with await self._get(key, {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            if answer.status == 404:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            answer.raise_for_status()
            if answer.status != 206 and begin:
                raise OSError(errno.ENOTSUP, "the server sends whole files only, no ranges", key)
            return bytes(await answer.read())

    def list_names(self, key: str) -> list[str]:
        """Return the names that the server's page of a folder links to."""
        top = key.rstrip("/") + "/"
        try:
            links = self.fs.ls(top, detail=False)
        except FileNotFoundError:
            links = []
        names = {unquote(link[len(top) :].split("?")[0].split("#")[0]) for link in links if link.startswith(top)}
        names = {name.strip("/") for name in names if name.strip("/") and "/" not in name.strip("/")}
        if not names:
            raise FileNotFoundError(errno.ENOENT, "the server has no such folder, or does not list it", key)
        return sorted(names)

    def list_sizes(self, key: str) -> dict[str, int | None]:
        stats = {name: self.stat(f"{key.rstrip('/')}/{name}") for name in self.list_names(key)}
        return {name: None if status is None else status.size for name, status in stats.items()}

    def list_recursive(self, key: str) -> list[str]:
        """Return the files of a folder. A web server does not distinguish folders, so files are the names with a dot."""
        return [f"{key.rstrip('/')}/{name}" for name in self.list_names(key) if "." in name]

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        _refuse_write(key)

    def begin_upload(self, upload: Upload) -> Any:
        _refuse_write(upload.key)

    def copy(self, old: str, new: str) -> None:
        _refuse_write(new)

    def remove(self, key: str) -> None:
        _refuse_write(key)


def _refuse_write(key: str) -> NoReturn:
    raise ConfigError(f"path must be writable, got {key}. Write to a folder or an object store instead of a web server.")
