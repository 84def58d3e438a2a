"""Send requests to servers, and read and write files on them. Requests are retried, and errors are ``OSError``."""

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
from types import TracebackType
from typing import Any, TypeVar

from dtrain.errors import ConfigError
from dtrain.storage.local import Buffer
from dtrain.storage.object_stores import AzStore, GsStore, HttpStore, MemoryStore, OciStore, S3Store
from dtrain.storage.parallel_parts import for_each_part
from dtrain.storage.path import RemotePath
from dtrain.storage.sftp_store import SftpStore, known_hosts_policy
from dtrain.storage.store import FileStat, RetryPolicy, Store, Upload

Result = TypeVar("Result")

RETRY = RetryPolicy()
# Limit of the parts of one upload; the limit of S3 is 10,000.
_MAX_PARTS = 9_000
_READ_REQUEST_BYTES = 8 * 2**20
# A shorter transfer shows no progress bar.
SHOW_AFTER_S = 1.0


def request(path: RemotePath, do: Callable[[Store], Result]) -> Result:
    """Send a request to the store of a path, and again after transient failures."""
    return RETRY.call(str(path), lambda: do(store_of(path)))


def request_once(
    path: RemotePath, do: Callable[[Store], None], is_done: Callable[[Store], bool], *, always: bool = False
) -> None:
    """Send a request that must succeed only once. After a lost answer, ``is_done`` tells an own success from a failure.

    Args:
        always: if True, ``is_done`` is asked after the first answer, too. HTTP libraries silently repeat a request if a kept
            connection has been closed.
    """
    in_doubt = always

    def attempt(store: Store) -> None:
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
        always=not supports_rename(path),
    )
    if not request(path, lambda store: _has_content(store, path, content)):
        raise OSError(5, "the server does not return the written content", str(path))


def _has_content(store: Store, path: RemotePath, content: bytes) -> bool:
    status = store.stat(path.key)
    return status == FileStat(size=len(content)) and (not content or store.read_range(path.key, 0, len(content)) == content)


