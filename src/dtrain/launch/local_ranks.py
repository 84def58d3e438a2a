"""Start ranks as processes of this machine, wait for them, and end them: the core of ``spawn``, ``run_ranks`` and ``prove``.

A rank is a fork, either of this process, with all its objects, or of a server process that has imported torch. Both start in
tenths of a second. The port of the ranks' store is reserved while the ranks run.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from dtrain import launch_protocol
from dtrain.launch.failure import RankExit, RootCause, find_root_cause, is_failed_exit
from dtrain.launch.launch_plan import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE
from dtrain.launch.processes import delay_interrupts, die_with_parent, fork_process, reset_signal_handlers, send_signal
from dtrain.launch_protocol import RankFailure

# Modules that a rank of a training loop imports. A fork of a server that has them starts with a second of a core less.
PRELOADED = (
    "dtrain.checkpoint.load",
    "dtrain.checkpoint.load_weights",
    "dtrain.checkpoint.save",
    "dtrain.data.loader",
    "dtrain.loggers.records",
    "dtrain.loggers.text",
    "dtrain.losses",
    "dtrain.run.run_dir",
    "dtrain.shard.fsdp",
    "dtrain.shard.materialize",
    "dtrain.step.compose",
    "dtrain.transforms",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.testing",
)
# seconds between checks for exits, on systems that do not signal the exit of a child
_POLL_INTERVAL_S = 0.05


def reserve_port() -> socket.socket:
    """Reserve a free port on loopback for the ranks, as long as the returned socket is open.

    The socket is bound but does not listen. Rank 0 may bind the same port, because both sockets set ``SO_REUSEADDR``. The
    kernel does not give the port to another program. No rank inherits the socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK_ADDRESS, 0))
    return holder


class LocalRanks:
    """Ranks of one process group on this machine, from their start to their end.

    Args:
        world_size: number of ranks.

    Attributes:
        processes: started processes by rank.
        exits: exits by rank.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # Processes of ``multiprocessing``, or ``_Fork``, which has the same members.
        self.processes: list[Any] = []
        self.exits: dict[int, RankExit] = {}
        self._port_holder = reserve_port()

    @property
    def running(self) -> list[int]:
        """Ranks that have not exited."""
        return [rank for rank in range(len(self.processes)) if rank not in self.exits]

    @property
    def has_failed(self) -> bool:
        """True if a rank exited with a failure."""
        return any(map(is_failed_exit, self.exits.values()))

    def environment(self, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of ``rank``: ``inherited``, and the variables of a rank whose peers are on this machine."""
        variables = launch_protocol.rank_environment(
            rank=rank,
            world_size=self.world_size,
            local_rank=rank,
            local_world_size=self.world_size,
            node_rank=0,
            nodes=1,
            addr=LOOPBACK_ADDRESS,
            port=self._port_holder.getsockname()[1],
        )
        ours = {launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: LOOPBACK_INTERFACE}
        return {**inherited, **variables, **ours}

    def fork(self, run: Callable[[], int], environment: Mapping[str, str]) -> None:
        """Start the next rank as a fork of this process, which returns ``run()`` as its exit code and dies with this process.

        Raises:
            OSError: the limit of processes or files is reached.
        """
        # The fork would print the buffered text as well.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()

        def run_fork() -> int:
            enter_rank(environment)
            self._port_holder.close()
            # A process group of its own ends together with the rank, and Ctrl-C reaches only the parent.
            os.setsid()
            die_with_parent(parent)
            ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN} - {signal.SIGTERM}
            reset_signal_handlers(ignore=ignored)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return run()

        with delay_interrupts(), warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads, because of their locks. torch, Python and logging recreate their locks
            # in a fork, and a time limit ends ranks that hang nevertheless.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.processes.append(_Fork(fork_process(run_fork)))

    def fork_from_server(self, target: Callable[..., object], *args: Any, server: forkserver.ForkServer | None = None) -> Any:
        """Start the next rank as a fork of ``server``, which calls ``target(*args)``, and return its process.

        None uses the server of ``multiprocessing``.
        """
        # Ranks may have children (loader workers), so they are no daemons.
        process = multiprocessing.get_context("forkserver").Process(target=target, args=args, daemon=False)
        with _use_server(server) if server is not None else contextlib.nullcontext():
            process.start()
        self.processes.append(process)
        return process

    def collect_exits(self) -> None:
        """Record the ranks that have exited. The processes that a fork of this process started end with it."""
        with delay_interrupts():
            for rank in self.running:
                code = self.processes[rank].exitcode
                if code is not None:
                    self.exits[rank] = RankExit(rank=rank, code=code, at=time.monotonic())

    def kill(self) -> None:
        """Kill the running ranks, and the processes of their process groups."""
        for process in (self.processes[rank] for rank in self.running):
            if process.exitcode is None:
                # The rank may not lead its process group yet. A kill also ends a stopped process.
                send_signal(process.pid, signal.SIGKILL)
                send_signal(-process.pid, signal.SIGKILL)

    def end(self, *, grace_s: Sequence[float] = ()) -> None:
        """End the running ranks: SIGTERM before each wait of ``grace_s`` seconds, then SIGKILL. Ctrl-C skips the waits.

        No process is left. Mutates: these ranks, whose port is free afterwards.
        """
        try:
            for wait_s in grace_s:
                for rank in self.running:
                    send_signal(self.processes[rank].pid, signal.SIGTERM)
                self.wait_until_exit(wait_s)
        finally:
            with delay_interrupts():
                self.kill()
                for rank in self.running:
                    self.processes[rank].join()
                self._port_holder.close()

    def wait_until_exit(self, timeout_s: float) -> None:
        """Wait until all ranks have exited, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.running and (rest_s := deadline - time.monotonic()) > 0:
            wait_for_exits([self], rest_s)


def wait_for_exits(
    groups: Collection[LocalRanks], timeout_s: float | None, pipes: Iterable[Connection[Any, Any]] = ()
) -> list[Any]:
    """Wait until a rank exits or a pipe is readable; record all exits, and return the readable pipes.

    Args:
        groups: groups whose exits are waited for.
        timeout_s: seconds to wait; None has no limit.
        pipes: pipes of ranks.
    """
    pipes = list(pipes)
    sentinels = [group.processes[rank].sentinel for group in groups for rank in group.running]
    if None in sentinels:
        timeout_s = _POLL_INTERVAL_S if timeout_s is None else min(timeout_s, _POLL_INTERVAL_S)
    ready = wait([*pipes, *(sentinel for sentinel in sentinels if sentinel is not None)], timeout_s)
    for group in groups:
        group.collect_exits()
    return [item for item in ready if item in pipes]


def enter_rank(environment: Mapping[str, str]) -> None:
    """Give this fork the environment of a rank, and one thread. Mutates: this process's environment."""
    # Existing objects belong to the parent. A process group freed here would wait for the parent's threads, and a collection
    # would write into every object, and so copy its page into this process.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:
        # torch has read OMP_NUM_THREADS. A fork has no OpenMP threads, and a parallel region would wait for them forever.
        sys.modules["torch"].set_num_threads(1)


