"""Who holds the lock of a root, as the lock file says it, and whether that process still lives. No file of the root is touched.

A process is known by the kernel that it runs on (boot id), by the space of its pid (pid namespace), by pid and start time.
Where all four can be compared the answer is certain. Where they cannot, on another host or in another container, the heartbeat
decides.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from dtrain.checkpoint import strict_json
from dtrain.errors import CorruptCheckpointError

FORMAT, VERSION = "dtrain-lock", 1
MAX_BYTES = 4096  # of a lock file; ours has some 400
HEARTBEAT_INTERVAL_S = 5.0
"""How often a holder renews its heartbeat."""
DEAD_AFTER_S = 60.0
"""A holder that cannot be looked at is dead when it has not renewed its heartbeat for so long."""
REBOOTED_AFTER_S = 20.0
"""The same for a host of our name with another boot id. Not at once: two machines may have one name."""
TORN_AFTER_S = 2.0
"""What is no record, and does not change for so long, is what somebody left who died while writing it."""

OwnerStatus = Literal["live", "dead", "unknown"]
_TOKEN = re.compile(r"[0-9a-f]{16}")
_WORD = re.compile(r"[!-~]{1,255}")  # what may go into a message as it is
_MAX_PID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOwner:
    """What a lock file says of its holder.

    Args:
        token: of this holding; no other has the same.
        host: its name.
        pid: of the process, in its own pid namespace.
        start_ticks: when the process started, in ticks since the boot of its kernel; this and the next two are None without /proc.
        boot_id: id of that boot.
        pid_namespace: the pid namespace.
        run_id: of the run.
        acquired_at: when the lock was taken, in seconds since 1970 by the holder's clock.
        heartbeat_at: when the holder was last known to live, likewise.
    """

    token: str
    host: str
    pid: int
    start_ticks: int | None
    boot_id: str | None
    pid_namespace: str | None
    run_id: str
    acquired_at: float
    heartbeat_at: float

    def encode(self) -> bytes:
        """The bytes of the lock file. The token comes first, so that a part of them can be told from anybody else's."""
        return json.dumps({**asdict(self), "format": FORMAT, "version": VERSION}, allow_nan=False).encode() + b"\n"

    def describe(self) -> str:
        """The holder in words, with which ``ps`` on the right host finds it."""
        return f"host {self.host}, pid {self.pid}, since {_format_utc(self.acquired_at)}, run {self.run_id}"


def parse_owner(data: bytes) -> LockOwner | None:
    """The holder that a lock file names, or None when it is nothing that this version writes."""
    try:
        raw = strict_json.read_object(
            strict_json.parse_json(data, "lock"), "lock", (*(f.name for f in fields(LockOwner)), "format", "version")
        )
        if (raw["format"], raw["version"]) != (FORMAT, VERSION):
            return None
        return LockOwner(
            token=strict_json.read_str(raw["token"], "token", _TOKEN),
            host=strict_json.read_str(raw["host"], "host", _WORD),
            pid=min(strict_json.read_int(raw["pid"], "pid"), _MAX_PID),
            start_ticks=strict_json.read_optional(raw["started"], "started", strict_json.read_int),
            boot_id=strict_json.read_optional(raw["boot"], "boot", _read_word),
            pid_namespace=strict_json.read_optional(raw["space"], "space", _read_word),
            run_id=strict_json.read_str(raw["run_id"], "run_id", _WORD),
            acquired_at=_read_seconds(raw["since"]),
            heartbeat_at=_read_seconds(raw["beat"]),
        )
    except CorruptCheckpointError:
        return None


def _read_word(value: object, where: str) -> str:
    return strict_json.read_str(value, where, _WORD)


def _read_seconds(value: object) -> float:
    if type(value) is not float or not 0 <= value < 1e11:
        raise CorruptCheckpointError(f"lock: needs seconds, got {strict_json.describe_value(value)}")
    return value


def current_owner(run_id: str, *, now: float) -> LockOwner:
    """This process as a holder that begins now."""
    space: str | None = None
    boot: str | None = None
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        pass  # no Linux, or a sandbox without them: what is None is never compared
    looked = process_start_ticks(os.getpid())
    return LockOwner(
        token=new_token(),
        host=re.sub(r"[^!-~]", "?", socket.gethostname())[:255] or "?",
        pid=os.getpid(),
        start_ticks=looked if type(looked) is int else None,
        boot_id=boot,
        pid_namespace=space,
        run_id=run_id,
        acquired_at=now,
        heartbeat_at=now,
    )


def new_token() -> str:
    """What no other holding is called."""
    return secrets.token_hex(8)


def is_same_process(one: LockOwner, other: LockOwner) -> bool:
    """Whether both are of one process: what it left behind itself, because an operation failed or it replaced its program."""
    names = ("host", "pid", "started", "boot", "space")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def with_heartbeat(holder: LockOwner, *, now: float) -> LockOwner:
    """The same holder, alive at ``now``. Its beat never stands still, whatever the clock does: a change is what shows life."""
    return replace(holder, heartbeat_at=max(now, holder.heartbeat_at + 1e-3))


def process_start_ticks(pid: int) -> int | Literal["gone", "hidden"]:
    """When the process of this pid started, in ticks; "gone" when it has ended; "hidden" when that is all that can be seen."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass  # another user's: it is there
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name in brackets may hold anything
    except OSError:
        return "hidden"
    return "gone" if words[0] in (b"Z", b"X") else int(words[19])


def owner_status(holder: LockOwner | None, me: LockOwner, *, now: float, unchanged_s: float) -> OwnerStatus:
    """Whether who wrote a lock file lives.

    Args:
        holder: what the file says, None when it makes no sense.
        me: this process.
        now: by the clock of this host. It is compared with the holder's: one that is a minute ahead of it takes a living
            holder on another host for dead, who will find out at its next heartbeat; one that is behind waits longer.
        unchanged_s: for how long this process has seen the file unchanged.

    Returns:
        "unknown" while the file has to be watched: its next change shows a living holder, the lack of one a dead one.
    """
    if holder is None:
        return "dead" if unchanged_s >= TORN_AFTER_S else "unknown"
    same_kernel = holder.boot_id is not None and holder.boot_id == me.boot_id
    if same_kernel and holder.pid_namespace is not None and holder.pid_namespace == me.pid_namespace and holder.pid > 0:
        return _status_by_pid(holder)
    # The ids of another boot, or the pids of another space, say nothing here: a pid that does not exist may well be alive.
    rebooted = holder.host == me.host and holder.boot_id is not None and me.boot_id is not None and not same_kernel
    silent_s = max(now - holder.heartbeat_at, unchanged_s)
    return "dead" if silent_s >= (REBOOTED_AFTER_S if rebooted else DEAD_AFTER_S) else "unknown"


def _status_by_pid(holder: LockOwner) -> OwnerStatus:
    found = process_start_ticks(holder.pid)
    if found == "gone":
        return "dead"
    # The pid of a dead process is given out again, with another start time.
    return "dead" if type(found) is int and holder.start_ticks is not None and found != holder.start_ticks else "live"


def _format_utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
