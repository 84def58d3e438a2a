"""Operate on files and folders of this machine (``local``) and of servers (``remote``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from dtrain.storage import local, remote
from dtrain.storage.local import Buffer
from dtrain.storage.parallel_parts import for_each_part
from dtrain.storage.path import AnyPath, RemotePath
from dtrain.storage.remote import request, request_once, stat


def supports_rename(path: AnyPath) -> bool:
    """Return True if a folder can be renamed atomically, so that a rename commits.

    Object stores have no rename: the commit must be the file that ``create_file`` writes last.
    """
    return remote.supports_rename(path) if isinstance(path, RemotePath) else True


def exists(path: AnyPath) -> bool:
    """Return True if the name exists, also as a dangling link."""
    return stat(path) is not None if isinstance(path, RemotePath) else local.exists(path)


def is_folder(path: AnyPath) -> bool:
    """Return True if there is a folder, or a link to a folder. On object stores, the folder must have content."""
    if not isinstance(path, RemotePath):
        return local.is_folder(path)
    status = stat(path)
    return status is not None and status.size is None


def file_size(path: AnyPath) -> int | None:
    """Return the size in bytes of a regular file (or a link to one), or None if there is no regular file."""
    if not isinstance(path, RemotePath):
        return local.file_size(path)
    status = stat(path)
    return None if status is None else status.size


def list_names(path: AnyPath) -> list[str]:
    """Return the sorted names in a folder. Raise ``FileNotFoundError`` if there is no such folder."""
    if not isinstance(path, RemotePath):
        return local.list_names(path)
    return sorted(request(path, lambda store: store.list_names(path.key)))


def list_sizes(path: AnyPath) -> dict[str, int | None]:
    """Return the names in a folder with their sizes in bytes, None for what is no regular file, by name.

    A server is asked for all of them at once. Raise ``FileNotFoundError`` if there is no such folder.
    """
    if isinstance(path, RemotePath):
        return dict(sorted(request(path, lambda store: store.list_sizes(path.key)).items()))
    return {name: local.file_size(path / name) for name in local.list_names(path)}


def walk_files(path: AnyPath) -> Iterator[tuple[str, int]]:
    """Iterate over all files below a folder: relative name with ``/``, and size. Web servers list one folder only."""
    return _walk_remote(path) if isinstance(path, RemotePath) else local.walk_files(path)


def _walk_remote(path: RemotePath) -> Iterator[tuple[str, int]]:
    keys = sorted(request(path, lambda store: store.list_recursive(path.key)))
    paths = [path / key.strip("/").removeprefix(path.key.strip("/")) for key in keys]
    sizes: list[int | None] = [None] * len(keys)

    def read_size(number: int) -> None:
        sizes[number] = file_size(paths[number])

    for_each_part(len(keys), read_size, threads=request(path, lambda store: store.max_requests), name="dtrain-stat")
    for file, size in zip(paths, sizes, strict=True):
        if size is not None:
            yield "/".join(file.parts[len(path.parts) :]), size


def make_folders(path: AnyPath) -> None:
    """Create the folder and its missing parents, durably as far as the folder's own entry goes."""
    if not isinstance(path, RemotePath):
        local.make_folders(path)
    elif supports_rename(path) and not is_folder(path):
        if path.parent != path:
            make_folders(path.parent)
        # Another rank may have created the folder first.
        with contextlib.suppress(FileExistsError):
            make_folder(path)


def make_folder(path: AnyPath) -> None:
    """Create one folder, which must not exist. On object stores, do nothing."""
    if isinstance(path, RemotePath):
        request_once(path, lambda store: store.make_folder(path.key), lambda store: store.stat(path.key) is not None)
    else:
        local.make_folder(path)


def sync_folder(path: AnyPath) -> None:
    """Make the names in a folder durable. On a server, names are durable when the server has answered."""
    if not isinstance(path, RemotePath):
        local.sync_folder(path)


def rename(old: AnyPath, new: AnyPath) -> None:
    """Rename a file or folder within one storage, atomically. A folder with content is not replaced.

    Requires ``supports_rename``.
    """
    if isinstance(old, RemotePath) and isinstance(new, RemotePath):
        request_once(
            old,
            lambda store: store.rename(old.key, new.key),
            lambda store: store.stat(old.key) is None and store.stat(new.key) is not None,
        )
    else:
        assert not isinstance(old, RemotePath), f"{old} and {new} are in different storages"
        assert not isinstance(new, RemotePath), f"{old} and {new} are in different storages"
        local.rename(old, new)


