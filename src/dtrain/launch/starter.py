"""Start processes for the supervisor: as forks of the fork server if one runs, otherwise as plain interpreters.

The fork server imports the modules that the program will import, and forks a process per request.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol
from dtrain.launch import processes
from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import Target, build_rank_command
from dtrain.launch.processes import SUCCESSOR_ID, ProcessRequest, inherited_flags, start_process
from dtrain.lazy_imports import public_names

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_SOURCE_FILES = 100
_MAX_SOURCE_BYTES = 1 << 20  # bytes per file
# Packages that import slowly and behave the same in a fork.
_WORTH_LOADING = ("torch", "numpy", "tensordict", "torchdata", "einops")
# Words of programs that train. The first use of an optimizer or of FSDP2 imports torch._dynamo, which takes a second of a core.
_TRAINING = re.compile(r"optim|fully_shard|shard_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadModules:
    """Modules to preload. If a module in ``needed`` cannot be imported, the ranks start as plain interpreters."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def find_preload_modules(target: Target) -> PreloadModules:
    """Find the modules that the program will import and that are worth preloading; empty if an interpreter starts as quickly.

    The program's own files are parsed, not run. A program that only uses the standard library needs no preloading. Any other
    program may import torch.
    """
    source = None if target.kind == "command" else find_source(target)
    if source is None:
        return PreloadModules()
    worth_loading: dict[str, None] = {}
    foreign = False
    for text, folder in program_sources(source):
        for name in imported_names(text):
            top = name.partition(".")[0]
            foreign = foreign or not (
                top in sys.stdlib_module_names or (folder / f"{top}.py").is_file() or (folder / top).is_dir()
            )
            if top in _WORTH_LOADING:
                worth_loading[name] = None
        if _TRAINING.search(text):
            worth_loading["torch._dynamo"] = None
        if re.search(r"\bdtrain\b", text):
            worth_loading.update(dict.fromkeys(_dtrain_modules(text)))
    if not foreign:
        return PreloadModules()
    return PreloadModules(needed=("torch",), optional=tuple(name for name in worth_loading if name != "torch"))


def program_sources(first: Path) -> Iterator[tuple[str, Path]]:
    """Yield the source and the folder of a script and of the imported modules in the script's folder."""
    folder, todo, seen = first.parent, [first], {first}
    # The list grows during the loop.
    for path in todo:
        try:
            if path.stat().st_size > _MAX_SOURCE_BYTES:
                continue
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            # The ranks report an unreadable file.
            continue
        yield text, folder
        for name in imported_names(text):
            parts = name.split(".")
            for candidate in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if candidate not in seen and len(seen) < _MAX_SOURCE_FILES and candidate.is_file():
                    seen.add(candidate)
                    todo.append(candidate)


def imported_names(text: str) -> list[str]:
    """Return the dotted names that a source may import from other packages. Some names may not be modules."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _dtrain_modules(text: str) -> list[str]:
    """Return the modules that define the public names of dtrain whose words occur in ``text``."""
    words = set(re.findall(r"\w+", text))
    top = Path(dtrain.__file__)
    sub_packages = [top.parent / word / "__init__.py" for word in public_names(str(top)) if word in words]
    modules: dict[str, None] = {}
    for file in (top, *(path for path in sub_packages if path.is_file())):
        defined_in = public_names(str(file)).items()
        modules.update((module, None) for name, module in defined_in if name in words and module != "dtrain")
    return list(modules)


@dataclass(slots=True, kw_only=True, eq=False)
class ForkServer:
    """Fork server: its process, and the launcher's end of the channel, which is readable after a message or the server's exit.

    ``is_ready`` is True once the server accepts requests.
    """

    pid: int
    channel: socket.socket
    is_ready: bool = False

    def request_process(self, request: ProcessRequest) -> None:
        """Request a process from the server; its answer has the pid.

        Raises:
            OSError: the server exited.
        """
        message = {**asdict(request), "fds": list(request.fds), "parent": os.getpid()}
        del message["owned"]
        socket.send_fds(self.channel, [json.dumps(message).encode()], list(request.fds.values()))

    def read_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the new messages of the server.

        A message has ``unsafe`` (None, or the reason that the server does not fork), or the ``id`` of a request with ``pid`` or
        ``error``. The last message is ``ended``.
        """
        while True:
            try:
                data = self.channel.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                yield {"ended": True}
                return
            yield json.loads(data)


