"""What is to be started: a rank, or the process that serves the ranks' store.

Starting a process as an interpreter, or any program, of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain import launch_protocol
from dtrain.launch.processes import die_with_parent, reset_signal_handlers

STORE_ID = -1
"""The id of the store's process among those of the ranks, which are their numbers."""

FD_VARIABLES = {"pulse": launch_protocol.HEARTBEAT_FD, "ask": launch_protocol.DUMP_REQUEST_FD}
"""Descriptors that a process knows by a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """One process. ``fds`` are named ``stdin``, ``stdout``, ``stderr``, or as in ``VARIABLES``, or ``listener``."""

    id: int  # the global rank, or STORE_ID
    kind: Literal["rank", "store"]
    fds: Mapping[str, int]
    owned: frozenset[str] = frozenset()  # names of descriptors that are closed in the parent once the process has them
    environment: Mapping[str, str]  # what it has besides that of all ranks
    cores: Sequence[int] = ()  # those it may run on; empty: as its parent
    address: str = ""  # where the listener is bound, and its port
    port: int = 0

    @property
    def variables(self) -> dict[str, str]:
        """By name, the variables of those descriptors that it was given."""
        return {name: variable for name, variable in FD_VARIABLES.items() if name in self.fds}


_EXEC_FAILED_EXIT_CODE = 127  # what a shell exits with for a command that it cannot run
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def start_process(
    request: ProcessRequest, command: Sequence[str], common_environment: Mapping[str, str], *, block_interrupts: bool = False
) -> int:
    """Start ``command`` in a session of its own and return its pid; it is killed when this process dies.

    It sees Python's default signal handling, whatever this process ignores or blocks.

    An interrupt while an interpreter starts makes it print a page about itself. So SIGINT may begin blocked; the program then
    unblocks it (``rank.run`` does).

    Args:
        request: its descriptors, cores, and part of the environment.
        command: the program's path and its arguments.
        common_environment: the rest of the environment.
        block_interrupts: if True, SIGINT is blocked when the program begins.

    Raises:
        OSError: no more processes.
    """
    parent = os.getpid()
    # Blocked across the fork: the child has our handlers until it resets them, and they write into our wake-up pipe.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _exec_program(request, command, common_environment, parent, interrupts_wait=block_interrupts)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _exec_program(
    request: ProcessRequest, command: Sequence[str], common: Mapping[str, str], parent: int, *, interrupts_wait: bool
) -> None:
    """Turn this fresh fork into the program. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        # Blocked before the other signals are unblocked: Ctrl-C may come in between.
        reset_signal_handlers(block={signal.SIGINT} if interrupts_wait else ())
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
        os._exit(_EXEC_FAILED_EXIT_CODE)
