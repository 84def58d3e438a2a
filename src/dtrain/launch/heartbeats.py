"""Report heartbeats and progress of a rank to its launcher through a pipe. Imports no torch.

All ranks of a node write to one pipe, in records that are small enough for atomic writes. Only the main thread reports
progress: a separate thread would report heartbeats while the training hangs in a collective.
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

# 64 bytes. Writes of at most PIPE_BUF bytes are atomic.
_RECORD_STRUCT = struct.Struct("<4sHHqd40s")
# Start of each record. Other data in the pipe is skipped.
_MAGIC = b"dtrP"
# Progress between two records is only counted.
_MIN_INTERVAL_S = 0.1
RECORD_BYTES = _RECORD_STRUCT.size
_CHUNK = 1 << 16


class ProgressKind(IntEnum):
    """Kind of a record, which determines the meaning of its ``value``."""

    # The rank has entered ``init_dist``'s block. Value: pid.
    OPENED = 1
    # Value: number of heartbeats of the main thread.
    PROGRESS = 2
    # A checkpoint is durable. Value: step.
    COMMITTED = 3
    # The rank waits for the other ranks at the end of ``init_dist``'s block. Value: number of heartbeats.
    LEAVING = 4
    # The rank has left the block. Value: pid.
    CLOSED = 5
    # An exception has left the rank's script, and its record is written. Value: exit code.
    FAILED = 6
    # The rank has completed its first step, and the list of its modules is written. Value: step.
    STARTED = 7
    # Value: 1 if the rank stays when another rank dies, 0 if it does so no longer.
    STAYS = 8
    # A collective of the rank has failed, and the rank asks whether a rank has died. Value: 0.
    ASKS = 9


_PROGRESS_KINDS = frozenset(ProgressKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """One record. ``at`` is the host's monotonic clock in seconds, ``activity`` the next activity of the rank."""

    kind: ProgressKind
    rank: int
    value: int
    at: float
    activity: str = ""

    def encode(self) -> bytes:
        """Encode the record in ``RECORD_BYTES`` bytes."""
        return _RECORD_STRUCT.pack(
            _MAGIC, self.kind, self.rank, self.value, self.at, self.activity.encode(errors="replace")[:40]
        )


class ProgressDecoder:
    """Decoder of the launcher that parses records from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[ProgressRecord]:
        """Return the records that ``data`` completes. Other data is skipped. Mutates: this decoder."""
        data, records = self._rest + data, []
        start = data.find(_MAGIC)
        while 0 <= start <= len(data) - RECORD_BYTES:
            _, kind, rank, value, time_s, activity = _RECORD_STRUCT.unpack_from(data, start)
            if kind in _PROGRESS_KINDS:
                text = activity.rstrip(b"\0").decode(errors="replace")
                records.append(ProgressRecord(kind=ProgressKind(kind), rank=rank, value=value, at=time_s, activity=text))
            start = data.find(_MAGIC, start + (RECORD_BYTES if kind in _PROGRESS_KINDS else len(_MAGIC)))
        self._rest = data[start:] if start >= 0 else data[-len(_MAGIC) :]
        return records


class SharedFiles:
    """Descriptors that all ranks of the job get: the write end of the pipe for progress reports, and ``/dev/null``."""

    def __init__(self) -> None:
        self.progress_fd, self.pulse = os.pipe()
        os.set_blocking(self.progress_fd, False)
        self.devnull = os.open(os.devnull, os.O_RDONLY)
        self._decoder = ProgressDecoder()

    def read_progress(self) -> list[ProgressRecord]:
        """Return the new progress reports."""
        try:
            return self._decoder.feed(os.read(self.progress_fd, _CHUNK))
        except BlockingIOError:
            return []


@dataclass(slots=True)
class _HeartbeatState:
    """Connection of this process to the launcher, and its progress."""

    fd: int | None = None
    pid: int = 0
    rank: int = 0
    count: int = 0
    activity: str = ""
    written_at: float = 0.0
    # Two numbers of the launcher: of restarts, before it replaces a rank, and of answers that it replaces none. And the last
    # restart that this rank has followed.
    restarts: memoryview | None = None
    followed: int = 0


# An object of the module, because a process has one pipe to its launcher, and a heartbeat takes well under a microsecond.
_STATE = _HeartbeatState()


def connect(fd: int, rank: int) -> None:
    """Report to the launcher on ``fd`` from now on, as ``rank``.

    Mutates: this process's heartbeat state; ``fd``, which processes started by this process no longer inherit.

    Raises:
        OSError: ``fd`` is not an open pipe. A process started by a rank may inherit the variable without the pipe.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise OSError(errno.EBADF, "the launcher's pipe is not there", str(fd))
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    _STATE.fd, _STATE.pid, _STATE.rank = fd, os.getpid(), rank
    _STATE.count, _STATE.activity, _STATE.written_at = 0, "", 0.0


