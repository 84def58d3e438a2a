"""Read and write files on servers with requests that are retried. The module is a ``Store`` of remote paths.

``CONNECTIONS`` is the only state of ``storage``. A path is a value, which cannot own a connection, and a connection for each
request would cost a handshake, a search for credentials and, for SFTP, a login. A connection depends only on the path and on
fsspec's configuration, so a request cannot tell who has made its connection. All errors are ``OSError``.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from dtrain.errors import ConfigError
from dtrain.storage.local import Buffer, Closing
from dtrain.storage.object_stores import AzStore, GsStore, HttpStore, MemoryStore, OciStore, S3Store
from dtrain.storage.parallel_parts import for_each_part
from dtrain.storage.path import RemotePath
from dtrain.storage.remote_store import FileStat, RemoteStore, RetryPolicy, Upload
from dtrain.storage.sftp_store import SftpStore

Result = TypeVar("Result")

RETRY = RetryPolicy()
# Limit of the parts of one upload; the limit of S3 is 10,000.
_MAX_PARTS = 9_000
_READ_REQUEST_BYTES = 8 * 2**20
# A shorter transfer shows no progress bar.
SHOW_AFTER_S = 1.0

_STORES: dict[str, type[RemoteStore]] = {
    "s3": S3Store,
    "gs": GsStore,
    "az": AzStore,
    "oci": OciStore,
    "sftp": SftpStore,
    "memory": MemoryStore,
    "http": HttpStore,
    "https": HttpStore,
}


class Connections:
    """Stores by protocol and server, each with the options of fsspec's configuration that made it."""

    def __init__(self) -> None:
        # Reentrant, because the garbage collector may use a store during a connect.
        self._lock = threading.RLock()
        self._stores: dict[str, tuple[dict[str, Any], RemoteStore]] = {}
        self._inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def store_of(self, path: RemotePath) -> RemoteStore:
        """Return the connected store of ``path``.

        Credentials and options come from fsspec: the environment variables of each library, and fsspec's own configuration
        (``FSSPEC_S3_ENDPOINT_URL=...`` or a file in ``~/.config/fsspec``). If the configuration has changed since the last
        request, a new connection replaces the old connection.

        Raises:
            ConfigError: the library refuses the options or finds no credentials.
            OSError: the server cannot be reached, or refuses.
        """
        import fsspec
        from fsspec.config import apply_config

        file_system, kind = fsspec.get_filesystem_class(path.protocol), _STORES[path.protocol]
        name, configured = f"{path.protocol}://{path.authority}", apply_config(file_system, {})
        with self._lock:
            connected_with, store = self._stores.get(name, (None, None))
            if store is None or connected_with != configured:
                options = kind.connection_options(path.authority, configured)
                try:
                    store = kind(file_system(**options, skip_instance_cache=True))
                except OSError:
                    raise
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"{path.protocol}://: {str(error).splitlines()[0]}. "
                        "Set options in the environment or in fsspec's configuration."
                    ) from error
                self._stores[name] = (configured, store)
            return store

    def close(self) -> None:
        """Close all connections. The next use connects again."""
        with self._lock:
            while self._stores:
                self._stores.popitem()[1][1].close()

    def _reset_after_fork(self) -> None:
        """Forget the parent's connections in a forked child. They are kept, since closing them would wait for its threads."""
        self._inherited.append(self._stores)
        self._stores, self._lock = {}, threading.RLock()
        if (asyn := sys.modules.get("fsspec.asyn")) is not None:
            # Another thread of the parent may have held the lock at the fork.
            asyn.reset_lock()


# An object of the module, because a path is a value, which cannot own a connection, and a new connection takes longer than a
# small request.
CONNECTIONS = Connections()


def disconnect() -> None:
    """Close all connections of this process. The next use connects again."""
    CONNECTIONS.close()


def request(path: RemotePath, do: Callable[[RemoteStore], Result]) -> Result:
    """Send a request to the store of a path, and again after transient failures."""
    return RETRY.call(str(path), lambda: do(CONNECTIONS.store_of(path)))


def request_once(
    path: RemotePath, do: Callable[[RemoteStore], None], is_done: Callable[[RemoteStore], bool], *, always: bool = False
) -> None:
    """Send a request that must succeed only once. After a lost answer, ``is_done`` tells an own success from a failure.

    Args:
        always: if True, ``is_done`` is asked after the first answer, too, except on servers with real folders. HTTP libraries
            silently repeat a request if a kept connection has been closed.
    """
    in_doubt = always and not supports_rename(path)

    def attempt(store: RemoteStore) -> None:
        nonlocal in_doubt
        try:
            do(store)
        except Exception:
            if in_doubt and is_done(store):
                return
            in_doubt = True
            raise

    request(path, attempt)


