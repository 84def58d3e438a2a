"""Files of this machine: create, write, sync, rename, list, remove, read a range.

Every operation is one call of ``os``, made through the name ``os`` of this module, so that a test can fail, kill or record
the k-th one by putting something else in its place. Errors are ``OSError`` that carry the path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

Buffer = bytes | bytearray | memoryview


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path into an ``OSError`` of a call that knew only a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def real_path(path: Path | str) -> Path:
    """``path`` made absolute, with links resolved: one name for one folder, whether or not it exists."""
    return Path(os.path.realpath(path))


def make_folders(path: Path) -> None:
    """Create the folder and its parents where missing, durably as far as the folder's own entry goes."""
    if not is_folder(path):
        os.makedirs(path, exist_ok=True)
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create one folder that must not exist yet."""
    os.mkdir(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in the same file system, atomically. A folder with content is not replaced."""
    os.rename(old, new)


def remove_folder(path: Path, *, first: str | None = None) -> None:
    """Remove a folder and all below it, never following links.

    Args:
        path: the folder.
        first: a name in it that goes before all others, so that what an interrupted removal leaves lacks it.
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
    """The names in a folder, sorted."""
    return sorted(os.listdir(path))


def is_folder(path: Path) -> bool:
    """Whether there is a folder (or a link to one)."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def exists(path: Path) -> bool:
    """Whether the name exists, whatever it is (a dangling link does)."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def file_size(path: Path) -> int | None:
    """Bytes of a regular file (or a link to one); None when there is none, or something else of that name."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class FileWriter:
    """A new file, written from its beginning to its end. A context manager; leaving it does not make the file durable.

    Raises:
        FileExistsError: the name is taken.
    """

    __slots__ = ("_handle", "_path", "written")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.written = 0

    def write(self, data: Buffer) -> None:
        """Append all of ``data``; the system may take it in several calls."""
        rest = memoryview(data).cast("B")
        with _naming(self._path):
            while rest:
                taken = os.write(self._handle, rest)
                self.written += taken
                rest = rest[taken:]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with _naming(self._path):
            os.fsync(self._handle)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _naming(self._path):
            os.close(self._handle)


def write_file(path: Path, data: Buffer) -> None:
    """Create a file with this content, on the disk when this returns."""
    with FileWriter(path) as file:
        file.write(data)
        file.sync()


class FileReader:
    """A regular file, read by ranges. A context manager.

    Raises:
        OSError: there is no such file, or it is no regular file (a pipe is refused, not waited for).
    """

    __slots__ = ("_handle", "_path", "size")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        found = os.fstat(self._handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._handle)
            raise OSError(f"not a regular file: {path}")
        self.size = found.st_size

    def read_into(self, begin: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``begin`` on. Returns how many bytes there were, fewer only at the end of the file.

        Mutates: ``out``.
        """
        done = 0
        with _naming(self._path):
            while done < len(out):
                got = os.preadv(self._handle, [out[done:]], begin + done)
                if got == 0:
                    break
                done += got
        return done

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._handle)


def read_file(path: Path, *, limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        OSError: no regular file, or a larger one.
    """
    with FileReader(path) as file:
        if file.size > limit:
            raise OSError(f"{path} has {file.size} bytes, at most {limit} are read")
        out = bytearray(file.size)
        return bytes(out[: file.read_into(0, memoryview(out))])


def append_line(path: Path, line: str) -> None:
    """Append one line to a text file, which is created where missing, with its folders.

    A writer that was killed may have left half a line: it is ended first, so that this one is whole.
    """
    make_folders(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with _naming(path):
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            rest = memoryview(("\n" * torn + line + "\n").encode())
            while rest:
                rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)
