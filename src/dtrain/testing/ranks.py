"""Run a function on several real ranks inside a test.

``run_ranks(fn, 2)`` starts two processes joined by gloo, calls ``fn`` on both, and returns both results. ``Ranks`` keeps
the processes, so that a test session starts them once. The processes start and end together, also if the caller is killed. They
are forked from a server process that has imported torch and nothing else, so a start takes tenths of a second.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from dtrain import launch_protocol
from dtrain.arguments import check_int
from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError, DistError, RankError
from dtrain.typing import Plain

RankFn = Callable[..., Plain]
"""A module-level function; arguments and result are plain data."""

# Time for reports on their way when the first failure is read; the earliest failure counts. Seconds.
SETTLE_S = 0.1
# Time to wait for the root cause when the first report comes from a rank that only lost its peer. Seconds.
ROOT_CAUSE_WAIT_S = 10.0


def run_ranks(fn: RankFn, world_size: int, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` real ranks, inside ``init_dist``, and return the results by rank.

    The call never hangs and leaves no process, even if a rank raises, dies or is stopped, after Ctrl-C, or if the caller is
    killed. When one rank fails, the other ranks end at once, because they may be waiting for the failed rank.

    Args:
        fn: function at the top level of a file. Each rank imports the file under another name, so a script must call
            ``run_ranks`` below ``if __name__ == "__main__":``.
        world_size: number of CPU ranks, joined by gloo on loopback.
        args: plain data, equal on every rank; ``torch.distributed.get_rank()`` differs.
        timeout_s: seconds after which all ranks end; the error names the unfinished ranks, with stacks.

    Returns:
        The result of each rank, plain data, by rank.

    Example:
        def total(value):
            x = torch.tensor([value])
            torch.distributed.all_reduce(x)
            return x.item()

        def test_all_reduce():
            assert dt.testing.run_ranks(total, 2, 1.5) == [3.0, 3.0]

    Raises:
        ConfigError: ``fn`` is not at the top level of a file, ``args`` are not plain data, or ``world_size`` < 1.
        RankError: a rank raised, died, or did not finish. The traceback is that of the rank that failed *first*, not of a rank
            that lost its connection.
    """
    with Ranks(world_size) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


