"""Create, write, sync, rename, list, remove, lock and map files of this machine. The module is a ``Store`` of local paths.

Every operation is one call of ``os`` through the name ``os`` of this module. A test can replace this name to fail, kill or
record a call. Errors are ``OSError`` with the path.

Files that several processes share have locks of flock(2): the system releases a lock when the last handle is closed, however
the process ended. A handle that a fork has copied holds the same lock, so a fork must close the copied handles in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self

from dtrain.errors import ConfigError
from dtrain.storage.parallel_parts import for_each_part

Buffer = bytes | bytearray | memoryview
# Limit of the buffers of one system call.
_IOV_MAX = 1024
# The page cache writes smaller files as fast.
_DIRECT_MIN_BYTES = 16 * 2**20
# Alignment of positions, sizes and memory for O_DIRECT, which is sufficient for every common disk.
_BLOCK_BYTES = 4096
_MEMMOVE_MIN_BYTES = 64 * 2**10
_APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to an ``OSError`` of a call on a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _write_all(handle: int, data: Buffer, path: Path) -> None:
    """Write all of ``data`` at the position of the handle, in several system calls if needed."""
    rest = memoryview(data).cast("B")
    with _add_path_to_errors(path):
        while rest:
            rest = rest[os.write(handle, rest) :]


class Closing:
    """Context manager whose end calls ``close``."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the object."""
        raise NotImplementedError


def real_path(path: Path | str) -> Path:
    """Return the absolute path with resolved links: one name for one folder, which need not exist."""
    return Path(os.path.realpath(path))


def make_folders(path: Path) -> None:
    """Create the folder and its missing parents, durably as far as the folder's own entry goes."""
    if not is_folder(path):
        os.makedirs(path, exist_ok=True)
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create one folder, which must not exist."""
    os.mkdir(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _add_path_to_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def supports_rename(path: Path) -> bool:
    """Return True: a rename of a folder is atomic."""
    return True


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in one file system, atomically. A folder with content is not replaced."""
    os.rename(old, new)


def remove_folder(path: Path, *, first: str | None = None) -> None:
    """Remove a folder and its content, without following links.

    Args:
        path: folder to remove.
        first: name to remove before all other names, which the leftover of an interrupted removal therefore lacks.
    """
    names = list_names(path)
    for name in sorted(names, key=lambda name: (name != first, name)):
        entry = path / name
        if stat.S_ISDIR(os.lstat(entry).st_mode):
            remove_folder(entry)
        else:
            os.unlink(entry)
    os.rmdir(path)


