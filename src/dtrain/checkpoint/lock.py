"""Lock a root for one live job: rank 0 holds ``run.lock`` from its first save on and renews its heartbeat every few seconds.

The lock refuses a second job that was started by mistake into the same folder. Commits are atomic without the lock, and readers
take no lock. The lock of a killed job is taken over. The lock needs exclusive creation, replacement and removal of files only,
so it works on object stores as well.

The lock file names its owner. A process is identified by the boot id of its kernel, its pid namespace, its pid and its start
time. If all four can be compared, the answer whether the owner is alive is certain. If they cannot be compared (another host or
container), the heartbeat decides.

One process at a time takes a lock over: to replace the lock with token T, a process must first create ``run.lock.T``, and then
find the lock unchanged. If a live owner was taken for dead (because it was stopped for minutes, for example), the next save of
this owner finds another token in the file and raises.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import queue
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from dtrain import storage
from dtrain.arguments import warn
from dtrain.checkpoint.save_thread import process_instance
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

LOCK_FILE = "run.lock"
HEARTBEAT_THREAD = "dtrain-heartbeat"
# Limit for a lock file; a written file has about 400 bytes.
MAX_BYTES = 4096
HEARTBEAT_INTERVAL_S = 5.0
"""Interval between heartbeats of an owner."""
DEAD_AFTER_S = 60.0
"""Age of the last heartbeat from which an owner that cannot be inspected is dead."""
REBOOTED_AFTER_S = 20.0
"""Like ``DEAD_AFTER_S``, for a host of our name with another boot id. Not zero: two machines may have one name."""
TORN_AFTER_S = 2.0
"""Age from which an unreadable file that does not change is taken for the leftover of an interrupted write."""
_POLL_S = 0.2
_RELEASE_POLL_S = 0.01
# Time to release locks on servers at exit. After that, other processes detect the dead owner.
_EXIT_TIMEOUT_S = 10.0
_MAX_PID = 2**31 - 1
# Claims, and leftovers of a killed replacement.
_STALE_CLAIM = re.compile(r"run\.lock\.([0-9a-f]{16}|[0-9a-f]{8}\.tmp)")

# These characters are safe in a message.
_Word = Annotated[str, Meta(pattern=r"\A[!-~]{1,255}\Z")]
_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0, lt=1e11)]


class LockOwner(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Owner of a lock, as the lock file names the owner.

    Args:
        token: unique token of the lock.
        host: name of the host.
        pid: pid of the process in its pid namespace.
        start_ticks: start time of the process in ticks since boot; None without /proc.
        boot_id: id of the boot; None without /proc.
        pid_namespace: pid namespace; None without /proc.
        run_id: id of the run.
        acquired_at: time of acquisition in seconds since 1970 by the owner's clock.
        heartbeat_at: time of the last heartbeat in seconds since 1970 by the owner's clock.
    """

    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    host: _Word
    pid: _Count
    start_ticks: _Count | None
    boot_id: _Word | None
    pid_namespace: _Word | None
    run_id: _Word
    acquired_at: _Seconds
    heartbeat_at: _Seconds
    format: Literal["dtrain-lock"] = "dtrain-lock"
    version: Literal[1] = 1

    def encode(self) -> bytes:
        """Encode the lock file. The token is the first field, so that a part of the file identifies its writer."""
        return json.dumps(msgspec.structs.asdict(self), allow_nan=False).encode() + b"\n"

    def describe(self) -> str:
        """Describe the owner such that ``ps`` on the named host finds the process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.acquired_at))
        return f"host {self.host}, pid {self.pid}, since {since}, run {self.run_id}"


def parse_owner(data: bytes) -> LockOwner | None:
    """Parse a lock file. Return None if this version cannot have written the file."""
    try:
        owner = msgspec.json.decode(data, type=LockOwner)
    # Bytes that are not UTF-8 raise ValueError.
    except (msgspec.MsgspecError, ValueError):
        return None
    return replace(owner, pid=min(owner.pid, _MAX_PID))


def current_owner(run_id: str, *, now: float) -> LockOwner:
    """Return an owner for this process, which acquires a lock now."""
    pid_namespace: str | None = None
    boot_id: str | None = None
    # Without Linux, or in a sandbox without these files, the fields are None and never compared.
    with suppress(OSError):
        pid_namespace = os.readlink("/proc/self/ns/pid")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    start_ticks = process_start_ticks(os.getpid())
    return LockOwner(
        token=secrets.token_hex(8),
        host=re.sub(r"[^!-~]", "?", socket.gethostname())[:255] or "?",
        pid=os.getpid(),
        start_ticks=start_ticks if type(start_ticks) is int else None,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        run_id=run_id,
        acquired_at=now,
        heartbeat_at=now,
    )


def is_same_process(one: LockOwner, other: LockOwner) -> bool:
    """Return True if both owners are the same process, which may have left a lock after an error or an ``exec``."""
    names = ("host", "pid", "start_ticks", "boot_id", "pid_namespace")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def with_heartbeat(owner: LockOwner, *, now: float) -> LockOwner:
    """Return the owner with a heartbeat at ``now``. The heartbeat always increases, because a change shows life."""
    return replace(owner, heartbeat_at=max(now, owner.heartbeat_at + 1e-3))


def process_start_ticks(pid: int) -> int | Literal["gone", "hidden"]:
    """Return the start time of a process in ticks; "gone" if the process has ended, "hidden" if no more is visible."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        # The process exists and belongs to another user.
        pass
    try:
        # The process name in brackets may contain any character.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "hidden"
    return "gone" if words[0] in (b"Z", b"X") else int(words[19])


