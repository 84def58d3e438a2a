"""Files on servers, by the operations that ``local`` has: each is tried again while it may help, and errors are ``OSError``."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from dtrain.storage.local import Buffer
from dtrain.storage.parallel_parts import for_each_part
from dtrain.storage.path import RemotePath
from dtrain.storage.retry import RetryPolicy
from dtrain.storage.stores.base import FileStat, Store, Upload
from dtrain.storage.stores.connections import store_of
from dtrain.storage.transfer_progress import SHOW_AFTER_S, TransferProgress

Result = TypeVar("Result")

RETRY = RetryPolicy()
_MAX_PARTS = 9_000  # of one upload; S3 takes 10,000
_READ_REQUEST_BYTES = 8 * 2**20  # of one read request


def _request(path: RemotePath, do: Callable[[Store], Result]) -> Result:
    return RETRY.call(str(path), lambda: do(store_of(path)))


def _request_once(
    path: RemotePath, do: Callable[[Store], None], is_done: Callable[[Store], bool], *, always: bool = False
) -> None:
    """What must not be done twice. After an answer that was lost, ``is_done`` tells whether "exists" is our own work.

    ``always``: also after the first answer. Libraries of HTTP send a request again by themselves when the connection that they
    kept has gone, and do not say so.
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

    _request(path, attempt)


def supports_rename(path: RemotePath) -> bool:
    """Whether folders there are real, and renamed at once."""
    return _request(path, lambda store: store.supports_rename)


def _stat(path: RemotePath) -> FileStat | None:
    return _request(path, lambda store: store.stat(path.key))


def exists(path: RemotePath) -> bool:
    """Whether there is a file or folder of that name."""
    return _stat(path) is not None


def is_folder(path: RemotePath) -> bool:
    """Whether there is a folder; of object stores: something in it."""
    found = _stat(path)
    return found is not None and found.size is None


def file_size(path: RemotePath) -> int | None:
    """Bytes of a file; None when there is none."""
    found = _stat(path)
    return None if found is None else found.size


def list_names(path: RemotePath) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(_request(path, lambda store: store.list_names(path.key)))


def walk_files(path: RemotePath) -> Iterator[tuple[str, int]]:
    """Every file below a folder: its name relative to it, and its bytes."""
    keys = sorted(_request(path, lambda store: store.list_recursive(path.key)))
    places = [path / key.strip("/").removeprefix(path.key.strip("/")) for key in keys]
    sizes: list[int | None] = [None] * len(keys)

    def look(number: int) -> None:
        sizes[number] = file_size(places[number])

    for_each_part(len(keys), look, threads=_request(path, lambda store: store.max_requests), name="dtrain-look")
    for found, size in zip(places, sizes, strict=True):
        if size is not None:
            yield "/".join(found.parts[len(path.parts) :]), size


def make_folder(path: RemotePath) -> None:
    """Create one folder that must not exist yet; nothing on object stores."""
    _request_once(path, lambda store: store.make_folder(path.key), lambda store: store.stat(path.key) is not None)


def make_folders(path: RemotePath) -> None:
    """Create the folder and its parents where missing; nothing on object stores."""
    if not supports_rename(path) or is_folder(path):
        return
    if path.parent != path:
        make_folders(path.parent)
    with contextlib.suppress(FileExistsError):  # another rank was first
        make_folder(path)


def rename(old: RemotePath, new: RemotePath) -> None:
    """Give a file or folder another name on the same server, atomically."""
    _request_once(
        old,
        lambda store: store.rename(old.key, new.key),
        lambda store: store.stat(old.key) is None and store.stat(new.key) is not None,
    )


def remove_file(path: RemotePath) -> None:
    """Remove one file."""
    _request_once(path, lambda store: store.remove(path.key), lambda store: store.stat(path.key) is None)


def remove_folder(path: RemotePath, *, first: str | None = None) -> None:
    """Remove a folder and all below it; the name ``first`` in it goes before all others."""
    if first is not None and file_size(path / first) is not None:
        _remove_key(path, (path / first).key)
    files = _request(path, lambda store: store.list_recursive(path.key))
    threads = _request(path, lambda store: store.max_requests)
    for_each_part(len(files), lambda number: _remove_key(path, files[number]), threads=threads, name="dtrain-remove")
    if supports_rename(path):
        _remove_empty_folders(path)