def supports_rename(path: RemotePath) -> bool:
    """Return True if the server has real folders with atomic rename."""
    return request(path, lambda store: store.supports_rename)


def stat(path: RemotePath) -> FileStat | None:
    """Return the status of a name, or None without one."""
    return request(path, lambda store: store.stat(path.key))


def exists(path: RemotePath) -> bool:
    """Return True if the name exists."""
    return stat(path) is not None


def is_folder(path: RemotePath) -> bool:
    """Return True if there is a folder. On object stores, the folder must have content."""
    status = stat(path)
    return status is not None and status.size is None


def file_size(path: RemotePath) -> int | None:
    """Return the size of a file in bytes, or None without a file."""
    status = stat(path)
    return None if status is None else status.size


def free_bytes(path: RemotePath) -> int | None:
    """Return None: a server does not tell its free bytes."""
    return None


def list_names(path: RemotePath) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(request(path, lambda store: store.list_names(path.key)))


def list_sizes(path: RemotePath) -> dict[str, int | None]:
    """Return the names in a folder with their sizes in bytes, None for a folder."""
    return dict(sorted(request(path, lambda store: store.list_sizes(path.key)).items()))


def walk_files(path: RemotePath) -> Iterator[tuple[str, int]]:
    """Iterate over all files below a folder: relative name with ``/``, and size."""
    keys = sorted(request(path, lambda store: store.list_recursive(path.key)))
    paths = [path / key.strip("/").removeprefix(path.key.strip("/")) for key in keys]
    sizes: dict[int, int | None] = {}
    _for_each_request(path, len(keys), lambda number: sizes.update({number: file_size(paths[number])}), "dtrain-stat")
    for number, file in enumerate(paths):
        size = sizes[number]
        if size is not None:
            yield "/".join(file.parts[len(path.parts) :]), size


def _for_each_request(path: RemotePath, count: int, send: Callable[[int], None], name: str) -> None:
    """Send numbered requests in parallel, as many as the store takes."""
    for_each_part(count, send, threads=request(path, lambda store: store.max_requests), name=name)


def make_folders(path: RemotePath) -> None:
    """Create the folder and its missing parents on a server with real folders."""
    if supports_rename(path) and not is_folder(path):
        if path.parent != path:
            make_folders(path.parent)
        # Another rank may have created the folder first.
        with contextlib.suppress(FileExistsError):
            make_folder(path)


def make_folder(path: RemotePath) -> None:
    """Create one folder, which must not exist. On object stores, do nothing."""
    request_once(path, lambda store: store.make_folder(path.key), lambda store: store.stat(path.key) is not None)


def sync_folder(path: RemotePath) -> None:
    """Do nothing: names are durable when the server has answered."""


def rename(old: RemotePath, new: RemotePath) -> None:
    """Rename a file or folder atomically. Requires ``supports_rename``."""
    request_once(
        old,
        lambda store: store.rename(old.key, new.key),
        lambda store: store.stat(old.key) is None and store.stat(new.key) is not None,
    )


def link_file(old: RemotePath, new: RemotePath) -> None:
    """Copy a file on the server to a name that must not exist."""
    if exists(new):
        raise FileExistsError(17, "exists", str(new))
    request(old, lambda store: store.copy(old.key, new.key))


def remove_file(path: RemotePath) -> None:
    """Remove one file."""
    request_once(path, lambda store: store.remove(path.key), lambda store: store.stat(path.key) is None)


def remove_folder(path: RemotePath, *, first: str | None = None) -> None:
    """Remove a folder and its content; the name ``first`` before all other names."""

    def remove(key: str) -> None:
        # An earlier attempt, or another process, may have removed the file.
        with contextlib.suppress(FileNotFoundError):
            request(path, lambda store: store.remove(key))

    if first is not None and file_size(path / first) is not None:
        remove((path / first).key)
    keys = request(path, lambda store: store.list_recursive(path.key))
    _for_each_request(path, len(keys), lambda number: remove(keys[number]), "dtrain-remove")
    if supports_rename(path):
        _remove_empty_folders(path)


def _remove_empty_folders(path: RemotePath) -> None:
    for name in list_names(path):
        _remove_empty_folders(path / name)
    request_once(path, lambda store: store.remove_folder(path.key), lambda store: store.stat(path.key) is None)


def create_file(path: RemotePath, data: Buffer) -> None:
    """Create a file atomically, and read the file back. If several processes try, one of them succeeds.

    Raises:
        FileExistsError: the file exists.
    """
    content = bytes(data)
    # The mark distinguishes our file from another file of the same content.
    mark = secrets.token_hex(16)
    request_once(
        path,
        lambda store: store.put(path.key, content, mark=mark),
        lambda store: store.was_written_by(path.key, mark, content),
        always=True,
    )
    if not request(path, lambda store: store.has_content(path.key, content)):
        raise OSError(5, "the server does not return the written content", str(path))


