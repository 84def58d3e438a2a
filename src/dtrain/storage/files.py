"""Operate on files of this machine (``local``) and of servers (``remote``), which are two stores of one protocol, ``Store``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from dtrain.storage import local, remote
from dtrain.storage.local import Buffer, Closing
from dtrain.storage.path import AnyPath, RemotePath

PathT = TypeVar("PathT", contravariant=True)


class Store(Protocol[PathT]):
    """Module with the operations of one kind of path. The functions of this module describe the operations."""

    def supports_rename(self, path: PathT, /) -> bool: ...
    def exists(self, path: PathT, /) -> bool: ...
    def is_folder(self, path: PathT, /) -> bool: ...
    def file_size(self, path: PathT, /) -> int | None: ...
    def free_bytes(self, path: PathT, /) -> int | None: ...
    def list_names(self, path: PathT, /) -> list[str]: ...
    def list_sizes(self, path: PathT, /) -> dict[str, int | None]: ...
    def walk_files(self, path: PathT, /) -> Iterator[tuple[str, int]]: ...
    def make_folders(self, path: PathT, /) -> None: ...
    def make_folder(self, path: PathT, /) -> None: ...
    def sync_folder(self, path: PathT, /) -> None: ...
    def rename(self, old: PathT, new: PathT, /) -> None: ...
    def link_file(self, old: PathT, new: PathT, /) -> None: ...
    def remove_folder(self, path: PathT, /, *, first: str | None = None) -> None: ...
    def remove_file(self, path: PathT, /) -> None: ...
    def write_file(self, path: PathT, data: Buffer, /) -> None: ...
    def create_file(self, path: PathT, data: Buffer, /) -> None: ...
    def replace_file(self, path: PathT, data: Buffer, /) -> None: ...
    def write_parts(
        self, path: PathT, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], /, *, threads: int
    ) -> None: ...


def _store_of(path: AnyPath, second: AnyPath | None = None) -> Store[Any]:
    """Return the store of a path, or of two paths, which must be in one storage."""
    is_remote = isinstance(path, RemotePath)
    assert second is None or isinstance(second, RemotePath) == is_remote, f"{path} and {second} are in different storages"
    if is_remote:
        return remote
    return local


def supports_rename(path: AnyPath) -> bool:
    """Return True if a folder can be renamed atomically, so that a rename commits.

    Object stores have no rename: the commit must be the file that ``create_file`` writes last.
    """
    return _store_of(path).supports_rename(path)


def exists(path: AnyPath) -> bool:
    """Return True if the name exists, also as a dangling link."""
    return _store_of(path).exists(path)


def is_folder(path: AnyPath) -> bool:
    """Return True if there is a folder, or a link to a folder. On object stores, the folder must have content."""
    return _store_of(path).is_folder(path)


def file_size(path: AnyPath) -> int | None:
    """Return the size in bytes of a regular file (or a link to one), or None if there is no regular file."""
    return _store_of(path).file_size(path)


def free_bytes(path: AnyPath) -> int | None:
    """Return the free bytes of the storage of ``path``, or None if unknown, as on servers."""
    return _store_of(path).free_bytes(path)


def list_names(path: AnyPath) -> list[str]:
    """Return the sorted names in a folder. Raise ``FileNotFoundError`` if there is no such folder."""
    return _store_of(path).list_names(path)


def list_sizes(path: AnyPath) -> dict[str, int | None]:
    """Return the names in a folder with their sizes in bytes, None for what is no regular file, by name.

    A server is asked for all of them at once. Raise ``FileNotFoundError`` if there is no such folder.
    """
    return _store_of(path).list_sizes(path)


def walk_files(path: AnyPath) -> Iterator[tuple[str, int]]:
    """Iterate over all files below a folder: relative name with ``/``, and size. Web servers list one folder only."""
    return _store_of(path).walk_files(path)


def make_folders(path: AnyPath) -> None:
    """Create the folder and its missing parents, durably as far as the folder's own entry goes."""
    _store_of(path).make_folders(path)


