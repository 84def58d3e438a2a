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

from dtrain.checkpoint import closed
from dtrain.errors import DamagedCheckpointError

FORMAT, VERSION = "dtrain-lock", 1
MAX_BYTES = 4096  # of a lock file; ours has some 400
BEAT_S = 5.0
"""How often a holder renews its heartbeat."""
DEAD_AFTER_S = 60.0
"""A holder that cannot be looked at is dead when it has not renewed its heartbeat for so long."""
REBOOTED_AFTER_S = 20.0
"""The same for a host of our name with another boot id. Not at once: two machines may have one name."""
TORN_AFTER_S = 2.0
"""What is no record, and does not change for so long, is what somebody left who died while writing it."""

Verdict = Literal["live", "dead", "unknown"]
_TOKEN = re.compile(r"[0-9a-f]{16}")
_WORD = re.compile(r"[!-~]{1,255}")  # what may go into a message as it is
_LARGEST_PID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a lock file says of its holder.

    Args:
        token: of this holding; no other has the same.
        host: its name.
        pid: of the process, in its own pid namespace.
        started: when the process started, in ticks since the boot of its kernel; this and the next two are None without /proc.
        boot: id of that boot.
        space: the pid namespace.
        run_id: of the run.
        since: when the lock was taken, in seconds since 1970 by the holder's clock.
        beat: when the holder was last known to live, likewise.
    """

    token: str
    host: str
    pid: int
    started: int | None
    boot: str | None
    space: str | None
    run_id: str
    since: float
    beat: float

    def encode(self) -> bytes:
        """The bytes of the lock file. The token comes first, so that a part of them can be told from anybody else's."""
        return json.dumps({**asdict(self), "format": FORMAT, "version": VERSION}, allow_nan=False).encode() + b"\n"

    def describe(self) -> str:
        """The holder in words, with which ``ps`` on the right host finds it."""
        return f"host {self.host}, pid {self.pid}, since {_utc(self.since)}, run {self.run_id}"


def parse(data: bytes) -> Holder | None:
    """The holder that a lock file names, or None when it is nothing that this version writes."""
    try:
        raw = closed.record(closed.parse(data, "lock"), "lock", (*(f.name for f in fields(Holder)), "format", "version"))
        if (raw["format"], raw["version"]) != (FORMAT, VERSION):
            return None
        return Holder(
            token=closed.text(raw["token"], "token", _TOKEN),
            host=closed.text(raw["host"], "host", _WORD),
            pid=min(closed.whole(raw["pid"], "pid"), _LARGEST_PID),
            started=closed.optional(raw["started"], "started", closed.whole),
            boot=closed.optional(raw["boot"], "boot", _word),
            space=closed.optional(raw["space"], "space", _word),
            run_id=closed.text(raw["run_id"], "run_id", _WORD),
            since=_seconds(raw["since"]),
            beat=_seconds(raw["beat"]),
        )
    except DamagedCheckpointError:
        return None


def _word(value: object, where: str) -> str:
    return closed.text(value, where, _WORD)


def _seconds(value: object) -> float:
    if type(value) is not float or not 0 <= value < 1e11:
        raise DamagedCheckpointError(f"lock: needs seconds, got {closed.kind(value)}")
    return value


def this_process(run_id: str, *, now: float) -> Holder:
    """This process as a holder that begins now."""
    space: str | None = None
    boot: str | None = None
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        pass  # no Linux, or a sandbox without them: what is None is never compared
    looked = look_at(os.getpid())
    return Holder(
        token=new_token(),
        host=re.sub(r"[^!-~]", "?", socket.gethostname())[:255] or "?",
        pid=os.getpid(),
        started=looked if type(looked) is int else None,
        boot=boot,
        space=space,
        run_id=run_id,
        since=now,
        beat=now,
    )


def new_token() -> str:
    """What no other holding is called."""
    return secrets.token_hex(8)


def same_process(one: Holder, other: Holder) -> bool:
    """Whether both are of one process: what it left behind itself, because an operation failed or it replaced its program."""
    names = ("host", "pid", "started", "boot", "space")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def renewed(holder: Holder, *, now: float) -> Holder:
    """The same holder, alive at ``now``. Its beat never stands still, whatever the clock does: a change is what shows life."""
    return replace(holder, beat=max(now, holder.beat + 1e-3))


def look_at(pid: int) -> int | Literal["gone", "hidden"]:
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


def judge(holder: Holder | None, me: Holder, *, now: float, unchanged_s: float) -> Verdict:
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
    same_kernel = holder.boot is not None and holder.boot == me.boot
    if same_kernel and holder.space is not None and holder.space == me.space and holder.pid > 0:
        return _judge_by_pid(holder)
    # The ids of another boot, or the pids of another space, say nothing here: a pid that does not exist may well be alive.
    rebooted = holder.host == me.host and holder.boot is not None and me.boot is not None and not same_kernel
    silent_s = max(now - holder.beat, unchanged_s)
    return "dead" if silent_s >= (REBOOTED_AFTER_S if rebooted else DEAD_AFTER_S) else "unknown"


def _judge_by_pid(holder: Holder) -> Verdict:
    found = look_at(holder.pid)
    if found == "gone":
        return "dead"
    # The pid of a dead process is given out again, with another start time.
    return "dead" if type(found) is int and holder.started is not None and found != holder.started else "live"


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
