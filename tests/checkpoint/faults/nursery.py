"""A process with all modules loaded and no thread: the processes that are made to fail are forked from it.

Importing torch takes seconds, a fork hundredths of a second. The nursery itself comes from multiprocessing's fork server, which
other tests use as well, so it is a clean process, independent of the caller's past.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from dtrain import launch_protocol
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.processes import become_subreaper, descendants, die_with_parent, reap_children

LONG_S = 300.0  # how long a busy test machine may take
_PRELOAD = [
    "dtrain.testing.ranks",
    "torch.distributed.fsdp",
    "torch.testing",
]  # as dtrain.testing does: one server for both
_USED_LATER = ("torch._dynamo", "torch.onnx", "torch._inductor.test_operators", "numpy.fft", "numpy.random")


class Nursery:
    """A context manager; ``ask`` runs a function there, which may fork."""

    def __init__(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return ``fn(*args)``, called there. ``fn`` is a function of a module; arguments and results are plain data."""
        self._pipe.send_bytes(json.dumps([fn.__module__, fn.__qualname__, args]).encode())
        answer = json.loads(self._pipe.recv_bytes())
        if "error" in answer:
            raise RuntimeError(f"in the nursery: {answer['error']}")
        return answer["result"]

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(LONG_S)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env, OMP_NUM_THREADS="1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to decide about; it closes the pipe
    warnings.simplefilter("error")
    _prepare()
    while True:
        try:
            module, name, args = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            end_all()
            return
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(*args)}
        except BaseException:  # noqa: BLE001 - the caller raises every kind of error
            answer = {"error": traceback.format_exc()}
        pipe.send_bytes(json.dumps(answer).encode())


def _prepare() -> None:
    """Load all that the forks will need, and let none of them look through it for garbage."""
    import torch

    import public

    torch.set_num_threads(1)
    public.load_all()
    for name in _USED_LATER:
        with suppress(ImportError):  # another version of torch: a fork imports the missing modules, more slowly
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    become_subreaper()


@dataclass(slots=True, kw_only=True)
class Child:
    """A fork that runs a function: its process, and the pipe on which it answers."""

    pid: int
    pipe: int
    text: bytes = b""

    def answer(self, *, within_s: float = LONG_S) -> Any:
        """Return the result of its function.

        Raises:
            ChildProcessError: it died before it answered, or raised (with the traceback).
            TimeoutError: it has not answered.
        """
        deadline = time.monotonic() + within_s
        while not self.text.endswith(b"\n"):
            if not select.select([self.pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"process {self.pid} has not answered in {within_s:g} s")
            chunk = os.read(self.pipe, 1 << 16)
            if not chunk:
                raise ChildProcessError("died before it answered")
            self.text += chunk
        answer = json.loads(self.text)
        if "error" in answer:
            raise ChildProcessError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kill it, and collect it."""
        os.close(self.pipe)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def fork(fn: Callable[..., Any], *args: Any) -> Child:
    """Run ``fn(*args)`` in a fork of this process, which dies with it."""
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(fn, args, write, parent)
    os.close(write)
    return Child(pid=pid, pipe=read)


def _run(fn: Callable[..., Any], args: tuple[Any, ...], pipe: int, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        for stream in (1, 2):
            os.dup2(_nowhere(), stream)  # notices by the thousand; errors come back through the pipe
        try:
            answer = {"result": fn(*args)}
        except Exception:  # noqa: BLE001 - the parent raises it
            answer = {"error": traceback.format_exc()}
        _send(pipe, json.dumps(answer).encode() + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers
        traceback.print_exc()
    finally:
        os._exit(code)


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _send(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


@contextmanager
def fork_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> Iterator[list[Child]]:
    """Run ``fn(*args)`` on so many ranks, with no launcher that would end the remaining ranks when one dies."""
    children: list[Child] = []
    try:
        with reserve_port() as held:
            for rank in range(world_size):
                children.append(fork(_as_rank, rank, world_size, held.getsockname()[1], fn, args))
            yield children
    finally:
        for child in children:
            child.close()


def _as_rank(rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    for name in (launch_protocol.RUN_DIR, launch_protocol.AGENT_STORE):
        os.environ.pop(name, None)
    who = launch_protocol.rank_environment(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
        addr="127.0.0.1", port=port,
    )  # fmt: skip
    os.environ.update({**who, launch_protocol.LOOPBACK: "1", launch_protocol.GLOO_INTERFACE: "lo"})
    return fn(*args)


def apart(fn: Callable[..., Any], *args: Any, within_s: float = LONG_S) -> Any:
    """Return ``fn(*args)``, called in a fork of this process, which keeps the threads that it starts."""
    child = fork(fn, *args)
    try:
        return child.answer(within_s=within_s)
    finally:
        child.close()


def end_all(*, within_s: float = LONG_S) -> list[int]:
    """Wait until all processes forked here have ended. Kill and return those that did not end."""
    deadline = time.monotonic() + within_s
    while reap_children()[1]:
        if time.monotonic() > deadline:
            late = descendants()
            for pid in late:
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + within_s
            while reap_children()[1] and time.monotonic() < deadline:
                time.sleep(0.01)
            return late
        time.sleep(0.005)
    return []
