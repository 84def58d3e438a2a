"""Find the interpreter flags that ranks inherit, and the program's modules that would shadow modules loaded here."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS_WITH_VALUE = "WX"
_PROGRAM_FLAGS = "cm"
# flags for a prompt after the script, and for a first line that is not Python
_LAUNCHER_ONLY_FLAGS = "ix"
_IGNORE_ENVIRONMENT_FLAGS = {"-E", "-I"}


def inherited_flags() -> list[str]:
    """Return the flags of this interpreter, which the interpreters of the ranks inherit."""
    flags = parse_flags(sys.orig_argv)
    # Flags that ignore the environment also ignore PYTHONUNBUFFERED, and the output of ranks would be delayed.
    return [*flags, "-u"] if _IGNORE_ENVIRONMENT_FLAGS & set(flags) and "-u" not in flags else flags


def parse_flags(command: Sequence[str]) -> list[str]:
    """Return the flags in an interpreter's command line, before the program. No side effects.

    >>> parse_flags(["python", "-OB", "-Xdev", "-W", "error", "-m", "dtrain", "-W"])
    ['-O', '-B', '-X', 'dev', '-W', 'error']
    """
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            flags += [word, next(words, "")]
            continue
        if len(word) < 2 or word[0] != "-" or word[1] == "-":
            break
        # Several flags may share a word, the last flag with its value.
        for place, letter in enumerate(word[1:], start=2):
            if letter in _PROGRAM_FLAGS:
                return flags
            if letter in _FLAGS_WITH_VALUE:
                flags += [f"-{letter}", word[place:] or next(words, "")]
                break
            if letter not in _LAUNCHER_ONLY_FLAGS:
                flags.append(f"-{letter}")
    return flags


_MODULE_SUFFIXES = frozenset(importlib.machinery.all_suffixes())


def first_import_folder(kind: str, target: str) -> Path | None:
    """Return the folder that a plain interpreter searches first for modules: the script's folder, or with ``-m`` the current.

    None if Python's safe-path mode is on, and for a zip archive, in which Python searches first.

    Raises:
        OSError: the current folder was removed.
    """
    if sys.flags.safe_path or (kind == "script" and zipfile.is_zipfile(target)):
        return None
    return Path(os.path.realpath(target)).parent if kind == "script" else Path.cwd()


def find_shadowed_modules(folder: Path) -> list[str]:
    """Return the names of loaded modules that ``folder`` would shadow.

    Raises:
        OSError: the folder cannot be read.
    """
    # Built-in modules always come first.
    loaded = sys.modules.keys() - set(sys.builtin_module_names)
    # Check names first, because the folder may contain many files that are not modules.
    found = {name for entry in os.listdir(folder) if (name := entry.partition(".")[0]) in loaded and _is_module(folder / entry)}
    return [name for name in sorted(found) if not _is_inside(folder, getattr(sys.modules[name], "__file__", None))]


def _is_inside(folder: Path, file: str | None) -> bool:
    return file is not None and folder in Path(os.path.realpath(file)).parents


def _is_module(path: Path) -> bool:
    """Return True if a file or folder can be imported."""
    _, dot, rest = path.name.partition(".")
    return dot + rest in _MODULE_SUFFIXES or (
        not dot and any((path / f"__init__{suffix}").is_file() for suffix in _MODULE_SUFFIXES)
    )
