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
import re
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch.distributed import distributed_c10d

from dtrain import launch_protocol
from dtrain.arguments import check_int
from dtrain.dist.context import current_context
from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError, RankError
from dtrain.launch.failure import RootCause, is_failed_exit, signal_name
from dtrain.launch.local_ranks import PRELOADED, LocalRanks, enter_rank, find_first_failure, report_failure, wait_for_exits
from dtrain.launch.processes import process_fields
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
    raises on any rank, all processes end, because they may be waiting for each other; the next ``run`` starts new ones. All
    groups of a process share one gloo device. Use the object as a context manager, or call ``close``. As a pytest fixture::

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
        self._pool: _RankPool | None = None
        self._end: weakref.finalize[..., Ranks] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(kill=kind is not None)

    def run(self, fn: RankFn, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results by rank; see ``run_ranks``."""
        code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", repr(fn))
        if code is None or "<" in name:
            raise ConfigError(
                f"run_ranks: fn must be a function at the top level of a file, got {name}. Ranks import it by name."
            )
        try:
            task = json.dumps({"file": code.co_filename, "name": name, "args": args}).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise ConfigError(
                f"run_ranks: {name}: args must be plain data (numbers, text, lists, dicts): {problem}. "
                "Build tensors and modules inside the function."
            ) from None
        if self._pool is None:
            self._pool = _RankPool(self.world_size, self.device)
            # Ranks that are not closed would keep the interpreter from exiting.
            self._end = weakref.finalize(self, self._pool.end, kill=True)
        try:
            return self._pool.run(task, name, timeout_s)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the processes: close their process groups first, or kill them at once if ``kill`` is True."""
        pool, self._pool = self._pool, None
        if pool is not None and self._end is not None:
            self._end.detach()
            pool.end(kill=kill)


START_TIMEOUT_S = 120.0
STACK_TIMEOUT_S = 5.0
# Time for the last collective and for closing the process groups. Seconds.
END_TIMEOUT_S = 30.0
_STANDARD_ERROR = 2
# Lines of standard error of a rank that has died, in the error.
ERROR_LINES = 10
# Threads of a gloo group that run its collectives, as torch has them.
_GLOO_THREADS = 2
# Time until the exit of a rank whose pipe has closed. Seconds.
_EXIT_TIMEOUT_S = 10.0


class _RankPool:
    """Rank processes with an open process group, a pipe to each, and the reaper that ends them if the caller is killed.

    Raises:
        RankError: a rank died, or did not start in time; no process is left then.
    """

    def __init__(self, world_size: int, device: str | None) -> None:
        self._stack_folder = tempfile.TemporaryDirectory(prefix="dtrain-ranks-")
        self._ranks = LocalRanks(world_size)
        self._pipes: list[Connection[Any, Any]] = []
        self._reaper: tuple[Any, Connection[Any, Any]] | None = None
        try:
            self._start(device)
            self._await_ready()
        except BaseException:
            self.end(kill=True)
            raise

    def _start(self, device: str | None) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, __name__])
        # The fork server keeps the environment of its own start, so the current one is passed on.
        inherited = {name: value for name, value in os.environ.items() if name != launch_protocol.AGENT_STORE}
        for rank in range(self._ranks.world_size):
            environment = self._ranks.environment(rank, {**inherited, launch_protocol.OMP_THREADS: "1"})
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            with theirs:
                # A rank may die before it writes.
                self._error_file(rank).touch()
                files = str(self._stack_file(rank)), str(self._error_file(rank))
                self._ranks.fork_from_server(run_worker, theirs, environment, *files, device)
        ours, theirs = context.Pipe()
        pids = [process.pid for process in self._ranks.processes]
        with theirs:
            reaper = context.Process(target=kill_orphaned_ranks, args=(theirs, pids, self._stack_folder.name))
            reaper.start()
        self._reaper = reaper, ours

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting = dict(enumerate(self._pipes))
        while waiting:
            if time.monotonic() >= deadline:
                raise RankError(
                    f"run_ranks: ranks {sorted(waiting)} of {len(self._pipes)} did not start within {START_TIMEOUT_S:g} s. "
                    "Run fewer ranks on a busy machine."
                )
            for rank, message in self._receive(waiting, deadline):
                if message is None:
                    raise RankError(
                        f"run_ranks: before all ranks were ready, rank {rank} of {len(self._pipes)} {self._describe_exit(rank)}"
                    )

    def run(self, task: bytes, name: str, timeout_s: float) -> list[Any]:
        """Run a task on all ranks and return the results by rank.

        Raises:
            RankError: a rank raised, died, or did not finish in time.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(task)
            except BrokenPipeError:
                raise RankError(f"run_ranks: {name}: rank {rank} of {len(self._pipes)} {self._describe_exit(rank)}") from None
        waiting, answers = dict(enumerate(self._pipes)), dict[int, dict[str, Any]]()
        died: set[int] = set()
        cause: RootCause | None = None
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            for rank, message in self._receive(waiting, deadline):
                if message is None:
                    died.add(rank)
                else:
                    answers[rank] = json.loads(message)
            cause = self._find_cause(died, answers)
            if cause is not None:
                settle_s = ROOT_CAUSE_WAIT_S if _follows_peer(cause, answers) else SETTLE_S
                deadline = min(deadline, time.monotonic() + settle_s)
        if cause is not None:
            raise RankError(f"run_ranks: {name}: {self._describe_failures(cause, died, answers, waiting)}")
        if waiting:
            ranks, stacks = f"ranks {sorted(waiting)} of {len(self._pipes)}", self._describe_stacks(waiting)
            raise RankError(f"run_ranks: {name}: {ranks} did not finish within {timeout_s:g} s\n{stacks}")
        return [answers[rank]["result"] for rank in range(len(self._pipes))]

    def _receive(self, waiting: dict[int, Connection[Any, Any]], deadline: float) -> list[tuple[int, bytes | None]]:
        """Wait for messages of ranks, and return them with their ranks; None for a rank that has died.

        Mutates: ``waiting``, which loses these ranks.
        """
        ready = wait_for_exits([self._ranks], max(0.0, deadline - time.monotonic()), waiting.values())
        messages: list[tuple[int, bytes | None]] = []
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready or rank in self._ranks.exits]:
            pipe = waiting.pop(rank)
            try:
                # A process of a dead rank may keep the pipe open.
                messages.append((rank, pipe.recv_bytes() if pipe.poll() else None))
            except (EOFError, ConnectionResetError):
                messages.append((rank, None))
        return messages

    def _find_cause(self, died: Collection[int], answers: Mapping[int, dict[str, Any]]) -> RootCause | None:
        for rank in died:
            self._await_exit(rank)
        exits = [self._ranks.exits[rank] for rank in died if rank in self._ranks.exits]
        # A rank that leaves with code 0 in the middle of a task has failed, too.
        return find_first_failure([exit_ if is_failed_exit(exit_) else replace(exit_, code=1) for exit_ in exits], answers)

    def _describe_failures(
        self, cause: RootCause, died: Collection[int], answers: Mapping[int, dict[str, Any]], waiting: Collection[int]
    ) -> str:
        texts = {rank: self._describe_exit(rank) for rank in died}
        texts |= {
            rank: f"raised\n{answer['failure']['traceback_text']}" for rank, answer in answers.items() if "failure" in answer
        }
        lines = [f"rank {cause.rank} of {len(self._pipes)} {texts.pop(cause.rank).rstrip()}"]
        # The error is the last line of a traceback; how a rank died is the first.
        last_words = {rank: text.splitlines()[0 if rank in died else -1] for rank, text in texts.items()}
        lines += [f"rank {rank} failed after it: {words}" for rank, words in last_words.items()]
        if waiting and _follows_peer(cause, answers):
            lines.append(f"ranks {sorted(waiting)} had not finished:\n{self._describe_stacks(waiting)}")
        return "\n".join(lines)

    def end(self, *, kill: bool = False) -> None:
        """End the processes: close their process groups first, or kill them at once if ``kill`` is True."""
        for pipe in self._pipes:
            pipe.close()
        if not kill:
            self._ranks.wait_until_exit(END_TIMEOUT_S)
        self._ranks.end()
        if self._reaper is not None:
            process, pipe = self._reaper
            # The reaper may have been killed, too.
            with suppress(BrokenPipeError):
                pipe.send_bytes(b"done")
            process.join()
            pipe.close()
        self._stack_folder.cleanup()

    def _describe_exit(self, rank: int) -> str:
        """Describe the exit of a rank whose pipe has closed: ``died with exit code 3``, or the signal and the call."""
        self._await_exit(rank)
        code = self._ranks.exits[rank].code if rank in self._ranks.exits else None
        errors = self._error_file(rank).read_text(errors="replace").splitlines()[-ERROR_LINES:]
        if code is None or code >= 0:
            return "\n".join([f"died with exit code {code}", *errors])
        stack = self._stack_file(rank).read_text().rstrip()
        collective = find_collective(stack)
        text = f"died with exit code {code} ({signal_name(-code)}{f' in {collective}' if collective else ''})"
        return "\n".join([text, *errors, *([stack] if stack else [])])

    def _await_exit(self, rank: int) -> None:
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while rank not in self._ranks.exits and (rest_s := deadline - time.monotonic()) > 0:
            wait_for_exits([self._ranks], rest_s)

    def _describe_stacks(self, ranks: Collection[int]) -> str:
        """Return the call stacks of ranks that do not answer, or that a signal has stopped them."""
        for rank in ranks:
            # The rank may have just died.
            with suppress(ProcessLookupError):
                os.kill(self._ranks.processes[rank].pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        return "\n".join(f"rank {rank}:\n{self._describe_stack(rank, deadline)}" for rank in ranks)

    def _describe_stack(self, rank: int, deadline: float) -> str:
        if process_fields(self._ranks.processes[rank].pid)[:1] in (["T"], ["t"]):
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
        return Path(self._stack_folder.name) / f"rank-{rank}.txt"

    def _error_file(self, rank: int) -> Path:
        return Path(self._stack_folder.name) / f"rank-{rank}-stderr.txt"


def find_collective(stack: str) -> str | None:
    """Return the collective in a stack of faulthandler: the outermost function of torch.distributed; None without one."""
    modules = "distributed_c10d|_functional_collectives"
    frames = re.findall(rf'File ".*/torch/distributed/(?:{modules})\.py", line \d+ in (\w+)', stack)
    return frames[-1] if frames else None


def _follows_peer(cause: RootCause, answers: Mapping[int, dict[str, Any]]) -> bool:
    """Return True if the first failure so far is that of a rank that only lost a peer."""
    return cause.rank in answers and bool(answers[cause.rank]["follows_peer"])


# A signal that no tested code uses.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


def run_worker(
    pipe: Connection[Any, Any], environment: dict[str, str], stack_file: str, error_file: str, device: str | None
) -> None:
    """Run a rank: open the process group, then run tasks until the pipe closes. ``STACK_SIGNAL`` writes the call stacks.

    Standard error goes to ``error_file``, so that the last words of a rank that dies are not lost, and after each task to where
    it was. If ``device`` is not None, tensors that a task makes are on the rank's device.
    """
    enter_rank(environment)
    show_errors = _keep_errors(error_file)
    _share_gloo_device()
    with (
        init_dist(device=device or "cpu", backend="gloo", init_timeout_s=120) as info,
        open(stack_file, "w") as stacks,
        nullcontext() if device is None else info.device,
    ):
        # Stacks are written on a signal. faulthandler's timer would read running threads, which has crashed slow ranks.
        faulthandler.register(STACK_SIGNAL, file=stacks)
        # A crash of torch or of a backend, such as SIGSEGV, writes the stacks, too.
        faulthandler.enable(file=stacks)
        pipe.send_bytes(b"ready")
        while True:
            try:
                task = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            answer = _run_task(task, info.rank)
            show_errors()
            try:
                pipe.send_bytes(answer)
            # The caller gave up on this task.
            except (BrokenPipeError, ConnectionResetError):
                os._exit(1)


def _keep_errors(path: str) -> Callable[[], None]:
    """Write this process's standard error to a file; the result writes what is new there to the former standard error."""
    former = os.dup(_STANDARD_ERROR)
    # Loader workers write to the same file.
    errors = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, _STANDARD_ERROR)
    shown = 0

    def show() -> None:
        nonlocal shown
        sys.stderr.flush()
        while block := os.pread(errors, 1 << 16, shown):
            shown += len(block)
            os.write(former, block)

    return show


