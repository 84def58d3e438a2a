"""One live job per root: ``run.lock``, held by rank 0 from its first save on and renewed every few seconds.

It keeps out a second job that was started by mistake into the same folder. It does not make commits atomic, which they are
without it, and who only reads takes none. What a killed job leaves is taken over. Nothing but creating a file that must not
exist, replacing one and removing one is needed, so it works on object stores as well.

Taking over is for one process at a time: who wants to replace the lock with token T must first create ``run.lock.T``, and then
still find what it judged. A holder that was taken for dead and is not (stopped for minutes, say) finds another's token in the
file, and its next save raises.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import lock_owner as holders
from dtrain.checkpoint.lock_owner import LockOwner
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

LOCK_FILE = "run.lock"
HEARTBEAT_THREAD = "dtrain-heartbeat"  # the name of the thread
_STALE_CLAIM = re.compile(r"run\.lock\.([0-9a-f]{16}|[0-9a-f]{8}\.tmp)")  # claims, and what a killed replacement leaves
_POLL_S = 0.2
_EXIT_TIMEOUT_S = 10.0  # for servers to let go of locks; then others have to see that the process has gone


@dataclass(slots=True, eq=False)
class _HeldLock:
    """A lock file of this process; ``handles`` are the ``Lock`` objects on it."""

    root: AnyPath
    owner: LockOwner
    handles: int = 0
    protected: set[int] = field(default_factory=set)
    lost_to: str | None = None
    released: bool = False

    @property
    def path(self) -> AnyPath:
        return self.root / LOCK_FILE


@dataclass(slots=True, eq=False)
class _LockRegistry:
    """What this process holds, by root. ``lock`` is reentrant: the garbage collector may release a lock anywhere.

    ``to_release`` has holds on servers that the garbage collector released, and None to wake the thread that renews and drops.
    """

    pid: int = field(default_factory=os.getpid)
    locks: dict[str, _HeldLock] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    acquisition_lock: threading.Lock = field(default_factory=threading.Lock)
    to_release: queue.SimpleQueue[_HeldLock | None] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event | None = None  # of the thread that renews; None while there is none


_REGISTRY = _LockRegistry()


def _registry() -> _LockRegistry:
    """The record of this process. A fork begins with an empty one: it holds nothing, and its locks may be in any state."""
    global _REGISTRY
    if _REGISTRY.pid != os.getpid():
        _REGISTRY = _LockRegistry()
    return _REGISTRY


class Lock:
    """One hold on a root. Released by ``release``, with the last reference to it, or when the interpreter ends normally.

    A root may be held several times by one process; the file goes with the last hold.
    """

    __slots__ = ("__weakref__", "_finish", "_held", "_of")

    def __init__(self, of: _LockRegistry, held: _HeldLock) -> None:
        self._of, self._held = of, held
        held.handles += 1
        self._finish = weakref.finalize(self, _release_from_gc, of, held)
        self._finish.atexit = isinstance(held.root, Path)

    def __repr__(self) -> str:
        return f"Lock({str(self._held.path)!r})"

    @property
    def root(self) -> AnyPath:
        """What is held."""
        return self._held.root

    def protect(self, steps: Collection[int]) -> None:
        """Keep these steps of the root from ``prune`` in this process. Mutates: this hold's record."""
        self._held.protected.update(steps)

    def check(self) -> None:
        """Make sure that the lock is still ours. A file that somebody has removed meanwhile is put back.

        Raises:
            CheckpointError: another process has taken it over, or this hold was released or belongs to the parent process.
            OSError: the file cannot be read.
        """
        if self._of.pid != os.getpid():
            raise CheckpointError(f"{self.root}: is held by the process that this one is a fork of; save from that one")
        with self._of.lock:
            if not self._finish.alive:
                raise CheckpointError(f"{self.root}: the lock was released; take it again before saving")
            if not _still_ours(self._held) and self._held.lost_to is None:
                _create(self._held.path, self._held.owner)
                _still_ours(self._held)  # somebody else may have been faster
            if self._held.lost_to is not None:
                raise CheckpointError(
                    f"{self.root}: another process has taken the lock of this run ({self._held.lost_to}): this one was silent for "
                    "so long that it was taken for dead; end one of the two, then load the latest step"
                )

    def release(self) -> None:
        """Give up this hold. A second call does nothing. Mutates: the lock file goes with the last hold."""
        if self._finish.detach() is not None:
            _release(self._of, self._held)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_root(root: AnyPath, run_id: str, *, protected: Collection[int] = ()) -> Lock:
    """Hold ``root`` for a run of this process, or raise because another live process does.

    Args:
        root: a folder, made if missing; its one true name (``storage.real_path``).
        run_id: of the run, for the message that others get.
        protected: steps of the root that this process still needs: the one resumed from.

    Returns:
        A hold, which counts as long as the object lives. When this process holds the root already, one more on the same file.

    Mutates: ``run.lock``; a thread renews it every few seconds until the last hold of this process is released.
    Waits: for up to a minute, when the holder is on another host or in another container and was alive less than a minute ago:
    it either renews its lock, and is refused with its name, or has died, and is taken over. On the same host that is known at
    once.

    Raises:
        CheckpointError: a live process holds the root.
        OSError: a file operation failed.
    """
    process = _registry()
    with process.acquisition_lock:  # so that two threads of this process do not take each other for strangers
        made = _share_held_lock(process, root)
        if made is None:
            storage.make_folders(root)
            held = _HeldLock(root=root, owner=_acquire_file(root / LOCK_FILE, holders.current_owner(run_id, now=time.time())))
            with process.lock:
                process.locks[str(root)] = held
                made = Lock(process, held)
                _start_heartbeat(process)
            _remove_stale_claims(held)
    made.protect(protected)
    return made


