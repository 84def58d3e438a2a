"""A port on which forked ranks will meet, kept for them from before they start.

A rank as a fork of this process: how it becomes one, runs a function, and reports what came of it.

``spawn``: several real ranks of a function, from a script or a notebook.

The ranks are forks of this process, so a closure or a function typed into a notebook works, and nothing is imported twice.
They are supervised as by the launcher: the first failure ends them all, and none outlives the call or this process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from dtrain import launch_protocol
from dtrain.errors import ConfigError, RankError
from dtrain.launch.failure import RankExit, RootCause, find_root_cause, is_failed_exit, signal_name
from dtrain.launch.launch_plan import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE, MAX_RANKS
from dtrain.launch.processes import delay_interrupts, die_with_parent, send_signal


def reserve_port() -> socket.socket:
    """A free port on loopback, kept for the ranks for as long as the returned socket is open.

    The socket is bound but does not listen. Rank 0 may bind the same port, because both sides set ``SO_REUSEADDR`` (torch
    does), while the kernel gives it to nobody who asks for any free port. So there is no moment in which it can be lost,
    as there is between choosing a port, closing it and hoping. No rank inherits the socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK_ADDRESS, 0))
    return holder


_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpawnTask:
    """What every rank is to run, and where they meet: ``port_holder`` keeps the port for them."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    nproc: int
    port_holder: socket.socket


@dataclass(slots=True, kw_only=True, eq=False)
class ForkedRank:
    """A started rank, what it has reported so far, and how it ended, None while it runs."""

    rank: int
    pid: int
    pipe: int
    report_bytes: bytearray = field(default_factory=bytearray)
    exit: RankExit | None = None

    def read_report(self) -> bool:
        """Take in what there is of its report; whether more may come."""
        while True:
            try:
                chunk = os.read(self.pipe, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.report_bytes += chunk

    def parse_report(self) -> dict[str, Any]:
        """What it said about itself: ``result``, ``failure`` and ``of_a_peer``, or ``not_plain``; nothing if it died before."""
        return json.loads(self.report_bytes) if self.report_bytes.endswith(b"\n") else {}

    def kill_process_group(self) -> None:
        """Kill what it has started, and itself if it runs. Before it is collected: its number may be another's afterwards."""
        send_signal(self.pid, signal.SIGKILL)  # it may not have come to lead its group yet
        send_signal(-self.pid, signal.SIGKILL)

    def collect_exit(self, now: float) -> None:
        """Note how it ended, if it has; nothing that it started runs then.

        Mutates: ``end``.
        """
        # Seen before it is collected: as long as it is a zombie, its number cannot become another process's.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.read_report()
            self.kill_process_group()
            self.exit = RankExit(rank=self.rank, code=os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), at=now)


def fork_rank(task: SpawnTask, rank: int) -> ForkedRank:
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
            _run_rank_process(task, rank, write, parent)
    except OSError:
        os.close(read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write)
    os.set_blocking(read, False)
    return ForkedRank(rank=rank, pid=pid, pipe=read)


def _run_rank_process(task: SpawnTask, rank: int, pipe: int, parent: int) -> NoReturn:
    """Run the function in this fresh fork, report, and end without the exit handlers of the process it was copied from."""
    code = 1
    try:
        gc.freeze()  # what it finds here is the parent's: freed in this process, a process group would wait for its threads
        os.setsid()  # a group of its own, to end what it starts together with it; Ctrl-C reaches the parent alone
        die_with_parent(parent)
        _reset_signals()
        _set_rank_environment(rank, task.nproc, task.port_holder)
        code, report = _call_function(task, rank)
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


