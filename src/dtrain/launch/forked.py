"""A rank as a fork of this process: how it becomes one, runs a function, and reports what came of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from dtrain import wire
from dtrain.launch.plan import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE
from dtrain.launch.processes import die_with_parent, send
from dtrain.launch.verdict import Exit

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What every rank is to run, and where they meet: ``held`` keeps the port for them."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    nproc: int
    held: socket.socket


@dataclass(slots=True, kw_only=True, eq=False)
class ForkedRank:
    """A started rank, what it has reported so far, and how it ended, None while it runs."""

    rank: int
    pid: int
    pipe: int
    text: bytearray = field(default_factory=bytearray)
    end: Exit | None = None

    def read(self) -> bool:
        """Take in what there is of its report; whether more may come."""
        while True:
            try:
                chunk = os.read(self.pipe, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.text += chunk

    def report(self) -> dict[str, Any]:
        """What it said about itself: ``result``, ``failure`` and ``of_a_peer``, or ``not_plain``; nothing if it died before."""
        return json.loads(self.text) if self.text.endswith(b"\n") else {}

    def kill_family(self) -> None:
        """Kill what it has started, and itself if it runs. Before it is collected: its number may be another's afterwards."""
        send(self.pid, signal.SIGKILL)  # it may not have come to lead its group yet
        send(-self.pid, signal.SIGKILL)

    def collect(self, now: float) -> None:
        """Note how it ended, if it has; nothing that it started runs then.

        Mutates: ``end``.
        """
        # Seen before it is collected: as long as it is a zombie, its number cannot become another process's.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.read()
            self.kill_family()
            self.end = Exit(rank=self.rank, code=os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), at=now)


def fork_rank(task: Task, rank: int) -> ForkedRank:
    """Start ``rank`` as a fork of this process; it is killed when this process dies.

    Raises:
        OSError: no more processes or files.
    """
    sys.stdout.flush()  # what waits in a buffer would be printed by the fork as well
    sys.stderr.flush()
    read, write = os.pipe()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the fork has our handlers until it resets them
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads, as a notebook's is. Raised as an error after the fork, the
            # warning would lose the child. It is meant for locks that other threads hold: those of torch, of Python and of
            # logging are made anew in a fork, and ranks that get stuck all the same are ended by the caller's timeout_s.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(read)
            _be_rank(task, rank, write, parent)
    except OSError:
        os.close(read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write)
    os.set_blocking(read, False)
    return ForkedRank(rank=rank, pid=pid, pipe=read)


def _be_rank(task: Task, rank: int, pipe: int, parent: int) -> NoReturn:
    """Run the function in this fresh fork, report, and end without the exit handlers of the process it was copied from."""
    code = 1
    try:
        gc.freeze()  # what it finds here is the parent's: freed in this process, a process group would wait for its threads
        os.setsid()  # a group of its own, to end what it starts together with it; Ctrl-C reaches the parent alone
        die_with_parent(parent)
        _reset_signals()
        _become(rank, task.nproc, task.held)
        code, report = _run(task, rank)
        with open(pipe, "wb") as file:
            file.write(json.dumps(report).encode() + b"\n")
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or the stream is closed
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers, whatever went wrong
        traceback.print_exc()
    finally:
        os._exit(code)


def _reset_signals() -> None:
    """Python's default handling: handlers and wake-up pipes of the parent mean nothing here."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)) or number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _become(rank: int, nproc: int, held: socket.socket) -> None:
    """Make this process a rank: its environment, and what torch took over from the parent."""
    port = held.getsockname()[1]
    held.close()
    for name in [name for name in os.environ if name.startswith(wire.OWNED_PREFIXES)]:
        del os.environ[name]
    who = wire.rank_environment(
        rank=rank,
        world_size=nproc,
        local_rank=rank,
        local_world_size=nproc,
        node_rank=0,
        nodes=1,
        addr=LOOPBACK_ADDRESS,
        port=port,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault(wire.THREADS, str(max(1, cores // nproc)))
    os.environ.update({**who, wire.LOOPBACK: "1", wire.GLOO_INTERFACE: LOOPBACK_INTERFACE})
    if "torch" in sys.modules:
        # The threads of OpenMP are not in a fork, and a parallel region would wait for them forever.
        sys.modules["torch"].set_num_threads(1)


def _run(task: Task, rank: int) -> tuple[int, dict[str, Any]]:
    """What the process is to exit with, and its report: the result, or the record of what left the function."""
    try:
        result = task.fn(*task.args)
    except BaseException as error:  # noqa: BLE001 - every way in which it can fail is reported to the parent, which raises it
        failure = wire.Failure.of(rank, error)
        if failure.exit_code == 0:  # sys.exit() without a code: done, with nothing to return
            return 0, {"result": None}
        return failure.exit_code, {"failure": asdict(failure), "of_a_peer": _is_of_a_peer(error)}
    try:
        json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        return 1, {"not_plain": f"{type(result).__name__}: {error}"}
    return 0, {"result": result}


def _is_of_a_peer(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank has failed: one of ours or torch's classes for it, or a lost connection."""
    timeouts = sys.modules.get("dtrain.dist.timeouts")  # loaded wherever process groups of ours are
    ours = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return ours or (timeouts is not None and timeouts.is_of_a_collective(error))