def owner_status(
    owner: LockOwner | None, our_owner: LockOwner, *, now: float, unchanged_s: float
) -> Literal["live", "dead", "unknown"]:
    """Determine whether the owner of a lock file is alive.

    Args:
        owner: the parsed owner; None if the file is unreadable.
        our_owner: owner of this process.
        now: time of this host's clock, which is compared with the owner's clock. A clock that is a minute ahead takes a live
            owner on another host for dead, and this owner raises at its next heartbeat. A clock that is behind waits longer.
        unchanged_s: time for which this process has seen the file unchanged.

    Returns:
        "unknown" while the file has to be watched: a change shows a live owner, no change a dead owner.
    """
    if owner is None:
        return "dead" if unchanged_s >= TORN_AFTER_S else "unknown"
    same_kernel = owner.boot_id is not None and owner.boot_id == our_owner.boot_id
    if same_kernel and owner.pid_namespace is not None and owner.pid_namespace == our_owner.pid_namespace and owner.pid > 0:
        start_ticks = process_start_ticks(owner.pid)
        # The kernel reuses the pid of a dead process, with another start time.
        reused = type(start_ticks) is int and owner.start_ticks is not None and start_ticks != owner.start_ticks
        return "dead" if start_ticks == "gone" or reused else "live"
    # Ids of another boot or pids of another namespace say nothing: a pid that does not exist here may be alive there.
    rebooted = owner.host == our_owner.host and owner.boot_id is not None and our_owner.boot_id is not None and not same_kernel
    silent_s = max(now - owner.heartbeat_at, unchanged_s)
    return "dead" if silent_s >= (REBOOTED_AFTER_S if rebooted else DEAD_AFTER_S) else "unknown"


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
                if not storage.is_folder(self.root):
                    warn(
                        f"{self.root} was removed while this run was using it, and its steps with it. The folder is created "
                        "again."
                    )
                    storage.make_folders(self.root)
                self._held.owner = with_heartbeat(self._held.owner, now=time.time())
                write_again(self._held.path, self._held.owner)
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
        while True:
            with registry.lock:
                held = registry.locks.get(str(root))
                hold = None if held is None or held.lost_to is not None or held.released else Lock(registry, held)
            # Another thread may be removing the lock file of a root that this process held.
            if hold is not None or held is None or not held.released:
                break
            time.sleep(_RELEASE_POLL_S)
        if hold is None:
            storage.make_folders(root)
            owner = acquire_file(root / LOCK_FILE, current_owner(run_id, now=time.time()))
            file_lock = registry.lock if isinstance(root, Path) else threading.RLock()
            held = _HeldLock(root=root, owner=owner, file_lock=file_lock)
            with registry.lock:
                registry.locks[str(root)] = held
                hold = Lock(registry, held)
                if registry.stop is None:
                    atexit.unregister(_release_at_exit)
                    atexit.register(_release_at_exit)
                    registry.stop = threading.Event()
                    thread_args = (registry, registry.stop)
                    threading.Thread(target=_heartbeat_loop, args=thread_args, name=HEARTBEAT_THREAD, daemon=True).start()
            _remove_stale_claims(held)
    hold.protect(protected)
    return hold


def _remove_stale_claims(held: _HeldLock) -> None:
    """Remove leftovers of processes that died during a takeover or heartbeat. Claims on a removed lock cannot succeed."""
    with suppress(OSError):
        for name in storage.list_names(held.root):
            if _STALE_CLAIM.fullmatch(name) and name != f"{LOCK_FILE}.{held.owner.token}":
                with suppress(OSError):
                    storage.remove_file(held.root / name)


def protected_steps(root: AnyPath) -> frozenset[int]:
    """Return the steps of the root that the holds in this process protect."""
    held = process_instance(_LockRegistry).locks.get(str(root))
    return frozenset() if held is None else frozenset(held.protected)


def _still_ours(held: _HeldLock) -> bool:
    """Return True if the lock file is ours. The lock is lost if another owner may have had the file. Mutates: ``held``."""
    content = read_file(held.path)
    if content is None:
        # The file was removed by hand, or by another owner that came and ended while this process sent no heartbeat. A removed
        # root has no steps that another owner could have written.
        silent = time.time() - held.owner.heartbeat_at >= DEAD_AFTER_S
        if silent and storage.is_folder(held.root):
            held.lost_to = "a process that has ended since"
        return False
    owner = parse_owner(content)
    if owner is not None and owner.token == held.owner.token:
        return held.lost_to is None
    # No process leaves bytes that name no owner, so nobody has taken the lock over.
    if owner is not None:
        held.lost_to = owner.describe()
    return False


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


