"""Run a function on several real ranks inside a test.

``run_ranks(fn, 2)`` starts two processes joined by gloo, calls ``fn`` on both, and returns both results. ``Ranks`` keeps
the processes, so that a test session pays for them once. Processes are forked from a server process that has imported
torch and nothing else, so a start costs tenths of a second.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from dtrain import wire
from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError, RankError
from dtrain.types import Plain

RankFn = Callable[..., Plain]
"""A module-level function; arguments and result are plain data."""


def run_ranks(fn: RankFn, world_size: int, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
    """``fn(*args)`` on ``world_size`` real ranks, inside ``init_dist``; the results by rank.

    Args:
        fn: a module-level function (it is found again by file and name in the other processes).
        world_size: how many CPU ranks, joined by gloo on loopback.
        args: plain data.
        timeout_s: after this many seconds all ranks are ended, and the error names those that had not finished, with stacks.

    Raises:
        RankError: a rank raised, died, or did not finish; with the first failing rank's traceback.
    """
    with Ranks(world_size) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


class Ranks:
    """``world_size`` processes with an open process group that run one function after another.

    A function that raises on any rank ends all the processes (they may be waiting for each other); the next ``run``
    starts new ones.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigError(f"Ranks: needs at least one rank, got {world_size=}")
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, fn: RankFn, *args: Plain, timeout_s: float = 120.0) -> list[Any]:
        """``fn(*args)`` on every rank; see ``run_ranks``."""
        task = json.dumps({**_address(fn), "args": args, "timeout_s": timeout_s}).encode()
        if not self._processes:
            self._start()
        try:
            for rank, pipe in enumerate(self._pipes):
                self._send(fn.__qualname__, rank, pipe, task)
            return self._collect(fn.__qualname__, time.monotonic() + timeout_s)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the processes: politely (their groups are closed), or at once."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not kill:
                process.join(30)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None

    def _start(self) -> None:
        context = _fork_server()
        self._stacks = tempfile.TemporaryDirectory(prefix="dtrain-ranks-")
        with socket.socket() as held:
            # Bound but not listening: nobody else gets the port, and rank 0 may still bind and listen on it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                env = _environment(rank, self.world_size, held.getsockname()[1])
                process = context.Process(target=_serve, args=(theirs, env, str(self._stack_file(rank))), daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(120):
                    self.close(kill=True)
                    raise RankError(f"run_ranks: rank {rank} of {self.world_size} did not start within 120 s")
                try:
                    pipe.recv_bytes()
                except EOFError:
                    error = self._died("start", rank)
                    self.close(kill=True)
                    raise error from None

    def _stack_file(self, rank: int) -> Path:
        assert self._stacks is not None
        return Path(self._stacks.name) / f"rank-{rank}.txt"

    def _collect(self, name: str, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = "\n".join(f"rank {r}:\n{self._read_stacks(r)}" for r in waiting)
                raise RankError(
                    f"run_ranks: {name}: ranks {sorted(waiting)} of {self.world_size} did not finish in time\n{stacks}"
                )
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                results[rank] = self._receive(name, rank)
                del waiting[rank]
        return [results[rank] for rank in range(self.world_size)]

    def _send(self, name: str, rank: int, pipe: Connection[Any, Any], task: bytes) -> None:
        try:
            pipe.send_bytes(task)
        except BrokenPipeError:
            raise self._died(name, rank) from None

    def _died(self, name: str, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(10)
        return RankError(f"run_ranks: {name}: rank {rank} of {self.world_size} died with exit code {process.exitcode}")

    def _receive(self, name: str, rank: int) -> Any:
        try:
            answer = json.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            raise self._died(name, rank) from None
        if "error" in answer:
            raise RankError(f"run_ranks: {name}: rank {rank} of {self.world_size} raised\n{answer['error']}")
        return answer["result"]

    def _read_stacks(self, rank: int) -> str:
        path = self._stack_file(rank)
        return path.read_text() if path.exists() else "(no stack)"


def _address(fn: RankFn) -> dict[str, str]:
    """Where the other processes find ``fn``."""
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", repr(fn))
    if code is None or "<" in name:
        raise ConfigError(f"run_ranks: needs a function at the top level of a file, got {name}; other processes cannot find it")
    return {"file": code.co_filename, "name": name}


def _fork_server() -> Any:
    """A context whose processes are forked from one clean process that has torch loaded and a single thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtrain.testing.ranks", "torch.distributed.fsdp", "torch.testing"])
    return context


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    place = wire.rank_environment(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
        addr="127.0.0.1", port=port,
    )  # fmt: skip
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {**place, wire.LOOPBACK: "1", wire.GLOO_INTERFACE: loopback, wire.THREADS: "1"}


def _serve(pipe: Connection[Any, Any], env: dict[str, str], stack_file: str) -> None:
    """What a rank's process does: open the group, then run tasks until the pipe closes."""
    import torch

    os.environ.pop(wire.AGENT_STORE, None)
    os.environ.update(env)
    torch.set_num_threads(1)  # the variable is read when torch is loaded, which was before the fork
    with init_dist(device="cpu", init_timeout_s=120), open(stack_file, "w") as stacks:
        pipe.send_bytes(b"ready")
        while True:
            try:
                task = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            # Shortly before the caller's deadline, so that the stacks are there when it looks.
            faulthandler.dump_traceback_later(max(0.1, task["timeout_s"] - 2), file=stacks)
            answer = _answer(task)
            faulthandler.cancel_dump_traceback_later()
            try:
                pipe.send_bytes(answer)
            except (BrokenPipeError, ConnectionResetError):  # the caller gave up on this task
                os._exit(1)


def _answer(task: dict[str, Any]) -> bytes:
    try:
        fn: Any = _load(Path(task["file"]))
        for part in task["name"].split("."):
            fn = getattr(fn, part)
        return json.dumps({"result": fn(*task["args"])}).encode()
    except BaseException:  # noqa: BLE001  # every way a rank can fail is reported to the caller, which raises it
        return json.dumps({"error": traceback.format_exc()}).encode()


def _load(file: Path) -> ModuleType:
    """The module that ``file`` holds, imported once per process under a name of its own."""
    name = f"dtrain_ranks_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"run_ranks: cannot import {file}; define the function at the top level of a file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
    return sys.modules[name]
