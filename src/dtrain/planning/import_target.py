"""Import an object of the user's code by ``module:name`` or ``file.py:name``, with errors in one line."""

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
    """Imported module, and the name of an object in it. ``value`` is None if the module has no such name."""

    module: ModuleType
    source: str
    name: str

    @property
    def value(self) -> Any:
        """Object with this name."""
        return getattr(self.module, self.name, None)

    def function_names(self) -> str:
        """Return the functions that the module defines, for an error."""
        module = self.module.__name__
        names = [key for key, value in vars(self.module).items() if inspect.isfunction(value) and value.__module__ == module]
        return ", ".join(sorted(names)) or "none"


@contextmanager
def import_target(caller: str, target: str, kind: str, example: str) -> Iterator[ImportedTarget]:
    """Import the module of ``target``: ``module:name``, searched from the current folder, or ``file.py:name``.

    Imports by the module work inside the context. ``caller`` begins the errors, ``kind`` is the expected kind of object, and
    ``example`` is a valid target.

    Mutates: ``sys.path``, inside the context; ``sys.modules``.

    Raises:
        ConfigError: there is no such module or file, or its import fails.
    """
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise ConfigError(f"{caller}: target must name a file or module and a {kind}, got {target!r}. Write it {example}.")
    is_file = source.endswith(".py") or os.sep in source
    before = list(sys.path)
    sys.path.insert(0, str(Path(source).resolve().parent) if is_file else os.getcwd())
    try:
        module = _import_file(caller, source) if is_file else _import_module(caller, source, example)
        yield ImportedTarget(module=module, source=source, name=name)
    finally:
        sys.path[:] = before


@contextmanager
def summarize_user_errors(prefix: str, error_class: type[DtrainError]) -> Iterator[None]:
    """Raise errors and exits of the user's code as one line with their location; errors of dtrain pass unchanged."""
    try:
        yield
    except DtrainError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
        at = f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        raise error_class(f"{prefix}: {type(error).__name__}: {text}{at}. Fix the error there.") from error


def _import_file(caller: str, source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{caller}: no such file: {source!r} (in {os.getcwd()!r}). Check the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{caller}: {source!r} is not a Python file. Name a file that ends with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
        spec.loader.exec_module(module)
    return module


def _import_module(caller: str, source: str, example: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(f"{caller}: {source!r} is neither a module's name nor a file that ends with .py. Write it {example}.")
    try:
        with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
            return importlib.import_module(source)
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{source}.".startswith(f"{missing.name}."):
            raise ConfigError(
                f"{caller}: no module named {source!r} in {os.getcwd()!r} or the environment. Check the name."
            ) from None
        raise


def _is_library(file: str) -> bool:
    own = str(Path(__file__).parent.parent)
    return file.startswith((own, os.path.dirname(os.__file__), "<")) or "site-packages" in file