def _share_held_lock(process: _LockRegistry, root: AnyPath) -> Lock | None:
    """A hold on what this process holds already, None when it holds nothing, or holds it no longer."""
    with process.lock:
        held = process.locks.get(str(root))
        return Lock(process, held) if held is not None and held.lost_to is None else None


def is_held_here(root: AnyPath) -> bool:
    """Whether this process holds the root."""
    return str(root) in _registry().locks


def protected_steps(root: AnyPath) -> frozenset[int]:
    """The steps of the root that its holds in this process need."""
    held = _registry().locks.get(str(root))
    return frozenset() if held is None else frozenset(held.protected)


def _acquire_file(path: AnyPath, me: LockOwner) -> LockOwner:
    """Make ``path`` a file that names this process, as soon as no live one is named there."""
    watched, since = b"", time.monotonic()
    while True:
        now = time.time()
        me = replace(me, acquired_at=now, heartbeat_at=now)
        if _create(path, me):
            return me
        found = _read(path)
        if found is None:
            continue  # released between the two
        holder = holders.parse_owner(found)
        if found != watched:
            before = holders.parse_owner(watched)
            if holder is not None and before is not None and holder.token == before.token:
                raise _in_use_error(path, holder)  # it has renewed its heartbeat
            watched, since = found, time.monotonic()
        verdict = holders.owner_status(holder, me, now=now, unchanged_s=time.monotonic() - since)
        if holder is not None and holders.is_same_process(holder, me):
            verdict = "dead"  # this process holds nothing here: its last attempt failed half way
        if verdict == "live":
            assert holder is not None, "what names nobody is not alive"
            raise _in_use_error(path, holder)
        if verdict == "dead" and _take_over(path, found, me):
            return me
        time.sleep(_POLL_S)


def _take_over(path: AnyPath, found: bytes, me: LockOwner) -> bool:
    """Put ``me`` in the place of a dead holder, if what was judged is still there. The claim on it is a lock like any other."""
    dead = holders.parse_owner(found)
    token = hashlib.sha256(found).hexdigest()[:16] if dead is None else dead.token
    claim = path.with_name(f"{LOCK_FILE}.{token}")
    claimed = _acquire_file(claim, replace(me, token=holders.new_token()))
    try:
        if _read(path) != found:
            return False  # another one was faster, or the holder lives after all
        storage.replace_file(path, me.encode())
        return True
    finally:
        _remove_if_owned_by(claim, claimed)


def _in_use_error(path: AnyPath, holder: LockOwner) -> CheckpointError:
    return CheckpointError(
        f"{path.parent}: is in use by another live job ({holder.describe()}); save into another root, or end that job first"
    )


def _create(path: AnyPath, me: LockOwner) -> bool:
    """Create the file; False when there is one."""
    data = me.encode()
    try:
        storage.create_file(path, data)
    except FileExistsError:
        return False
    except OSError:
        # What we began must not stand in the way of the next attempt, and nobody else's file is a part of ours.
        with suppress(OSError):
            found = _read(path)
            if found is not None and data.startswith(found):
                storage.remove_file(path)
        raise
    return True