def _remove_key(path: RemotePath, key: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # by the try before this, or by somebody else
        _request(path, lambda store: store.remove(key))


def _remove_empty_folders(path: RemotePath) -> None:
    for name in list_names(path):
        _remove_empty_folders(path / name)
    _request_once(path, lambda store: store.remove_folder(path.key), lambda store: store.stat(path.key) is None)


def link_file(old: RemotePath, new: RemotePath) -> None:
    """A copy that the server makes by itself. ``OSError`` where it does not, or where ``new`` is taken."""
    if exists(new):
        raise FileExistsError(17, "exists", str(new))
    _request(old, lambda store: store.copy(old.key, new.key))


def create_file(path: RemotePath, data: Buffer) -> None:
    """Create a file at once, of several that try by one, and read it back.

    Raises:
        FileExistsError: the name is taken.
    """
    content = bytes(data)
    mark = secrets.token_hex(16)  # tells our file from one of the same content
    _request_once(
        path,
        lambda store: store.put(path.key, content, mark=mark),
        lambda store: store.was_written_by(path.key, mark, content),
        always=not supports_rename(path),
    )
    if not _request(path, lambda store: _has_content(store, path, content)):
        raise OSError(5, "the server does not give back what was written", str(path))


def _has_content(store: Store, path: RemotePath, content: bytes) -> bool:
    found = store.stat(path.key)
    return found == FileStat(size=len(content)) and (not content or store.read_range(path.key, 0, len(content)) == content)


def replace_file(path: RemotePath, data: Buffer) -> None:
    """Give the file this content; whoever reads meanwhile gets the old content or the new, whole."""
    content = bytes(data)
    _request(path, lambda store: store.put(path.key, content))


def write_parts(path: RemotePath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file of parts that lie one after the other. What nobody finishes is not seen under the name.

    Parts are sent side by side, small ones joined. Holds the bytes of as many as are under way. ``threads`` is of no concern:
    what is waited for is the network.
    """
    store = _request(path, lambda store: store)
    groups = _group_parts(sizes, max(store.part_bytes, -(-sum(sizes) // _MAX_PARTS)))
    begins = list(accumulate((sum(sizes[part] for part in group) for group in groups), initial=0))

    def content(number: int) -> bytes:
        return b"".join(data for part in groups[number] for data in part_of(part))

    if len(groups) <= 1:
        create_file(path, content(0) if groups else b"")
        return
    upload = _request(path, lambda store: store.upload(path.key, len(groups)))
    finished = False
    try:
        with TransferProgress(f"writing {path.name}", begins[-1]) as progress:

            def send(number: int) -> None:
                data = content(number)
                RETRY.call(str(path), lambda: upload.send_part(number, begins[number], data))
                progress.advance(len(data))

            for_each_part(len(groups), send, threads=store.max_requests, name="dtrain-send")
        _finish_upload(path, upload, begins[-1])
        finished = True
    finally:
        _clean_up_upload(path, upload, finished=finished)


def _group_parts(sizes: Sequence[int], least: int) -> list[range]:
    """Parts to be sent in one request: the fewest that make ``least`` bytes."""
    groups, begin, filled = [], 0, 0
    for part, size in enumerate(sizes):
        filled += size
        if filled >= least or part == len(sizes) - 1:
            groups.append(range(begin, part + 1))
            begin, filled = part + 1, 0
    return groups


def _finish_upload(path: RemotePath, upload: Upload, size: int) -> None:
    _request_once(path, lambda store: upload.finish(), lambda store: upload.is_committed(), always=not supports_rename(path))
    if (found := file_size(path)) != size:
        raise OSError(5, f"the server has {found} bytes of {size}", str(path))


def _clean_up_upload(path: RemotePath, upload: Upload, *, finished: bool) -> None:
    """Parts that stay behind are in the way of whoever lists the folder; after another error they are of less concern."""
    with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
        RETRY.call(str(path), lambda: upload.clean_up(finished=finished))


class RemoteFileWriter:
    """A new file, written from its beginning to its end, and sent when it is synced. Not for large ones."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._content = bytearray()
        if exists(path):
            raise FileExistsError(17, "exists", str(path))

    @property
    def written(self) -> int:
        """Bytes so far."""
        return len(self._content)

    def write(self, data: Buffer) -> None:
        """Append all of ``data``."""
        self._content += memoryview(data).cast("B")

    def sync(self) -> None:
        """Send it."""
        view = memoryview(self._content)
        sizes = [min(2**24, len(view) - begin) for begin in range(0, len(view), 2**24)]
        write_parts(self._path, sizes, lambda part: [view[part << 24 : (part << 24) + sizes[part]]], threads=1)

    def close(self) -> None:
        """Nothing: what was not synced is not there."""


class RemoteFileReader:
    """A file, read by ranges; large ones by several requests at a time."""

    def __init__(self, path: RemotePath, *, quiet: bool = False) -> None:
        self._path = path
        found = _stat(path)
        if found is None:
            raise FileNotFoundError(2, "no such file", str(path))
        if found.size is None:
            raise OSError(f"not a regular file: {path}")
        self.size: int = found.size
        self._ranges = found.ranges
        self._progress = TransferProgress(f"reading {path.name}", None, show_after_s=math.inf if quiet else SHOW_AFTER_S)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``begin`` on; returns how many bytes there were."""
        count = max(0, min(len(out), self.size - begin))
        if not self._ranges and (begin or count < self.size):
            raise OSError(95, "the server gives whole files only, no parts of them", str(self._path))
        pieces = list(_split_range(count)) if self._ranges else [(0, count)]

        def read(number: int) -> None:
            low, high = pieces[number]
            out[low:high] = _request(self._path, lambda store: store.read_range(self._path.key, begin + low, begin + high))
            self._progress.advance(high - low)

        threads = _request(self._path, lambda store: store.max_requests)
        for_each_part(len(pieces), read, threads=threads, name="dtrain-fetch")
        return count

    @property
    def ranges(self) -> bool:
        """Whether parts of it can be read."""
        return self._ranges

    def close(self) -> None:
        """No more is read."""
        self._progress.__exit__(None, None, None)


def _split_range(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, _READ_REQUEST_BYTES):
        yield begin, min(count, begin + _READ_REQUEST_BYTES)
