"""The preloaded process: ``python preload.py FD NEEDED OPTIONAL KIND TARGET ARGS...``. Imports once, forks for each request.

A fork runs the script as the plain interpreter would (``rank``): the same main module, arguments, search path, exit handlers,
signal handling and random streams. What cannot be forked safely is not: then the launcher is told why, and starts plain
interpreters. The program never starts CUDA and has one thread whenever it forks.

Requests come as JSON with the descriptors that the new process gets; each fork is made by a child that ends at once, so that
the rank becomes a child of the nearest subreaper above, which is the supervisor.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: its modules must not shadow anybody's

import gc
import importlib
import json
import os
import socket
import threading
import time
from typing import Any, NoReturn

from dtrain.launch.processes import die_with_parent, set_process_title
from dtrain.launch.spawn import interpreter, rank_main, store_main

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 8
_AUTHKEY_BYTES = 32  # as many as Python draws
_REPARENT_TIMEOUT_S = 30.0


def main() -> None:
    """Load, say how it went, and serve requests. Returns in a fork only, after its script has ended by itself."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    needed, optional, kind, target, *args = sys.argv[2:]
    unsafe = _import_modules(needed.split(","), optional.split(",")) or _find_shadowing(kind, target)
    _send_message(channel, {"unsafe": unsafe})
    if unsafe is not None:
        _wait_until_closed(channel)
    request, fds = _serve_requests(channel)
    channel.close()
    _apply_request(request, fds)
    if request["kind"] == "store":
        store_main.serve_store(fds["listener"], request["address"], request["port"])
    set_process_title(rank_main.interpreter_command(kind, target, args))
    rank_main.run_target(kind, target, args)


def _import_modules(needed: list[str], optional: list[str]) -> str | None:
    """Import modules; why this process must not be forked then, if so.

    It is enough that one of those needed cannot be imported. Of the others, the script is to say that they are missing.
    """
    for names in (needed, optional):
        for name in filter(None, names):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - the script is to fail with it, where people look for it
                if names is needed:
                    return f"{name} cannot be imported here ({type(error).__name__}: {error})"
        if (what := _find_unsafe_state()) is not None:
            return f"importing {', '.join(names)} started {what}"
    return None


def _find_unsafe_state() -> str | None:
    """What runs here that is not in a fork, if anything."""
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"{threads} thread{'s' * (threads > 1)}"
    torch = sys.modules.get("torch")
    return "CUDA" if torch is not None and torch.cuda.is_initialized() else None


def _find_shadowing(kind: str, target: str) -> str | None:
    """Why the program would import other modules than those loaded here, if so."""
    whose = "the script's folder" if kind == "script" else "the current folder"
    try:
        folder = interpreter.first_import_folder(kind, target)
        names = [] if folder is None else interpreter.find_shadowed_modules(folder)
    except OSError:
        return f"{whose} cannot be read"
    return f"{whose} has a {names[0]!r} of its own" if names else None


def _wait_until_closed(channel: socket.socket) -> NoReturn:
    """Until the launcher ends this process. Requests that have come meanwhile are those that it now starts in another way."""
    while channel.recv(_MAX_MESSAGE_BYTES):  # without taking their descriptors, which are closed
        pass
    os._exit(0)


def _serve_requests(channel: socket.socket) -> tuple[dict[str, Any], dict[str, int]]:
    """Fork for each request until the launcher ends this process; returns in the forks, with their request and descriptors."""
    gc.collect()
    gc.freeze()  # pages of what is loaded stay shared: the collector would write into every object's header
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, _MAX_FDS)
        if not data:
            os._exit(0)
        request = json.loads(data)
        named = dict(zip(request["fds"], fds, strict=True))
        child = os.fork()
        if child == 0:
            _detach_child(channel, request)
            return request, named
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


def _detach_child(channel: socket.socket, request: dict[str, Any]) -> None:
    """Returns in the grandchild, once it is the supervisor's; its parent tells the supervisor and ends."""
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _send_message(channel, {"id": request["id"], "error": error.strerror})
        os._exit(1)
    if pid:
        _send_message(channel, {"id": request["id"], "pid": pid})
        os._exit(0)
    deadline = time.monotonic() + _REPARENT_TIMEOUT_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.setsid()
    die_with_parent(request["parent"])


def _send_message(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _apply_request(request: dict[str, Any], fds: dict[str, int]) -> None:
    """Take on the environment, descriptors and random streams of a process of its own."""
    os.environ.update(request["environment"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if name in fds:
            os.dup2(fds[name], number)
            os.close(fds[name])
    for name, variable in request["variables"].items():
        os.set_inheritable(fds[name], False)
        os.environ[variable] = str(fds[name])
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    _reset_process_state()


def _reset_process_state() -> None:
    """Give modules that are loaded already what they would have drawn or looked up when a process of its own loaded them."""
    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):  # not in every version does Python do so by itself in a fork
        main._set_native_id()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(_AUTHKEY_BYTES)
    began = getattr(sys.modules.get("logging"), "_startTime", None)
    if began is not None:  # seconds, or in later versions of Python nanoseconds
        sys.modules["logging"].__dict__["_startTime"] = time.time_ns() if isinstance(began, int) else time.time()
    # Python's own random numbers begin anew in a fork; those of NumPy and torch would be the same on all ranks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.seed()
        # The variable was read when torch was imported, with one thread: so that there was none but the main one at the fork.
        torch.set_num_threads(_parse_omp_threads(os.environ.get("OMP_NUM_THREADS", "")))


def _parse_omp_threads(text: str) -> int:
    """The number of threads of the outermost level, as OpenMP reads its variable; 1 where it says nothing of use."""
    first = text.partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


if __name__ == "__main__":
    main()
