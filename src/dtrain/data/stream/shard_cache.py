"""``ShardCache``: a folder of downloaded and decompressed shards, bounded in bytes, shared by all processes of a machine.

A complete shard has a name of 32 hex digits; other files of the folder are neither touched nor counted. An incomplete shard is
``NAME.BYTES.part``: the cache reserves that many bytes for it, and its writer holds the lock of the file. If the lock is free,
the writer is dead, and any process may remove the file. A reader holds a shared lock of a complete shard. Only files that no
process locks are removed to make room. Every change of the folder happens under the lock of ``.lock``, which is held while
the folder is listed, not during a download. The locks are the operating system's, so they end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from weakref import WeakSet

from dtrain import storage
from dtrain.errors import DataError
from dtrain.storage import Buffer, FolderEntry, LockableFile

_SHARD_NAME = re.compile(r"[0-9a-f]{32}")
_PARTIAL_NAME = re.compile(r"([0-9a-f]{32})\.([0-9]+)\.part")
_LOCK_NAME = ".lock"
# Step of a reservation of unknown final size.
_RESERVE_STEP_BYTES = 64 * 2**20
# Time limit for another process that writes the shard.
_WRITER_TIMEOUT_S = 300.0
# Time limit for other processes to free space.
_SPACE_TIMEOUT_S = 5.0

_CacheState = Literal["ready", "busy", "full", "damaged"]


class CacheFullError(Exception):
    """The cache has no room, because all of its shards are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheContents:
    """Contents of the folder: complete shards, least recently used first; names of incomplete shards; bytes in total."""

    shards: list[FolderEntry]
    parts: list[str]
    used: int