def _set_rank_environment(rank: int, nproc: int, held: socket.socket) -> None:
    """Make this process a rank: its environment, and what torch took over from the parent."""
    port = held.getsockname()[1]
    held.close()
    for name in [name for name in os.environ if name.startswith(launch_protocol.OWNED_PREFIXES)]:
        del os.environ[name]
    who = launch_protocol.rank_environment(
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
    os.environ.setdefault(launch_protocol.OMP_THREADS, str(max(1, cores // nproc)))
    os.environ.update({**who, launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: LOOPBACK_INTERFACE})
    if "torch" in sys.modules:
        # The threads of OpenMP are not in a fork, and a parallel region would wait for them forever.
        sys.modules["torch"].set_num_threads(1)


def _call_function(task: SpawnTask, rank: int) -> tuple[int, dict[str, Any]]:
    """What the process is to exit with, and its report: the result, or the record of what left the function."""
    try:
        result = task.fn(*task.args)
    except BaseException as error:  # noqa: BLE001 - every way in which it can fail is reported to the parent, which raises it
        failure = launch_protocol.RankFailure.from_exception(rank, error)
        if failure.exit_code == 0:  # sys.exit() without a code: done, with nothing to return
            return 0, {"result": None}
        return failure.exit_code, {"failure": asdict(failure), "of_a_peer": _is_caused_by_peer(error)}
    try:
        json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        return 1, {"not_plain": f"{type(result).__name__}: {error}"}
    return 0, {"result": result}


def _is_caused_by_peer(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank has failed: one of ours or torch's classes for it, or a lost connection."""
    timeouts = sys.modules.get("dtrain.dist.timeout_report")  # loaded wherever process groups of ours are
    ours = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return ours or (timeouts is not None and timeouts.is_of_a_collective(error))


GRACE_S = 5.0
"""Between asking a rank to end and killing it, in seconds."""

_POLL_INTERVAL_S = 0.05  # how often ends of processes are looked for; what they report wakes the loop at once
_SECOND_SIGTERM_S = 2.5
_FAILURE_COLLECT_S = 0.5  # after the first failure: a peer may die of it before the culprit's own report is here


@dataclass(slots=True, kw_only=True, eq=False)
class _SpawnedJob:
    name: str
    nproc: int
    ranks: list[ForkedRank] = field(default_factory=list)

    def alive_ranks(self) -> list[ForkedRank]:
        return [rank for rank in self.ranks if rank.exit is None]

    def collect_exits(self) -> None:
        with delay_interrupts():
            for rank in self.alive_ranks():
                rank.collect_exit(time.monotonic())

    def has_failed(self) -> bool:
        return any(rank.exit is not None and is_failed_exit(rank.exit) for rank in self.ranks)


def spawn(fn: Callable[..., Any], *args: Any, nproc: int, timeout_s: float | None = None) -> list[Any]:
    """The results of ``fn(*args)`` on ``nproc`` real ranks of this machine, by rank.

    Each rank is a fork of this process with the environment of a launched rank, so ``fn`` calls ``init_dist`` as a script
    would. It sees copies of everything here, the random streams too (``seed_all(seed, rank)`` tells ranks apart). What it
    changes is lost; its result comes back as JSON holds it (tuples become lists). Ranks print where this process does.

        def train(steps):
            with dt.init_dist() as info:
                ...
            return {"rank": info.rank, "loss": loss}

        results = dt.spawn(train, 100, nproc=2)

    A fork has none of its parent's threads: where torch was loaded here before, it computes with one thread in each rank.

    Args:
        fn: any callable, also a closure; its result is plain data.
        args: anything; nothing is serialised on the way in.
        nproc: number of ranks, 1 to 256.
        timeout_s: after so many seconds all ranks are ended; None waits as long as they run.

    Raises:
        ConfigError: ``nproc`` or ``timeout_s`` out of range, a process group is open here, CUDA has started here (a fork could
            use neither), or a result is not plain data.
        RankError: a rank could not be started, raised (its traceback follows), exited, was killed, or did not finish in time.
            All ranks are ended then, as they are on Ctrl-C, and when this process dies.
    """
    _check_arguments(nproc, timeout_s)
    job = _SpawnedJob(name=getattr(fn, "__qualname__", repr(fn)), nproc=nproc)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        gc.collect()  # process groups that wait in garbage are freed here, where their threads are
        with reserve_port() as held:
            task = SpawnTask(fn=fn, args=args, nproc=nproc, port_holder=held)
            for rank in range(nproc):
                with delay_interrupts():
                    job.ranks.append(_start_rank(task, rank))
            _wait_for_ranks(job, deadline)
            return _collect_results(job)
    finally:
        _terminate_ranks(job)


def _check_arguments(nproc: int, timeout_s: float | None) -> None:
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= MAX_RANKS:
        raise ConfigError(f"spawn: nproc must be a whole number from 1 to {MAX_RANKS}, got {nproc!r}; 2 is a start")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"spawn: timeout_s must be a positive number of seconds, or None, got {timeout_s!r}")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("spawn: a process group is open in this process; call it before init_dist, or after its block")
    if torch.cuda.is_initialized():
        raise ConfigError("spawn: CUDA has started in this process, and a fork cannot use it; call it before any use of a GPU")


def _start_rank(task: SpawnTask, rank: int) -> ForkedRank:
    try:
        return fork_rank(task, rank)
    except OSError as error:
        raise RankError(f"spawn: rank {rank} of {task.nproc} could not be started: {error.strerror}; use fewer") from None


def _wait_for_ranks(job: _SpawnedJob, deadline: float | None) -> None:
    """Until every rank has ended; or one has failed, and what the others had to say about it is in; or the time is up."""
    decide_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in job.ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while job.alive_ranks():
            for key, _ in selector.select(_POLL_INTERVAL_S):
                if not key.data.read():
                    selector.unregister(key.fd)
            job.collect_exits()
            now = time.monotonic()
            if decide_at is None and job.has_failed():
                decide_at = now + _FAILURE_COLLECT_S
            if decide_at is not None and now >= decide_at:
                return
            if deadline is not None and now >= deadline and (late := [rank.rank for rank in job.alive_ranks()]):
                raise RankError(
                    f"spawn: {job.name}: ranks {late} of {job.nproc} did not finish within timeout_s and were ended; "
                    "do they wait for each other?"
                )
            if not selector.get_map():
                time.sleep(_POLL_INTERVAL_S)  # all has been said, but not everybody has ended


def _collect_results(job: _SpawnedJob) -> list[Any]:
    """The results by rank.

    Raises:
        ConfigError: one that is not plain data.
        RankError: a rank failed; the one that the others followed.
    """
    reports = {rank.rank: rank.parse_report() for rank in job.ranks}
    for rank, report in reports.items():
        if "not_plain" in report:
            raise ConfigError(f"spawn: {job.name}: rank {rank} returned what JSON cannot hold ({report['not_plain']})")
    cause = _find_spawn_cause(job, reports)
    if cause is not None:
        raise RankError(f"spawn: {job.name}: rank {cause.rank} of {job.nproc} {_describe_cause(cause)}")
    for ended in job.ranks:
        if "result" not in reports[ended.rank] and ended.exit is not None:
            who = f"rank {ended.rank} of {job.nproc}"
            raise RankError(f"spawn: {job.name}: {who} exited with code {ended.exit.code} before it returned")
    return [reports[rank.rank]["result"] for rank in job.ranks]


def _find_spawn_cause(job: _SpawnedJob, reports: dict[int, dict[str, Any]]) -> RootCause | None:
    """The first failure; a rank that only lost its peers is blamed when there is no other."""
    failures = {
        rank: launch_protocol.RankFailure(**report["failure"]) for rank, report in reports.items() if "failure" in report
    }
    echoes = {rank for rank in failures if reports[rank]["of_a_peer"]}
    exits = [rank.exit for rank in job.ranks if rank.exit is not None]
    first = find_root_cause(
        [exit_ for exit_ in exits if exit_.rank not in echoes],
        [failure for rank, failure in failures.items() if rank not in echoes],
    )
    return first if first is not None or not echoes else find_root_cause(exits, list(failures.values()))


def _describe_cause(cause: RootCause) -> str:
    failure = cause.failure
    if failure is not None and failure.error_type != "SystemExit":
        return f"failed: {failure.error_type}: {failure.message}\n{failure.traceback_text}".rstrip()
    if cause.code < 0:
        hint = "; often the kernel, out of memory" if cause.code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-cause.code)}{hint}"
    said = f": {failure.message}" if failure is not None and not failure.message.isdecimal() else ""
    return f"exited with code {cause.code}{said}"


def _terminate_ranks(job: _SpawnedJob) -> None:
    """End every rank that runs, gently first; no process of the job is left, nor a zombie. Ctrl-C makes it shorter."""
    try:
        # Asked twice: a rank that could save takes the first signal for a request to do so, and the second one for the end.
        for patience_s in (_SECOND_SIGTERM_S, GRACE_S - _SECOND_SIGTERM_S):
            for rank in job.alive_ranks():
                send_signal(rank.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience_s
            while job.alive_ranks() and time.monotonic() < deadline:
                job.collect_exits()
                time.sleep(_POLL_INTERVAL_S / 5)
    finally:
        with delay_interrupts():
            for rank in job.alive_ranks():
                rank.kill_process_group()
            for rank in job.alive_ranks():
                os.waitpid(rank.pid, 0)
            for rank in job.ranks:
                os.close(rank.pipe)
