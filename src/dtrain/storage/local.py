"""Create, write, sync, rename, list, remove and read files of this machine.

Every operation is one call of ``os`` through the name ``os`` of this module. A test can replace this name to fail, kill or
record a call. Errors are ``OSError`` with the path.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from dtrain.storage.o_direct import DirectWriter
from dtrain.storage.parallel_parts import for_each_part

Buffer = bytes | bytearray | memoryview
# Limit of the buffers of one system call.
_IOV_MAX = 1024
# The page cache writes smaller files as fast.
_DIRECT_MIN_BYTES = 16 * 2**20
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


class LocalFileWriter:
    """New file, written sequentially. A context manager, whose end does not make the file durable.

    Raises:
        FileExistsError: the file exists.
    """

    __slots__ = ("_handle", "_path", "written")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.written = 0

    def write(self, data: Buffer) -> None:
        """Append all of ``data``, in several system calls if needed."""
        rest = memoryview(data).cast("B")
        with _add_path_to_errors(self._path):
            while rest:
                count = os.write(self._handle, rest)
                self.written += count
                rest = rest[count:]

    def sync(self) -> None:
        """Wait until the data are on the disk."""
        with _add_path_to_errors(self._path):
            os.fsync(self._handle)

    def __enter__(self) -> LocalFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
    with LocalFileWriter(path) as file:
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


class LocalFileReader:
    """Regular file, read by ranges.

    Raises:
        OSError: there is no regular file. A pipe is refused without waiting.
    """

    __slots__ = ("_handle", "_path", "size")

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
    with LocalFileWriter(path) as file, DirectWriter(path, os, enabled=begins[-1] >= _DIRECT_MIN_BYTES) as direct:

        def write(part: int) -> None:
            buffers = [memoryview(data).cast("B") for data in part_of(part)]
            assert sum(map(len, buffers)) == sizes[part], f"the size of part {part} differs from its declared size"
            with _add_path_to_errors(path):
                done = direct.write_at(begins[part], buffers)
            if done < sizes[part]:
                file.write_at(begins[part] + done, _drop_bytes(buffers, done))

        for_each_part(len(sizes), write, threads=threads, name="dtrain-write")
        file.sync()


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
            rest = memoryview(("\n" * torn + line + "\n").encode())
            while rest:
                rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)