def list_names(path: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(os.listdir(path))


def list_sizes(path: Path) -> dict[str, int | None]:
    """Return the names in a folder with their sizes in bytes, None for what is no regular file."""
    return {name: file_size(path / name) for name in list_names(path)}


def walk_files(path: Path) -> Iterator[tuple[str, int]]:
    """Iterate over all regular files below a folder: relative name with ``/``, and size in bytes. Links to files are files."""
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = Path(folder) / name
            size = file_size(full)
            if size is not None:
                yield full.relative_to(path).as_posix(), size


def is_folder(path: Path) -> bool:
    """Return True if there is a folder, or a link to a folder."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def exists(path: Path) -> bool:
    """Return True if the name exists, also as a dangling link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def file_size(path: Path) -> int | None:
    """Return the size in bytes of a regular file (or a link to one), or None if there is no regular file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class FileWriter(Closing):
    """New file of this machine, written sequentially. A context manager, whose end does not make the file durable.

    Raises:
        FileExistsError: the file exists.
    """

    __slots__ = ("_handle", "_path", "written")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.written = 0

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        _write_all(self._handle, data, self._path)
        self.written += memoryview(data).nbytes

    def sync(self) -> None:
        """Wait until the data are on the disk."""
        with _add_path_to_errors(self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        with _add_path_to_errors(self._path):
            os.close(self._handle)

    def write_at(self, begin: int, buffers: Sequence[Buffer]) -> None:
        """Write consecutive buffers at byte ``begin``. Threads may write ranges that do not overlap."""
        rest = [view for data in buffers if len(view := memoryview(data).cast("B"))]
        with _add_path_to_errors(self._path):
            while rest:
                count = os.pwritev(self._handle, rest[:_IOV_MAX], begin)
                begin += count
                rest = _drop_bytes(rest, count)


def _drop_bytes(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    for index, view in enumerate(buffers):
        if count < len(view):
            return [view[count:], *buffers[index + 1 :]]
        count -= len(view)
    return []


def write_file(path: Path, data: Buffer) -> None:
    """Create a file with this content. The data are on the disk when the function returns.

    Raises:
        FileExistsError: the file exists.
    """
    with FileWriter(path) as file:
        file.write(data)
        file.sync()


def create_file(path: Path, data: Buffer) -> None:
    """Create a file as ``write_file`` does, with a durable name. If several processes try, one of them succeeds."""
    write_file(path, data)
    sync_folder(path.parent)


def replace_file(path: Path, data: Buffer) -> None:
    """Replace the content of a file durably and atomically: a reader gets the old content or the new content."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_file(temporary, data)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file or a link. The removal is durable when the folder is synced."""
    os.unlink(path)


def link_file(old: Path, new: Path) -> None:
    """Create the hard link ``new`` to a file.

    Raises:
        OSError: ``new`` exists, or the file system does not support the link (another device, some network shares).
    """
    os.link(old, new, follow_symlinks=False)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user can write on the file system of ``path``, which need not exist."""
    while not exists(path) and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class LocalFileReader(Closing):
    """Regular file, read by ranges.

    Raises:
        OSError: there is no regular file. A pipe is refused without waiting.
    """

    __slots__ = ("_handle", "_path", "size")

    # True if each read is a request to a server, and True if ranges can be read.
    is_remote, ranges = False, True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise OSError(f"not a regular file: {path}")
        self.size = status.st_size

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes, which is smaller only at the end of the file.

        Mutates: ``out``.
        """
        done = 0
        with _add_path_to_errors(self._path):
            while done < len(out):
                count = os.preadv(self._handle, [out[done:]], begin + done)
                if count == 0:
                    break
                done += count
        return done

    def version(self) -> str:
        """Return the version: size, times of the last write and of the last change of the file's status, and number."""
        status = os.fstat(self._handle)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_dev} {status.st_ino}"

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def write_parts(path: Path, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file from consecutive parts, as ``files.write_parts`` describes.

    Raises:
        OSError: the first error, after all threads have ended. The file is left incomplete.
    """
    begins = list(accumulate(sizes, initial=0))
    with FileWriter(path) as file, _DirectWriter(path, enabled=begins[-1] >= _DIRECT_MIN_BYTES) as direct:

        def write(number: int) -> None:
            buffers = [memoryview(data).cast("B") for data in part_of(number)]
            assert sum(map(len, buffers)) == sizes[number], f"the size of part {number} differs from its declared size"
            with _add_path_to_errors(path):
                done = direct.write_at(begins[number], buffers)
            if done < sizes[number]:
                file.write_at(begins[number] + done, _drop_bytes(buffers, done))

        for_each_part(len(sizes), write, threads=threads, name="dtrain-write")
        file.sync()


class _DirectWriter(Closing):
    """Second handle on a file that is being written, opened with O_DIRECT, which bypasses the page cache.

    Copying data that are not read again soon costs more than the disk. The handle writes whole blocks at block boundaries. The
    caller must write all other data through the first handle. If the file system does not support O_DIRECT, or if not
    ``enabled``, no data are written.

    Source: the notes on O_DIRECT in open(2) of the Linux man-pages.
    """

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._handle: int | None = None
        self._unsupported = False
        self._memory = threading.local()
        if enabled and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                self._handle = os.open(path, os.O_WRONLY | os.O_DIRECT)

    def write_at(self, begin: int, buffers: Sequence[memoryview]) -> int:
        """Write consecutive buffers at byte ``begin``. Threads may write ranges that do not overlap.

        Returns:
            The number of bytes written, from the first byte on.
        """
        size = sum(map(len, buffers))
        if self._handle is None or self._unsupported or begin % _BLOCK_BYTES or size % _BLOCK_BYTES or not size:
            return 0
        view, done = self._gather(buffers, size), 0
        while done < size:
            try:
                count = os.pwritev(self._handle, [view[done:]], begin + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system supports O_DIRECT, but not this alignment.
                self._unsupported = True
                return done
            done += count
            if count % _BLOCK_BYTES:
                break
        return done

    def _gather(self, buffers: Sequence[memoryview], size: int) -> memoryview:
        """Return the bytes in page-aligned memory: the buffer itself, or a copy in memory of the thread."""
        first = buffers[0]
        if len(buffers) == 1 and not first.readonly and _address_of(first) % _BLOCK_BYTES == 0:
            return first
        memory = getattr(self._memory, "own", None)
        if memory is None or len(memory) < size:
            memory = self._memory.own = mmap.mmap(-1, size)
        begin = 0
        for data in buffers:
            end = begin + len(data)
            if data.readonly or len(data) < _MEMMOVE_MIN_BYTES:
                memory[begin:end] = data
            else:
                # memmove releases the GIL.
                ctypes.memmove(_address_of(memory, begin), _address_of(data), len(data))
            begin = end
        return memoryview(memory)[:size]

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


def _address_of(data: mmap.mmap | memoryview, begin: int = 0) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data, begin))


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file. A missing file is created with its folders.

    A killed writer may have left an incomplete line, which is ended first.
    """
    try:
        handle = os.open(path, _APPEND_FLAGS, 0o644)
    # The folder is created only after an error, because every microsecond of this function counts.
    except FileNotFoundError:
        make_folders(path.parent)
        handle = os.open(path, _APPEND_FLAGS, 0o644)
    try:
        with _add_path_to_errors(path):
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        _write_all(handle, ("\n" * torn + line + "\n").encode(), path)
    finally:
        os.close(handle)


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
    files = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                files.append(FolderEntry(name=entry.name, size=status.st_size, modified_ns=status.st_mtime_ns))
    return files


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


class LockableFile(Closing):
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
        self._handle: int | None = self._open(path, mode)

    @staticmethod
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
        _write_all(self.fileno, data, self._path)

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

    def close(self) -> None:
        """Close the handle. A second call does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)
