"""Start a rank or the store process as a new interpreter, with fork and exec."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain import launch_protocol
from dtrain.launch.processes import die_with_parent, fork_process, reset_signal_handlers

STORE_ID = -1
"""Request id of the store process. The ids of rank processes are their global ranks."""

FD_VARIABLES = {"pulse": launch_protocol.HEARTBEAT_FD, "ask": launch_protocol.DUMP_REQUEST_FD}
"""Environment variable that names each descriptor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """Process to start.

    Attributes:
        id: the global rank, or ``STORE_ID``.
        kind: the program.
        fds: descriptors by name: ``stdin``, ``stdout``, ``stderr``, ``listener``, or a name in ``FD_VARIABLES``.
        owned: names of descriptors that the parent closes once the process has them.
        environment: variables besides the common environment of all ranks.
        cores: allowed CPU cores; empty uses the parent's cores.
        address: address of the listener.
        port: port of the listener.
    """

    id: int
    kind: Literal["rank", "store"]
    fds: Mapping[str, int]
    owned: frozenset[str] = frozenset()
    environment: Mapping[str, str]
    cores: Sequence[int] = ()
    address: str = ""
    port: int = 0

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the passed descriptors, by descriptor name."""
        return {name: variable for name, variable in FD_VARIABLES.items() if name in self.fds}


# exit code of a shell for a command that cannot run
_EXEC_FAILED_EXIT_CODE = 127
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def start_process(
    request: ProcessRequest, command: Sequence[str], common_environment: Mapping[str, str], *, block_interrupts: bool = False
) -> int:
    """Start ``command`` in a new session and return its pid. The process is killed when this process dies.

    The process gets Python's default signal handling, whatever this process ignores or blocks.

    An interrupt during interpreter startup prints a long traceback of the interpreter. ``block_interrupts`` therefore blocks
    SIGINT until the program unblocks the signal (``rank_main.run_target`` does).

    Args:
        request: descriptors, cores, and part of the environment.
        command: path and arguments of the program.
        common_environment: rest of the environment.
        block_interrupts: if True, SIGINT is blocked at the start of the program.

    Raises:
        OSError: the process limit is reached.
    """
    parent = os.getpid()

    def run() -> int:
        try:
            os.setsid()
            die_with_parent(parent)
            # Ctrl-C may arrive when the other signals are unblocked, so block SIGINT first.
            reset_signal_handlers(block={signal.SIGINT} if block_interrupts else ())
            for name, fd in request.fds.items():
                if name in _STREAMS:
                    os.dup2(fd, _STREAMS[name])
                else:
                    os.set_inheritable(fd, True)
            if request.cores:
                os.sched_setaffinity(0, request.cores)
            known = {variable: str(request.fds[name]) for name, variable in request.variables.items()}
            os.execve(command[0], list(command), {**common_environment, **request.environment, **known})
        except Exception as error:  # noqa: BLE001 - the program's own output has the reason
            os.write(2, f"cannot start {command[0]!r}: {error}\n".encode(errors="backslashreplace"))
        return _EXEC_FAILED_EXIT_CODE

    # Until the child resets the handlers of this process, they would write into this process's wake-up pipe.
    return fork_process(run)
