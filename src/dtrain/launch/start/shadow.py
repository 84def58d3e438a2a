"""Modules of the program's own that have the name of one that is loaded: in a plain interpreter they would come first."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path

_SUFFIXES = frozenset(importlib.machinery.all_suffixes())


def first_folder(kind: str, target: str) -> Path | None:
    """Where a plain interpreter looks for modules first: beside the script, or with ``-m`` in the current folder.

    None where it was told not to.

    Raises:
        OSError: the current folder is gone.
    """
    if sys.flags.safe_path:
        return None
    return Path(os.path.realpath(target)).parent if kind == "script" else Path.cwd()


def shadowed(folder: Path) -> list[str]:
    """Names of loaded modules that ``folder`` has others for.

    Raises:
        OSError: it cannot be read.
    """
    loaded = sys.modules.keys() - set(sys.builtin_module_names)  # nothing comes before those built in
    # By name first: there may be a great many files that are no modules.
    found = {name for entry in os.listdir(folder) if (name := entry.partition(".")[0]) in loaded and _is_module(folder / entry)}
    return [name for name in sorted(found) if not _is_below(folder, getattr(sys.modules[name], "__file__", None))]


def _is_below(folder: Path, file: str | None) -> bool:
    return file is not None and folder in Path(os.path.realpath(file)).parents


def _is_module(path: Path) -> bool:
    """Whether a file or a folder can be imported."""
    _, dot, rest = path.name.partition(".")
    return dot + rest in _SUFFIXES or (not dot and any((path / f"__init__{suffix}").is_file() for suffix in _SUFFIXES))
