"""``module:factory`` and ``file.py:factory``: a workload by its name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dtrain.errors import ConfigError, StepError
from dtrain.planning.loaded import Loaded, loaded, told
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
    with loaded("plan", target, "factory", _EXAMPLE) as found:
        workload = _made(found, arguments)
        with told(f"plan: a step of {target!r} failed", StepError):
            yield workload


def _made(found: Loaded, arguments: Mapping[str, Any]) -> Workload:
    factory, place, name = found.value, found.place, found.name
    if isinstance(factory, Workload) and not arguments:
        return factory
    if not callable(factory):
        what = "is no function" if hasattr(found.module, name) else "is not there"
        raise ConfigError(f"plan: {name!r} {what} in {place!r}; its functions are {found.functions()}")
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"plan: {name!r} in {place!r} cannot be called so: {error}; give its arguments by --arg name=value"
        ) from None
    with told(f"plan: {name!r} in {place!r} failed", ConfigError):
        workload = factory(**arguments)
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"plan: {name!r} in {place!r} must return a dt.Workload, got {type(workload).__name__}; "
            "as in dt.Workload(model=..., loss_fn=..., batch=...)"
        )
    return workload
