"""``module:name`` and ``file.py:name``: what the user's own code holds under a name, and its errors in one line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrain.errors import ConfigError, DtrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTarget:
    """What was found: ``value`` is what ``module`` holds under ``name``, None where it holds nothing."""

    module: ModuleType
    source: str
    name: str

    @property
    def value(self) -> Any:
        """What it holds."""
        return getattr(self.module, self.name, None)

    def function_names(self) -> str:
        """The functions that the module defines, for an error."""
        own = self.module.__name__
        found = [key for key, value in vars(self.module).items() if inspect.isfunction(value) and value.__module__ == own]
        return ", ".join(sorted(found)) or "none"


@contextmanager
def import_target(caller: str, target: str, kind: str, example: str) -> Iterator[ImportedTarget]:
    """What ``target`` names, ``module:name``, found from the current folder on, or ``file.py:name``.

    Imports of the module work while the block runs. ``caller`` begins the errors, ``kind`` is the kind of thing that is looked
    for, and ``example`` shows a target.

    Mutates: ``sys.path``, for the time of the block; ``sys.modules``.

    Raises:
        ConfigError: no such module or file, or one that cannot be imported.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"{caller}: {target!r} names no {kind}; name a file or module and a {kind} in it, {example}")
    is_file = place.endswith(".py") or os.sep in place
    before = list(sys.path)
    sys.path.insert(0, str(Path(place).resolve().parent) if is_file else os.getcwd())
    try:
        yield ImportedTarget(
            module=_import_file(caller, place) if is_file else _import_module(caller, place, example), source=place, name=name
        )
    finally:
        sys.path[:] = before


@contextmanager
def summarize_user_errors(prefix: str, error_class: type[DtrainError]) -> Iterator[None]:
    """Errors of the user's code, and that it exits, as one line that says where; errors of dtrain as they are."""
    try:
        yield
    except DtrainError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
        at = f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        raise error_class(f"{prefix}: {type(error).__name__}: {text}{at}; mend it there") from error


def _import_file(caller: str, source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{caller}: no such file: {source!r} (in {os.getcwd()!r}); check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{caller}: {source!r} is not a Python file; name one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
        spec.loader.exec_module(module)
    return module


def _import_module(caller: str, source: str, example: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(f"{caller}: {source!r} is neither a module's name nor a file that ends with .py; {example}")
    try:
        with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
            return importlib.import_module(source)
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{source}.".startswith(f"{missing.name}."):
            raise ConfigError(
                f"{caller}: no module named {source!r} in {os.getcwd()!r} or the environment; check the name"
            ) from None
        raise


def _is_library(file: str) -> bool:
    own = str(Path(__file__).parent.parent)
    return file.startswith((own, os.path.dirname(os.__file__), "<")) or "site-packages" in file
