"""Open files that several processes of this machine share: locks, memory maps and private folders.

As in ``local``, every operation is one call of ``os``, through the name ``os`` of this module. Locks are locks of flock(2): the
system releases a lock when the last handle is closed, however the process ended. A handle that a fork has copied holds the same
lock, so a fork must close the copied handles in the child.
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
    """Regular file in a folder: name, size in bytes, and time of the last use or write in nanoseconds."""

    name: str
    size: int
    modified_ns: int


def scan_folder(path: Path) -> list[FolderEntry]:
    """Return the regular files in a folder. Files that are removed meanwhile are skipped."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(FolderEntry(name=entry.name, size=status.st_size, modified_ns=status.st_mtime_ns))
    return found


def walk_files(path: Path) -> Iterator[tuple[str, int]]:
    """Iterate over all regular files below a folder: relative name with ``/``, and size in bytes. Links to files are files."""
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = Path(folder) / name
            size = local.file_size(full)
            if size is not None:
                yield full.relative_to(path).as_posix(), size


def modified_ns(path: Path) -> int | None:
    """Return the time of the last write in nanoseconds, or None if there is no file."""
    try:
        return os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user can access, unless the folder exists.

    Raises:
        ConfigError: the folder exists and belongs to another user. Such a folder in a shared place is not safe.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(f"{path} must be a folder of this user (uid {os.getuid()}). Name another folder.") from None


# A link is refused, and a pipe is not waited for.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK


def _open(path: Path, mode: OpenMode) -> int:
    if mode == "new":
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # An existing file is opened without O_CREAT, which systems refuse for files of other users in /tmp.
        handle = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    except FileNotFoundError:
        if mode == "read":
            raise
        handle = os.open(path, os.O_RDONLY | os.O_CREAT | _OPEN_FLAGS, 0o644)
    except OSError as error:
        # A link raises ELOOP, a socket ENXIO.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(errno.EINVAL, _NO_FILE, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return handle


class LockableFile:
    """Open file that can be locked. A context manager.

    Args:
        path: path of the file.
        mode: ``"read"`` opens an existing file; ``"lock"`` creates a missing file, which is never written; ``"new"`` creates a
            file to write, which must not exist.

    Raises:
        FileNotFoundError: no file to read. FileExistsError: the new file exists.
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
        """Size in bytes."""
        return os.fstat(self.fileno).st_size

    @property
    def is_linked(self) -> bool:
        """True if the file is still in a folder. Another process may have removed the file between opening and locking."""
        return os.fstat(self.fileno).st_nlink > 0

    def lock(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Lock the file, exclusively or shared, and wait for the lock if ``wait``. Return True if locked."""
        flags = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self.fileno, flags)
        except BlockingIOError:
            return False
        return True

    def touch(self) -> None:
        """Set the time of the last use, unless the file belongs to another user or the disk is read-only."""
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
        """Remove the content of the file."""
        os.ftruncate(self.fileno, 0)
        os.lseek(self.fileno, 0, os.SEEK_SET)

    def map_memory(self) -> memoryview:
        """Map the file into memory. The view and its slices stay readable, and keep a lock, until they are released."""
        size = self.size
        if size == 0:
            return memoryview(b"")
        # The map has a copy of the handle.
        return memoryview(mmap.mmap(self.fileno, size, access=mmap.ACCESS_READ))

    def __enter__(self) -> LockableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle. A second call does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)