def report_failure(rank: int, error: BaseException) -> dict[str, Any]:
    """Return the report of a rank about the exception that left its function, as plain data for ``find_first_failure``."""
    # Every process with process groups of dtrain has imported the module.
    timeouts = sys.modules.get("dtrain.dist.incident")
    ours = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    follows = ours or (timeouts is not None and timeouts.is_collective_error(error))
    return {"failure": asdict(RankFailure.from_exception(rank, error)), "follows_peer": follows}


def find_first_failure(exits: Iterable[RankExit], reports: Mapping[int, Mapping[str, Any]]) -> RootCause | None:
    """Return the first failure, or None without failures. A rank that only lost its peers counts if no other rank failed.

    Args:
        exits: exits of the ranks.
        reports: reports by rank; those of failures are made by ``report_failure``.
    """
    exits = list(exits)
    failures = {rank: RankFailure(**report["failure"]) for rank, report in reports.items() if "failure" in report}
    following = {rank for rank in failures if reports[rank]["follows_peer"]}
    first = find_root_cause(
        [exit_ for exit_ in exits if exit_.rank not in following],
        [failure for rank, failure in failures.items() if rank not in following],
    )
    return first if first is not None or not following else find_root_cause(exits, list(failures.values()))


class _Fork:
    """Fork of this process, with the members of a process of ``multiprocessing``.

    ``sentinel`` is readable at its exit; None if the system has no such descriptor.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel: int | None = None
        self._exit_code: int | None = None
        # Missing outside of Linux, and if the limit of files is reached.
        with contextlib.suppress(AttributeError, OSError):
            self.sentinel = os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        if self._exit_code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            # While the process is a zombie, its pid cannot be reused.
            send_signal(-self.pid, signal.SIGKILL)
            self.join()
        return self._exit_code

    def join(self) -> None:
        """Wait for the end of the process."""
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if self.sentinel is not None:
                os.close(self.sentinel)
                self.sentinel = None


@contextlib.contextmanager
def _use_server(server: forkserver.ForkServer) -> Iterator[None]:
    """Start processes as forks of ``server``. Mutates: ``multiprocessing``, and the main module, in the context.

    The server of ``multiprocessing`` may run already, with other modules. A fork would import the main module, which has
    nothing to do with the rank's program.
    """
    connect, main = forkserver.connect_to_new_process, sys.modules["__main__"]
    forkserver.connect_to_new_process = server.connect_to_new_process
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        forkserver.connect_to_new_process = connect
