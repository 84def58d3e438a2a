"""Read files from a web server. The request for the first byte of a file shows if the server supports ranges."""

from __future__ import annotations

import errno
import os
import re
from typing import Any, ClassVar, NoReturn
from urllib.parse import unquote

from dtrain.errors import ConfigError
from dtrain.storage.store import FileStat, Store, Upload

# Sizes and ranges must be of the file, not of a compressed transfer.
_HEADERS = {"Accept-Encoding": "identity"}
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HttpStore(Store):
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
                size = _total_size(key, answer.headers.get("Content-Range", ""))
                return FileStat(size=size, version=answer.headers.get("ETag"))
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
        found = {name: self.stat(f"{key.rstrip('/')}/{name}") for name in self.list_names(key)}
        return {name: None if status is None else status.size for name, status in found.items()}

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


def _total_size(key: str, text: str) -> int:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise OSError(errno.ENOTSUP, f"the server does not send the size of the file (Content-Range: {text!r})", key)
    return int(match[3])


def _refuse_write(key: str) -> NoReturn:
    raise ConfigError(f"path must be writable, got {key}. Write to a folder or an object store instead of a web server.")
