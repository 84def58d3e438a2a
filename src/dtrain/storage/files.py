"""The operations on files, for places of this machine and on servers alike: each is done by ``local`` or by ``remote``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from dtrain.storage import file_lock, local, remote
from dtrain.storage.local import Buffer
from dtrain.storage.path import AnyPath, RemotePath


def supports_rename(path: AnyPath) -> bool:
    """Whether a folder there can be given another name at once, so that a rename commits.

    Not so on object stores: there, what counts as there has to be the file that is put last, by ``create_file``.
    """
    return remote.supports_rename(path) if isinstance(path, RemotePath) else True


def exists(path: AnyPath) -> bool:
    """Whether the name exists, whatever it is (a dangling link does)."""
    return remote.exists(path) if isinstance(path, RemotePath) else local.exists(path)


def is_folder(path: AnyPath) -> bool:
    """Whether there is a folder (or a link to one); on object stores, whether there is anything in it."""
    return remote.is_folder(path) if isinstance(path, RemotePath) else local.is_folder(path)


def file_size(path: AnyPath) -> int | None:
    """Bytes of a regular file (or a link to one); None when there is none, or something else of that name."""
    return remote.file_size(path) if isinstance(path, RemotePath) else local.file_size(path)


def list_names(path: AnyPath) -> list[str]:
    """The names in a folder, sorted. ``FileNotFoundError`` when there is no such folder."""
    return remote.list_names(path) if isinstance(path, RemotePath) else local.list_names(path)


def walk_files(path: AnyPath) -> Iterator[tuple[str, int]]:
    """Every file below a folder: its name relative to it, with ``/``, and its bytes. Web servers tell of one folder only."""
    return remote.walk_files(path) if isinstance(path, RemotePath) else file_lock.walk_files(path)


def make_folders(path: AnyPath) -> None:
    """Create the folder and its parents where missing, durably as far as the folder's own entry goes."""
    remote.make_folders(path) if isinstance(path, RemotePath) else local.make_folders(path)


def make_folder(path: AnyPath) -> None:
    """Create one folder that must not exist yet. On object stores there is nothing to do, and nothing is checked."""
    remote.make_folder(path) if isinstance(path, RemotePath) else local.make_folder(path)


def sync_folder(path: AnyPath) -> None:
    """Make the names in a folder durable. On a server they are when it has answered."""
    if not isinstance(path, RemotePath):
        local.sync_folder(path)


def rename(old: AnyPath, new: AnyPath) -> None:
    """Give a file or folder another name in the same place, atomically. A folder with content is not replaced.

    Only where ``renames``.
    """
    if isinstance(old, RemotePath) and isinstance(new, RemotePath):
        remote.rename(old, new)
    else:
        assert not isinstance(old, RemotePath), f"{old} and {new} are in different places"
        assert not isinstance(new, RemotePath), f"{old} and {new} are in different places"
        local.rename(old, new)


def remove_folder(path: AnyPath, *, first: str | None = None) -> None:
    """Remove a folder and all below it, never following links.

    Args:
        path: the folder.
        first: a name in it that goes before all others, so that what an interrupted removal leaves lacks it.
    """
    remote.remove_folder(path, first=first) if isinstance(path, RemotePath) else local.remove_folder(path, first=first)


def remove_file(path: AnyPath) -> None:
    """Remove one file."""
    remote.remove_file(path) if isinstance(path, RemotePath) else local.remove_file(path)


def write_file(path: AnyPath, data: Buffer) -> None:
    """Create a file with this content, on the disk when this returns.

    Raises:
        FileExistsError: the name is taken.
    """
    remote.create_file(path, data) if isinstance(path, RemotePath) else local.write_file(path, data)


def create_file(path: AnyPath, data: Buffer) -> None:
    """``write_file``, durably as far as the name goes, too: of several that try, one succeeds.

    On a server it is read back, and an answer that was lost is no failure.
    """
    remote.create_file(path, data) if isinstance(path, RemotePath) else local.create_file(path, data)


def replace_file(path: AnyPath, data: Buffer) -> None:
    """Give the file this content, durably; whoever reads meanwhile gets the old content or the new, whole."""
    remote.replace_file(path, data) if isinstance(path, RemotePath) else local.replace_file(path, data)


def link_file(old: AnyPath, new: AnyPath) -> None:
    """Make ``new`` the same file as ``old`` without writing it: one more name, or a copy that the server makes by itself.

    Raises:
        OSError: ``new`` is taken, or the place knows nothing of the kind.
    """
    if isinstance(old, RemotePath) and isinstance(new, RemotePath):
        remote.link_file(old, new)
    else:
        assert not isinstance(old, RemotePath), f"{old} and {new} are in different places"
        assert not isinstance(new, RemotePath), f"{old} and {new} are in different places"
        local.link_file(old, new)


def free_bytes(path: AnyPath) -> int | None:
    """Bytes that can still be written where ``path`` is, or will be; None when that is not known, as on servers."""
    return None if isinstance(path, RemotePath) else local.free_bytes(path)


def write_parts(path: AnyPath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file of parts that lie one after the other, on the disk when this returns.

    Args:
        path: a name that is not taken.
        sizes: bytes of each part.
        part_of: called once per part, in no fixed order, from the thread that writes it (which may as well compute a digest):
            the part's bytes in one or more buffers, which nobody changes until this returns.
        threads: that write side by side; with 1 no thread is started. To a server up to eight send, whatever is given.

    Raises:
        OSError: the first one, when no thread writes any more. What is there of a local file by then stays; on a server there
            is none.
    """
    if isinstance(path, RemotePath):
        remote.write_parts(path, sizes, part_of, threads=threads)
    else:
        local.write_parts(path, sizes, part_of, threads=threads)


class FileWriter:
    """A new file, written from its beginning to its end. A context manager; leaving it does not make the file durable.

    On a server the file is there when it has been synced, once, at the end; until then its content is held.

    Raises:
        FileExistsError: the name is taken.
    """

    __slots__ = ("_file",)

    def __init__(self, path: AnyPath) -> None:
        self._file = remote.RemoteFileWriter(path) if isinstance(path, RemotePath) else local.LocalFileWriter(path)

    @property
    def written(self) -> int:
        """Bytes so far."""
        return self._file.written

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        self._file.write(data)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        self._file.sync()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


class FileReader:
    """A regular file, read by ranges. A context manager.

    Args:
        path: of the file.
        quiet: show no progress: for what goes on in the background.

    Raises:
        OSError: there is no such file, or it is no regular file (a pipe is refused, not waited for).
    """

    __slots__ = ("_file", "is_remote", "ranges", "size")

    def __init__(self, path: AnyPath, *, quiet: bool = False) -> None:
        self._file = remote.RemoteFileReader(path, quiet=quiet) if isinstance(path, RemotePath) else local.LocalFileReader(path)
        self.is_remote = isinstance(path, RemotePath)  # a request costs more than the bytes of many small reads
        self.size = self._file.size
        self.ranges = not isinstance(self._file, remote.RemoteFileReader) or self._file.ranges  # else it is read whole, at once

    def read_into(self, begin: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``begin`` on. Returns how many bytes there were, fewer only at the end of the file.

        Mutates: ``out``.
        """
        return self._file.read_into(begin, out)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def read_file(path: AnyPath, *, limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        OSError: no regular file, or a larger one.
    """
    with FileReader(path) as file:
        if file.size > limit:
            raise OSError(f"{path} has {file.size} bytes, at most {limit} are read")
        out = bytearray(file.size)
        return bytes(out[: file.read_into(0, memoryview(out))])
