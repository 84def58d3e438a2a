"""Starting one rank as a process of its own, and the port on which the ranks will meet."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.launch.plan import LOOPBACK_ADDRESS
from dtrain.launch.processes import die_with_parent

_CANNOT_START = 127  # what a shell exits with for a command that it cannot run


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A started rank and our ends of its pipes, which do not block."""

    rank: int
    pid: int
    stdout: int
    stderr: int


def hold_port() -> socket.socket:
    """A free port on loopback, kept for the ranks for as long as the returned socket is open.

    The socket is bound but does not listen. Rank 0 may bind the same port, because both sides set ``SO_REUSEADDR`` (torch
    does), while the kernel gives it to nobody who asks for any free port. So there is no moment in which it can be lost,
    as there is between choosing a port, closing it and hoping. No rank inherits the socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK_ADDRESS, 0))
    return holder


def start_rank(rank: int, command: list[str], environment: Mapping[str, str], *, keep_stdin: bool) -> RankProcess:
    """Start ``command`` in a session of its own, with pipes for its output; it is killed when this process dies.

    It sees Python's default signal handling, whatever this process ignores or blocks, and reads from nothing unless
    ``keep_stdin``: several ranks would tear one input apart.

    Raises:
        OSError: no more processes or files.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    parent = os.getpid()
    # Blocked across the fork: the child has our handlers until it resets them, and they write into our wake-up pipe.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_rank(command, environment, out_write, err_write, parent=parent, keep_stdin=keep_stdin)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(out_write)
        os.close(err_write)
    os.set_blocking(out_read, False)
    os.set_blocking(err_read, False)
    return RankProcess(rank=rank, pid=pid, stdout=out_read, stderr=err_read)


def _become_rank(
    command: list[str], environment: Mapping[str, str], out: int, err: int, *, parent: int, keep_stdin: bool
) -> None:
    """Turn this fresh fork into the rank. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is not None:  # None: the C library keeps it for itself
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if not keep_stdin:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.execve(command[0], command, environment)
    except BaseException as error:  # noqa: BLE001 - a copy of the supervisor must not live on, whatever went wrong
        os.write(2, f"cannot start {command[0]!r}: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(_CANNOT_START)