def _heartbeat_loop(registry: _LockRegistry, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            dropped = registry.to_release.get(timeout=HEARTBEAT_INTERVAL_S)
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
        renewed = with_heartbeat(held.owner, now=time.time())
        if _still_ours(held):
            storage.replace_file(held.path, renewed.encode())
            held.owner = renewed
            # The garbage collector may have released the hold in this thread during the replacement.
            if held.released:
                remove_if_owned_by(held.path, renewed)
        elif held.lost_to is None:
            # Overwritten bytes would look like a dead owner, because they do not change. A removed file is left to the next
            # save, because the heartbeat might disturb a removal of the root.
            if storage.exists(held.path):
                write_again(held.path, renewed)
            held.owner = renewed


def acquire_file(path: AnyPath, our_owner: LockOwner) -> LockOwner:
    """Create ``path`` with this process as owner, once no live owner is named there."""
    watched, since = b"", time.monotonic()
    while True:
        now = time.time()
        our_owner = replace(our_owner, acquired_at=now, heartbeat_at=now)
        if create_lock_file(path, our_owner):
            return our_owner
        content = read_file(path)
        if content is None:
            # The owner released the lock after the attempt to create the file.
            continue
        owner = parse_owner(content)
        if content != watched:
            before = parse_owner(watched)
            if owner is not None and before is not None and owner.token == before.token:
                # The owner has renewed its heartbeat.
                raise _in_use_error(path, owner)
            watched, since = content, time.monotonic()
        status = owner_status(owner, our_owner, now=now, unchanged_s=time.monotonic() - since)
        if owner is not None and is_same_process(owner, our_owner):
            # This process has no lock on the root, so its last attempt failed half way.
            status = "dead"
        if status == "live":
            assert owner is not None, "a file without owner is never live"
            raise _in_use_error(path, owner)
        if status == "dead" and _take_over(path, content, our_owner):
            return our_owner
        time.sleep(_POLL_S)


def write_again(path: AnyPath, our_owner: LockOwner) -> None:
    """Create the lock file of a live owner again, or replace bytes that no process writes. Other owners keep the file.

    Waits: ``TORN_AFTER_S`` seconds for such bytes to change, because another process may be about to complete them.
    """
    watched, since = b"", time.monotonic()
    while not create_lock_file(path, our_owner):
        content = read_file(path)
        if content is not None and parse_owner(content) is not None:
            return
        if content != watched:
            watched, since = content or b"", time.monotonic()
        if content is not None and time.monotonic() - since >= TORN_AFTER_S and _take_over(path, content, our_owner):
            return
        time.sleep(_POLL_S)


def _take_over(path: AnyPath, content: bytes, our_owner: LockOwner) -> bool:
    """Replace a dead owner, or bytes that name no owner, by ``our_owner`` if the file still has this content.

    The claim for the takeover is a lock file itself.
    """
    dead = parse_owner(content)
    token = hashlib.sha256(content).hexdigest()[:16] if dead is None else dead.token
    claim = path.with_name(f"{LOCK_FILE}.{token}")
    claimed = acquire_file(claim, replace(our_owner, token=secrets.token_hex(8)))
    try:
        if read_file(path) != content:
            # Another process was faster, or the owner is alive.
            return False
        storage.replace_file(path, our_owner.encode())
        return True
    finally:
        remove_if_owned_by(claim, claimed)


def _in_use_error(path: AnyPath, owner: LockOwner) -> CheckpointError:
    return CheckpointError(
        f"{path.parent}: another live job uses this root ({owner.describe()}). Save into another root, or end that job first."
    )


def create_lock_file(path: AnyPath, our_owner: LockOwner) -> bool:
    """Create the lock file. Return False if the file exists."""
    data = our_owner.encode()
    try:
        storage.create_file(path, data)
    except FileExistsError:
        return False
    except OSError:
        # A partly written file of this process must not block the next attempt. Files of other processes differ in the token.
        with suppress(OSError):
            content = read_file(path)
            if content is not None and data.startswith(content):
                storage.remove_file(path)
        raise
    return True


def read_file(path: AnyPath) -> bytes | None:
    """Return the content of a lock file; None if there is none, and b"" if the content cannot be a lock file."""
    try:
        size = storage.file_size(path)
        if size is None:
            return b"" if storage.exists(path) else None
        return b"" if size > MAX_BYTES else storage.read_file(path, limit=MAX_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            # The file was removed or replaced while being read.
            return None
        raise


def remove_if_owned_by(path: AnyPath, our_owner: LockOwner) -> None:
    """Remove a lock file if this process owns it. If the removal fails, a file with a dead owner remains."""
    with suppress(OSError, ConfigError):
        owner = parse_owner(read_file(path) or b"")
        if owner is not None and owner.token == our_owner.token:
            storage.remove_file(path)
