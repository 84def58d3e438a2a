"""What every server is asked, and the answers of those that fsspec makes look alike."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.storage.retry import TruncatedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What a name stands for: a file with its size, or a folder (``size`` is None). ``ranges``: parts of it can be read."""

    size: int | None
    ranges: bool = True


class Upload(Protocol):
    """A file on its way to the server in parts, which nobody sees before ``finish``."""

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        """Send a part: its number from 0 on, the byte it begins at. Threads may send several at a time, and each again."""

    def finish(self) -> None:
        """Make the file of all parts. ``FileExistsError`` when the name is taken."""

    def is_committed(self) -> bool:
        """Whether the name has this upload's content: ``finish`` was done, though the answer was lost."""

    def clean_up(self, *, finished: bool) -> None:
        """Remove what was sent and is no part of a finished file."""


class Store(Protocol):
    """One bucket, or one server. Keys are names from the top, ``RemotePath.key``."""

    supports_rename: bool
    """Whether folders are real and can be given another name, all at once."""

    part_bytes: int
    """Parts of an upload have at least so many bytes, but for the last."""

    max_requests: int
    """So many requests at a time, since one alone mostly waits for the network."""

    def stat(self, key: str) -> FileStat | None:
        """What the name stands for, if anything."""

    def list_names(self, key: str) -> list[str]:
        """Names in a folder."""

    def list_recursive(self, key: str) -> list[str]:
        """Keys of all files below a folder."""

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)`` of a file, all of them."""

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        """Set the content of a file at once. With a mark, which the file gets, ``FileExistsError`` when there is a file."""

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Whether the file is there by a ``put`` of this content with this mark."""

    def upload(self, key: str, count: int) -> Upload:
        """Begin a new file of ``count`` parts."""

    def copy(self, old: str, new: str) -> None:
        """Make ``new`` the same as ``old`` without sending its bytes. ``OSError`` where the server does not."""

    def rename(self, old: str, new: str) -> None:
        """Give a file or folder another name. Only where ``renames``."""

    def make_folder(self, key: str) -> None:
        """Create a folder that must not exist; nothing where folders are not real."""

    def remove(self, key: str) -> None:
        """Remove a file."""

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder; nothing where folders are not real."""

    def close(self) -> None:
        """Let go of the connections."""


class ObjectStore:
    """A store without real folders, through its fsspec file system. ``put`` and ``upload`` are each server's own."""

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
        found = (entry["name"].strip("/") for entry in entries)
        return [name.rsplit("/", 1)[-1] for name in found if name != key.strip("/")]  # a folder may have an object of its name

    def list_recursive(self, key: str) -> list[str]:
        return [str(name) for name in self.fs.find(key)]

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        data = bytes(self.fs.cat_file(key, start=begin, end=end))
        if len(data) != end - begin:
            raise TruncatedError(f"{len(data)} bytes came of {end - begin}")
        return data

    def copy(self, old: str, new: str) -> None:
        self.fs.cp_file(old, new)

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("objects have no folders to rename")

    def make_folder(self, key: str) -> None:
        """Nothing: a folder is there when something is in it."""

    def remove(self, key: str) -> None:
        self.fs.rm_file(key)

    def remove_folder(self, key: str) -> None:
        """Nothing: it has gone with what was in it."""

    def close(self) -> None:
        """Nothing; the file system's own end closes its connections."""
