"""Import modules once and fork a process per request: ``python forkserver_main.py FD NEEDED OPTIONAL KIND TARGET ARGS...``.

A fork runs the script as a plain interpreter would (``rank_main``): the same main module, arguments, search path, exit
handlers, signal handling and random streams. If forks are not safe, the server sends the reason, and the launcher starts plain
interpreters. The server never starts CUDA and has one thread at each fork.

A request may also ask for a successor: a fork that first imports what a rank has imported in the meantime, so that a restarted
rank imports nothing again. The launcher uses the successor once it is ready, and ends this process.

Requests are JSON messages with the descriptors of the new process. A child that exits at once makes each fork, so that the rank
becomes a child of the nearest subreaper above, the supervisor.

The ranks' store is such a process, too, or a plain interpreter: ``python forkserver_main.py store FD ADDRESS PORT``. It
inherits a listening socket, on loopback if all ranks are on this machine. So no other program can take the port between its
choice and its use, and nothing else is bound. Every attempt of a job has its own store: restarted ranks must not read the
addresses of ranks that exited.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import gc
import importlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from dtrain import launch_protocol
from dtrain.launch import processes, rank_main
from dtrain.launch.processes import die_with_parent, set_process_title

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 8
# length of the key that Python generates
_AUTHKEY_BYTES = 32
_REPARENT_TIMEOUT_S = 30.0
# Variables that differ between the ranks of a node.
_RANK_VARIABLES = frozenset({launch_protocol.RANK, launch_protocol.LOCAL_RANK, "ROLE_RANK", launch_protocol.FAILURE_FILE})


def main() -> None:
    """Import modules, send the result, and serve requests. Returns only in a fork, after the end of its script."""
    if sys.argv[1] == "store":
        serve_store(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    needed, optional, kind, target, *args = sys.argv[2:]
    modules = (needed.split(","), optional.split(","))
    unsafe = _import_modules(*modules) or _find_shadowing(kind, target)
    request, fds = _announce_and_serve(channel, unsafe)
    while request["kind"] == "server":
        channel.close()
        channel = socket.socket(fileno=fds["channel"])
        _replace_streams(fds)
        unsafe = _prepare_successor(Path(request["modules"])) or _find_shadowing(kind, target)
        request, fds = _announce_and_serve(channel, unsafe)
    channel.close()
    _apply_request(request, fds)
    if request["kind"] == "store":
        serve_store(fds["listener"], request["address"], request["port"])
    set_process_title(rank_main.interpreter_command(kind, target, args))
    rank_main.run_target(kind, target, args)


def _announce_and_serve(channel: socket.socket, unsafe: str | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Tell the launcher that this process is ready, or why it must not be forked, and serve requests. Returns in each fork."""
    _send_message(channel, {"unsafe": unsafe})
    if unsafe is not None:
        # The launcher ends this process, and starts pending requests as plain interpreters. Without recv_fds their descriptors
        # are closed.
        while channel.recv(_MAX_MESSAGE_BYTES):
            pass
        os._exit(0)
    return _serve_requests(channel)


def _prepare_successor(file: Path) -> str | None:
    """Import the modules that a rank has imported in the last attempt. Return the reason if this process must not be forked.

    A module that read a variable of its rank would have read another value here.
    """
    read: set[str] = set()
    encode = os.environ.encodekey

    def record(key: str) -> str:
        read.add(key)
        return encode(key)

    try:
        names = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    os.environ.encodekey = record
    try:
        unsafe = _import_modules([], names)
    finally:
        os.environ.encodekey = encode
    if unsafe is None and (of_rank := sorted(read & _RANK_VARIABLES)):
        unsafe = f"a module reads {', '.join(of_rank)} at its import"
    result = "serves the next restart" if unsafe is None else f"is not used: {unsafe}"
    print(f"dtrain: launch: fork server {os.getpid()} with {len(names)} more modules {result}", flush=True)
    return unsafe


