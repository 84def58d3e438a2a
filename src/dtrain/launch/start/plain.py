"""Starting a process as an interpreter, or any program, of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from dtrain.launch.processes import die_with_parent, forget_signals
from dtrain.launch.start.request import Request

_CANNOT_START = 127  # what a shell exits with for a command that it cannot run
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def start_plain(request: Request, command: Sequence[str], common: Mapping[str, str], *, interrupts_wait: bool = False) -> int:
    """Start ``command`` in a session of its own and return its pid; it is killed when this process dies.

    It sees Python's default signal handling, whatever this process ignores or blocks.

    An interrupt while an interpreter starts makes it print a page about itself. So SIGINT may begin blocked; the program then
    unblocks it (``rank.run`` does).

    Args:
        request: its descriptors, cores, and part of the environment.
        command: the program's path and its arguments.
        common: the rest of the environment.
        interrupts_wait: if True, SIGINT is blocked when the program begins.

    Raises:
        OSError: no more processes.
    """
    parent = os.getpid()
    # Blocked across the fork: the child has our handlers until it resets them, and they write into our wake-up pipe.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(request, command, common, parent, interrupts_wait=interrupts_wait)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become(request: Request, command: Sequence[str], common: Mapping[str, str], parent: int, *, interrupts_wait: bool) -> None:
    """Turn this fresh fork into the program. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        # Blocked before the other signals are unblocked: Ctrl-C may come in between.
        forget_signals(block={signal.SIGINT} if interrupts_wait else ())
        for name, fd in request.fds.items():
            if name in _STREAMS:
                os.dup2(fd, _STREAMS[name])
            else:
                os.set_inheritable(fd, True)
        if request.cores:
            os.sched_setaffinity(0, request.cores)
        known = {variable: str(request.fds[name]) for name, variable in request.variables.items()}
        os.execve(command[0], list(command), {**common, **request.environment, **known})
    except BaseException as error:  # noqa: BLE001 - a copy of the supervisor must not live on, whatever went wrong
        os.write(2, f"cannot start {command[0]!r}: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(_CANNOT_START)
