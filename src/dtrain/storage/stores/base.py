"""Define the requests to every kind of server (``Store``, ``Upload``), and implement common requests with fsspec."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.storage.retry import TruncatedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """Status of a name: a file with its size, or a folder (``size`` is None). ``ranges`` is True if ranges can be read."""

    size: int | None
    ranges: bool = True


class Upload(Protocol):
    """Upload of a file in parts, which is not visible before ``finish``."""

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        """Send part ``number`` (from 0 on), which begins at byte ``begin``. Threads may send parts in parallel and again."""

    def finish(self) -> None:
        """Create the file from all parts. Raise ``FileExistsError`` if the file exists."""

    def is_committed(self) -> bool:
        """Return True if the name has this upload's content: ``finish`` succeeded, but its answer was lost."""

    def clean_up(self, *, finished: bool) -> None:
        """Remove sent parts that are not part of a finished file."""


class Store(Protocol):
    """Store of one bucket or server. Keys are names from the top, ``RemotePath.key``."""

    supports_rename: bool
    """True if folders are real and can be renamed atomically."""

    part_bytes: int
    """Minimum size of the parts of an upload in bytes, except for the last part."""

    max_requests: int
    """Number of parallel requests, because a single request mostly waits for the network."""

    def stat(self, key: str) -> FileStat | None:
        """Return the status of a name, or None without one."""

    def list_names(self, key: str) -> list[str]:
        """Return the names in a folder."""

    def list_recursive(self, key: str) -> list[str]:
        """Return the keys of all files below a folder."""

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Return all bytes ``[begin, end)`` of a file."""

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        """Write a file atomically. With a mark, which the file gets, raise ``FileExistsError`` if the file exists."""

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Return True if a ``put`` of this content with this mark has created the file."""

    def upload(self, key: str, count: int) -> Upload:
        """Start a new file of ``count`` parts."""

    def copy(self, old: str, new: str) -> None:
        """Copy a file on the server without sending its bytes. Raise ``OSError`` if the server cannot."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder. Requires ``supports_rename``."""

    def make_folder(self, key: str) -> None:
        """Create a folder, which must not exist. Without real folders, do nothing."""

    def remove(self, key: str) -> None:
        """Remove a file."""

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder. Without real folders, do nothing."""

    def close(self) -> None:
        """Close the connections."""


class ObjectStore:
    """Store without real folders, with fsspec's file system. Subclasses implement ``put`` and ``upload``."""

    supports_rename = False
    part_bytes = 8 * 2**20
    max_requests = 8

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def stat(self, key: str) -> FileStat | None:
        try:
            info = self.fs.info(key)
        except FileNotFoundError:
            return None
        return FileStat(size=None if info["type"] == "directory" else int(info["size"]))

    def list_names(self, key: str) -> list[str]:
        entries = self.fs.ls(key, detail=True)
        if not entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        names = (entry["name"].strip("/") for entry in entries)
        # A folder may have an object of its own name.
        return [name.rsplit("/", 1)[-1] for name in names if name != key.strip("/")]

    def list_recursive(self, key: str) -> list[str]:
        return [str(name) for name in self.fs.find(key)]

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        data = bytes(self.fs.cat_file(key, start=begin, end=end))
        if len(data) != end - begin:
            raise TruncatedError(f"the server must send {end - begin} bytes, got {len(data)}")
        return data

    def copy(self, old: str, new: str) -> None:
        self.fs.cp_file(old, new)

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("object stores have no folders to rename")

    def make_folder(self, key: str) -> None:
        """Do nothing: a folder exists if it has content."""

    def remove(self, key: str) -> None:
        self.fs.rm_file(key)

    def remove_folder(self, key: str) -> None:
        """Do nothing: a folder without content does not exist."""

    def close(self) -> None:
        """Do nothing: the file system closes its connections when it is deleted."""
