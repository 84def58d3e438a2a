"""Run a function on several real ranks, from a script or a notebook.

The ranks are forks of this process, so a closure or a function typed into a notebook works, and no module is imported twice.
They are supervised as by the launcher: the first failure ends all ranks, and no rank outlives the call or this process.
"""

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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtrain import launch_protocol
from dtrain.arguments import check_int, check_number, explain_arguments
from dtrain.errors import ConfigError, RankError
from dtrain.launch.failure import RankExit, RootCause, find_root_cause, is_failed_exit, signal_name
from dtrain.launch.launch_dir import choose_socket_prefix, remove_socket_folders
from dtrain.launch.launch_plan import LOOPBACK_ADDRESS, LOOPBACK_INTERFACE, MAX_RANKS
from dtrain.launch.processes import delay_interrupts, die_with_parent, fork_process, reset_signal_handlers, send_signal


def reserve_port() -> socket.socket:
    """Reserve a free port on loopback for the ranks, as long as the returned socket is open.

    The socket is bound but does not listen. Rank 0 may bind the same port, because both sockets set ``SO_REUSEADDR``. The
    kernel does not give the port to another program. No rank inherits the socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK_ADDRESS, 0))
    return holder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpawnTask:
    """Function of every rank, its arguments, the number of ranks, and resources: the socket that reserves the port of their
    store, and the beginning of the paths of their folders for sockets.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    world_size: int
    port_holder: socket.socket
    socket_prefix: str


@dataclass(slots=True, kw_only=True, eq=False)
class ForkedRank:
    """Started rank: its process, the bytes of its report so far, and its exit, None while the rank runs."""

    rank: int
    pid: int
    pipe: int
    report_bytes: bytearray = field(default_factory=bytearray)
    exit: RankExit | None = None

    def read_report(self) -> bool:
        """Read the available part of the rank's report. Return True if more may follow."""
        while True:
            try:
                chunk = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.report_bytes += chunk

    def parse_report(self) -> dict[str, Any]:
        """Parse the report: ``result``, ``failure`` and ``caused_by_peer``, or ``not_json``; empty without a full report."""
        return json.loads(self.report_bytes) if self.report_bytes.endswith(b"\n") else {}

    def kill_process_group(self) -> None:
        """Kill the rank and the processes it started. Call before the rank is reaped, because its pid may be reused then."""
        # The rank may not lead its process group yet.
        send_signal(self.pid, signal.SIGKILL)
        send_signal(-self.pid, signal.SIGKILL)

    def collect_exit(self, now: float) -> None:
        """Record the rank's exit, if it has exited, and kill the processes it started.

        Mutates: ``exit``.
        """
        # While the rank is a zombie, its pid cannot be reused.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.read_report()
            self.kill_process_group()
            self.exit = RankExit(rank=self.rank, code=os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), at=now)


def fork_rank(task: SpawnTask, rank: int) -> ForkedRank:
    """Start ``rank`` as a fork of this process; the rank is killed when this process dies.

    Raises:
        OSError: the limit of processes or files is reached.
    """
    # The fork would print the buffered text as well.
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    parent = os.getpid()

    def run() -> int:
        os.close(read)
        return _run_rank_process(task, rank, write, parent)

    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads, because of their locks. torch, Python and logging recreate their locks
            # in a fork, and timeout_s ends ranks that hang nevertheless.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = fork_process(run)
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    os.set_blocking(read, False)
    return ForkedRank(rank=rank, pid=pid, pipe=read)


