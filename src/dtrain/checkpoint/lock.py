"""Lock a root for one live job: rank 0 holds ``run.lock`` from its first save on and renews its heartbeat every few seconds.

The lock refuses a second job that was started by mistake into the same folder. Commits are atomic without the lock, and readers
take no lock. The lock of a killed job is taken over. The lock needs exclusive creation, replacement and removal of files only,
so it works on object stores as well.

One process at a time takes a lock over: to replace the lock with token T, a process must first create ``run.lock.T``, and then
find the lock unchanged. If a live owner was taken for dead (because it was stopped for minutes, for example), the next save of
this owner finds another token in the file and raises.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import threading
import time
import warnings
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import lock_owner
from dtrain.checkpoint.lock_file import LOCK_FILE, acquire_file, read_file, remove_if_owned_by, write_again
from dtrain.checkpoint.lock_owner import LockOwner
from dtrain.checkpoint.process_instance import process_instance
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

HEARTBEAT_THREAD = "dtrain-heartbeat"
# Claims, and leftovers of a killed replacement.
_STALE_CLAIM = re.compile(r"run\.lock\.([0-9a-f]{16}|[0-9a-f]{8}\.tmp)")
_RELEASE_POLL_S = 0.01
# Time to release locks on servers at exit. After that, other processes detect the dead owner.
_EXIT_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _HeldLock:
    """Lock file of this process; ``handles`` counts its ``Lock`` objects. The file is used under ``file_lock``.

    A lock on a server has a ``file_lock`` of its own, so that a server that does not answer delays no other root. A local lock
    has the registry's, because the garbage collector may release a local lock anywhere.
    """

    root: AnyPath
    owner: LockOwner
    file_lock: threading.RLock
    handles: int = 0
    protected: set[int] = field(default_factory=set)
    lost_to: str | None = None
    released: bool = False

    @property
    def path(self) -> AnyPath:
        return self.root / LOCK_FILE


@dataclass(slots=True, eq=False)
class _LockRegistry:
    """Locks of this process by root. ``lock`` is reentrant, because the garbage collector may release a lock anywhere.

    ``to_release`` holds locks on servers that the garbage collector released, and None to wake the heartbeat thread. ``stop``
    ends the heartbeat thread, and is None without a thread.
    """

    pid: int = field(default_factory=os.getpid)
    locks: dict[str, _HeldLock] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    acquisition_lock: threading.Lock = field(default_factory=threading.Lock)
    to_release: queue.SimpleQueue[_HeldLock | None] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event | None = None


class Lock:
    """Hold on a root, released by ``release``, with the last reference, or when the interpreter ends normally.

    A process may hold a root several times; the file is removed with the last hold.
    """

    __slots__ = ("__weakref__", "_finish", "_held", "_registry")

    def __init__(self, registry: _LockRegistry, held: _HeldLock) -> None:
        self._registry, self._held = registry, held
        held.handles += 1
        self._finish = weakref.finalize(self, _release_from_gc, registry, held)
        self._finish.atexit = isinstance(held.root, Path)

    def __repr__(self) -> str:
        return f"Lock({str(self._held.path)!r})"

    @property
    def root(self) -> AnyPath:
        """Locked root."""
        return self._held.root

    def protect(self, steps: Collection[int]) -> None:
        """Keep ``prune`` in this process from removing these steps. Mutates: the record of this hold."""
        self._held.protected.update(steps)

    def check(self) -> None:
        """Raise unless this process still owns the lock. A lock file or root that was removed or overwritten is written again.

        Warns if the root was removed.

        Raises:
            CheckpointError: another process has taken over the lock, or this hold was released or is the parent process's.
            OSError: an unreadable lock file.
        """
        if self._registry.pid != os.getpid():
            raise CheckpointError(f"{self.root}: the lock belongs to the parent process of this fork. Save from the parent.")
        with self._held.file_lock:
            if not self._finish.alive:
                raise CheckpointError(f"{self.root}: the lock was released. Lock the root again before saving.")
            if not _still_ours(self._held) and self._held.lost_to is None:
                _write_again(self._held)
                # Another process may have created the file first.
                _still_ours(self._held)
            if self._held.lost_to is not None:
                raise CheckpointError(
                    f"{self.root}: another process has taken over the lock of this run ({self._held.lost_to}), because this "
                    "process sent no heartbeat for too long. End one of the two, then load the latest step."
                )

    def release(self) -> None:
        """Release this hold. A second call does nothing. Mutates: the lock file is removed with the last hold."""
        if self._finish.detach() is not None:
            _release(self._registry, self._held)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_root(root: AnyPath, run_id: str, *, protected: Collection[int] = ()) -> Lock:
    """Lock ``root`` for a run of this process, or raise if another live process has locked the root.

    Args:
        root: folder, created if missing, as ``storage.real_path`` returns it.
        run_id: id of the run, for the messages of other processes.
        protected: steps of the root that this process still needs: the step resumed from.

    Returns:
        A hold, which lasts as long as the object. If this process has locked the root already, the file is shared.

    Mutates: ``run.lock``; a thread renews its heartbeat every few seconds until the last hold of this process is released.
    Waits: up to a minute if the owner is on another host or in another container and was alive less than a minute ago. A
    heartbeat of the owner then raises, and silence lets this process take over. An owner on the same host is inspected at once.

    Raises:
        CheckpointError: a live process has locked the root.
        OSError: a failed file operation.
    """
    registry = process_instance(_LockRegistry)
    # Two threads of this process must not take each other for different processes.
    with registry.acquisition_lock:
        while (hold := _share_held_lock(registry, root)) is None and _is_being_released(registry, root):
            time.sleep(_RELEASE_POLL_S)
        if hold is None:
            storage.make_folders(root)
            owner = acquire_file(root / LOCK_FILE, lock_owner.current_owner(run_id, now=time.time()))
            file_lock = registry.lock if isinstance(root, Path) else threading.RLock()
            held = _HeldLock(root=root, owner=owner, file_lock=file_lock)
            with registry.lock:
                registry.locks[str(root)] = held
                hold = Lock(registry, held)
                _start_heartbeat(registry)
            _remove_stale_claims(held)
    hold.protect(protected)
    return hold


def _share_held_lock(registry: _LockRegistry, root: AnyPath) -> Lock | None:
    """Return another hold on a lock of this process, or None if the process has none or has lost the lock."""
    with registry.lock:
        held = registry.locks.get(str(root))
        shareable = held is not None and held.lost_to is None and not held.released
        return Lock(registry, held) if held is not None and shareable else None


def _is_being_released(registry: _LockRegistry, root: AnyPath) -> bool:
    """Return True while another thread removes the lock file of a root that this process held."""
    held = registry.locks.get(str(root))
    return held is not None and held.released


def protected_steps(root: AnyPath) -> frozenset[int]:
    """Return the steps of the root that the holds in this process protect."""
    held = process_instance(_LockRegistry).locks.get(str(root))
    return frozenset() if held is None else frozenset(held.protected)


def _write_again(held: _HeldLock) -> None:
    """Write the lock file and its root again, unless another process does so first. Mutates: ``held``."""
    if not storage.is_folder(held.root):
        warnings.warn(
            f"{held.root} was removed while this run was using it, and its steps with it. The folder is created again.",
            stacklevel=2,
        )
        storage.make_folders(held.root)
    held.owner = lock_owner.with_heartbeat(held.owner, now=time.time())
    write_again(held.path, held.owner)


def _still_ours(held: _HeldLock) -> bool:
    """Return True if the lock file is ours. The lock is lost if another owner may have had the file. Mutates: ``held``."""
    found = read_file(held.path)
    if found is None:
        # The file was removed by hand, or by another owner that came and ended while this process sent no heartbeat. A removed
        # root has no steps that another owner could have written.
        silent = time.time() - held.owner.heartbeat_at >= lock_owner.DEAD_AFTER_S
        if silent and storage.is_folder(held.root):
            held.lost_to = "a process that has ended since"
        return False
    owner = lock_owner.parse_owner(found)
    if owner is not None and owner.token == held.owner.token:
        return held.lost_to is None
    # No process leaves bytes that name no owner, so nobody has taken the lock over.
    if owner is not None:
        held.lost_to = owner.describe()
    return False


def _remove_stale_claims(held: _HeldLock) -> None:
    """Remove leftovers of processes that died during a takeover or heartbeat. Claims on a removed lock cannot succeed."""
    with suppress(OSError):
        for name in storage.list_names(held.root):
            if _STALE_CLAIM.fullmatch(name) and name != f"{LOCK_FILE}.{held.owner.token}":
                with suppress(OSError):
                    storage.remove_file(held.root / name)


def _release_from_gc(registry: _LockRegistry, held: _HeldLock) -> None:
    """Release a hold from the garbage collector, which may interrupt any operation of this thread.

    For a lock on a server, the interrupted operation may be a request to this server. Another thread releases such a lock.
    """
    if isinstance(held.root, Path):
        _release(registry, held)
    elif registry.pid == os.getpid():
        registry.to_release.put(held)


def _release_at_exit() -> None:
    """Release locks on servers when the interpreter ends, if the server answers in time."""
    registry, deadline = process_instance(_LockRegistry), time.monotonic() + _EXIT_TIMEOUT_S
    for held in [held for held in registry.locks.values() if not isinstance(held.root, Path)]:
        held.handles = 1
        registry.to_release.put(held)
        while str(held.root) in registry.locks and time.monotonic() < deadline:
            time.sleep(0.01)


def _release(registry: _LockRegistry, held: _HeldLock) -> None:
    """Release a hold, from any thread."""
    if registry.pid != os.getpid():
        # A fork of the owner ends.
        return
    with registry.lock:
        held.handles -= 1
        if held.handles > 0:
            return
        held.released = True
    with held.file_lock:
        remove_if_owned_by(held.path, held.owner)
    with registry.lock:
        if registry.locks.get(str(held.root)) is held:
            del registry.locks[str(held.root)]
        if not registry.locks and registry.stop is not None:
            registry.stop.set()
            registry.stop = None
            registry.to_release.put(None)


def _start_heartbeat(registry: _LockRegistry) -> None:
    """Start the heartbeat thread unless it runs."""
    if registry.stop is None:
        atexit.unregister(_release_at_exit)
        atexit.register(_release_at_exit)
        registry.stop = threading.Event()
        threading.Thread(target=_heartbeat_loop, args=(registry, registry.stop), name=HEARTBEAT_THREAD, daemon=True).start()


def _heartbeat_loop(registry: _LockRegistry, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            dropped = registry.to_release.get(timeout=lock_owner.HEARTBEAT_INTERVAL_S)
        except queue.Empty:
            for held in list(registry.locks.values()):
                _renew_heartbeat(held)
        else:
            if dropped is not None:
                _release(registry, dropped)


def _renew_heartbeat(held: _HeldLock) -> None:
    """Renew one heartbeat. A failure does not end the thread, because the disk may be full for a while."""
    # A server that needs other credentials by now raises ConfigError.
    with held.file_lock, suppress(OSError, ConfigError):
        if held.released:
            return
        renewed = lock_owner.with_heartbeat(held.owner, now=time.time())
        if _still_ours(held):
            storage.replace_file(held.path, renewed.encode())
            held.owner = renewed
            # The garbage collector may have released the hold in this thread during the replacement.
            if held.released:
                remove_if_owned_by(held.path, renewed)
        elif held.lost_to is None and storage.exists(held.path):
            # Overwritten bytes would look like a dead owner, because they do not change.
            write_again(held.path, renewed)
            held.owner = renewed
        elif held.lost_to is None:
            # The file was removed, and the next save creates the file again: the heartbeat might disturb a removal of the root.
            held.owner = renewed
