"""Parse the owner of a root's lock file, and determine whether the owner's process is alive. No file of the root is read.

A process is identified by the boot id of its kernel, its pid namespace, its pid and its start time. If all four can be
compared, the answer is certain. If they cannot be compared (another host or container), the heartbeat decides.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dtrain.checkpoint import strict_json
from dtrain.checkpoint.strict_json import Count
from dtrain.errors import CorruptCheckpointError

FORMAT, VERSION = "dtrain-lock", 1
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

OwnerStatus = Literal["live", "dead", "unknown"]
# These characters are safe in a message.
_Word = Annotated[str, Meta(pattern=r"\A[!-~]{1,255}\Z")]
_Seconds = Annotated[float, Meta(ge=0, lt=1e11)]
_MAX_PID = 2**31 - 1


@strict_json.compile_schema
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
    pid: Count
    start_ticks: Count | None
    boot_id: _Word | None
    pid_namespace: _Word | None
    run_id: _Word
    acquired_at: _Seconds
    heartbeat_at: _Seconds

    def encode(self) -> bytes:
        """Encode the lock file. The token is the first field, so that a part of the file identifies its writer."""
        return (
            json.dumps({**msgspec.structs.asdict(self), "format": FORMAT, "version": VERSION}, allow_nan=False).encode() + b"\n"
        )

    def describe(self) -> str:
        """Describe the owner such that ``ps`` on the named host finds the process."""
        return f"host {self.host}, pid {self.pid}, since {_format_utc(self.acquired_at)}, run {self.run_id}"


def parse_owner(data: bytes) -> LockOwner | None:
    """Parse a lock file. Return None if this version cannot have written the file."""
    try:
        raw = strict_json.parse_json(data, "lock")
        if type(raw) is not dict or (raw.pop("format", None), raw.pop("version", None)) != (FORMAT, VERSION):
            return None
        owner = strict_json.convert(raw, LockOwner, "lock")
    except CorruptCheckpointError:
        return None
    return msgspec.structs.replace(owner, pid=min(owner.pid, _MAX_PID))


def current_owner(run_id: str, *, now: float) -> LockOwner:
    """Return an owner for this process, which acquires a lock now."""
    pid_namespace: str | None = None
    boot_id: str | None = None
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        # Without Linux, or in a sandbox without these files, the fields are None and never compared.
        pass
    start_ticks = process_start_ticks(os.getpid())
    return LockOwner(
        token=new_token(),
        host=re.sub(r"[^!-~]", "?", socket.gethostname())[:255] or "?",
        pid=os.getpid(),
        start_ticks=start_ticks if type(start_ticks) is int else None,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        run_id=run_id,
        acquired_at=now,
        heartbeat_at=now,
    )


def new_token() -> str:
    """Return a unique token."""
    return secrets.token_hex(8)


def is_same_process(one: LockOwner, other: LockOwner) -> bool:
    """Return True if both owners are the same process, which may have left a lock after an error or an ``exec``."""
    names = ("host", "pid", "start_ticks", "boot_id", "pid_namespace")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def with_heartbeat(owner: LockOwner, *, now: float) -> LockOwner:
    """Return the owner with a heartbeat at ``now``. The heartbeat always increases, because a change shows life."""
    return msgspec.structs.replace(owner, heartbeat_at=max(now, owner.heartbeat_at + 1e-3))


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


def owner_status(owner: LockOwner | None, our_owner: LockOwner, *, now: float, unchanged_s: float) -> OwnerStatus:
    """Return whether the owner of a lock file is alive.

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
        return _status_by_pid(owner)
    # Ids of another boot or pids of another namespace say nothing: a pid that does not exist here may be alive there.
    rebooted = owner.host == our_owner.host and owner.boot_id is not None and our_owner.boot_id is not None and not same_kernel
    silent_s = max(now - owner.heartbeat_at, unchanged_s)
    return "dead" if silent_s >= (REBOOTED_AFTER_S if rebooted else DEAD_AFTER_S) else "unknown"


def _status_by_pid(owner: LockOwner) -> OwnerStatus:
    found = process_start_ticks(owner.pid)
    if found == "gone":
        return "dead"
    # The kernel reuses the pid of a dead process, with another start time.
    return "dead" if type(found) is int and owner.start_ticks is not None and found != owner.start_ticks else "live"


def _format_utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
