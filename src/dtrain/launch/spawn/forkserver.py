"""Find the modules that a program will import, start the fork server that preloads them, and request forks from the server."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol
from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import Target
from dtrain.launch.spawn.exec import ProcessRequest, start_process
from dtrain.launch.spawn.interpreter import inherited_flags
from dtrain.lazy_imports import public_names

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_SOURCE_FILES = 100
_MAX_SOURCE_BYTES = 1 << 20  # bytes per file
# Packages that import slowly and behave the same in a fork.
_WORTH_LOADING = ("torch", "numpy", "tensordict", "torchdata", "einops")


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
    found: dict[str, None] = {}
    foreign = False
    for text, folder in _program_sources(source):
        for name in _imported_names(text):
            top = name.partition(".")[0]
            foreign = foreign or not (top in sys.stdlib_module_names or _is_program_module(folder, top))
            if top in _WORTH_LOADING:
                found[name] = None
        if re.search(r"\bdtrain\b", text):
            found.update(dict.fromkeys(_dtrain_modules(text)))
    return (
        PreloadModules(needed=("torch",), optional=tuple(name for name in found if name != "torch"))
        if foreign
        else PreloadModules()
    )


def _program_sources(first: Path) -> Iterator[tuple[str, Path]]:
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
        for name in _imported_names(text):
            parts = name.split(".")
            for candidate in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if candidate not in seen and len(seen) < _MAX_SOURCE_FILES and candidate.is_file():
                    seen.add(candidate)
                    todo.append(candidate)


def _imported_names(text: str) -> list[str]:
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


def _is_program_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


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
    """Fork server: its process and the launcher's end of the channel. ``is_ready`` is True once the server accepts requests."""

    pid: int
    channel: socket.socket
    is_ready: bool = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when the server sent a message or exited."""
        return self.channel.fileno()

    def request_process(self, request: ProcessRequest) -> None:
        """Request a process from the server; its answer has the pid.

        Raises:
            OSError: the server exited.
        """
        message = {**asdict(request), "fds": list(request.fds), "variables": request.variables, "parent": os.getpid()}
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
