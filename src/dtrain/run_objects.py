"""Objects that belong to a run beside its model: the loader and the stateful objects of ``Step.init``, and their marks.

An object is named by a key: ``"loader"``, or ``"stateful/<name>"``. ``ignore=`` of a load takes these keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from dtrain.errors import ConfigError
from dtrain.typing import Stateful

LOADER, STATEFUL = "loader", "stateful"
DICT_TYPES = (dict, OrderedDict, Counter)
"""Classes of the dicts that a checkpoint can hold."""
_FILLED = (*DICT_TYPES, list)
_VALUES = (type(None), bool, int, float, str, tuple)


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """Object that each rank saves for itself. See ``per_rank``."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class NotSaved:
    """Object that checkpoints leave out. See ``not_saved``."""

    value: Any


def unwrap(value: Any) -> Any:
    """Return an object without its mark."""
    return value.value if isinstance(value, PerRank | NotSaved) else value


def is_stateful(value: Any) -> bool:
    """Return True if an object has ``state_dict`` and ``load_state_dict``."""
    value = unwrap(value)
    return isinstance(value, Stateful) and not isinstance(value, type)


def is_tracked_loader(value: Any) -> bool:
    """Return True if an object is a loader whose batches carry their position, which ``build_loader`` makes."""
    return hasattr(unwrap(value), "_last_batch_info")


def run_objects(loader: Any, stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a run by key, with their marks.

    Raises:
        ConfigError: a loader without a position; a name that is not a text, or an object that a load could not put back.
    """
    if not isinstance(stateful, Mapping):
        raise ConfigError(
            f"init: stateful must be a dict of named objects, got {type(stateful).__name__}. "
            "Name them, as in stateful={'stop': stop}."
        )
    check_entries(stateful, "init", STATEFUL)
    objects = {} if loader is None else {LOADER: _check_loader(loader)}
    return {**objects, **{f"{STATEFUL}/{name}": value for name, value in stateful.items()}}


def _check_loader(loader: Any) -> Any:
    """Return the loader of ``Step.init`` if it has a position, or a mark."""
    if isinstance(loader, NotSaved):
        return loader
    if isinstance(loader, PerRank):
        raise ConfigError(f"init: loader must be a loader, got per_rank({loader.value!r}). Pass the loader itself.")
    if is_stateful(loader):
        # Equal states of another library may mean different samples on each rank.
        return loader if is_tracked_loader(loader) else PerRank(loader)
    if isinstance(loader, DataLoader):
        raise ConfigError(
            "init: loader must resume in the middle of an epoch, got a torch DataLoader, which cannot. Use dt.build_loader or "
            "torchdata's StatefulDataLoader, or loader=dt.checkpoint.not_saved(loader) to start its epoch anew."
        )
    raise ConfigError(
        f"init: loader must have state_dict and load_state_dict, got {type(loader).__name__}. Use dt.build_loader, or "
        "loader=dt.checkpoint.not_saved(loader) to start anew after a resume."
    )


def check_entries(entries: Mapping[str, Any], caller: str, parameter: str) -> None:
    """Check named objects that a checkpoint is to hold.

    Raises:
        ConfigError: a name that is not a text, or a value that a load could not put back.
    """
    for name, value in entries.items():
        if type(name) is not str:
            raise ConfigError(
                f"{caller}: {parameter} must have string names, got {type(name).__name__} {name!r}. "
                f"Use texts as keys, such as {parameter}={{'stop': stop}}."
            )
        content = unwrap(value)
        if isinstance(content, PerRank | NotSaved):
            raise ConfigError(f"{caller}: {parameter}: {name} must have one mark, got two. Leave out one of them.")
        if is_stateful(content) or isinstance(value, NotSaved) or isinstance(content, Tensor) or type(content) in _FILLED:
            continue
        if isinstance(content, _VALUES):
            raise ConfigError(
                f"{caller}: {parameter}: {name} must be filled in place by a load, which {type(content).__name__} "
                f"{repr(content)[:60]} cannot. Put it into a dict that the loop reads: "
                f"{parameter}={{'{name}': {{'value': ...}}}}."
            )
        got = (
            f"the class {content.__name__}"
            if isinstance(content, type)
            else f"{type(content).__module__}.{type(content).__name__}"
        )
        advice = (
            "Pass torch.from_numpy(array)" if hasattr(content, "__array__") else "Wrap it in a class that has the two methods"
        )
        raise ConfigError(
            f"{caller}: {parameter}: {name} must be an object with state_dict and load_state_dict, or a dict, list or tensor, "
            f"got {got}. {advice}."
        )
