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

from dtrain import wire
from dtrain.launch.plan import Target
from dtrain.launch.start.interpreter import flags_to_pass_on
from dtrain.launch.start.plain import start_plain
from dtrain.launch.start.request import Request
from dtrain.launch.target import find_source

_LONGEST = 1 << 16
_MOST_FILES = 100  # of the program's own that are looked at
_LARGEST = 1 << 20  # bytes of a file that is looked at
_WORTH_LOADING = ("torch", "numpy", "tensordict", "torchdata", "einops")  # slow, and the same wherever they are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """What to load. Where one of ``needed`` cannot be, plain interpreters are started instead."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def modules_to_load(target: Target) -> Modules:
    """What the program will import and is worth loading once for all ranks; nothing where a plain interpreter is as fast.

    Its own files are read, not run. A program of the standard library alone needs nothing; any other may load torch.
    """
    source = None if target.kind == "command" else find_source(target)
    if source is None:
        return Modules()
    found: dict[str, None] = {}
    foreign = False
    for text, folder in _own_sources(source):
        for name in _imports(text):
            top = name.partition(".")[0]
            foreign = foreign or not (top in sys.stdlib_module_names or _is_own(folder, top))
            if top in _WORTH_LOADING:
                found[name] = None
        if re.search(r"\bdtrain\b", text):
            found.update(dict.fromkeys(_of_dtrain(text)))
    return Modules(needed=("torch",), optional=tuple(name for name in found if name != "torch")) if foreign else Modules()


def _own_sources(first: Path) -> Iterator[tuple[str, Path]]:
    """The text of a script and of the modules beside it that it imports, and their folder."""
    folder, todo, seen = first.parent, [first], {first}
    for path in todo:  # grows while it is walked
        try:
            if path.stat().st_size > _LARGEST:
                continue
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # the ranks will say so
        yield text, folder
        for name in _imports(text):
            parts = name.split(".")
            for candidate in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if candidate not in seen and len(seen) < _MOST_FILES and candidate.is_file():
                    seen.add(candidate)
                    todo.append(candidate)


def _imports(text: str) -> list[str]:
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


def _is_own(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _of_dtrain(text: str) -> list[str]:
    """The modules of the public names that occur in ``text``."""
    import dtrain

    words = set(re.findall(r"\w+", text))
    return list(dict.fromkeys(f"dtrain.{module}" for name, module in dtrain._MODULE_OF.items() if name in words))


@dataclass(slots=True, kw_only=True, eq=False)
class Preloaded:
    """The process, our end of its channel, and what it has said. ``ready`` once it forks."""

    pid: int
    channel: socket.socket
    ready: bool = False

    def fileno(self) -> int:
        """Becomes readable when it says something, or has ended."""
        return self.channel.fileno()

    def ask(self, request: Request) -> None:
        """Have it start a process; it answers later, with the pid.

        Raises:
            OSError: it has ended.
        """
        message = {**asdict(request), "fds": list(request.fds), "variables": request.variables, "parent": os.getpid()}
        del message["owned"]
        socket.send_fds(self.channel, [json.dumps(message).encode()], list(request.fds.values()))

    def read(self) -> Iterator[dict[str, Any]]:
        """What it has said since: ``unsafe`` (None, or why it does not fork), or the ``id`` of a request with its ``pid`` or
        ``error``; and ``ended`` when it will say nothing more."""
        while True:
            try:
                data = self.channel.recv(_LONGEST)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                yield {"ended": True}
                return
            yield json.loads(data)


def start_preloaded(target: Target, modules: Modules, common: Mapping[str, str], *, log: int) -> Preloaded:
    """Start the process; it answers when it has loaded ``modules``.

    Args:
        target: what its forks will run.
        modules: what to import.
        common: the environment that all ranks have in common.
        log: descriptor for what is printed while importing.

    Raises:
        OSError: no more processes or files.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.fspath(Path(__file__).with_name("preload.py"))
    # One thread in torch's libraries and in NumPy's, so that there is none but the main one when it forks; ranks set their own.
    single = {wire.THREADS: "1"}
    request = Request(id=0, kind="rank", fds={"stdout": log, "stderr": log, "channel": theirs.fileno()}, environment=single)
    command = [
        sys.executable,
        *flags_to_pass_on(),
        program,
        str(theirs.fileno()),
        ",".join(modules.needed),
        ",".join(modules.optional),
        target.kind,
        target.name,
        *target.args,
    ]
    with theirs:
        pid = start_plain(request, command, common, interrupts_wait=True)  # its forks are ranks, which unblock them
    ours.setblocking(False)
    return Preloaded(pid=pid, channel=ours)