class Ranks:
    """Processes with an open process group that run one function after another.

    The processes start with the first ``run``, in the caller's current folder and with its environment variables. If a function
    raises on any rank, all processes end, because they may be waiting for each other; the next ``run`` starts new ones. Use the
    object as a context manager, or call ``close``. As a pytest fixture::

        @pytest.fixture(scope="session")
        def two_ranks():
            with dt.testing.Ranks(2) as ranks:
                yield ranks


        def test_all_ranks_run(two_ranks):
            assert two_ranks.run(world_size) == [2, 2]

    Args:
        world_size: number of ranks, joined by gloo on loopback.
        device: type of the device of all ranks, such as ``"cuda"``, on which the functions make their tensors. The ranks share
            the devices of this machine. None uses the CPU.

    Raises:
        ConfigError: ``world_size`` < 1.
    """

    def __init__(self, world_size: int, *, device: str | None = None) -> None:
        self.world_size = check_int("Ranks", "world_size", world_size)
        self.device = device
        self._pool: RankProcesses | None = None
        self._end: weakref.finalize[..., Ranks] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(kill=kind is not None)

    def run(self, fn: RankFn, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results by rank; see ``run_ranks``."""
        task = _encode_task({**_function_address(fn), "args": args}, fn.__qualname__)
        pool = self._open()
        try:
            return _TaskRun(pool, fn.__qualname__, timeout_s).results(task)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the processes: close their process groups first, or kill them at once if ``kill`` is True."""
        pool, self._pool = self._pool, None
        if pool is not None and self._end is not None:
            self._end.detach()
            pool.end(kill=kill)

    def _open(self) -> RankProcesses:
        if self._pool is None:
            self._pool = RankProcesses.start(self.world_size, self.device)
            # Ranks that are not closed would keep the interpreter from exiting.
            self._end = weakref.finalize(self, self._pool.end, kill=True)
        return self._pool


_DIED, _RAISED, _PEER_LOST = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFailure:
    """Failure of one rank.

    ``order`` sorts failures by their probable cause: a death first, then an error, then an error out of a collective; then by
    time (of the system's monotonic clock, which all processes share).
    """

    rank: int
    order: tuple[int, float]
    text: str

    @property
    def is_root_cause(self) -> bool:
        return self.order[0] < _PEER_LOST


class _TaskRun:
    """Run of one function on all ranks of a pool, with its results or failures."""

    def __init__(self, pool: RankProcesses, name: str, timeout_s: float) -> None:
        self._pool, self._name, self._timeout_s = pool, name, timeout_s
        self._waiting = dict(enumerate(pool.pipes))
        self._results: dict[int, Any] = {}
        self._failures: list[_RankFailure] = []

    def results(self, task: bytes) -> list[Any]:
        for rank, pipe in enumerate(self._pool.pipes):
            try:
                pipe.send_bytes(task)
            except BrokenPipeError:
                raise RankError(f"{self._describe_rank(rank)} {self._pool.describe_exit(rank)}") from None
        self._collect(time.monotonic() + self._timeout_s)
        if self._failures:
            raise self._failure_error()
        if self._waiting:
            raise self._timeout_error()
        return [self._results[rank] for rank in range(len(self._results))]

    def _collect(self, deadline: float) -> None:
        """Read answers until all arrived, the time is over, or the root cause of a failure is known."""
        while self._waiting:
            ready = wait(list(self._waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in [r for r, pipe in self._waiting.items() if pipe in ready]:
                self._receive(rank)
            if self._failures:
                settled = any(failure.is_root_cause for failure in self._failures)
                deadline = min(deadline, time.monotonic() + (SETTLE_S if settled else ROOT_CAUSE_WAIT_S))

    def _receive(self, rank: int) -> None:
        try:
            answer = json.loads(self._waiting.pop(rank).recv_bytes())
        except (EOFError, ConnectionResetError):
            order = (_DIED, time.monotonic())
            self._failures.append(_RankFailure(rank=rank, order=order, text=self._pool.describe_exit(rank)))
            return
        if "error" in answer:
            order = (_PEER_LOST if answer["peer_lost"] else _RAISED, answer["at"])
            self._failures.append(_RankFailure(rank=rank, order=order, text=f"raised\n{answer['error']}"))
        else:
            self._results[rank] = answer["result"]

    def _failure_error(self) -> RankError:
        first, *others = sorted(self._failures, key=lambda failure: failure.order)
        lines = [f"{self._describe_rank(first.rank)} {first.text.rstrip()}"]
        lines += [f"rank {other.rank} failed after it: {other.text.splitlines()[-1]}" for other in others]
        if self._waiting and not first.is_root_cause:
            lines.append(f"ranks {sorted(self._waiting)} had not finished:\n{self._pool.describe_stacks(self._waiting)}")
        return RankError("\n".join(lines))

    def _timeout_error(self) -> RankError:
        waiting = f"ranks {sorted(self._waiting)} of {len(self._pool.pipes)}"
        stacks = self._pool.describe_stacks(self._waiting)
        return RankError(f"run_ranks: {self._name}: {waiting} did not finish within {self._timeout_s:g} s\n{stacks}")

    def _describe_rank(self, rank: int) -> str:
        return f"run_ranks: {self._name}: rank {rank} of {len(self._pool.pipes)}"


def _function_address(fn: RankFn) -> dict[str, str]:
    """Return the file and name of ``fn`` for the rank processes."""
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", repr(fn))
    if code is None or "<" in name:
        raise ConfigError(f"run_ranks: fn must be a function at the top level of a file, got {name}. Ranks import it by name.")
    return {"file": code.co_filename, "name": name}


def _encode_task(task: dict[str, Any], name: str) -> bytes:
    try:
        return json.dumps(task).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(
            f"run_ranks: {name}: args must be plain data (numbers, text, lists, dicts): {problem}. "
            "Build tensors and modules inside the function."
        ) from None


START_TIMEOUT_S = 120.0
STACK_TIMEOUT_S = 5.0
# Time for the last collective and for closing the process groups. Seconds.
END_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class RankProcesses:
    """Rank processes with an open process group, a pipe to each, and the reaper that ends them if the caller is killed."""

    stack_folder: tempfile.TemporaryDirectory[str]
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection[Any, Any]] = field(default_factory=list)
    reaper: tuple[Any, Connection[Any, Any]] | None = None

    @classmethod
    def start(cls, world_size: int, device: str | None) -> RankProcesses:
        """Start ``world_size`` ranks and wait until they are ready.

        Raises:
            RankError: a rank died, or did not start in time; no process is left then.
        """
        pool = cls(tempfile.TemporaryDirectory(prefix="dtrain-ranks-"))
        try:
            pool._start(world_size, device)
        except BaseException:
            pool.end(kill=True)
            raise
        return pool

    def _start(self, world_size: int, device: str | None) -> None:
        context = _forkserver_context()
        with socket.socket() as reserved:
            # The socket is bound but does not listen: no other process gets the port, and rank 0 can still listen on it.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            for rank in range(world_size):
                env = _rank_environment(rank, world_size, reserved.getsockname()[1])
                process, pipe = _start_process(context, run_worker, env, str(self._stack_file(rank)), device)
                self.processes.append(process)
                self.pipes.append(pipe)
            self.reaper = _start_process(
                context, kill_orphaned_ranks, [process.pid for process in self.processes], self.stack_folder.name
            )
            self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(
                    f"run_ranks: ranks {sorted(waiting)} of {len(self.pipes)} did not start within {START_TIMEOUT_S:g} s. "
                    "Run fewer ranks on a busy machine."
                )
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    waiting.pop(rank).recv_bytes()
                except EOFError:
                    raise RankError(
                        f"run_ranks: rank {rank} of {len(self.pipes)} {self.describe_exit(rank)} before it was ready. See its "
                        "output."
                    ) from None

    def end(self, *, kill: bool = False) -> None:
        """End the processes: close their process groups first, or kill them at once if ``kill`` is True."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if kill else END_TIMEOUT_S)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            # A kill also ends a stopped process, and does nothing to one that has ended.
            process.kill()
            process.join()
        if self.reaper is not None:
            process, pipe = self.reaper
            # The reaper may have been killed, too.
            with suppress(BrokenPipeError):
                pipe.send_bytes(b"done")
            process.join()
            pipe.close()
        self.stack_folder.cleanup()

    def describe_exit(self, rank: int) -> str:
        """Return the exit of a rank whose pipe has closed: ``"died with exit code 3"``."""
        process = self.processes[rank]
        process.join(10)
        return f"died with exit code {process.exitcode}"

    def describe_stacks(self, ranks: Collection[int]) -> str:
        """Return the call stacks of ranks that do not answer, or that a signal has stopped them."""
        for rank in ranks:
            # The rank may have just died.
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        return "\n".join(f"rank {rank}:\n{self._describe_stack(rank, deadline)}" for rank in ranks)

    def _describe_stack(self, rank: int, deadline: float) -> str:
        if _is_stopped(self.processes[rank].pid):
            return "(stopped by a signal, so it runs no code)"
        text = None
        while time.monotonic() < deadline:
            text, before = self._stack_file(rank).read_text(), text
            # The stack is written line by line, so it is complete once it no longer grows.
            if text and text == before:
                return text.rstrip()
            time.sleep(0.1)
        return text or "(no stack)"

    def _stack_file(self, rank: int) -> Path:
        return Path(self.stack_folder.name) / f"rank-{rank}.txt"


def _start_process(context: Any, target: Any, *args: Any) -> tuple[Any, Connection[Any, Any]]:
    """Start a process that runs ``target(pipe, *args)``, and return it with the caller's end of the pipe."""
    ours, theirs = context.Pipe()
    # A rank may have children (loader workers), so it is no daemon.
    process = context.Process(target=target, args=(theirs, *args), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _forkserver_context() -> Any:
    """Return a context whose processes are forked from one clean process with torch loaded and a single thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtrain.testing.ranks", "torch.distributed.fsdp", "torch.testing"])
    return context


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    rank_env = launch_protocol.rank_environment(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
        addr="127.0.0.1", port=port,
    )  # fmt: skip
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # The fork server keeps the environment of its own start, so the current one is passed on.
    return {
        **os.environ,
        **rank_env,
        launch_protocol.LOOPBACK: "1",
        launch_protocol.GLOO_INTERFACE: loopback,
        launch_protocol.OMP_THREADS: "1",
    }


def _is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by SIGSTOP or a debugger; False if the system does not say."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")


READY = b"ready"
# A signal that no tested code uses.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


def run_worker(pipe: Connection[Any, Any], env: dict[str, str], stack_file: str, device: str | None) -> None:
    """Run a rank: open the process group, then run tasks until the pipe closes. ``STACK_SIGNAL`` writes the call stacks.

    If ``device`` is not None, tensors that a task makes are on the rank's device.
    """
    os.environ.clear()
    os.environ.update(env)
    os.environ.pop(launch_protocol.AGENT_STORE, None)
    # torch reads OMP_NUM_THREADS when it is imported, which was before the fork.
    torch.set_num_threads(1)
    with (
        init_dist(device=device or "cpu", backend="gloo", init_timeout_s=120) as info,
        open(stack_file, "w") as stacks,
        nullcontext() if device is None else info.device,
    ):
        # Stacks are written on a signal. faulthandler's timer would read running threads, which has crashed slow ranks.
        faulthandler.register(STACK_SIGNAL, file=stacks)
        pipe.send_bytes(READY)
        while True:
            try:
                task = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            try:
                pipe.send_bytes(_run_task(task))
            # The caller gave up on this task.
            except (BrokenPipeError, ConnectionResetError):
                os._exit(1)


def kill_orphaned_ranks(pipe: Connection[Any, Any], ranks: list[int], folder: str) -> None:
    """Wait for a message on the pipe; if the pipe closes without one, the caller was killed: kill the ranks.

    The function runs in its own process, because a rank that is stopped or busy in C runs no thread. The kernel's parent death
    signal does not help, because the ranks are children of the fork server.

    Mutates: the ranks' folder, which is removed after a kill.
    """
    # Ctrl-C reaches all processes of the terminal; the caller decides which ones end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        for pid in ranks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # A dying rank may still write there.
        shutil.rmtree(folder, ignore_errors=True)


def _run_task(task: dict[str, Any]) -> bytes:
    try:
        fn: Any = _load_module(Path(task["file"]))
        for part in task["name"].split("."):
            fn = getattr(fn, part)
        return _encode_result(fn(*task["args"]), task["name"])
    # Every failure of a rank is reported to the caller, which raises it.
    except BaseException as error:  # noqa: BLE001
        # The time is taken first, because formatting may take a while.
        at = time.monotonic()
        return json.dumps({"at": at, "error": traceback.format_exc(), "peer_lost": _is_peer_failure(error)}).encode()


def _encode_result(result: Any, name: str) -> bytes:
    try:
        return json.dumps({"result": result}).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(
            f"run_ranks: {name}: a result must be plain data (numbers, text, lists, dicts): {problem}. "
            "Return numbers instead of tensors."
        ) from None


def _is_peer_failure(error: BaseException) -> bool:
    """Return True if ``error`` came out of a collective, as on a rank whose peer has failed.

    torch has no class for a lost connection (gloo raises ``RuntimeError``), so the traceback decides: the error was raised in
    ``torch.distributed``, or in torch on behalf of it.
    """
    if isinstance(error, DistError):
        return True
    if isinstance(error, RuntimeError):
        library = f"{Path(torch.__file__).parent}{os.sep}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if not frame.filename.startswith(library):
                return False
            if frame.filename.startswith(f"{library}distributed{os.sep}"):
                return True
    return False


def _load_module(file: Path) -> ModuleType:
    """Return the module in ``file``, imported once per process under its own name."""
    name = f"dtrain_ranks_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"run_ranks: cannot import {file}. Define the function at the top level of a file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        # The folder goes last, so that its files do not hide other modules of the caller.
        sys.path.append(str(file.parent))
        spec.loader.exec_module(module)
    return sys.modules[name]
