"""Check that a script, module or command can run, and find its source file. The code is compiled as text and never executed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import warnings
import zipfile
import zipimport
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import Target

_DESCRIPTOR_FOLDER = re.compile(r"/dev/fd|/proc/(self|[0-9]+)/(task/[0-9]+/)?fd")
_MAX_LINKS = 40


def check_script(path: str) -> None:
    """Check that ``path`` is a file of Python source that compiles, or a zip archive with a ``__main__`` module.

    Raises:
        ConfigError: the file is missing, a folder, an open file of the launcher, unreadable, or not Python.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"launch: {path!r} is a folder. Name the script in the folder, or use -m for a package.")
    if not os.path.lexists(path):
        raise ConfigError(f"launch: no such script: {path!r} (in {os.getcwd()!r}). Check the path.")
    if not file.is_file():
        raise ConfigError(f"launch: {path!r} is not a regular file. Save the script to a file, because every rank reads it.")
    if _is_open_file(path):
        raise ConfigError(
            f"launch: {path!r} is an open file of the launcher, such as standard input, which ranks do not have. "
            "Save the script to a file, because every rank reads it."
        )
    if zipfile.is_zipfile(path):
        _check_archive(path)
        return
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"launch: cannot read {path!r}: {error.strerror}. Make the file readable.") from None
    _check_source(path, source)


def _is_open_file(path: str) -> bool:
    """Return True for a path of a file descriptor, such as ``/dev/stdin`` and ``/dev/fd/3``, also through links."""
    current = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        parent = os.path.realpath(os.path.dirname(current))
        if _DESCRIPTOR_FOLDER.fullmatch(parent):
            return True
        current = os.path.join(parent, os.path.basename(current))
        if not os.path.islink(current):
            return False
        current = os.path.join(parent, os.readlink(current))
    return False


def _check_archive(path: str) -> None:
    """Check that ``python path`` can run a zip archive, as ``zipapp`` makes."""
    try:
        code = zipimport.zipimporter(path).get_code("__main__")
    except SyntaxError as error:
        raise ConfigError(
            f"launch: {path}/__main__.py:{error.lineno} is not valid Python: {_one_line(error.msg)}. Fix the error first."
        ) from None
    except ImportError:
        code = None
    if code is None:
        raise ConfigError(
            f"launch: {path!r} is a zip archive without __main__.py. Make it with python -m zipapp -m module:function."
        )


def check_module(name: str) -> None:
    """Check that ``python -m name`` finds code to run from the current folder.

    Finders are called level by level, so that no parent package is imported. An import may take seconds, or load torch.

    Raises:
        ConfigError: the module does not exist, is a package without ``__main__``, or does not compile.
    """
    if not all(word.isidentifier() for word in name.split(".")):
        raise ConfigError(f"launch: {name!r} is not a module name. Pass a dotted name to -m, and a script without -m.")
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        if _find_spec(f"{name}.__main__") is None:
            raise ConfigError(f"launch: {name!r} is a package without __main__.py. Name a module of the package.")
        return
    if spec is None:
        raise ConfigError(f"launch: no module named {name!r} in {os.getcwd()!r} or the environment. Check the name.")
    if spec.origin is not None and spec.origin.endswith(".py") and os.path.isfile(spec.origin):
        _check_source(spec.origin, Path(spec.origin).read_bytes())


def find_source(target: Target) -> Path | None:
    """Return the Python source file of a script or module; None if there is no such file."""
    if target.kind == "script":
        return Path(os.path.realpath(target.name))
    spec = _find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{target.name}.__main__")
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def check_command(name: str) -> None:
    """Check that ``name`` is an executable program: a path, or a name on ``PATH``.

    Raises:
        ConfigError: the program does not exist or is not executable.
    """
    if shutil.which(name) is not None:
        return
    if os.path.isdir(name):
        raise ConfigError(f"launch: {name!r} is a folder. Pass a program to -c.")
    if os.path.lexists(name):
        advice = "Make it executable" if os.path.dirname(name) else f"Name it as ./{name} and make it executable"
        raise ConfigError(f"launch: {name!r} cannot be run as a program. {advice}, or run a Python script without -c.")
    raise ConfigError(f"launch: no program {name!r} in PATH. Check the name, or run a Python script without -c.")


def _find_spec(name: str) -> ModuleSpec | None:
    first, *rest = name.split(".")
    before = list(sys.path)
    # Ranks search the current folder first. The launcher's own first entry is another folder.
    sys.path.insert(0, os.getcwd())
    try:
        # Editable installs have finders of their own.
        specs = (finder.find_spec(first, None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        for word in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # With the full name, Python would look for the parent among the imported modules.
            spec = PathFinder.find_spec(word, list(spec.submodule_search_locations))
    finally:
        sys.path[:] = before
    return spec


def _check_source(path: str, source: bytes) -> None:
    try:
        with warnings.catch_warnings():
            # The ranks compile the source again, and warn there.
            warnings.simplefilter("ignore")
            # compile() ignores invalid bytes in comments, but the interpreter does not. So decode first.
            compile(importlib.util.decode_source(source), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        # Terminals and editors open this form of a location.
        location = f"{path}:{error.lineno}" if error.lineno else repr(path)
        raise ConfigError(f"launch: {location} is not valid Python: {_one_line(error.msg)}. Fix the error first.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"launch: {path!r} is not {error.encoding} text (byte {error.start}). Save the script as UTF-8."
        ) from None
    # Before Python 3.12, null bytes raise ValueError.
    except ValueError as error:
        raise ConfigError(f"launch: {path!r} is not valid Python: {_one_line(str(error))}. Fix the error first.") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
