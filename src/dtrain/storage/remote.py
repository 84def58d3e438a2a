"""Files on servers, by the operations that ``local`` has: each is tried again while it may help, and errors are ``OSError``."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from dtrain.storage.local import Buffer
from dtrain.storage.parts import for_each_part
from dtrain.storage.places import RemotePath
from dtrain.storage.progress import QUIET_S, Progress
from dtrain.storage.retry import Retry
from dtrain.storage.stores.base import Found, Store, Upload
from dtrain.storage.stores.connect import store_of

Result = TypeVar("Result")

RETRY = Retry()
_MOST_PARTS = 9_000  # of one upload; S3 takes 10,000
_PIECE_BYTES = 8 * 2**20  # of one read request


def _ask(path: RemotePath, do: Callable[[Store], Result]) -> Result:
    return RETRY.call(str(path), lambda: do(store_of(path)))


def _once(path: RemotePath, do: Callable[[Store], None], is_done: Callable[[Store], bool], *, always: bool = False) -> None:
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

    _ask(path, attempt)


def renames(path: RemotePath) -> bool:
    """Whether folders there are real, and renamed at once."""
    return _ask(path, lambda store: store.renames)


def _look(path: RemotePath) -> Found | None:
    return _ask(path, lambda store: store.look(path.key))


def exists(path: RemotePath) -> bool:
    """Whether there is a file or folder of that name."""
    return _look(path) is not None


def is_folder(path: RemotePath) -> bool:
    """Whether there is a folder; of object stores: something in it."""
    found = _look(path)
    return found is not None and found.size is None


def file_size(path: RemotePath) -> int | None:
    """Bytes of a file; None when there is none."""
    found = _look(path)
    return None if found is None else found.size


def list_names(path: RemotePath) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(_ask(path, lambda store: store.names(path.key)))


def walk_files(path: RemotePath) -> Iterator[tuple[str, int]]:
    """Every file below a folder: its name relative to it, and its bytes."""
    keys = sorted(_ask(path, lambda store: store.files(path.key)))
    places = [path / key.strip("/").removeprefix(path.key.strip("/")) for key in keys]
    sizes: list[int | None] = [None] * len(keys)

    def look(number: int) -> None:
        sizes[number] = file_size(places[number])

    for_each_part(len(keys), look, threads=_ask(path, lambda store: store.side_by_side), name="dtrain-look")
    for found, size in zip(places, sizes, strict=True):
        if size is not None:
            yield "/".join(found.parts[len(path.parts) :]), size


def make_folder(path: RemotePath) -> None:
    """Create one folder that must not exist yet; nothing on object stores."""
    _once(path, lambda store: store.make_folder(path.key), lambda store: store.look(path.key) is not None)


def make_folders(path: RemotePath) -> None:
    """Create the folder and its parents where missing; nothing on object stores."""
    if not renames(path) or is_folder(path):
        return
    if path.parent != path:
        make_folders(path.parent)
    with contextlib.suppress(FileExistsError):  # another rank was first
        make_folder(path)


def rename(old: RemotePath, new: RemotePath) -> None:
    """Give a file or folder another name on the same server, atomically."""
    _once(
        old,
        lambda store: store.rename(old.key, new.key),
        lambda store: store.look(old.key) is None and store.look(new.key) is not None,
    )


def remove_file(path: RemotePath) -> None:
    """Remove one file."""
    _once(path, lambda store: store.remove(path.key), lambda store: store.look(path.key) is None)


def remove_folder(path: RemotePath, *, first: str | None = None) -> None:
    """Remove a folder and all below it; the name ``first`` in it goes before all others."""
    if first is not None and file_size(path / first) is not None:
        _remove(path, (path / first).key)
    files = _ask(path, lambda store: store.files(path.key))
    threads = _ask(path, lambda store: store.side_by_side)
    for_each_part(len(files), lambda number: _remove(path, files[number]), threads=threads, name="dtrain-remove")
    if renames(path):
        _remove_empty(path)


def _remove(path: RemotePath, key: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # by the try before this, or by somebody else
        _ask(path, lambda store: store.remove(key))


def _remove_empty(path: RemotePath) -> None:
    for name in list_names(path):
        _remove_empty(path / name)
    _once(path, lambda store: store.remove_folder(path.key), lambda store: store.look(path.key) is None)


def link_file(old: RemotePath, new: RemotePath) -> None:
    """A copy that the server makes by itself. ``OSError`` where it does not, or where ``new`` is taken."""
    if exists(new):
        raise FileExistsError(17, "exists", str(new))
    _ask(old, lambda store: store.copy(old.key, new.key))


def create_file(path: RemotePath, data: Buffer) -> None:
    """Create a file at once, of several that try by one, and read it back.

    Raises:
        FileExistsError: the name is taken.
    """
    content = bytes(data)
    mark = secrets.token_hex(16)  # tells our file from one of the same content
    _once(
        path,
        lambda store: store.put(path.key, content, mark=mark),
        lambda store: store.is_ours(path.key, mark, content),
        always=not renames(path),
    )
    if not _ask(path, lambda store: _holds(store, path, content)):
        raise OSError(5, "the server does not give back what was written", str(path))


def _holds(store: Store, path: RemotePath, content: bytes) -> bool:
    found = store.look(path.key)
    return found == Found(size=len(content)) and (not content or store.get(path.key, 0, len(content)) == content)


def replace_file(path: RemotePath, data: Buffer) -> None:
    """Give the file this content; whoever reads meanwhile gets the old content or the new, whole."""
    content = bytes(data)
    _ask(path, lambda store: store.put(path.key, content))


def write_parts(path: RemotePath, sizes: Sequence[int], part_of: Callable[[int], Sequence[Buffer]], *, threads: int) -> None:
    """Create a file of parts that lie one after the other. What nobody finishes is not seen under the name.

    Parts are sent side by side, small ones joined. Holds the bytes of as many as are under way. ``threads`` is of no concern:
    what is waited for is the network.
    """
    store = _ask(path, lambda store: store)
    groups = _groups(sizes, max(store.part_bytes, -(-sum(sizes) // _MOST_PARTS)))
    begins = list(accumulate((sum(sizes[part] for part in group) for group in groups), initial=0))

    def content(number: int) -> bytes:
        return b"".join(data for part in groups[number] for data in part_of(part))

    if len(groups) <= 1:
        create_file(path, content(0) if groups else b"")
        return
    upload = _ask(path, lambda store: store.upload(path.key, len(groups)))
    finished = False
    try:
        with Progress(f"writing {path.name}", begins[-1]) as progress:

            def send(number: int) -> None:
                data = content(number)
                RETRY.call(str(path), lambda: upload.part(number, begins[number], data))
                progress.advance(len(data))

            for_each_part(len(groups), send, threads=store.side_by_side, name="dtrain-send")
        _finish(path, upload, begins[-1])
        finished = True
    finally:
        _clear(path, upload, finished=finished)


def _groups(sizes: Sequence[int], least: int) -> list[range]:
    """Parts to be sent in one request: the fewest that make ``least`` bytes."""
    groups, begin, filled = [], 0, 0
    for part, size in enumerate(sizes):
        filled += size
        if filled >= least or part == len(sizes) - 1:
            groups.append(range(begin, part + 1))
            begin, filled = part + 1, 0
    return groups


def _finish(path: RemotePath, upload: Upload, size: int) -> None:
    _once(path, lambda store: upload.finish(), lambda store: upload.is_there(), always=not renames(path))
    if (found := file_size(path)) != size:
        raise OSError(5, f"the server has {found} bytes of {size}", str(path))


def _clear(path: RemotePath, upload: Upload, *, finished: bool) -> None:
    """Parts that stay behind are in the way of whoever lists the folder; after another error they are of less concern."""
    with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
        RETRY.call(str(path), lambda: upload.clear(finished=finished))


class FileWriter:
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


class FileReader:
    """A file, read by ranges; large ones by several requests at a time."""

    def __init__(self, path: RemotePath, *, quiet: bool = False) -> None:
        self._path = path
        found = _look(path)
        if found is None:
            raise FileNotFoundError(2, "no such file", str(path))
        if found.size is None:
            raise OSError(f"not a regular file: {path}")
        self.size: int = found.size
        self._ranges = found.ranges
        self._progress = Progress(f"reading {path.name}", None, quiet_s=math.inf if quiet else QUIET_S)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``begin`` on; returns how many bytes there were."""
        count = max(0, min(len(out), self.size - begin))
        if not self._ranges and (begin or count < self.size):
            raise OSError(95, "the server gives whole files only, no parts of them", str(self._path))
        pieces = list(_pieces(count)) if self._ranges else [(0, count)]

        def read(number: int) -> None:
            low, high = pieces[number]
            out[low:high] = _ask(self._path, lambda store: store.get(self._path.key, begin + low, begin + high))
            self._progress.advance(high - low)

        threads = _ask(self._path, lambda store: store.side_by_side)
        for_each_part(len(pieces), read, threads=threads, name="dtrain-fetch")
        return count

    @property
    def ranges(self) -> bool:
        """Whether parts of it can be read."""
        return self._ranges

    def close(self) -> None:
        """No more is read."""
        self._progress.__exit__(None, None, None)


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, _PIECE_BYTES):
        yield begin, min(count, begin + _PIECE_BYTES)
