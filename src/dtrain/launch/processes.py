"""Finding and ending processes, however they try to get away. Linux does the work; elsewhere it is best effort.

A *child subreaper* becomes the parent of every orphan below it, also of one that left its session or process group.
So "has no children" means, for a subreaper, "nothing of the job is left": no list of pids has to be kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_RETRY_S = 0.02  # a process may fork while it is being killed: its child is found in the next round


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it, from now on. Nothing outside Linux."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies; exits at once when it already has. Nothing outside Linux.

    Survives ``exec``, not ``fork``: it covers direct children only.
    """
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between our fork and the call
            os._exit(128 + signal.SIGKILL)


def reset_signal_handlers(*, ignore: Collection[int] = (), block: Collection[int] = ()) -> None:
    """Take on Python's default handling of every signal in a fresh fork, whatever the parent had.

    Args:
        ignore: signals that are ignored.
        block: signals that are blocked; all others are not.

    Mutates: this process's signal handling.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:  # None: the C library keeps it for itself
            signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, block)


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Have a Ctrl-C wait until the end of the block: between a process's start and the note of it, it would leave it behind.

    Nothing outside the main thread, which alone is interrupted, and where Ctrl-C does not raise.

    Mutates: this process's handler of SIGINT, within the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[-1])


def reap_children() -> tuple[list[tuple[int, int]], bool]:
    """Collect every child that has ended, without waiting.

    Returns:
        ``(pid, code)`` of each, where a negative code is the signal that ended it; and whether any child is left.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def set_process_title(command: Sequence[str], *, comm: str | None = None) -> None:
    """Let ``ps`` and ``pkill -f`` find this process by ``command``, and what looks at names alone by ``comm``. Linux only.

    The kernel shows the memory that the arguments were in when the program began: nothing happens where they were shorter.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        if comm is not None:
            Path("/proc/self/comm").write_bytes(os.fsencode(comm))
        stat = Path("/proc/self/stat").read_bytes()
        begin, end = (int(word) for word in stat[stat.rindex(b")") + 2 :].split()[45:47])
        text = b"\0".join(os.fsencode(part) for part in command) + b"\0"
        if 0 < begin < end and len(text) <= end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def descendants(*, exclude_sessions: Collection[int] = ()) -> list[int]:
    """The pids of all processes below this one, children before grandchildren; empty outside Linux.

    Children in ``exclude_sessions`` are left out, with all below them.
    """
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    spared = set()
    for name in os.listdir("/proc"):
        if name.isdecimal() and (place := _parent_and_session(name)) is not None:
            children.setdefault(place[0], []).append(int(name))
            if place[1] in exclude_sessions:
                spared.add(int(name))
    found = [pid for pid in children.get(os.getpid(), ()) if pid not in spared]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def list_sessions() -> frozenset[int]:
    """The sessions of this process and of all below it.

    A process can begin a session but not join one: what is started later and begins its own is in none of these, with
    everything that it starts in turn.
    """
    found = set()
    for pid in (os.getpid(), *descendants()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            found.add(os.getsid(pid))
    return frozenset(found)


def _parent_and_session(pid: str) -> tuple[int, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it ended while the folder was read, or belongs to somebody whose processes we may not see
    _, parent, _, session = stat[stat.rindex(b")") + 1 :].split()[:4]  # the name in brackets may hold anything, brackets too
    return int(parent), int(session)


def send_signal(pid: int, number: int) -> None:
    """Signal one process; one that is gone, or that became another user's, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_descendants(number: int, leaders: Iterable[int], *, exclude: Collection[int] = ()) -> None:
    """Signal everything below this process but ``exclude``; outside Linux the process groups of ``leaders`` stand in for it."""
    for pid in descendants():
        if pid not in exclude:
            send_signal(pid, number)
    if not _LINUX:
        for pid in leaders:
            send_signal(-pid, number)


def kill_descendants(*, timeout_s: float, exclude_sessions: Collection[int] = ()) -> list[int]:
    """Kill everything below this process and wait for it; returns the pids of what did not die ``timeout_s`` seconds.

    Children in ``exclude_sessions`` are left alone, with all below them, and not waited for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        _, any_left = reap_children()
        left = descendants(exclude_sessions=exclude_sessions) if any_left else []
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_KILL_RETRY_S)