def connect_from_env(environment: MutableMapping[str, str], rank: int) -> None:
    """Connect to the pipe named by the launcher's variable. Do nothing without the variable, or if the pipe is gone.

    Mutates: ``environment``. The variable is removed, because processes started by this process do not inherit the pipe.
    """
    number = environment.pop(HEARTBEAT_FD, None)
    if number is not None:
        # The variable may belong to another launch, which this process does not report to.
        with contextlib.suppress(OSError, ValueError):
            connect(int(number), rank)


def heartbeat(activity: str) -> None:
    """Report progress of the main thread to the launcher's watchdog.

    Does nothing without a launcher, in a fork of the rank, or outside of the main thread. Takes well under a microsecond, and
    writes at most ten times a second.

    Args:
        activity: next activity of the main thread, in a word or two, for reports of hangs.

    Mutates: this process's heartbeat state.

    Example:
        for batch in loader:
            dt.launch.heartbeat("generate")
            samples = generate(model, batch)  # minutes without a step
    """
    state = _STATE
    if state.fd is None or threading.current_thread() is not threading.main_thread():
        return
    state.count += 1
    state.activity = activity
    now = time.monotonic()
    if now - state.written_at >= _MIN_INTERVAL_S:
        state.written_at = now
        report(ProgressKind.PROGRESS, state.count, activity)


def report(kind: ProgressKind, value: int = 0, activity: str = "") -> None:
    """Send one record now. Do nothing without a launcher, or in a fork of the rank. Never waits, never raises."""
    state = _STATE
    if state.fd is None or state.pid != os.getpid():
        return
    record = ProgressRecord(kind=kind, rank=state.rank, value=value, at=time.monotonic(), activity=activity)
    try:
        os.write(state.fd, record.encode())
    except BlockingIOError:
        # The pipe is full. A later record will contain newer progress.
        return
    except OSError:
        # The launcher is gone.
        state.fd = None


def is_connected() -> bool:
    """Return True if a launcher reads what this process reports."""
    return _STATE.fd is not None and _STATE.pid == os.getpid()


def watch_replacements(restarts: memoryview, current: int) -> None:
    """Read from now on whether the launcher replaces a dead rank.

    Args:
        restarts: memory of two numbers, which the launcher writes.
        current: number of restarts at the start of this rank.

    Mutates: this process's heartbeat state.
    """
    _STATE.restarts, _STATE.followed = restarts, current


def replacement() -> int | None:
    """Return the number of restarts of which this rank does not know yet; None if no rank was replaced since."""
    state = _STATE
    announced = 0 if state.restarts is None or state.pid != os.getpid() else int(state.restarts[0])
    return announced if announced > state.followed else None


def num_answers() -> int:
    """Return how often the launcher has answered a rank that asks, after it has looked for dead ranks to replace."""
    return 0 if _STATE.restarts is None else int(_STATE.restarts[1])


def can_see_replacements() -> bool:
    """Return True if a launcher tells this process of the ranks that it replaces."""
    return _STATE.restarts is not None and is_connected()


def follow(restarts: int) -> None:
    """Record that this rank is connected with the ranks of a restart. Mutates: this process's heartbeat state."""
    _STATE.followed = restarts


def followed() -> int:
    """Return the restart whose ranks this rank is connected with."""
    return _STATE.followed


def last_progress() -> tuple[int, str]:
    """Return the main thread's number of heartbeats and last activity, newer than any record sent."""
    return _STATE.count, _STATE.activity
