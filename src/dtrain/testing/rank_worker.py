"""What the processes behind ``Ranks`` do: a rank runs tasks, a guard ends the ranks when the caller is killed."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dtrain import launch_protocol
from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError, DistError

READY = b"ready"
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # one that no code under test has a use for


def run_worker(pipe: Connection[Any, Any], env: dict[str, str], stack_file: str) -> None:
    """A rank: open the group, then run tasks until the pipe closes. ``STACK_SIGNAL`` makes it write down where it is."""
    os.environ.clear()
    os.environ.update(env)
    os.environ.pop(launch_protocol.AGENT_STORE, None)
    torch.set_num_threads(1)  # the variable is read when torch is loaded, which was before the fork
    with init_dist(device="cpu", init_timeout_s=120), open(stack_file, "w") as stacks:
        # On demand, and not by faulthandler's timer: that reads the stacks of threads that run, which has crashed slow ranks.
        faulthandler.register(STACK_SIGNAL, file=stacks)
        pipe.send_bytes(READY)
        while True:
            try:
                task = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            try:
                pipe.send_bytes(_run_task(task))
            except (BrokenPipeError, ConnectionResetError):  # the caller gave up on this task
                os._exit(1)


def kill_orphaned_ranks(pipe: Connection[Any, Any], ranks: list[int], folder: str) -> None:
    """Wait for a word on the pipe; if it closes without one, the caller was killed: kill the ranks, remove their folder.

    A process of its own, because a rank may be busy in C, or stopped, and then no thread of it would run. The kernel's
    parent death signal is no help: the ranks are children of the fork server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the caller decides what ends
    try:
        pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        for pid in ranks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(folder, ignore_errors=True)  # a rank that is dying may still write there, and nobody is left to tell


def _run_task(task: dict[str, Any]) -> bytes:
    try:
        fn: Any = _load_module(Path(task["file"]))
        for part in task["name"].split("."):
            fn = getattr(fn, part)
        return _encode_result(fn(*task["args"]), task["name"])
    except BaseException as error:  # noqa: BLE001  # every way a rank can fail is reported to the caller, which raises it
        at = time.monotonic()  # first of all: formatting may take a while
        return json.dumps({"at": at, "error": traceback.format_exc(), "blames_a_peer": _is_peer_failure(error)}).encode()


def _encode_result(result: Any, name: str) -> bytes:
    try:
        return json.dumps({"result": result}).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(f"run_ranks: {name}: a result is plain data (numbers, text, lists, dicts): {problem}") from None


def _is_peer_failure(error: BaseException) -> bool:
    """Whether ``error`` looks like what a rank gets when another one has failed: it came out of a collective.

    torch has no class of its own for a lost connection (gloo raises ``RuntimeError``), so the place counts: whether the error
    was raised in ``torch.distributed``, or in torch on behalf of it.
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
    """The module that ``file`` holds, imported once per process under a name of its own."""
    name = f"dtrain_ranks_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"run_ranks: cannot import {file}; define the function at the top level of a file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.append(str(file.parent))  # at the end: a neighbour of this file must not hide what the caller finds elsewhere
        spec.loader.exec_module(module)
    return sys.modules[name]
