"""Is there something to run? Looks at the script or module as text, without running a line of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import Target


def check_script(path: str) -> None:
    """Return when ``path`` is a file of Python source that compiles.

    Raises:
        ConfigError: missing, a folder, unreadable, or not Python.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"launch: {path!r} is a folder; name the script in it, or use -m for a package")
    if not os.path.lexists(path):
        raise ConfigError(f"launch: no such script: {path!r} (in {os.getcwd()!r}); check the path")
    if not file.is_file():
        raise ConfigError(f"launch: {path!r} is not a regular file; every rank reads the script, so save it to one")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"launch: cannot read {path!r}: {error.strerror}; make it readable") from None
    _check_source(path, source)


def check_module(name: str) -> None:
    """Return when ``python -m name`` would find something to run from the current folder.

    Finders are asked level by level, so that no parent package is imported: that could take seconds, or import torch.

    Raises:
        ConfigError: no module of that name, a package without ``__main__``, or source that does not compile.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"launch: {name!r} is not a module name; -m takes a dotted name, a script needs no -m")
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        if _find_spec(f"{name}.__main__") is None:
            raise ConfigError(f"launch: {name!r} is a package without __main__.py; name a module in it")
        return
    if spec is None:
        raise ConfigError(f"launch: no module named {name!r} in {os.getcwd()!r} or the environment; check the name")
    if spec.origin is not None and spec.origin.endswith(".py") and os.path.isfile(spec.origin):
        _check_source(spec.origin, Path(spec.origin).read_bytes())


def find_source(target: Target) -> Path | None:
    """The file of Python source that a script or module runs, None when there is none to be read."""
    if target.kind == "script":
        return Path(os.path.realpath(target.name))
    spec = _find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{target.name}.__main__")
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def check_command(name: str) -> None:
    """Return when ``name`` is a program that can be run: a path, or found on ``PATH``.

    Raises:
        ConfigError: it is neither.
    """
    if shutil.which(name) is not None:
        return
    if os.path.isdir(name):
        raise ConfigError(f"launch: {name!r} is a folder; -c takes a program")
    if os.path.lexists(name):
        how = "make it executable" if os.path.dirname(name) else f"name it as ./{name} and make it executable"
        raise ConfigError(f"launch: {name!r} cannot be run as a program; {how}, or leave -c out for a Python script")
    raise ConfigError(f"launch: no program {name!r} in PATH; check the name, or leave -c out for a Python script")


def _find_spec(name: str) -> ModuleSpec | None:
    first, *rest = name.split(".")
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())  # where the ranks will look first; the launcher's own first entry is another one
    try:
        spec = _find_top_level_spec(first)
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # By its last part only: with the full name, Python looks for the parent among the imported modules.
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    finally:
        sys.path[:] = before
    return spec


def _find_top_level_spec(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:  # also those of editable installs
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _check_source(path: str, source: bytes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks compile it again, and warn there
            # Decoded first: compile() overlooks wrong bytes in comments, and the interpreter does not.
            compile(importlib.util.decode_source(source), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else repr(path)  # as terminals and editors open it
        raise ConfigError(f"launch: {place} is not valid Python: {_one_line(error.msg)}; fix it first") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"launch: {path!r} is not {error.encoding} text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:  # null bytes, before Python 3.12
        raise ConfigError(f"launch: {path!r} is not valid Python: {_one_line(str(error))}; fix it first") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
