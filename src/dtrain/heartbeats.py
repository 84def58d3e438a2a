"""What a rank tells its launcher while it runs: that it is alive, where it is, and what it has committed. Imports no torch.

All ranks of a node write into one pipe, in records that are small enough to go in whole. Only the main thread reports progress:
a thread of its own would go on saying "alive" while the training is stuck in a collective.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import IntEnum

from dtrain.launch_protocol import HEARTBEAT_FD

_RECORD_STRUCT = struct.Struct("<4sHHqd40s")  # 64 bytes: far below what a pipe takes in whole (PIPE_BUF)
_MAGIC = b"dtrP"  # begins each record: whatever a program writes into the pipe by mistake is passed over
_MIN_INTERVAL_S = 0.1  # a record of progress; in between it is only counted
RECORD_BYTES = _RECORD_STRUCT.size


class ProgressKind(IntEnum):
    """What a record is about; ``value`` is the number that comes with it."""

    OPENED = 1  # the rank is in ``init_dist``'s block; its pid
    PROGRESS = 2  # how often the main thread has passed a point of progress
    COMMITTED = 3  # the step of a checkpoint that is durable now
    LEAVING = 4  # the rank leaves ``init_dist``'s block: it waits for the others there; progress
    CLOSED = 5  # it has left; its pid
    FAILED = 6  # its script was left by an exception, of which there is a record now; the exit code that is due


_PROGRESS_KINDS = frozenset(ProgressKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """One record. ``at`` is seconds of the host's monotonic clock, ``activity`` what the rank was about to do."""

    kind: ProgressKind
    rank: int
    value: int
    at: float
    activity: str = ""

    def encode(self) -> bytes:
        """The record as bytes, ``RECORD_BYTES`` of them."""
        return _RECORD_STRUCT.pack(
            _MAGIC, self.kind, self.rank, self.value, self.at, self.activity.encode(errors="replace")[:40]
        )


class ProgressDecoder:
    """The launcher's end: makes records of what comes out of the pipe, in pieces of any length."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[ProgressRecord]:
        """The records that ``data`` completes. What is none of ours is passed over. Mutates: this decoder."""
        data, records = self._rest + data, []
        at = data.find(_MAGIC)
        while 0 <= at <= len(data) - RECORD_BYTES:
            record = _decode_record(data[at : at + RECORD_BYTES])
            if record is not None:
                records.append(record)
            at = data.find(_MAGIC, at + (len(_MAGIC) if record is None else RECORD_BYTES))
        self._rest = data[at:] if at >= 0 else data[-len(_MAGIC) :]
        return records


def _decode_record(data: bytes) -> ProgressRecord | None:
    _, kind, rank, value, at, doing = _RECORD_STRUCT.unpack(data)
    if kind not in _PROGRESS_KINDS:
        return None
    return ProgressRecord(
        kind=ProgressKind(kind), rank=rank, value=value, at=at, activity=doing.rstrip(b"\0").decode(errors="replace")
    )


@dataclass(slots=True)
class _HeartbeatState:
    """Where this process reports, if anywhere."""

    fd: int | None = None
    pid: int = 0
    rank: int = 0
    count: int = 0
    activity: str = ""
    written_at: float = 0.0


_STATE = _HeartbeatState()


def connect(fd: int, rank: int) -> None:
    """Report to the launcher on ``fd`` from now on, as ``rank``.

    Mutates: this process's record; ``fd``, which programs that it starts do not inherit any more.

    Raises:
        OSError: ``fd`` is not open, or is no pipe: a program that a rank has started may have the variable and not the pipe.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise OSError(errno.EBADF, "the launcher's pipe is not there", str(fd))
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    _STATE.fd, _STATE.pid, _STATE.rank = fd, os.getpid(), rank
    _STATE.count, _STATE.activity, _STATE.written_at = 0, "", 0.0


def connect_from_env(environment: MutableMapping[str, str], rank: int) -> None:
    """``connect`` to where the launcher has said, unless it has said nothing, or the pipe is not there.

    Mutates: ``environment``: what this process starts would inherit the variable and not the pipe, whose number is free there.
    """
    number = environment.pop(HEARTBEAT_FD, None)
    if number is not None:
        with contextlib.suppress(OSError, ValueError):  # of somebody else's launch: this process has nobody to report to
            connect(int(number), rank)


def heartbeat(activity: str) -> None:
    """Count one point of progress. Nothing without a launcher, in a fork of the rank, or outside its main thread.

    Args:
        activity: what the main thread does next, in a word or two; it is what a report of a hang says of this rank.

    Mutates: this process's count. Costs well under a microsecond, and a write at most ten times a second.
    """
    process = _STATE
    if process.fd is None or threading.current_thread() is not threading.main_thread():
        return
    process.count += 1
    process.activity = activity
    now = time.monotonic()
    if now - process.written_at >= _MIN_INTERVAL_S:
        process.written_at = now
        report(ProgressKind.PROGRESS, process.count, activity)


def report(kind: ProgressKind, value: int = 0, activity: str = "") -> None:
    """Send one record now. Nothing without a launcher, or in a fork of the rank. Never waits, never raises."""
    process = _STATE
    if process.fd is None or process.pid != os.getpid():
        return
    pulse = ProgressRecord(kind=kind, rank=process.rank, value=value, at=time.monotonic(), activity=activity)
    try:
        os.write(process.fd, pulse.encode())
    except BlockingIOError:
        return  # the launcher is behind: a later record of progress says more than this one
    except OSError:
        process.fd = None  # the launcher has gone; it ends this process, or has let it go


def is_connected() -> bool:
    """Return True if a launcher reads what this process reports."""
    return _STATE.fd is not None and _STATE.pid == os.getpid()


def last_progress() -> tuple[int, str]:
    """How many points of progress the main thread has passed, and what it does since the last: newer than any record sent."""
    return _STATE.count, _STATE.activity
