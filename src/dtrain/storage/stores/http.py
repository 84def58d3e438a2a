"""Files on a web server, to read. What a server says of ranges is found by asking for the first byte of a file."""

from __future__ import annotations

import errno
import os
import re
from typing import Any, NoReturn
from urllib.parse import unquote

from dtrain.errors import ConfigError
from dtrain.storage.retry import TruncatedError
from dtrain.storage.stores.base import FileStat, ObjectStore, Upload

OPTIONS: dict[str, Any] = {"simple_links": False, "client_kwargs": {"auto_decompress": False}}
_HEADERS = {"Accept-Encoding": "identity"}  # sizes and ranges are of the file, not of what it is packed into on its way
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HttpStore(ObjectStore):
    """A server. Keys are whole URLs, with names as they are, not quoted."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        import aiohttp

        fs.kwargs.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=10, sock_read=60))

    def stat(self, key: str) -> FileStat | None:
        """As of every store; ``Found.ranges`` tells whether the server gives parts of this file."""
        from fsspec.asyn import sync

        found: FileStat | None = sync(self.fs.loop, self._first_byte, key)
        return found

    async def _first_byte(self, key: str) -> FileStat | None:
        async with await self._asked(key, {"Range": "bytes=0-0"}) as answer:
            if answer.status in (404, 410):
                return None
            if answer.status in (206, 416):
                return FileStat(size=_total_size(key, answer.headers.get("Content-Range", "")))
            answer.raise_for_status()
            if (length := answer.headers.get("Content-Length")) is None:
                raise OSError(errno.ENOTSUP, "the server does not say how large it is", key)
            return FileStat(size=int(length), ranges=False)

    async def _asked(self, key: str, headers: dict[str, str]) -> Any:
        import yarl

        session = await self.fs.set_session()
        options = {**self.fs.kwargs, "headers": {**self.fs.kwargs.get("headers", {}), **_HEADERS, **headers}}
        return session.get(yarl.URL(key.replace("?", "%3F").replace("#", "%23")), **options)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        from fsspec.asyn import sync

        data: bytes = sync(self.fs.loop, self._part, key, begin, end)
        return data

    async def _part(self, key: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        async with await self._asked(key, {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            if answer.status == 404:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            answer.raise_for_status()
            if answer.status != 206 and begin:
                raise OSError(errno.ENOTSUP, "the server gives whole files only, no parts of them", key)
            data = bytes(await answer.read())
        if len(data) != end - begin:
            raise TruncatedError(f"{len(data)} bytes came of {end - begin}")
        return data

    def list_names(self, key: str) -> list[str]:
        """Names that the server's page about a folder links to."""
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

    def list_recursive(self, key: str) -> list[str]:
        """Files of a folder; a web server's folders do not tell themselves from files, so only names with a dot are."""
        return [f"{key.rstrip('/')}/{name}" for name in self.list_names(key) if "." in name]

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        _refuse_write(key)

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        return False

    def upload(self, key: str, count: int) -> Upload:
        _refuse_write(key)

    def copy(self, old: str, new: str) -> None:
        _refuse_write(new)

    def remove(self, key: str) -> None:
        _refuse_write(key)


def _total_size(key: str, text: str) -> int:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise OSError(errno.ENOTSUP, f"the server does not say how large it is (Content-Range: {text!r})", key)
    return int(found[3])


def _refuse_write(key: str) -> NoReturn:
    raise ConfigError(f"{key}: http:// and https:// are for reading; write to a folder or an object store")
