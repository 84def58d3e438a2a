"""A folder of shards as they are after download and decompression, bounded in bytes, shared by all processes of a machine.

A whole shard has a name of 32 digits; other files in the folder are neither touched nor counted. One that is being made is
``NAME.BYTES.part``: that many bytes are reserved for it, and whoever makes it holds the lock of the file. So a part without a
lock has no owner any more, and whoever comes by removes it. Whoever reads a whole shard holds its lock with others, and only
what nobody holds is removed to make room. All decisions about what is in the folder are made under the lock of ``.lock``, for
as long as it takes to list the folder; nothing is downloaded meanwhile. The locks are the system's: they end with the process,
however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtrain import storage
from dtrain.data.stream.fork_safety import FORK_REGISTRY
from dtrain.errors import DataError
from dtrain.storage import Buffer, FolderEntry, LockableFile

_SHARD_NAME = re.compile(r"[0-9a-f]{32}")
_PARTIAL_NAME = re.compile(r"([0-9a-f]{32})\.([0-9]+)\.part")
_LOCK_NAME = ".lock"
_RESERVE_STEP_BYTES = 64 * 2**20  # by which a reservation grows where the size is not known before
_WRITER_TIMEOUT_S = 300.0  # so long another process may take for a shard
_SPACE_TIMEOUT_S = 5.0  # so long others may keep everything in use

_CacheState = Literal["ready", "busy", "full", "damaged"]


class CacheFullError(Exception):
    """There is no room: what is in the folder is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheContents:
    """What is there: whole shards, from the one that was used longest ago; names of those that are made; bytes in all."""

    shards: list[FolderEntry]
    parts: list[str]
    used: int