class ShardCache:
    """Complete shards by name. Any process, thread and fork may use the same folder at the same time.

    Args:
        folder: folder of the cache, created on first use.
        max_bytes: maximum of bytes of all files, including reservations for incomplete shards.
        release: function that closes shards that this process has open but does not need; called if there is no room.
        private: parent folder that only this user may write to; None if there is no such folder.
    """

    def __init__(
        self, folder: Path, max_bytes: int, release: Callable[[], object] = lambda: None, *, private: Path | None = None
    ) -> None:
        self.folder, self.limit, self._release, self._private = folder, max_bytes, release, private
        self._trusted = private is None
        self._open_files: set[LockableFile] = set()
        self.writer_timeout_s, self.space_timeout_s = _WRITER_TIMEOUT_S, _SPACE_TIMEOUT_S
        # True after a wait for room has failed. The cache does not wait again until there is room.
        self._is_crowded = False
        FORK_REGISTRY.register(self)

    def after_fork(self) -> None:
        """Close a forked child's copies of the handles, because they would keep the parent's locks."""
        for file in self._open_files:
            file.close()
        self._open_files = set()

    def check_owner(self) -> None:
        """Check the owner of a private folder before its contents are used, since the contents are not verified again.

        Raises:
            ConfigError: the folder belongs to another user.
        """
        if not self._trusted and self._private is not None:
            storage.make_private_folder(self._private)
            self._trusted = True

    def contains(self, name: str) -> bool:
        """Return True if the complete shard is in the cache."""
        return storage.exists(self.folder / name)

    def get(
        self,
        name: str,
        size: int,
        make: Callable[[PartialFile], None],
        *,
        is_sound: Callable[[memoryview], bool] = lambda view: True,
    ) -> memoryview | None:
        """Return the bytes of a shard, memory-mapped. If the shard is missing, ``make`` writes it.

        Args:
            name: name of the shard.
            size: bytes of the complete shard.
            make: function that writes the shard to a ``PartialFile``. Only one process runs it for a shard at a time.
            is_sound: function that returns False for damaged bytes. A damaged shard is removed and made again.

        Returns:
            The bytes. The shard cannot be removed while the view, or a slice of the view, exists. None if the caller should
            read without the cache: there is no room, or another process takes too long to write the shard, or has a damaged
            copy open.

        Raises:
            DataError: the shard is larger than the whole cache.
            Exception: an exception of ``make``. The incomplete shard is removed.
        """
        start = time.monotonic()
        pause, has_released = 0.002, False
        space_timeout_s = 0.0 if self._is_crowded else self.space_timeout_s
        while True:
            view, state = self._try(name, size, make, is_sound)
            if state == "ready":
                self._is_crowded = False
                return view
            if state == "full" and not has_released:
                self._release()
                has_released = True
                continue
            if (
                time.monotonic() - start
                > {"busy": self.writer_timeout_s, "full": space_timeout_s, "damaged": self.space_timeout_s}[state]
            ):
                self._is_crowded = state == "full"
                return None
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def fill(self, name: str, size: int, make: Callable[[PartialFile], None]) -> None:
        """Write the shard to the cache, unless another process is writing it or there is no room."""
        if self.contains(name):
            with contextlib.suppress(OSError), self._open_file(self.folder / name) as file:
                # The shard is needed soon, so it must not be the least recently used.
                file.touch()
            return
        self._try(name, size, make, lambda view: True)

    def _try(
        self, name: str, size: int, make: Callable[[PartialFile], None], is_sound: Callable[[memoryview], bool]
    ) -> tuple[memoryview | None, _CacheState]:
        view, state = self._open_complete(name, is_sound)
        if state is not None:
            return view, state
        partial_file = None
        try:
            partial_file = self._reserve(name, size)
            if partial_file is None:
                return None, "busy"
            make(partial_file)
            return partial_file.commit(), "ready"
        except CacheFullError:
            return None, "full"
        except FileNotFoundError:
            # Another process has removed the folder, so the caller tries again.
            return None, "busy"
        finally:
            if partial_file is not None:
                partial_file.close()

    def _open_complete(self, name: str, is_sound: Callable[[memoryview], bool]) -> tuple[memoryview | None, _CacheState | None]:
        """Open the shard if it is complete. The state is None if the shard is missing."""
        self.check_owner()
        # The view keeps a handle of its own, which ends with the view in a forked child, too.
        with FORK_REGISTRY.lock:
            try:
                file = LockableFile(self.folder / name)
            except FileNotFoundError:
                return None, None
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The name is a link or another object that this library did not create.
                file = None
            if file is None:
                with self.index_lock():
                    storage.remove_file(self.folder / name)
                return None, None
            with file:
                # The lock is not free if the shard is being removed.
                if not file.lock(shared=True) or not file.is_linked:
                    return None, None
                file.touch()
                view = file.map_memory()
        if is_sound(view):
            return view, "ready"
        # Deleting the view releases its lock.
        del view
        with self.index_lock():
            return None, None if self._remove_unused(name, unless=is_sound) else "damaged"

    def _reserve(self, name: str, size: int) -> PartialFile | None:
        """Reserve room for a shard, and return the partial file; None if another process writes or has written the shard.

        Raises:
            CacheFullError: there is no room.
        """
        if size > self.limit:
            raise DataError(f"a shard needs {size} bytes, but the cache {self.folder} has cache_bytes={self.limit}. Raise it.")
        with self.index_lock():
            contents = self._scan()
            if self.contains(name) or name in contents.parts:
                return None
            self._make_space(contents, size)
            path = self.folder / f"{name}.{size}.part"
            with FORK_REGISTRY.lock:
                file = LockableFile(path, "new")
                self._open_files.add(file)
            if not file.lock():
                raise AssertionError(f"{path} is new, but locked by another process")
            return PartialFile(self, name, size, file)

    def _scan(self) -> _CacheContents:
        """List the folder, and remove partial files of dead processes. Requires the lock."""
        shards, parts, used = [], [], 0
        for entry in storage.scan_folder(self.folder):
            if _SHARD_NAME.fullmatch(entry.name):
                shards.append(entry)
                used += entry.size
            elif (match := _PARTIAL_NAME.fullmatch(entry.name)) and self._is_being_written(entry.name):
                parts.append(match[1])
                used += max(entry.size, int(match[2]))
        shards.sort(key=lambda entry: entry.modified_ns)
        return _CacheContents(shards=shards, parts=parts, used=used)

    def _is_being_written(self, name: str) -> bool:
        """Return True if a process writes this partial file, which holds the lock. Otherwise remove the file."""
        try:
            with self._open_file(self.folder / name) as file:
                if not file.lock():
                    return True
                storage.remove_file(self.folder / name)
        except FileNotFoundError:
            pass
        except PermissionError:
            # In a folder where only owners may remove files, another user's file takes up room.
            return True
        return False

    def _make_space(self, contents: _CacheContents, needed_bytes: int) -> None:
        """Remove unused shards as far as necessary, until there is room for ``needed_bytes`` more bytes.

        Raises:
            CacheFullError: there is no room.
        """
        used = contents.used
        for entry in contents.shards:
            if used + needed_bytes <= self.limit:
                break
            if self._remove_unused(entry.name):
                used -= entry.size
        if used + needed_bytes > self.limit:
            raise CacheFullError

    def _remove_unused(self, name: str, *, unless: Callable[[memoryview], bool] | None = None) -> bool:
        """Remove a shard that no process uses. Return True if the shard is gone, or if a new copy fulfils ``unless``."""
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
        """Hold an exclusive lock of the file ``name``, which stays in the folder."""
        while True:
            # The folder may have been removed and created again by another user.
            self._trusted = self._private is None
            self.check_owner()
            storage.make_folders(self.folder)
            with self._open_file(self.folder / name, lock=True) as file:
                file.lock(wait=True)
                # If the folder was removed, other processes lock another file.
                if file.is_linked:
                    yield
                    return

    def index_lock(self) -> AbstractContextManager[None]:
        """Return the lock of the folder. While it is held, no other process changes the folder. Hold it briefly."""
        return self.locked(_LOCK_NAME)

    @contextmanager
    def _open_file(self, path: Path, *, lock: bool = False) -> Iterator[LockableFile]:
        """Open a file whose handle a forked child closes."""
        with FORK_REGISTRY.lock:
            file = LockableFile(path, "lock" if lock else "read")
            self._open_files.add(file)
        try:
            yield file
        finally:
            self.close_file(file)

    def close_file(self, file: LockableFile) -> None:
        """Close a handle, and remove it from the handles that a forked child closes."""
        with FORK_REGISTRY.lock:
            self._open_files.discard(file)
            file.close()

    def grow(self, partial_file: PartialFile, size: int) -> None:
        """Raise the reservation of a partial file, which renames the file."""
        if size > self.limit:
            raise DataError(
                f"a shard needs at least {size} bytes, but the cache {self.folder} has cache_bytes={self.limit}. Raise it."
            )
        with self.index_lock():
            self._make_space(self._scan(), size - partial_file.reserved)
            path = self.folder / f"{partial_file.name}.{size}.part"
            storage.rename(partial_file.path, path)
        partial_file.path, partial_file.reserved = path, size


