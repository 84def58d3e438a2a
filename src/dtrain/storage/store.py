"""``Store``: the requests to a server, with fsspec as far as all servers agree; ``Upload``: a file that is sent in parts."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dtrain.storage.retry import TruncatedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """Status of a name: a file with its size, or a folder (``size`` is None). ``ranges`` is True if ranges can be read.

    ``version`` is a text that changes with every write of the file; None if the server has no such text.
    """

    size: int | None
    ranges: bool = True
    version: str | None = field(default=None, compare=False)


class Store:
    """Store of one bucket or server. The defaults are for object stores, which have no real folders.

    A file of one request is created by ``put``, and a file of many parts by an ``Upload``. Both write a random mark, which
    distinguishes the file from a file of another process if the answer of the server is lost.

    Args:
        fs: fsspec's file system.
    """

    # Options of fsspec's file system; the user's configuration overrides them by name.
    options: ClassVar[dict[str, Any]] = {"use_listings_cache": False}
    # True if folders are real and can be renamed atomically.
    supports_rename = False
    # Minimum size of the parts of an upload in bytes, except for the last part.
    part_bytes = 8 * 2**20
    # True if ranges of all files can be read.
    has_ranges = True
    # Number of parallel requests, because a single request mostly waits for the network.
    max_requests = 8

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def stat(self, key: str) -> FileStat | None:
        """Return the status of a name, or None without one."""
        try:
            info = self.fs.info(key)
        except FileNotFoundError:
            return None
        version = info.get("ETag") or info.get("etag")
        return FileStat(size=None if info["type"] == "directory" else int(info["size"]), version=version)

    def list_names(self, key: str) -> list[str]:
        """Return the names in a folder."""
        return list(self.list_sizes(key))

    def list_sizes(self, key: str) -> dict[str, int | None]:
        """Return the names in a folder with their sizes, None for a folder."""
        entries = self.fs.ls(key, detail=True)
        if not entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        found = {}
        for entry in entries:
            name = entry["name"].strip("/")
            # A folder may have an object of its own name.
            if name != key.strip("/"):
                found[name.rsplit("/", 1)[-1]] = None if entry["type"] == "directory" else int(entry["size"])
        return found

    def list_recursive(self, key: str) -> list[str]:
        """Return the keys of all files below a folder."""
        return [str(name) for name in self.fs.find(key)]

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Return all bytes ``[begin, end)`` of a file."""
        data = self._read(key, begin, end)
        if len(data) != end - begin:
            raise TruncatedError(f"the server must send {end - begin} bytes, got {len(data)}")
        return data

    def _read(self, key: str, begin: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(key, start=begin, end=end))

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        """Write a file atomically. With a mark, which the file gets, raise ``FileExistsError`` if the file exists."""
        raise NotImplementedError

    def mark_of(self, key: str) -> str | None:
        """Return the mark that a file was created with."""
        return None

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Return True if a ``put`` of this content with this mark has created the file."""
        return self.mark_of(key) == mark

    def begin_upload(self, upload: Upload) -> Any:
        """Start an upload, and return its id."""

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        """Send a part that begins at byte ``begin``, and return its tag. Threads may send parts in parallel and again."""
        raise NotImplementedError

    def finish_upload(self, upload: Upload) -> None:
        """Create the file from all parts. Raise ``FileExistsError`` if the file exists."""
        raise NotImplementedError

    def is_committed(self, upload: Upload) -> bool:
        """Return True if the name has the upload's content: ``finish_upload`` succeeded, but its answer was lost."""
        return self.mark_of(upload.key) == upload.mark

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        """Remove sent parts that are not part of a finished file."""

    def copy(self, old: str, new: str) -> None:
        """Copy a file on the server without sending its bytes. Raise ``OSError`` if the server cannot."""
        self.fs.cp_file(old, new)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder. Requires ``supports_rename``."""
        raise NotImplementedError("object stores have no folders to rename")

    def make_folder(self, key: str) -> None:
        """Create a folder, which must not exist. Without real folders, do nothing."""

    def remove(self, key: str) -> None:
        """Remove a file."""
        self.fs.rm_file(key)

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder. Without real folders, do nothing."""

    def close(self) -> None:
        """Close the connections. fsspec's file system closes its connections when it is deleted."""


class Upload:
    """Upload of a file in parts, which is not visible before ``Store.finish_upload``. The store gives ids and tags."""

    def __init__(self, store: Store, key: str) -> None:
        self.key, self.mark = key, secrets.token_hex(16)
        self._tags: dict[int, Any] = {}
        self.id = store.begin_upload(self)

    def add_part(self, number: int, tag: Any) -> None:
        """Record a sent part."""
        self._tags[number] = tag

    @property
    def tags(self) -> list[Any]:
        """Tags of all sent parts, in order."""
        return [self._tags[number] for number in sorted(self._tags)]