def start_forkserver(
    target: Target, modules: PreloadModules, common_environment: Mapping[str, str], *, log_fd: int
) -> ForkServer:
    """Start a fork server, which sends a message after the import of ``modules``.

    Args:
        target: program of the forks.
        modules: modules to import.
        common_environment: environment of all ranks.
        log_fd: descriptor for output during the imports.

    Raises:
        OSError: the limit of processes or files is reached.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.fspath(Path(__file__).with_name("forkserver_main.py"))
    # torch and NumPy get one thread, so that only the main thread runs at a fork. Ranks set their own number of threads.
    single = {launch_protocol.OMP_THREADS: "1"}
    request = ProcessRequest(
        id=0, kind="rank", fds={"stdout": log_fd, "stderr": log_fd, "channel": theirs.fileno()}, environment=single
    )
    command = [
        sys.executable,
        *inherited_flags(),
        program,
        str(theirs.fileno()),
        ",".join(modules.needed),
        ",".join(modules.optional),
        target.kind,
        target.name,
        *target.args,
    ]
    with theirs:
        # SIGINT starts blocked, because the forks are ranks, which unblock the signal.
        pid = start_process(request, command, common_environment, block_interrupts=True)
    ours.setblocking(False)
    return ForkServer(pid=pid, channel=ours)


# A channel buffers some 100 KiB and few descriptors.
_MAX_IN_FLIGHT = 16  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent:
    """Result of a request: its ``pid`` or its ``error``. An event without ``id`` is a message to the user."""

    id: int | None = None
    pid: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessStarter:
    """Starter of the processes of one job. The starter closes the descriptors that a request owns after passing them on.

    Attributes:
        target: program of the ranks.
        log_path: log of processes that are not ranks.
        common_environment: environment of all ranks.
        forkserver: the fork server, if one runs.
        pending: requests without a process, in order of arrival.
        in_flight: ids of pending requests that the fork server knows.
        successor: fork server that imports what a rank has imported, for the next restart.
    """

    target: Target
    log_path: Path = Path(os.devnull)
    common_environment: Mapping[str, str] = field(default_factory=dict)
    forkserver: ForkServer | None = None
    pending: dict[int, ProcessRequest] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    successor: ForkServer | None = None

    def preload(self, requested: Sequence[str] | None) -> None:
        """Start the fork server if there are modules to preload.

        Args:
            requested: modules to import beside those that the program seems to import; None adds none, () imports nothing.

        Raises:
            OSError: the limit of processes or files is reached.
        """
        # Only on Linux the forks become children of the supervisor.
        if self.target.kind == "command" or sys.platform != "linux" or requested == ():
            return
        modules = find_preload_modules(self.target)
        modules = replace(modules, needed=tuple(dict.fromkeys((*modules.needed, *(requested or ())))))
        if not modules.needed:
            return
        fd = self._open_log()
        try:
            self.forkserver = start_forkserver(self.target, modules, self.common_environment, log_fd=fd)
        finally:
            os.close(fd)

    def start(self, request: ProcessRequest) -> list[StartEvent]:
        """Start a process; its event is returned now, or later by ``read_events``."""
        if request.kind == "store":
            log = {"stdout": self._open_log(), "stderr": self._open_log()}
            request = replace(request, fds={**request.fds, **log}, owned=request.owned | set(log))
        if self.forkserver is None:
            return [self._start_process(request)]
        self.pending[request.id] = request
        self._send_pending()
        return []

    def read_events(self) -> list[StartEvent]:
        """Return the new events of the fork server."""
        events: list[StartEvent] = []
        for message in [] if self.forkserver is None else list(self.forkserver.read_messages()):
            if "ended" in message:
                events += self._fall_back_to_exec("the preloaded process has ended", ended=True)
            elif "unsafe" in message:
                if message["unsafe"] is not None:
                    events += self._fall_back_to_exec(message["unsafe"])
                elif self.forkserver is not None:
                    self.forkserver.is_ready = True
            else:
                self.in_flight.discard(message["id"])
                self._release(self.pending.pop(message["id"]))
                if message["id"] == SUCCESSOR_ID and self.successor is not None:
                    self.successor.pid = message.get("pid", 0)
                events.append(StartEvent(id=message["id"], pid=message.get("pid", 0), error=message.get("error")))
        self._send_pending()
        return events

    def start_successor(self, modules: Path) -> bool:
        """Request a fork of the fork server that imports more modules, and return True if it was requested.

        Args:
            modules: file with the names of the modules, one a line.

        Raises:
            OSError: the limit of files is reached.
        """
        if self.forkserver is None or not self.forkserver.is_ready or self.successor is not None or self.pending:
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.successor = ForkServer(pid=0, channel=ours)
        names = os.fspath(modules)
        fds = {"stdout": self._open_log(), "stderr": self._open_log(), "channel": theirs.detach()}
        self.start(ProcessRequest(id=SUCCESSOR_ID, kind="server", fds=fds, owned=frozenset(fds), environment={}, modules=names))
        return True

    def promote_successor(self) -> int | None:
        """Read the message of the successor, which then takes the place of the fork server, or ends.

        Returns:
            The pid of the server that is not needed any more.
        """
        old, new, self.successor = self.forkserver, self.successor, None
        assert new is not None, "the channel is watched while there is a successor"
        is_ready = any("unsafe" in message and message["unsafe"] is None for message in new.read_messages())
        # A request that the old server knows must be answered by it.
        if is_ready and old is not None and not self.pending:
            new.is_ready, self.forkserver = True, new
            old.channel.close()
            return old.pid
        new.channel.close()
        return new.pid

    def withdraw_pending(self) -> list[int]:
        """Withdraw the requests that the fork server does not know yet, and return their ids."""
        ids = [number for number in self.pending if number not in self.in_flight]
        for number in ids:
            self._release(self.pending.pop(number))
        return ids

    def stop_forkserver(self, *, ended: bool = False) -> None:
        """Stop the fork server, unless it has ``ended``, and drop its requests."""
        if self.forkserver is not None:
            if not ended:
                processes.send_signal(self.forkserver.pid, signal.SIGKILL)
            self.forkserver.channel.close()
            self.forkserver = None
        for request in self.pending.values():
            self._release(request)
        self.pending.clear()
        self.in_flight.clear()

    def _send_pending(self) -> None:
        """Send pending requests, as many as the channel holds."""
        for number, request in self.pending.items():
            if self.forkserver is None or len(self.in_flight) >= _MAX_IN_FLIGHT:
                return
            if number not in self.in_flight:
                # If the server exited, the end of its channel is read later, and all requests fall back to exec.
                with contextlib.suppress(OSError):
                    self.forkserver.request_process(request)
                    self.in_flight.add(number)

    def _fall_back_to_exec(self, reason: str, *, ended: bool = False) -> list[StartEvent]:
        """Start the pending requests and all later requests as plain interpreters."""
        successor = self.pending.pop(SUCCESSOR_ID, None)
        if successor is not None:
            self._release(successor)
        missing, self.pending = list(self.pending.values()), {}
        self.stop_forkserver(ended=ended)
        notice = StartEvent(error=f"{reason}; starting plain interpreters (--no-preload does so at once)")
        return [notice, *(self._start_process(request) for request in missing)] if missing else []

    def _open_log(self) -> int:
        try:
            return os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        # A full or removed run folder only costs the log.
        except OSError:
            return os.open(os.devnull, os.O_WRONLY)

    def _start_process(self, request: ProcessRequest) -> StartEvent:
        command = build_rank_command(self.target)
        if request.kind == "store":
            program = Path(__file__).with_name("forkserver_main.py")
            command = [
                sys.executable,
                os.fspath(program),
                "store",
                str(request.fds["listener"]),
                request.address,
                str(request.port),
            ]
        try:
            wait = request.kind == "rank" and self.target.kind != "command"
            return StartEvent(
                id=request.id, pid=start_process(request, command, self.common_environment, block_interrupts=wait)
            )
        except OSError as error:
            return StartEvent(id=request.id, error=error.strerror)
        finally:
            self._release(request)

    @staticmethod
    def _release(request: ProcessRequest) -> None:
        for name, fd in request.fds.items():
            if name in request.owned:
                os.close(fd)