def make_folder(path: AnyPath) -> None:
    """Create one folder, which must not exist. On object stores, do nothing."""
    _store_of(path).make_folder(path)


def sync_folder(path: AnyPath) -> None:
    """Make the names in a folder durable. On a server, names are durable when the server has answered."""
    _store_of(path).sync_folder(path)


def rename(old: AnyPath, new: AnyPath) -> None:
    """Rename a file or folder within one storage, atomically. A folder with content is not replaced.

    Requires ``supports_rename``.
    """
    _store_of(old, new).rename(old, new)


def link_file(old: AnyPath, new: AnyPath) -> None:
    """Link ``new`` to the file ``old`` without writing data. A server makes a copy by itself.

    Raises:
        OSError: ``new`` exists, or the storage supports no links.
    """
    _store_of(old, new).link_file(old, new)


def remove_folder(path: AnyPath, *, first: str | None = None) -> None:
    """Remove a folder and its content, without following links.

    Args:
        path: folder to remove.
        first: name to remove before all other names, which the leftover of an interrupted removal therefore lacks.
    """
    _store_of(path).remove_folder(path, first=first)


def remove_file(path: AnyPath) -> None:
    """Remove one file."""
    _store_of(path).remove_file(path)


def write_file(path: AnyPath, data: Buffer) -> None:
    """Create a file with this content. The data are on the disk when the function returns.

    Raises:
        FileExistsError: the file exists.
    """
    _store_of(path).write_file(path, data)


def create_file(path: AnyPath, data: Buffer) -> None:
    """Create a file as ``write_file`` does, with a durable name. If several processes try, one of them succeeds.

    On a server the file is read back, and a lost answer is no failure.
    """
    _store_of(path).create_file(path, data)


def replace_file(path: AnyPath, data: Buffer) -> None:
    """Replace the content of a file durably and atomically: a reader gets the old content or the new content."""
    _store_of(path).replace_file(path, data)


def write_parts(path: AnyPath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file from consecutive parts. The data are on the disk when the function returns.

    Args:
        path: name that does not exist.
        sizes: size of each part in bytes.
        part_of: function that returns a part as one or more buffers, which must not change until the end. Called once per
            part in any order, in the thread that writes the part (so the function may compute a digest).
        threads: number of threads that write; 1 starts no thread. To a server up to eight threads send in any case.

    Raises:
        OSError: the first error, after all threads have ended. A local file is left incomplete; on a server there is no file.
    """
    _store_of(path).write_parts(path, sizes, part_of, threads=threads)


class FileReader(Closing):
    """Regular file, read by ranges. A context manager.

    Args:
        path: path of the file.
        quiet: if True, no progress is shown, for reads in the background.
        size: size of the file in bytes if the caller knows it, so that a server is not asked; None asks.

    Raises:
        OSError: there is no regular file. A pipe is refused without waiting.
    """

    __slots__ = ("_file", "is_remote", "ranges", "size")

    def __init__(self, path: AnyPath, *, quiet: bool = False, size: int | None = None) -> None:
        self._file = (
            remote.RemoteFileReader(path, quiet=quiet, size=size)
            if isinstance(path, RemotePath)
            else local.LocalFileReader(path)
        )
        # A request costs more than the bytes of many small reads. A server without range requests sends the whole file at once.
        self.is_remote, self.ranges, self.size = self._file.is_remote, self._file.ranges, self._file.size

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes, which is smaller only at the end of the file.

        Mutates: ``out``.
        """
        return self._file.read_into(begin, out)

    def version(self) -> str | None:
        """Return a text that changes with every write of the file; None if the server has no such text (no ETag)."""
        return self._file.version()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_file(path: AnyPath, *, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes.

    Raises:
        OSError: no regular file, or a larger file.
    """
    with FileReader(path) as file:
        if file.size > limit:
            raise OSError(f"{path} must have at most {limit} bytes, got {file.size}")
        out = bytearray(file.size)
        return bytes(out[: file.read_into(0, memoryview(out))])