class ShardCache:
    """Whole shards by name. Any process, thread and fork may use the same folder at the same time.

    Args:
        folder: of the cache; made when it is first needed.
        max_bytes: bytes that all files in it have at most, with what is reserved for those that are being made.
        private: the folder that it is in, if only this user may have a say there.
        release: called when there is no room: lets go of shards that this process has open and does not need now.
    """

    def __init__(
        self, folder: Path, max_bytes: int, release: Callable[[], object] = lambda: None, *, private: Path | None = None
    ) -> None:
        self.folder, self.limit, self._release, self._private = folder, max_bytes, release, private
        self._trusted = private is None
        self._held: set[LockableFile] = set()
        self.writer_timeout_s, self.space_timeout_s = _WRITER_TIMEOUT_S, _SPACE_TIMEOUT_S
        self._is_crowded = False  # somebody has waited for room in vain: nobody does for as long as none is found
        FORK_REGISTRY.register(self)

    def after_fork(self) -> None:
        """In a child: its copies of the handles would keep locks that are the parent's."""
        for file in self._held:
            file.close()
        self._held = set()

    def check_owner(self) -> None:
        """Before anything in a folder for this user alone is believed: what others may have put there is not checked again.

        Raises:
            ConfigError: it is somebody else's.
        """
        if not self._trusted and self._private is not None:
            storage.make_private_folder(self._private)
            self._trusted = True

    def contains(self, name: str) -> bool:
        """Whether the whole shard is there now."""
        return storage.exists(self.folder / name)

    def get(
        self,
        name: str,
        size: int,
        make: Callable[[PartialFile], None],
        *,
        is_sound: Callable[[memoryview], bool] = lambda view: True,
    ) -> memoryview | None:
        """The bytes of a shard, mapped; made by ``make`` if nobody has it yet.

        Args:
            name: of the shard.
            size: bytes that it will have.
            make: writes them into the part it is given. At most one caller of all processes does so at a time.
            is_sound: returns False for bytes in the folder that are damaged; that shard is removed and made again.

        Returns:
            The bytes. It cannot be removed while the view, or a slice of it, lives. None where others have so much in use that
            there is no room, or where another process holds the shard for very long, or has a damaged one open: do without the
            cache.

        Raises:
            DataError: it is larger than the whole cache.
            Exception: what ``make`` raises. Nothing is left of the shard then.
        """
        begun = time.monotonic()
        pause, released = 0.002, False
        room_s = 0.0 if self._is_crowded else self.space_timeout_s
        while True:
            view, state = self._try(name, size, make, is_sound)
            if state == "ready":
                self._is_crowded = False
                return view
            if state == "full" and not released:
                self._release()
                released = True
                continue
            if (
                time.monotonic() - begun
                > {"busy": self.writer_timeout_s, "full": room_s, "damaged": self.space_timeout_s}[state]
            ):
                self._is_crowded = state == "full"
                return None
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def fill(self, name: str, size: int, make: Callable[[PartialFile], None]) -> None:
        """Have the shard in the folder if that is possible at once: not when another process makes it, or without room."""
        if self.contains(name):
            with contextlib.suppress(OSError), self._open_file(self.folder / name) as file:
                file.touch()  # it is wanted soon, so it is not the one to go
            return
        self._try(name, size, make, lambda view: True)

    def _try(
        self, name: str, size: int, make: Callable[[PartialFile], None], is_sound: Callable[[memoryview], bool]
    ) -> tuple[memoryview | None, _CacheState]:
        view, state = self._open_complete(name, is_sound)
        if state is not None:
            return view, state
        try:
            part = self._reserve(name, size)
            return self._make(part, make) if isinstance(part, PartialFile) else (None, part)
        except FileNotFoundError:  # somebody has removed the folder meanwhile: begin again
            return None, "busy"

    def _make(self, part: PartialFile, make: Callable[[PartialFile], None]) -> tuple[memoryview | None, _CacheState]:
        try:
            make(part)
            return part.commit(), "ready"
        except CacheFullError:
            return None, "full"
        finally:
            part.close()

    def _open_complete(self, name: str, is_sound: Callable[[memoryview], bool]) -> tuple[memoryview | None, _CacheState | None]:
        """The shard that is in the folder; no state if there is none."""
        self.check_owner()
        with FORK_REGISTRY.lock:  # a view has a handle of its own, which ends with it in a child, too
            try:
                file = LockableFile(self.folder / name)
            except FileNotFoundError:
                return None, None
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                file = None  # a link, or something else that no process of ours has put there
            if file is None:
                with self.index_lock():
                    storage.remove_file(self.folder / name)
                return None, None
            with file:
                if not file.lock(shared=True) or not file.is_linked:
                    return None, None  # it is being removed
                file.touch()
                view = file.map_memory()
        if is_sound(view):
            return view, "ready"
        del view  # and its lock
        with self.index_lock():
            return None, None if self._remove_unused(name, unless=is_sound) else "damaged"

    def _reserve(self, name: str, size: int) -> PartialFile | _CacheState:
        """A part for the shard with room for it, or why there is none."""
        if size > self.limit:
            raise DataError(f"a shard needs {size} bytes, the cache {self.folder} has cache_bytes={self.limit}; give it more")
        with self.index_lock():
            if self.contains(name):
                return "busy"  # no more: it came meanwhile
            contents = self._scan()
            if name in contents.parts:
                return "busy"
            if not self._make_space(contents, size):
                return "full"
            path = self.folder / f"{name}.{size}.part"
            with FORK_REGISTRY.lock:
                file = LockableFile(path, "new")
                self._held.add(file)
            if not file.lock():
                raise AssertionError(f"{path} is new, and locked by somebody else")
            return PartialFile(self, name, size, file)

    def _scan(self) -> _CacheContents:
        """What is there. Removes what dead processes have left. Only under the lock."""
        shards, parts, used = [], [], 0
        for entry in storage.scan_folder(self.folder):
            if _SHARD_NAME.fullmatch(entry.name):
                shards.append(entry)
                used += entry.size
            elif (part := _PARTIAL_NAME.fullmatch(entry.name)) and self._is_being_written(entry.name):
                parts.append(part[1])
                used += max(entry.size, int(part[2]))
        shards.sort(key=lambda entry: entry.modified_ns)
        return _CacheContents(shards=shards, parts=parts, used=used)

    def _is_being_written(self, name: str) -> bool:
        """Whether somebody is making this part; nobody is when its lock can be had."""
        try:
            with self._open_file(self.folder / name) as file:
                if not file.lock():
                    return True
                storage.remove_file(self.folder / name)
        except FileNotFoundError:
            pass
        except PermissionError:
            return True  # another user's, in a folder where only owners remove: it takes up room
        return False

    def _make_space(self, contents: _CacheContents, wanted: int) -> bool:
        """Whether there is room for so many more bytes, when what nobody uses has been removed as far as necessary."""
        used = contents.used
        for entry in contents.shards:
            if used + wanted <= self.limit:
                break
            if self._remove_unused(entry.name):
                used -= entry.size
        return used + wanted <= self.limit

    def _remove_unused(self, name: str, *, unless: Callable[[memoryview], bool] | None = None) -> bool:
        """Remove a shard that nobody uses. Returns whether it is gone, or, if another process has made it again, is sound."""
        try:
            with self._open_file(self.folder / name) as file:
                if not file.lock():
                    return False
                if unless is not None and unless(file.map_memory()):
                    return True
                storage.remove_file(self.folder / name)
        except FileNotFoundError:
            pass
        except PermissionError:
            return False
        return True

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """One at a time of all that give this name to it, which stays in the folder."""
        while True:
            self._trusted = self._private is None  # it may have been removed, and be another one
            self.check_owner()
            storage.make_folders(self.folder)
            with self._open_file(self.folder / name, lock=True) as file:
                file.lock(wait=True)
                if file.is_linked:  # or somebody has removed the folder, and others lock another file
                    yield
                    return

    def index_lock(self) -> AbstractContextManager[None]:
        """The lock of the folder: what is in it does not change but by the holder. For short."""
        return self.locked(_LOCK_NAME)

    @contextmanager
    def _open_file(self, path: Path, *, lock: bool = False) -> Iterator[LockableFile]:
        """A file that a child of a fork in the meantime does not keep."""
        with FORK_REGISTRY.lock:
            file = LockableFile(path, "lock" if lock else "read")
            self._held.add(file)
        try:
            yield file
        finally:
            self.close_file(file)

    def close_file(self, file: LockableFile) -> None:
        """Close a handle, here and for children."""
        with FORK_REGISTRY.lock:
            self._held.discard(file)
            file.close()

    def grow(self, part: PartialFile, size: int) -> Path:
        """Reserve more for a part, which gets another name by that."""
        if size > self.limit:
            raise DataError(
                f"a shard needs at least {size} bytes, the cache {self.folder} has cache_bytes={self.limit}; give it more"
            )
        with self.index_lock():
            if not self._make_space(self._scan(), size - part.reserved):
                raise CacheFullError
            path = self.folder / f"{part.name}.{size}.part"
            storage.rename(part.path, path)
            return path