class PartialFile:
    """Incomplete shard that this process writes."""

    def __init__(self, cache: ShardCache, name: str, reserved: int, file: LockableFile) -> None:
        self.name, self.reserved = name, reserved
        self.path = cache.folder / f"{name}.{reserved}.part"
        self._cache, self._file = cache, file
        self._written = 0
        self._committed = False

    def write(self, data: Buffer) -> None:
        """Append all of ``data``, and raise the reservation if necessary."""
        new_size = self._written + len(memoryview(data).cast("B"))
        if new_size > self.reserved:
            # A shard that is larger than the cache is refused.
            self._cache.grow(self, max(new_size, min(self._cache.limit, new_size + _RESERVE_STEP_BYTES)))
        self._file.write(data)
        self._written = new_size

    def clear(self) -> None:
        """Discard the bytes written so far."""
        self._file.truncate()
        self._written = 0

    def commit(self) -> memoryview:
        """Make the shard complete, and return a view that keeps the shard in the cache."""
        # The lock of the folder keeps other processes from removing the shard while its lock changes to a shared lock.
        with self._cache.index_lock():
            storage.rename(self.path, self._cache.folder / self.name)
            self._committed = True
            self._file.lock(shared=True)
            return self._file.map_memory()

    def close(self) -> None:
        """Close the file, and remove it unless it was committed."""
        if not self._committed:
            with contextlib.suppress(FileNotFoundError):
                storage.remove_file(self.path)
        self._cache.close_file(self._file)


class ForkAware(Protocol):
    """Object with file handles or threads."""

    def after_fork(self) -> None:
        """Reset the object in a forked child: close its copies of handles, and start without threads."""


class ForkRegistry:
    """Registry of objects to reset after a fork, one per process. The first use installs a hook, which is permanent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Lock for opening and closing a handle. A fork waits for it, so every handle is either registered or not open."""
        self._registered: WeakSet[ForkAware] = WeakSet()
        self._hooked = False

    def register(self, instance: ForkAware) -> None:
        """Call ``instance.after_fork()`` in every child that is forked from now on, for as long as ``instance`` lives."""
        with self.lock:
            self._registered.add(instance)
            if not self._hooked:
                self._hooked = True
                os.register_at_fork(
                    before=lambda: self.lock.acquire(),
                    after_in_parent=lambda: self.lock.release(),
                    after_in_child=self._after_fork_in_child,
                )

    def _after_fork_in_child(self) -> None:
        self.lock = threading.RLock()
        for instance in list(self._registered):
            instance.after_fork()


# The only state of this package in a module. A hook of os.register_at_fork belongs to the process and cannot be removed, so one
# hook serves all datasets, which the registry holds by weak references.
FORK_REGISTRY = ForkRegistry()