def _run_rank_process(task: SpawnTask, rank: int, pipe: int, parent: int) -> int:
    """Run the function in this fork, write the report, and return the exit code. Exit handlers of the parent do not run."""
    # Existing objects belong to the parent. A process group freed here would wait for the parent's threads.
    gc.freeze()
    # A process group of its own ends together with the rank, and Ctrl-C reaches only the parent.
    os.setsid()
    die_with_parent(parent)
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN} - {signal.SIGTERM}
    reset_signal_handlers(ignore=ignored)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_rank_environment(rank, task.world_size, task.port_holder)
    os.environ[launch_protocol.SOCKET_FOLDER_PREFIX] = task.socket_prefix
    code, report = _call_function(task, rank)
    with open(pipe, "wb") as file:
        file.write(json.dumps(report).encode() + b"\n")
    # The reader may be gone, or the stream closed.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _set_rank_environment(rank: int, world_size: int, port_holder: socket.socket) -> None:
    """Set the environment of a rank, and reset the state that torch copied from the parent."""
    port = port_holder.getsockname()[1]
    port_holder.close()
    for name in [name for name in os.environ if name.startswith(launch_protocol.OWNED_PREFIXES)]:
        del os.environ[name]
    rank_variables = launch_protocol.rank_environment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        nodes=1,
        addr=LOOPBACK_ADDRESS,
        port=port,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault(launch_protocol.OMP_THREADS, str(max(1, cores // world_size)))
    os.environ.update({**rank_variables, launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: LOOPBACK_INTERFACE})
    if "torch" in sys.modules:
        # A fork has no OpenMP threads, and a parallel region would wait for them forever.
        sys.modules["torch"].set_num_threads(1)


def _call_function(task: SpawnTask, rank: int) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the report of the rank: the result, or the failure record of the exception."""
    try:
        result = task.fn(*task.args)
    except BaseException as error:  # noqa: BLE001 - every failure is reported to the parent, which raises it
        failure = launch_protocol.RankFailure.from_exception(rank, error)
        # sys.exit() without a code means success without a result.
        if failure.exit_code == 0:
            return 0, {"result": None}
        return failure.exit_code, {"failure": asdict(failure), "caused_by_peer": _is_caused_by_peer(error)}
    try:
        json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        return 1, {"not_json": f"{type(result).__name__}: {error}"}
    return 0, {"result": result}


def _is_caused_by_peer(error: BaseException) -> bool:
    """Return True if ``error`` only reports another rank's failure: an error class of dtrain or torch, or a lost connection."""
    # Every process with process groups of dtrain has imported the module.
    timeouts = sys.modules.get("dtrain.dist.incident")
    ours = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return ours or (timeouts is not None and timeouts.is_collective_error(error))


GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

# seconds between checks for exits; a report of a rank ends the wait at once
_POLL_INTERVAL_S = 0.05
_SECOND_SIGTERM_S = 2.5
# A peer may fail before the report of the rank that failed first arrives.
_FAILURE_COLLECT_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class _SpawnedJob:
    name: str
    world_size: int
    ranks: list[ForkedRank] = field(default_factory=list)

    def alive_ranks(self) -> list[ForkedRank]:
        return [rank for rank in self.ranks if rank.exit is None]

    def collect_exits(self) -> None:
        with delay_interrupts():
            for rank in self.alive_ranks():
                rank.collect_exit(time.monotonic())

    def has_failed(self) -> bool:
        return any(rank.exit is not None and is_failed_exit(rank.exit) for rank in self.ranks)


@explain_arguments
def spawn(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float | None = None) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` real ranks of this machine and return the results by rank.

    Each rank is a fork of this process with the environment of a launched rank, so ``fn`` calls ``init_dist`` like a script.
    ``fn`` sees copies of all objects, including random generators (``seed_all(seed, rank)`` separates ranks). Changes in a rank
    are lost. Results are converted by JSON (tuples become lists). Ranks print to this process's streams.

        def train(steps):
            with dt.init_dist() as info:
                ...
            return {"rank": info.rank, "loss": loss}

        results = dt.spawn(train, 100, world_size=2)

    A fork has none of its parent's threads. If torch was imported before, each rank computes with one thread.

    Args:
        fn: any callable, also a closure; its result must be plain data.
        args: arguments of ``fn``, which are not serialized.
        world_size: number of ranks, 1 to 256.
        timeout_s: seconds after which all ranks are ended; None waits without limit.

    Raises:
        ConfigError: ``world_size`` or ``timeout_s`` is out of range, a process group is open here or CUDA is initialized here
            (a fork can use neither), or a result is not plain data.
        RankError: a rank could not be started, raised (its traceback follows), exited, was killed, or did not finish in time.
            All ranks are then ended, as on Ctrl-C and when this process dies.
    """
    _check_arguments(world_size, timeout_s)
    job, socket_prefix = _SpawnedJob(name=getattr(fn, "__qualname__", repr(fn)), world_size=world_size), choose_socket_prefix()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        # Unreferenced process groups must be freed in the process that has their threads.
        gc.collect()
        with reserve_port() as port_holder:
            task = SpawnTask(fn=fn, args=args, world_size=world_size, port_holder=port_holder, socket_prefix=socket_prefix)
            for rank in range(world_size):
                with delay_interrupts():
                    job.ranks.append(_start_rank(task, rank))
            _wait_for_ranks(job, deadline)
            return _collect_results(job)
    finally:
        try:
            _terminate_ranks(job)
        finally:
            remove_socket_folders(socket_prefix)


def _check_arguments(world_size: int, timeout_s: float | None) -> None:
    check_int("spawn", "world_size", world_size, maximum=MAX_RANKS, advice="Use 2, for example.")
    if timeout_s is not None:
        check_number("spawn", "timeout_s", timeout_s, above=0, advice="Use 60 seconds, for example, or None.")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("spawn: a process group is open in this process. Call spawn before init_dist, or after its block.")
    from dtrain.device import started_accelerator

    accelerator = started_accelerator()
    if accelerator is not None:
        name = accelerator.upper()
        raise ConfigError(f"spawn: {name} has started in this process, and a fork cannot use it. Call spawn before GPU use.")


def _start_rank(task: SpawnTask, rank: int) -> ForkedRank:
    try:
        return fork_rank(task, rank)
    except OSError as error:
        reason = f"could not be started: {error.strerror}. Use fewer ranks."
        raise RankError(f"spawn: rank {rank} of {task.world_size} {reason}") from None


def _wait_for_ranks(job: _SpawnedJob, deadline: float | None) -> None:
    """Wait until all ranks have exited, or a rank has failed and the reports of its peers are collected, or time is up."""
    decide_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in job.ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while job.alive_ranks():
            for key, _ in selector.select(_POLL_INTERVAL_S):
                if not key.data.read_report():
                    selector.unregister(key.fd)
            job.collect_exits()
            now = time.monotonic()
            if decide_at is None and job.has_failed():
                decide_at = now + _FAILURE_COLLECT_S
            if decide_at is not None and now >= decide_at:
                return
            if deadline is not None and now >= deadline and (late := [rank.rank for rank in job.alive_ranks()]):
                raise RankError(
                    f"spawn: {job.name}: ranks {late} of {job.world_size} did not finish within timeout_s and were ended. "
                    "Check whether the ranks wait for each other."
                )
            if not selector.get_map():
                # All reports are complete, but some ranks still run.
                time.sleep(_POLL_INTERVAL_S)


def _collect_results(job: _SpawnedJob) -> list[Any]:
    """Return the results by rank.

    Raises:
        ConfigError: a result is not plain data.
        RankError: a rank failed; the error names the first failure.
    """
    reports = {rank.rank: rank.parse_report() for rank in job.ranks}
    for rank, report in reports.items():
        if "not_json" in report:
            raise ConfigError(
                f"spawn: {job.name}: the result of rank {rank} must be plain data, which JSON can hold, "
                f"got {report['not_json']}. Return numbers, strings, lists or dictionaries."
            )
    cause = _find_spawn_cause(job, reports)
    if cause is not None:
        raise RankError(f"spawn: {job.name}: rank {cause.rank} of {job.world_size} {_describe_cause(cause)}")
    for forked in job.ranks:
        if "result" not in reports[forked.rank] and forked.exit is not None:
            subject = f"rank {forked.rank} of {job.world_size}"
            raise RankError(
                f"spawn: {job.name}: {subject} exited with code {forked.exit.code} before it returned. "
                "Return from the function instead of calling os._exit."
            )
    return [reports[rank.rank]["result"] for rank in job.ranks]


def _find_spawn_cause(job: _SpawnedJob, reports: dict[int, dict[str, Any]]) -> RootCause | None:
    """Return the first failure; a rank that only lost its peers counts if there is no other failure."""
    failures = {
        rank: launch_protocol.RankFailure(**report["failure"]) for rank, report in reports.items() if "failure" in report
    }
    caused_by_peer = {rank for rank in failures if reports[rank]["caused_by_peer"]}
    exits = [rank.exit for rank in job.ranks if rank.exit is not None]
    first = find_root_cause(
        [exit_ for exit_ in exits if exit_.rank not in caused_by_peer],
        [failure for rank, failure in failures.items() if rank not in caused_by_peer],
    )
    return first if first is not None or not caused_by_peer else find_root_cause(exits, list(failures.values()))


def _describe_cause(cause: RootCause) -> str:
    failure = cause.failure
    if failure is not None and failure.error_type != "SystemExit":
        return f"failed: {failure.error_type}: {failure.message}\n{failure.traceback_text}".rstrip()
    if cause.code < 0:
        hint = "; often the kernel, out of memory" if cause.code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-cause.code)}{hint}"
    message = f": {failure.message}" if failure is not None and not failure.message.isdecimal() else ""
    return f"exited with code {cause.code}{message}"


def _terminate_ranks(job: _SpawnedJob) -> None:
    """End every running rank, first with SIGTERM, then with SIGKILL. No process is left. Ctrl-C skips the wait."""
    try:
        # A rank that saves checkpoints treats the first SIGTERM as a stop request and the second SIGTERM as the end.
        for wait_s in (_SECOND_SIGTERM_S, GRACE_S - _SECOND_SIGTERM_S):
            for rank in job.alive_ranks():
                send_signal(rank.pid, signal.SIGTERM)
            deadline = time.monotonic() + wait_s
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
