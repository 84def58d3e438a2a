"""The launcher's side of the preloaded process: what it should load, starting it, and asking it for ranks."""

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

from dtrain import launch_protocol
from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import Target
from dtrain.launch.spawn.exec import ProcessRequest, start_process
from dtrain.launch.spawn.interpreter import inherited_flags

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_SOURCE_FILES = 100  # of the program's own that are looked at
_MAX_SOURCE_BYTES = 1 << 20  # bytes of a file that is looked at
_WORTH_LOADING = ("torch", "numpy", "tensordict", "torchdata", "einops")  # slow, and the same wherever they are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadModules:
    """What to load. Where one of ``needed`` cannot be, plain interpreters are started instead."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def find_preload_modules(target: Target) -> PreloadModules:
    """What the program will import and is worth loading once for all ranks; nothing where a plain interpreter is as fast.

    Its own files are read, not run. A program of the standard library alone needs nothing; any other may load torch.
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
    """The text of a script and of the modules beside it that it imports, and their folder."""
    folder, todo, seen = first.parent, [first], {first}
    for path in todo:  # grows while it is walked
        try:
            if path.stat().st_size > _MAX_SOURCE_BYTES:
                continue
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # the ranks will say so
        yield text, folder
        for name in _imported_names(text):
            parts = name.split(".")
            for candidate in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if candidate not in seen and len(seen) < _MAX_SOURCE_FILES and candidate.is_file():
                    seen.add(candidate)
                    todo.append(candidate)


def _imported_names(text: str) -> list[str]:
    """Dotted names of what a source may import from outside its own package: what follows ``from`` may be a module or not."""
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
    """The modules of the public names that occur in ``text``."""
    import dtrain

    words = set(re.findall(r"\w+", text))
    return list(dict.fromkeys(f"dtrain.{module}" for name, module in dtrain._MODULE_OF.items() if name in words))


@dataclass(slots=True, kw_only=True, eq=False)
class ForkServer:
    """The process, our end of its channel, and what it has said. ``is_ready`` once it forks."""

    pid: int
    channel: socket.socket
    is_ready: bool = False

    def fileno(self) -> int:
        """Becomes readable when it says something, or has ended."""
        return self.channel.fileno()

    def request_process(self, request: ProcessRequest) -> None:
        """Have it start a process; it answers later, with the pid.

        Raises:
            OSError: it has ended.
        """
        message = {**asdict(request), "fds": list(request.fds), "variables": request.variables, "parent": os.getpid()}
        del message["owned"]
        socket.send_fds(self.channel, [json.dumps(message).encode()], list(request.fds.values()))

    def read_messages(self) -> Iterator[dict[str, Any]]:
        """What it has said since: ``unsafe`` (None, or why it does not fork), or the ``id`` of a request with its ``pid`` or
        ``error``; and ``ended`` when it will say nothing more."""
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
    """Start the process; it answers when it has loaded ``modules``.

    Args:
        target: what its forks will run.
        modules: what to import.
        common_environment: the environment that all ranks have in common.
        log_fd: descriptor for what is printed while importing.

    Raises:
        OSError: no more processes or files.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.fspath(Path(__file__).with_name("preload.py"))
    # One thread in torch's libraries and in NumPy's, so that there is none but the main one when it forks; ranks set their own.
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
        pid = start_process(
            request, command, common_environment, block_interrupts=True
        )  # its forks are ranks, which unblock them
    ours.setblocking(False)
    return ForkServer(pid=pid, channel=ours)