write_file = create_file


def replace_file(path: RemotePath, data: Buffer) -> None:
    """Replace the content of a file atomically: a reader gets the old content or the new content."""
    content = bytes(data)
    request(path, lambda store: store.put(path.key, content))


def write_parts(path: RemotePath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file from consecutive parts. An unfinished file is not visible under its name.

    Parts are sent in parallel, and small parts are joined. Memory holds the bytes of all parts in progress. ``threads`` is
    ignored, because the number of parallel requests is a property of the store.
    """
    part_bytes = request(path, lambda store: store.part_bytes)
    groups = _group_parts(sizes, max(part_bytes, -(-sum(sizes) // _MAX_PARTS)))
    begins = list(accumulate((sum(sizes[number] for number in group) for group in groups), initial=0))

    def content(number: int) -> bytes:
        return b"".join(data for index in groups[number] for data in part_of(index))

    if len(groups) <= 1:
        create_file(path, content(0) if groups else b"")
        return
    upload = request(path, lambda store: Upload(store, path.key))
    finished = False
    try:
        with TransferProgress(f"writing {path.name}", begins[-1]) as progress:

            def send(number: int) -> None:
                data = content(number)
                upload.add_part(number, request(path, lambda store: store.send_part(upload, number, begins[number], data)))
                progress.advance(len(data))

            _for_each_request(path, len(groups), send, "dtrain-send")
        request_once(path, lambda store: store.finish_upload(upload), lambda store: store.is_committed(upload), always=True)
        if (uploaded := stat(path)) != FileStat(size=begins[-1]):
            raise OSError(5, f"size on the server must be {begins[-1]} bytes, got {uploaded and uploaded.size}", str(path))
        finished = True
    finally:
        # Leftover parts would appear in listings of the folder. After another error, failures are ignored.
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            request(path, lambda store: store.clean_up_upload(upload, finished=finished))


def _group_parts(sizes: Sequence[int], min_bytes: int) -> list[range]:
    """Group consecutive parts into requests of at least ``min_bytes`` bytes."""
    groups, begin, filled = [], 0, 0
    for number, size in enumerate(sizes):
        filled += size
        if filled >= min_bytes or number == len(sizes) - 1:
            groups.append(range(begin, number + 1))
            begin, filled = number + 1, 0
    return groups


class RemoteFileReader:
    """File, read by ranges, with parallel requests for large ranges. ``ranges`` is False if the server sends no ranges."""

    is_remote = True

    def __init__(self, path: RemotePath, *, quiet: bool = False, size: int | None = None) -> None:
        self._path = path
        # A web server may not support ranges, which only it can tell.
        is_size_known = size is not None and request(path, lambda store: store.has_ranges)
        status = FileStat(size=size) if is_size_known else stat(path)
        if status is None:
            raise FileNotFoundError(2, "no such file", str(path))
        if status.size is None:
            raise OSError(f"not a regular file: {path}")
        self.size, self.ranges, self._version = status.size, status.ranges, status.version
        self._progress = TransferProgress(f"reading {path.name}", None, show_after_s=math.inf if quiet else SHOW_AFTER_S)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on, and return the number of bytes."""
        count = max(0, min(len(out), self.size - begin))
        if not self.ranges and (begin or count < self.size):
            raise OSError(95, "the server sends whole files only, no ranges", str(self._path))
        step = _READ_REQUEST_BYTES if self.ranges else max(1, count)

        def read(number: int) -> None:
            low, high = number * step, min(count, (number + 1) * step)
            out[low:high] = request(self._path, lambda store: store.read_range(self._path.key, begin + low, begin + high))
            self._progress.advance(high - low)

        _for_each_request(self._path, -(-count // step), read, "dtrain-fetch")
        return count

    def version(self) -> str | None:
        """Return the version at the time of opening."""
        return self._version

    def close(self) -> None:
        """End the progress bar."""
        self._progress.close()


class TransferProgress(Closing):
    """Progress bar on standard error. A context manager; any thread may call ``advance``. Without a terminal, do nothing.

    Args:
        label: text before the bar.
        total: total number of bytes; None if unknown.
        show_after_s: time without a bar in seconds.
    """

    def __init__(self, label: str, total: int | None, *, show_after_s: float = SHOW_AFTER_S) -> None:
        self._label, self._total, self._show_after_s = label, total, show_after_s
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._done = 0
        self._closed = not sys.stderr.isatty()
        self._bar: Any = None

    def advance(self, count: int) -> None:
        """Add ``count`` bytes to the progress."""
        if self._closed:
            return
        with self._lock:
            self._done += count
            if self._bar is None and time.monotonic() - self._started_at >= self._show_after_s:
                self._start_bar()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task(self._label, total=self._total)
        self._bar.start()

    def close(self) -> None:
        """End the bar."""
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