def write_parts(path: RemotePath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file from consecutive parts. An unfinished file is not visible under its name.

    Parts are sent in parallel, and small parts are joined. Memory holds the bytes of all parts in progress. ``threads`` is
    ignored, because the number of parallel requests is a property of the store.
    """
    store = request(path, lambda store: store)
    groups = _group_parts(sizes, max(store.part_bytes, -(-sum(sizes) // _MAX_PARTS)))
    begins = list(accumulate((sum(sizes[part] for part in group) for group in groups), initial=0))

    def content(number: int) -> bytes:
        return b"".join(data for part in groups[number] for data in part_of(part))

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

            for_each_part(len(groups), send, threads=store.max_requests, name="dtrain-send")
        _finish_upload(path, upload, begins[-1])
        finished = True
    finally:
        _clean_up_upload(path, upload, finished=finished)


def _group_parts(sizes: Sequence[int], min_bytes: int) -> list[range]:
    """Group consecutive parts into requests of at least ``min_bytes`` bytes."""
    groups, begin, filled = [], 0, 0
    for part, size in enumerate(sizes):
        filled += size
        if filled >= min_bytes or part == len(sizes) - 1:
            groups.append(range(begin, part + 1))
            begin, filled = part + 1, 0
    return groups


def _finish_upload(path: RemotePath, upload: Upload, size: int) -> None:
    request_once(
        path,
        lambda store: store.finish_upload(upload),
        lambda store: store.is_committed(upload),
        always=not supports_rename(path),
    )
    if (uploaded := stat(path)) != FileStat(size=size):
        raise OSError(5, f"size on the server must be {size} bytes, got {uploaded and uploaded.size}", str(path))


def _clean_up_upload(path: RemotePath, upload: Upload, *, finished: bool) -> None:
    """Remove leftover parts, which would appear in listings of the folder. After another error, failures are ignored."""
    with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
        request(path, lambda store: store.clean_up_upload(upload, finished=finished))


class RemoteFileWriter:
    """New file, written sequentially, and sent by ``sync``. For small files only."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._content = bytearray()
        if stat(path) is not None:
            raise FileExistsError(17, "exists", str(path))

    @property
    def written(self) -> int:
        """Bytes written so far."""
        return len(self._content)

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        self._content += memoryview(data).cast("B")

    def sync(self) -> None:
        """Send the file."""
        view = memoryview(self._content)
        sizes = [min(2**24, len(view) - begin) for begin in range(0, len(view), 2**24)]
        write_parts(self._path, sizes, lambda part: [view[part << 24 : (part << 24) + sizes[part]]], threads=1)

    def close(self) -> None:
        """Do nothing: unsynced content is discarded."""


class RemoteFileReader:
    """File, read by ranges, with parallel requests for large ranges."""

    def __init__(self, path: RemotePath, *, quiet: bool = False, size: int | None = None) -> None:
        self._path = path
        # A web server may not support ranges, which only it can tell.
        known = size is not None and request(path, lambda store: store.has_ranges)
        status = FileStat(size=size) if known else stat(path)
        if status is None:
            raise FileNotFoundError(2, "no such file", str(path))
        if status.size is None:
            raise OSError(f"not a regular file: {path}")
        self.size: int = status.size
        self._ranges = status.ranges
        self._version = status.version
        self._progress = TransferProgress(f"reading {path.name}", None, show_after_s=math.inf if quiet else SHOW_AFTER_S)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on, and return the number of bytes."""
        count = max(0, min(len(out), self.size - begin))
        if not self._ranges and (begin or count < self.size):
            raise OSError(95, "the server sends whole files only, no ranges", str(self._path))
        ranges = list(_split_range(count)) if self._ranges else [(0, count)]

        def read(number: int) -> None:
            low, high = ranges[number]
            out[low:high] = request(self._path, lambda store: store.read_range(self._path.key, begin + low, begin + high))
            self._progress.advance(high - low)

        threads = request(self._path, lambda store: store.max_requests)
        for_each_part(len(ranges), read, threads=threads, name="dtrain-fetch")
        return count

    @property
    def ranges(self) -> bool:
        """True if ranges of the file can be read."""
        return self._ranges

    def version(self) -> str | None:
        """Return the version at the time of opening."""
        return self._version

    def close(self) -> None:
        """End the progress bar."""
        self._progress.__exit__(None, None, None)


def _split_range(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, _READ_REQUEST_BYTES):
        yield begin, min(count, begin + _READ_REQUEST_BYTES)


class TransferProgress:
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
                self._bar = _start_bar(self._label, self._total)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __enter__(self) -> TransferProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def _start_bar(label: str, total: int | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar


_STORES: dict[str, type[Store]] = {
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
        self._stores: dict[str, tuple[dict[str, Any], Store]] = {}
        self._inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def store_of(self, path: RemotePath) -> Store:
        """Return the connected store of ``path``."""
        name, options = f"{path.protocol}://{path.authority}", _configured_options(path.protocol)
        with self._lock:
            connected_with, store = self._stores.get(name, (None, None))
            if store is None or connected_with != options:
                store = _connect(path, options)
                self._stores[name] = (options, store)
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


CONNECTIONS = Connections()


def store_of(path: RemotePath) -> Store:
    """Return the connected store of ``path``.

    Credentials and options come from fsspec: the environment variables of each library, and fsspec's own configuration
    (``FSSPEC_S3_ENDPOINT_URL=...`` or a file in ``~/.config/fsspec``). If the configuration has changed since the last request,
    a new connection replaces the old connection.

    Raises:
        ConfigError: the library refuses the options or finds no credentials.
        OSError: the server cannot be reached, or refuses.
    """
    return CONNECTIONS.store_of(path)


def disconnect() -> None:
    """Close all connections of this process. The next use connects again."""
    CONNECTIONS.close()


def _configured_options(protocol: str) -> dict[str, Any]:
    """Return the options of a protocol in fsspec's configuration."""
    import fsspec
    from fsspec.config import apply_config

    options: dict[str, Any] = apply_config(fsspec.get_filesystem_class(protocol), {})
    return options


def _connect(path: RemotePath, configured: dict[str, Any]) -> Store:
    """Connect with our default options, which the configuration overrides by name."""
    import fsspec

    kind = _STORES[path.protocol]
    options = {**kind.options, **configured}
    for name, value in kind.options.items():
        if isinstance(value, dict):
            options[name] = {**value, **options[name]}
    if path.protocol == "sftp":
        options = {"host_key_policy": known_hosts_policy(), **options, **_sftp_address(path.authority)}
    try:
        return kind(fsspec.get_filesystem_class(path.protocol)(**options, skip_instance_cache=True))
    except OSError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path.protocol}://: {str(error).splitlines()[0]}. Set options in the environment or in fsspec's configuration."
        ) from error


def _sftp_address(authority: str) -> dict[str, Any]:
    user, _, host = authority.rpartition("@")
    name, _, port = host.partition(":")
    return {"host": name, **({"username": user} if user else {}), **({"port": int(port)} if port else {})}