class PartialFile:
    """A shard that is being made, by this process alone."""

    def __init__(self, cache: ShardCache, name: str, reserved: int, file: LockableFile) -> None:
        self.name, self.reserved = name, reserved
        self.path = cache.folder / f"{name}.{reserved}.part"
        self._cache, self._file = cache, file
        self._written = 0
        self._done = False

    def write(self, data: Buffer) -> None:
        """Append all of ``data``; what was reserved grows where that is not enough."""
        more = self._written + len(memoryview(data).cast("B"))
        if more > self.reserved:
            wanted = min(self._cache.limit, more + _RESERVE_STEP_BYTES) if more <= self._cache.limit else more
            self.path = self._cache.grow(self, wanted)
            self.reserved = wanted
        self._file.write(data)
        self._written = more

    def clear(self) -> None:
        """Begin again."""
        self._file.truncate()
        self._written = 0

    def commit(self) -> memoryview:
        """Make it a whole shard, which cannot be removed while the view lives."""
        with self._cache.index_lock():  # nobody removes it between the two locks that it is held with
            storage.rename(self.path, self._cache.folder / self.name)
            self._done = True
            self._file.lock(shared=True)
            return self._file.map_memory()

    def close(self) -> None:
        """Let go of it; what was not committed is gone."""
        if not self._done:
            with contextlib.suppress(FileNotFoundError):
                storage.remove_file(self.path)
        self._cache.close_file(self._file)