def _import_modules(needed: list[str], optional: list[str]) -> str | None:
    """Import modules, and return the reason if this process must not be forked.

    A needed module that cannot be imported is a reason. The script reports optional modules that are missing.
    """
    for names in (needed, optional):
        for name in filter(None, names):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - the script raises the same error, where users expect the error
                if names is needed:
                    return f"{name} cannot be imported here ({type(error).__name__}: {error})"
        if (state := _find_unsafe_state()) is not None:
            return f"importing {', '.join(names[:8])}{', ...' * (len(names) > 8)} started {state}"
    return None


def _find_unsafe_state() -> str | None:
    """Return the state of this process that a fork would break; None if forks are safe."""
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"{threads} thread{'s' * (threads > 1)}"
    if "torch" not in sys.modules:
        return None
    from dtrain.device import started_accelerator

    accelerator = started_accelerator()
    return accelerator and accelerator.upper()


def _find_shadowing(kind: str, target: str) -> str | None:
    """Return the reason if the program would import other modules than this process imported."""
    whose = "the script's folder" if kind == "script" else "the current folder"
    try:
        folder = processes.first_import_folder(kind, target)
        names = [] if folder is None else processes.find_shadowed_modules(folder)
    except OSError:
        return f"{whose} cannot be read"
    return f"{whose} has a {names[0]!r} of its own" if names else None


def _serve_requests(channel: socket.socket) -> tuple[dict[str, Any], dict[str, int]]:
    """Fork for each request until the launcher ends this process. Returns in each fork, with its request and descriptors."""
    gc.collect()
    # Frozen objects keep their pages shared. A collection would write into every object's header.
    gc.freeze()
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
    """Fork again and return in the grandchild, once the supervisor is its parent. The child sends the pid and exits."""
    child = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _send_message(channel, {"id": request["id"], "error": error.strerror})
        os._exit(1)
    if pid:
        _send_message(channel, {"id": request["id"], "pid": pid})
        os._exit(0)
    deadline = time.monotonic() + _REPARENT_TIMEOUT_S
    while os.getppid() == child and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.setsid()
    die_with_parent(request["parent"])


def _send_message(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _apply_request(request: dict[str, Any], fds: dict[str, int]) -> None:
    """Apply the environment, descriptors and random streams of the requested process."""
    os.environ.update(request["environment"])
    _replace_streams(fds)
    for name in processes.FD_VARIABLES:
        if name in fds:
            os.set_inheritable(fds[name], False)
            os.environ[name] = str(fds[name])
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    _reset_process_state()


def _replace_streams(fds: dict[str, int]) -> None:
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if name in fds:
            os.dup2(fds[name], number)
            os.close(fds[name])


def _reset_process_state() -> None:
    """Reset the state that imported modules computed once per process, such as keys, start times and random seeds."""
    main = threading.main_thread()
    # Some versions of Python do not update the thread id in a fork.
    if hasattr(main, "_set_native_id"):
        main._set_native_id()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(_AUTHKEY_BYTES)
    start_time = getattr(sys.modules.get("logging"), "_startTime", None)
    # Later versions of Python store nanoseconds instead of seconds.
    if start_time is not None:
        sys.modules["logging"].__dict__["_startTime"] = time.time_ns() if isinstance(start_time, int) else time.time()
    # A fork reseeds Python's own random generator. The generators of NumPy and torch would be equal on all ranks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.seed()
        # torch read the variable at import, when the variable asked for one thread.
        first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        # The number of the outermost level, as OpenMP reads it.
        torch.set_num_threads(max(1, int(first)) if first.isdecimal() else 1)


def serve_store(listener: int, address: str, port: int) -> NoReturn:
    """Serve torch's store on the descriptor ``listener``, bound to ``address`` and ``port``, until the process is killed."""
    import torch.distributed as dist

    store = dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable: the store is kept while the process lives")


if __name__ == "__main__":
    main()
