"""Packages that only some sinks need: found when the sink is made, so that a missing one is told at once, on all ranks."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from dtrain.extras import missing


def need(package: str) -> None:
    """See that a package is installed, without importing it.

    Raises:
        ConfigError: it is not. A folder of its name, such as W&B makes one, is no package.
    """
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # half an installation
        found = None
    if found is None or found.origin is None:
        raise missing(f"{package}: needs the package {package}", package)


def imported(name: str) -> ModuleType:
    """A module of such a package. In the main thread: what it imports, others may be importing, too."""
    return importlib.import_module(name)
