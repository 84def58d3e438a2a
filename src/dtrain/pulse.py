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

from dtrain.wire import PULSE_FD

_RECORD = struct.Struct("<4sHHqd40s")  # 64 bytes: far below what a pipe takes in whole (PIPE_BUF)
_MARK = b"dtrP"  # begins each record: whatever a program writes into the pipe by mistake is passed over
_AT_MOST_EVERY_S = 0.1  # a record of progress; in between it is only counted
RECORD_BYTES = _RECORD.size


class Kind(IntEnum):
    """What a record is about; ``value`` is the number that comes with it."""

    OPENED = 1  # the rank is in ``init_dist``'s block; its pid
    PROGRESS = 2  # how often the main thread has passed a point of progress
    COMMITTED = 3  # the step of a checkpoint that is durable now
    LEAVING = 4  # the rank leaves ``init_dist``'s block: it waits for the others there; progress
    CLOSED = 5  # it has left; its pid
    FAILED = 6  # its script was left by an exception, of which there is a record now; the exit code that is due


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """One record. ``at`` is seconds of the host's monotonic clock, ``doing`` what the rank was about to do."""

    kind: Kind
    rank: int
    value: int
    at: float
    doing: str = ""

    def encode(self) -> bytes:
        """The record as bytes, ``RECORD_BYTES`` of them."""
        return _RECORD.pack(_MARK, self.kind, self.rank, self.value, self.at, self.doing.encode(errors="replace")[:40])


class Decoder:
    """The launcher's end: makes records of what comes out of the pipe, in pieces of any length."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Pulse]:
        """The records that ``data`` completes. What is none of ours is passed over. Mutates: this decoder."""
        data, records = self._rest + data, []
        at = data.find(_MARK)
        while 0 <= at <= len(data) - RECORD_BYTES:
            record = _decoded(data[at : at + RECORD_BYTES])
            if record is not None:
                records.append(record)
            at = data.find(_MARK, at + (len(_MARK) if record is None else RECORD_BYTES))
        self._rest = data[at:] if at >= 0 else data[-len(_MARK) :]
        return records


def _decoded(data: bytes) -> Pulse | None:
    _, kind, rank, value, at, doing = _RECORD.unpack(data)
    if kind not in _KINDS:
        return None
    return Pulse(kind=Kind(kind), rank=rank, value=value, at=at, doing=doing.rstrip(b"\0").decode(errors="replace"))


@dataclass(slots=True)
class _Process:
    """Where this process reports, if anywhere."""

    fd: int | None = None
    pid: int = 0
    rank: int = 0
    passed: int = 0
    doing: str = ""
    written_at: float = 0.0


_PROCESS = _Process()


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
    _PROCESS.fd, _PROCESS.pid, _PROCESS.rank = fd, os.getpid(), rank
    _PROCESS.passed, _PROCESS.doing, _PROCESS.written_at = 0, "", 0.0


def connect_by(environment: MutableMapping[str, str], rank: int) -> None:
    """``connect`` to where the launcher has said, unless it has said nothing, or the pipe is not there.

    Mutates: ``environment``: what this process starts would inherit the variable and not the pipe, whose number is free there.
    """
    number = environment.pop(PULSE_FD, None)
    if number is not None:
        with contextlib.suppress(OSError, ValueError):  # of somebody else's launch: this process has nobody to report to
            connect(int(number), rank)


def beat(doing: str) -> None:
    """Count one point of progress. Nothing without a launcher, in a fork of the rank, or outside its main thread.

    Args:
        doing: what the main thread does next, in a word or two; it is what a report of a hang says of this rank.

    Mutates: this process's count. Costs well under a microsecond, and a write at most ten times a second.
    """
    process = _PROCESS
    if process.fd is None or threading.current_thread() is not threading.main_thread():
        return
    process.passed += 1
    process.doing = doing
    now = time.monotonic()
    if now - process.written_at >= _AT_MOST_EVERY_S:
        process.written_at = now
        report(Kind.PROGRESS, process.passed, doing)


def report(kind: Kind, value: int = 0, doing: str = "") -> None:
    """Send one record now. Nothing without a launcher, or in a fork of the rank. Never waits, never raises."""
    process = _PROCESS
    if process.fd is None or process.pid != os.getpid():
        return
    pulse = Pulse(kind=kind, rank=process.rank, value=value, at=time.monotonic(), doing=doing)
    try:
        os.write(process.fd, pulse.encode())
    except BlockingIOError:
        return  # the launcher is behind: a later record of progress says more than this one
    except OSError:
        process.fd = None  # the launcher has gone; it ends this process, or has let it go


def heard() -> bool:
    """Return True if a launcher reads what this process reports."""
    return _PROCESS.fd is not None and _PROCESS.pid == os.getpid()


def position() -> tuple[int, str]:
    """How many points of progress the main thread has passed, and what it does since the last: newer than any record sent."""
    return _PROCESS.passed, _PROCESS.doing
