"""Files that several processes of this machine use at a time: locks that end with their holder, memory maps, private folders.

As in ``local`` every operation is one call of ``os``, through the name ``os`` of this module. Locks are those of flock(2): the
system takes them back when the last handle is closed, however the process ended. A handle that a fork has copied is the same
holder, so whoever forks while it has some closes them in the child.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from dtrain.errors import ConfigError
from dtrain.storage import local
from dtrain.storage.local import Buffer

OpenMode = Literal["read", "lock", "new"]
_NO_FILE = "is not a regular file, but a link, pipe, device, socket or folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """A regular file in a folder: its name, bytes, and when it was last used or written, in nanoseconds."""

    name: str
    size: int
    modified_ns: int


def scan_folder(path: Path) -> list[FolderEntry]:
    """The regular files in a folder. What goes away meanwhile is left out."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(about.st_mode):
                found.append(FolderEntry(name=entry.name, size=about.st_size, modified_ns=about.st_mtime_ns))
    return found


def walk_files(path: Path) -> Iterator[tuple[str, int]]:
    """Every regular file below a folder: its name relative to it, with ``/``, and its bytes. Links to files are files."""
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = Path(folder) / name
            size = local.file_size(full)
            if size is not None:
                yield full.relative_to(path).as_posix(), size


def modified_ns(path: Path) -> int | None:
    """When the file was last written, in nanoseconds; None when there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can use, if it is not there.

    Raises:
        ConfigError: it is there and somebody else's: in a place where all may write, that is not to be trusted.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{path} is not a folder of this user (uid {os.getuid()}); give another place") from None


_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK  # a link is refused, and a pipe not waited for


def _open(path: Path, how: OpenMode) -> int:
    if how == "new":
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        handle = os.open(
            path, os.O_RDONLY | _OPEN_FLAGS
        )  # not made if it is there: systems refuse that for others' files in /tmp
    except FileNotFoundError:
        if how == "read":
            raise
        handle = os.open(path, os.O_RDONLY | os.O_CREAT | _OPEN_FLAGS, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise OSError(errno.EINVAL, _NO_FILE, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return handle


class LockableFile:
    """An open file that can be locked. A context manager.

    Args:
        path: of the file.
        mode: ``"read"`` one that exists; ``"lock"`` one that is made if it is missing and never written; ``"new"`` one that must
            not exist, to write.

    Raises:
        FileNotFoundError: nothing to read. FileExistsError: the new name is taken.
        OSError: a link, or no regular file.
    """

    __slots__ = ("_handle", "_path")

    def __init__(self, path: Path, mode: OpenMode = "read") -> None:
        self._path = path
        self._handle: int | None = _open(path, mode)

    @property
    def fileno(self) -> int:
        assert self._handle is not None, f"{self._path} is closed"
        return self._handle

    @property
    def size(self) -> int:
        """Bytes it has."""
        return os.fstat(self.fileno).st_size

    @property
    def is_linked(self) -> bool:
        """Whether it still stands in a folder: somebody may have removed it between opening and locking."""
        return os.fstat(self.fileno).st_nlink > 0

    def lock(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Take the lock, for oneself or with others that share it. Returns whether that was possible; waits if told to."""
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self.fileno, how)
        except BlockingIOError:
            return False
        return True

    def touch(self) -> None:
        """Note that it is used now. Nothing where it is somebody else's, or on a disk that is only read."""
        try:
            os.utime(self.fileno)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.EROFS):
                raise

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        rest = memoryview(data).cast("B")
        with local._add_path_to_errors(self._path):
            while rest:
                rest = rest[os.write(self.fileno, rest) :]

    def truncate(self) -> None:
        """Begin again with an empty file."""
        os.ftruncate(self.fileno, 0)
        os.lseek(self.fileno, 0, os.SEEK_SET)

    def map_memory(self) -> memoryview:
        """Its bytes, mapped into memory. They stay readable, and a lock stays taken, until the view and its slices are gone."""
        size = self.size
        if size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fileno, size, access=mmap.ACCESS_READ))  # which has a copy of the handle

    def __enter__(self) -> LockableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the handle; more than once is fine."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)
