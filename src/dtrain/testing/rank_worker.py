"""Main functions of the processes behind ``Ranks``: a rank that runs tasks, and a reaper that ends orphaned ranks."""

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
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dtrain import launch_protocol
from dtrain.dist.context import current_context
from dtrain.dist.init import init_dist
from dtrain.errors import ConfigError, DistError

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
        result = fn(*task["args"])
        # A task ends as a block of ``init_dist`` does: runs, loggers and checkpointers that it has opened are closed.
        current_context().run_shutdown_hooks(None)
        return _encode_result(result, task["name"])
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
