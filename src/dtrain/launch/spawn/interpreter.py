"""The interpreter's own options (``python -O -X dev -W error -m dtrain launch``), which are the ranks' as well.

Modules of the program's own that have the name of one that is loaded: in a plain interpreter they would come first."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_FLAGS_WITH_VALUE = "WX"
_PROGRAM_FLAGS = "cm"
_LAUNCHER_ONLY_FLAGS = "ix"  # a prompt after the script, and a first line that is no Python
_IGNORE_ENVIRONMENT_FLAGS = {"-E", "-I"}


def inherited_flags() -> list[str]:
    """The options that the interpreters of the ranks are started with: those of this one."""
    flags = parse_flags(sys.orig_argv)
    # Where variables are ignored, so is PYTHONUNBUFFERED: what ranks print would come late, or never.
    return [*flags, "-u"] if _IGNORE_ENVIRONMENT_FLAGS & set(flags) and "-u" not in flags else flags


def parse_flags(command: Sequence[str]) -> list[str]:
    """The options in an interpreter's command line, in front of what it runs. Pure.

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
        for place, letter in enumerate(word[1:], start=2):  # several may share a word, the last of them with its value
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
    """Where a plain interpreter looks for modules first: beside the script, or with ``-m`` in the current folder.

    None where it was told not to.

    Raises:
        OSError: the current folder is gone.
    """
    if sys.flags.safe_path:
        return None
    return Path(os.path.realpath(target)).parent if kind == "script" else Path.cwd()


def find_shadowed_modules(folder: Path) -> list[str]:
    """Names of loaded modules that ``folder`` has others for.

    Raises:
        OSError: it cannot be read.
    """
    loaded = sys.modules.keys() - set(sys.builtin_module_names)  # nothing comes before those built in
    # By name first: there may be a great many files that are no modules.
    found = {name for entry in os.listdir(folder) if (name := entry.partition(".")[0]) in loaded and _is_module(folder / entry)}
    return [name for name in sorted(found) if not _is_inside(folder, getattr(sys.modules[name], "__file__", None))]


def _is_inside(folder: Path, file: str | None) -> bool:
    return file is not None and folder in Path(os.path.realpath(file)).parents


def _is_module(path: Path) -> bool:
    """Whether a file or a folder can be imported."""
    _, dot, rest = path.name.partition(".")
    return dot + rest in _MODULE_SUFFIXES or (
        not dot and any((path / f"__init__{suffix}").is_file() for suffix in _MODULE_SUFFIXES)
    )
