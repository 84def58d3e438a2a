"""Files of this machine: create, write, sync, rename, list, remove, read a range.

Every operation is one call of ``os``, made through the name ``os`` of this module, so that a test can fail, kill or record
the k-th one by putting something else in its place. Errors are ``OSError`` that carry the path.
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
_IOV_MAX = 1024  # that the system takes in one call (IOV_MAX)
_DIRECT_MIN_BYTES = 16 * 2**20  # bytes of a file: what is smaller, the page cache takes as fast
_APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
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
        with _add_path_to_errors(path):
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


class LocalFileWriter:
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
        with _add_path_to_errors(self._path):
            while rest:
                taken = os.write(self._handle, rest)
                self.written += taken
                rest = rest[taken:]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with _add_path_to_errors(self._path):
            os.fsync(self._handle)

    def __enter__(self) -> LocalFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        with _add_path_to_errors(self._path):
            os.close(self._handle)

    def write_at(self, begin: int, buffers: Sequence[Buffer]) -> None:
        """Put the buffers one after the other at byte ``begin``. Threads may call it for ranges that do not overlap."""
        rest = [view for data in buffers if len(view := memoryview(data).cast("B"))]
        with _add_path_to_errors(self._path):
            while rest:
                taken = os.pwritev(self._handle, rest[:_IOV_MAX], begin)
                begin += taken
                rest = _drop_bytes(rest, taken)


def _drop_bytes(buffers: list[memoryview], taken: int) -> list[memoryview]:
    """What is left of the buffers when their first ``taken`` bytes are gone."""
    for index, view in enumerate(buffers):
        if taken < len(view):
            return [view[taken:], *buffers[index + 1 :]]
        taken -= len(view)
    return []


def write_file(path: Path, data: Buffer) -> None:
    """Create a file with this content, on the disk when this returns.

    Raises:
        FileExistsError: the name is taken.
    """
    with LocalFileWriter(path) as file:
        file.write(data)
        file.sync()


def create_file(path: Path, data: Buffer) -> None:
    """``write_file``, durably as far as the name goes, too: of several that try, one succeeds."""
    write_file(path, data)
    sync_folder(path.parent)


def replace_file(path: Path, data: Buffer) -> None:
    """Give the file this content, durably; whoever reads meanwhile gets the old content or the new, whole."""
    side = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_file(side, data)
        os.rename(side, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(side)
        raise
    sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove one file, or a link; its name is gone for good when the folder is synced."""
    os.unlink(path)


def link_file(old: Path, new: Path) -> None:
    """Give a file one more name, ``new``, without copying it.

    Raises:
        OSError: ``new`` is taken, or the file system has no such links (other devices, some network shares).
    """
    os.link(old, new, follow_symlinks=False)


def free_bytes(path: Path) -> int | None:
    """Bytes that this user can still write where ``path`` is, or will be; None when that is not known."""
    while not exists(path) and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class LocalFileReader:
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
        with _add_path_to_errors(self._path):
            while done < len(out):
                got = os.preadv(self._handle, [out[done:]], begin + done)
                if got == 0:
                    break
                done += got
        return done

    def __enter__(self) -> LocalFileReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


def write_parts(path: Path, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file of parts that lie one after the other, on the disk when this returns; as ``files.write_parts`` has it.

    Raises:
        OSError: the first one, when no thread writes any more. What is there of the file by then stays.
    """
    begins = list(accumulate(sizes, initial=0))
    with LocalFileWriter(path) as file, DirectWriter(path, os, enabled=begins[-1] >= _DIRECT_MIN_BYTES) as direct:

        def write(part: int) -> None:
            buffers = [memoryview(data).cast("B") for data in part_of(part)]
            assert sum(map(len, buffers)) == sizes[part], f"part {part} has another size than announced"
            with _add_path_to_errors(path):
                done = direct.write_at(begins[part], buffers)
            if done < sizes[part]:
                file.write_at(begins[part] + done, _drop_bytes(buffers, done))

        for_each_part(len(sizes), write, threads=threads, name="dtrain-write")
        file.sync()


def append_line(path: Path, line: str) -> None:
    """Append one line to a text file, which is created where missing, with its folders.

    A writer that was killed may have left half a line: it is ended first, so that this one is whole.
    """
    try:
        handle = os.open(path, _APPEND_FLAGS, 0o644)
    except FileNotFoundError:  # looked for only then: this is called where every microsecond counts
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