def _share_gloo_device() -> None:
    """Let all gloo groups of this process use one device. The thread of a device wakes 100 times a second, also when idle.

    Mutates: torch's class of gloo groups.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    construct, devices = gloo.__init__, [gloo.create_default_device()]

    def construct_on_device(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout, options._devices, options._threads = timeout, devices, _GLOO_THREADS
        construct(group, store, rank, size, options)

    gloo.__init__ = construct_on_device


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
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A dying rank may still write there.
        shutil.rmtree(folder, ignore_errors=True)


def _run_task(task: dict[str, Any], rank: int) -> bytes:
    try:
        fn: Any = attrgetter(task["name"])(_load_module(Path(task["file"])))
        result = fn(*task["args"])
        # A task ends as a block of ``init_dist`` does: runs, loggers and checkpointers that it has opened are closed.
        current_context().shutdown_hooks.run(None)
        try:
            return json.dumps({"result": result}).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise ConfigError(
                f"run_ranks: {task['name']}: a result must be plain data (numbers, text, lists, dicts): {problem}. "
                "Return numbers instead of tensors."
            ) from None
    # Every failure of a rank is reported to the caller, which raises it.
    except BaseException as error:  # noqa: BLE001
        return json.dumps(report_failure(rank, error)).encode()


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