def _read(path: AnyPath) -> bytes | None:
    """The content of a lock file, None when there is none, nothing when it cannot be one."""
    try:
        size = storage.file_size(path)
        if size is None:
            return b"" if storage.exists(path) else None
        return b"" if size > holders.MAX_BYTES else storage.read_file(path, limit=holders.MAX_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None  # removed or replaced while it was read, here or on a network's server
        raise


def _still_ours(held: _HeldLock) -> bool:
    """Whether the file is there and ours; the lock is lost if it is another's, or we may have missed one. Mutates: ``held``."""
    found = _read(held.path)
    if found is None:
        # Removed by hand, unless we were silent for so long that somebody may have come and gone.
        if time.time() - held.owner.heartbeat_at >= holders.DEAD_AFTER_S:
            held.lost_to = "one that has ended since"
        return False
    holder = holders.parse_owner(found)
    if holder is not None and holder.token == held.owner.token:
        return held.lost_to is None
    held.lost_to = "one that cannot be read" if holder is None else holder.describe()
    return False


def _remove_if_owned_by(path: AnyPath, me: LockOwner) -> None:
    """Remove a lock file if it is ours. Failing to leaves one whose holder is dead, or will be."""
    with suppress(OSError, ConfigError):
        found = holders.parse_owner(_read(path) or b"")
        if found is not None and found.token == me.token:
            storage.remove_file(path)


def _remove_stale_claims(held: _HeldLock) -> None:
    """Remove what was left by those that died while taking over or renewing. No claim on a lock that is gone can succeed."""
    with suppress(OSError):
        for name in storage.list_names(held.root):
            if _STALE_CLAIM.fullmatch(name) and name != f"{LOCK_FILE}.{held.owner.token}":
                with suppress(OSError):
                    storage.remove_file(held.root / name)


def _release_from_gc(process: _LockRegistry, held: _HeldLock) -> None:
    """The end of one hold by the garbage collector, whatever this thread is in the middle of.

    That may be a request to the very server, whose answer no other request can wait for; so another thread does it there.
    """
    if isinstance(held.root, Path):
        _release(process, held)
    elif process.pid == os.getpid():
        process.to_release.put(held)


def _release_at_exit() -> None:
    """Holds on servers end with the interpreter, too, if the server answers soon; it may be what the process has ended of."""
    process, deadline = _registry(), time.monotonic() + _EXIT_TIMEOUT_S
    for held in [held for held in process.locks.values() if not isinstance(held.root, Path)]:
        held.handles = 1
        process.to_release.put(held)
        while str(held.root) in process.locks and time.monotonic() < deadline:
            time.sleep(0.01)


def _release(process: _LockRegistry, held: _HeldLock) -> None:
    """The end of one hold, in whatever thread."""
    if process.pid != os.getpid():
        return  # a fork of the holder ends
    with process.lock:
        held.handles -= 1
        if held.handles > 0:
            return
        held.released = True
        _remove_if_owned_by(held.path, held.owner)
        if process.locks.get(str(held.root)) is held:
            del process.locks[str(held.root)]
        if not process.locks and process.stop is not None:
            process.stop.set()
            process.stop = None
            process.to_release.put(None)


def _start_heartbeat(process: _LockRegistry) -> None:
    """Have a thread renew what is held, if none does."""
    if process.stop is None:
        atexit.unregister(_release_at_exit)
        atexit.register(_release_at_exit)
        process.stop = threading.Event()
        threading.Thread(target=_heartbeat_loop, args=(process, process.stop), name=HEARTBEAT_THREAD, daemon=True).start()


def _heartbeat_loop(process: _LockRegistry, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            dropped = process.to_release.get(timeout=holders.HEARTBEAT_INTERVAL_S)
        except queue.Empty:
            for held in list(process.locks.values()):
                _renew_heartbeat(process, held)
        else:
            if dropped is not None:
                _release(process, dropped)


def _renew_heartbeat(process: _LockRegistry, held: _HeldLock) -> None:
    """One heartbeat. Failing is no reason to end: the disk may be full for a while."""
    with process.lock, suppress(OSError, ConfigError):  # the latter of a server that needs other credentials by now
        if not held.released and _still_ours(held):
            me = holders.with_heartbeat(held.owner, now=time.time())
            storage.replace_file(held.path, me.encode())
            held.owner = me
            if held.released:  # by the garbage collector, just now, in this thread
                _remove_if_owned_by(held.path, me)