def remove_folder(path: AnyPath, *, first: str | None = None) -> None:
    """Remove a folder and its content, without following links.

    Args:
        path: folder to remove.
        first: name to remove before all other names, which the leftover of an interrupted removal therefore lacks.
    """
    if not isinstance(path, RemotePath):
        local.remove_folder(path, first=first)
        return
    if first is not None and file_size(path / first) is not None:
        _remove_key(path, (path / first).key)
    keys = request(path, lambda store: store.list_recursive(path.key))
    threads = request(path, lambda store: store.max_requests)
    for_each_part(len(keys), lambda number: _remove_key(path, keys[number]), threads=threads, name="dtrain-remove")
    if supports_rename(path):
        _remove_empty_folders(path)


def _remove_key(path: RemotePath, key: str) -> None:
    # An earlier attempt, or another process, may have removed the file.
    with contextlib.suppress(FileNotFoundError):
        request(path, lambda store: store.remove(key))


def _remove_empty_folders(path: RemotePath) -> None:
    for name in list_names(path):
        _remove_empty_folders(path / name)
    request_once(path, lambda store: store.remove_folder(path.key), lambda store: store.stat(path.key) is None)


def remove_file(path: AnyPath) -> None:
    """Remove one file."""
    if isinstance(path, RemotePath):
        request_once(path, lambda store: store.remove(path.key), lambda store: store.stat(path.key) is None)
    else:
        local.remove_file(path)


def write_file(path: AnyPath, data: Buffer) -> None:
    """Create a file with this content. The data are on the disk when the function returns.

    Raises:
        FileExistsError: the file exists.
    """
    remote.create_file(path, data) if isinstance(path, RemotePath) else local.write_file(path, data)


def create_file(path: AnyPath, data: Buffer) -> None:
    """Create a file as ``write_file`` does, with a durable name. If several processes try, one of them succeeds.

    On a server the file is read back, and a lost answer is no failure.
    """
    remote.create_file(path, data) if isinstance(path, RemotePath) else local.create_file(path, data)


def replace_file(path: AnyPath, data: Buffer) -> None:
    """Replace the content of a file durably and atomically: a reader gets the old content or the new content."""
    if isinstance(path, RemotePath):
        content = bytes(data)
        request(path, lambda store: store.put(path.key, content))
    else:
        local.replace_file(path, data)


def link_file(old: AnyPath, new: AnyPath) -> None:
    """Link ``new`` to the file ``old`` without writing data. A server makes a copy by itself.

    Raises:
        OSError: ``new`` exists, or the storage supports no links.
    """
    if isinstance(old, RemotePath) and isinstance(new, RemotePath):
        if exists(new):
            raise FileExistsError(17, "exists", str(new))
        request(old, lambda store: store.copy(old.key, new.key))
    else:
        assert not isinstance(old, RemotePath), f"{old} and {new} are in different storages"
        assert not isinstance(new, RemotePath), f"{old} and {new} are in different storages"
        local.link_file(old, new)


def free_bytes(path: AnyPath) -> int | None:
    """Return the free bytes of the storage of ``path``, or None if unknown, as on servers."""
    return None if isinstance(path, RemotePath) else local.free_bytes(path)


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
    if isinstance(path, RemotePath):
        remote.write_parts(path, sizes, part_of, threads=threads)
    else:
        local.write_parts(path, sizes, part_of, threads=threads)


class FileWriter:
    """New file, written sequentially. A context manager, whose end does not make the file durable.

    On a server the file exists after ``sync``, which must be called once, at the end; until then the content is in memory.

    Raises:
        FileExistsError: the file exists.
    """

    __slots__ = ("_file",)

    def __init__(self, path: AnyPath) -> None:
        self._file = remote.RemoteFileWriter(path) if isinstance(path, RemotePath) else local.LocalFileWriter(path)

    @property
    def written(self) -> int:
        """Bytes written so far."""
        return self._file.written

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        self._file.write(data)

    def sync(self) -> None:
        """Wait until the data are on the disk."""
        self._file.sync()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


class FileReader:
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
        # A request costs more than the bytes of many small reads.
        self.is_remote = isinstance(path, RemotePath)
        self.size = self._file.size
        # A server without range requests sends the whole file at once.
        self.ranges = not isinstance(self._file, remote.RemoteFileReader) or self._file.ranges

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes, which is smaller only at the end of the file.

        Mutates: ``out``.
        """
        return self._file.read_into(begin, out)

    def version(self) -> str | None:
        """Return a text that changes with every write of the file; None if the server has no such text (no ETag)."""
        return self._file.version()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
