"""``module:factory`` and ``file.py:factory``: a workload by its name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrain.errors import ConfigError, DtrainError, StepError
from dtrain.planning.workload import Workload

_EXAMPLE = "as in model.py:workload or package.model:workload"


@contextmanager
def loaded_workload(target: str, arguments: Mapping[str, Any]) -> Iterator[Workload]:
    """What the factory named ``target`` returns for ``arguments``; its imports work while the block runs.

    Args:
        target: ``module:factory``, found from the current folder on, or ``file.py:factory``. A ``Workload`` in place of a
            factory is taken as it is.
        arguments: for the factory, by name.

    Mutates: ``sys.path``, for the time of the block; ``sys.modules``.

    Raises:
        ConfigError: no such module, file or factory; one that raises, does not take ``arguments``, or returns something else.
        StepError: in the block, whatever the workload's own functions raise.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"plan: {target!r} names no factory; name a file or module and a function in it, {_EXAMPLE}")
    is_file = place.endswith(".py") or os.sep in place
    before = list(sys.path)
    sys.path.insert(0, str(Path(place).resolve().parent) if is_file else os.getcwd())
    try:
        module = _file(place) if is_file else _module(place)
        workload = _made(module, place, name, arguments)
        with _told(f"plan: a step of {target!r} failed", StepError):
            yield workload
    finally:
        sys.path[:] = before


def _file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise ConfigError(f"plan: no such file: {place!r} (in {os.getcwd()!r}); check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plan: {place!r} is not a Python file; name one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _told(f"plan: {place!r} cannot be imported", ConfigError):
        spec.loader.exec_module(module)
    return module


def _module(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"plan: {place!r} is neither a module's name nor a file that ends with .py; {_EXAMPLE}")
    try:
        with _told(f"plan: {place!r} cannot be imported", ConfigError):
            return importlib.import_module(place)
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{place}.".startswith(f"{missing.name}."):
            raise ConfigError(
                f"plan: no module named {place!r} in {os.getcwd()!r} or the environment; check the name"
            ) from None
        raise


def _made(module: ModuleType, place: str, name: str, arguments: Mapping[str, Any]) -> Workload:
    factory = getattr(module, name, None)
    if isinstance(factory, Workload) and not arguments:
        return factory
    if not callable(factory):
        found = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        what = "is no function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"plan: {name!r} {what} in {place!r}; its functions are {', '.join(sorted(found)) or 'none'}")
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"plan: {name!r} in {place!r} cannot be called so: {error}; give its arguments by --arg name=value"
        ) from None
    with _told(f"plan: {name!r} in {place!r} failed", ConfigError):
        workload = factory(**arguments)
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"plan: {name!r} in {place!r} must return a dt.Workload, got {type(workload).__name__}; "
            "as in dt.Workload(model=..., loss_fn=..., batch=...)"
        )
    return workload


@contextmanager
def _told(what: str, kind: type[DtrainError]) -> Iterator[None]:
    """Errors of the user's code as one line that says where; those of dtrain as they are."""
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
        at = f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        raise kind(f"{what}: {type(error).__name__}: {text}{at}; mend it there") from error


def _is_library(file: str) -> bool:
    own = str(Path(__file__).parent.parent)
    return file.startswith((own, os.path.dirname(os.__file__), "<")) or "site-packages" in file
