"""What a checkpoint holds: a ``TrainState`` as plain values and named tensors.

Sections, and with them the beginnings of tensor keys::

    params/<name>                       model parameters, each tied one once
    buffers/<name>                      persistent buffers that are equal on all ranks
    optimizer/state/<name>/<key>        per parameter name
    optimizer/groups                    hyperparameters, with "params" as names
    slices/<transform>/...  clock  seed
    extra/<name>/...                    what the caller gave, equal on all ranks, without sharded tensors

and of each rank::

    rng/...                             its random state
    buffers/<name>                      its persistent buffers, where each rank has its own (``buffers="local"``)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from dtrain.checkpoint import closed, plain
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.rng import rng_state
from dtrain.errors import ConfigError
from dtrain.names import clean_buffers
from dtrain.state import TrainState
from dtrain.tensors import is_distributed

SECTIONS = ("params", "buffers", "optimizer", "slices", "clock", "seed", "extra")
# How torch computes a step, not what it computes: belongs to the machine and the program, which may differ after a resume.
MACHINE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_STORED = MACHINE_FLAGS | {"params", "param_names"}


@runtime_checkable
class Stateful(Protocol):
    """Something whose state can be taken as plain data (and tensors), and given back."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Contents:
    """One rank's view of what is to be saved.

    Args:
        shared: encoded values of the run by section, the same on every rank.
        tensors: tensors of the run by key: DTensors, and plain ones that are equal on every rank.
        values: encoded values of this rank.
        own: tensors of this rank by key.
    """

    shared: dict[str, Any]
    tensors: dict[str, Tensor]
    values: Any
    own: dict[str, Tensor]


def collect(state: TrainState, extra: Mapping[str, Any]) -> Contents:
    """The contents of a checkpoint of ``state``; the tensors are those of the state, not copies.

    Raises:
        ConfigError: something that is neither a tensor nor plain data, named by its path; a name in ``extra`` that is no text.
    """
    bad = next((name for name in extra if type(name) is not str), None)
    if bad is not None:
        raise ConfigError(f"extra: names are text, got {type(bad).__name__} {bad!r}")
    buffers = clean_buffers(state.model, persistent_only=True)
    local = state.spec.buffers == "local"
    tree = {
        "params": dict(state.params),
        "buffers": {} if local else buffers,
        "optimizer": {"state": _optimizer_state(state), "groups": optimizer_groups(state)},
        "slices": dict(state.slices),
        "clock": state.clock.state_dict(),
        "seed": state.seed,
        "extra": {name: thing.state_dict() if _is_stateful(thing) else thing for name, thing in extra.items()},
    }
    shared, tensors = {}, {}
    for section in SECTIONS:
        shared[section], found = plain.encode(tree[section], section)
        tensors.update(found)
    sharded = next((k for k, t in tensors.items() if k.startswith("extra/") and is_distributed(t)), None)
    if sharded is not None:
        raise ConfigError(f"{sharded}: extra holds plain tensors, got a sharded one (DTensor); put it into a slice")
    values, own = plain.encode({"rng": rng_state(), "buffers": buffers if local else {}}, "")
    return Contents(shared=shared, tensors=tensors, values=values, own=own)


def _is_stateful(thing: Any) -> bool:
    return isinstance(thing, Stateful) and not isinstance(thing, type)


def stateful(extra: Mapping[str, Any]) -> dict[str, Stateful]:
    """Those of ``extra`` that take a state."""
    return {name: cast(Stateful, thing) for name, thing in extra.items() if _is_stateful(thing)}


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    """The optimizer's state by parameter name, in the order of the parameters."""
    names = {id(param): name for name, param in state.params.items()}
    by_name = {}
    for param, content in state.optimizer.state.items():
        if id(param) not in names:
            what = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            raise ConfigError(f"optimizer/state: holds state for something that is no parameter of the model ({what})")
        by_name[names[id(param)]] = content
    return {name: dict(by_name[name]) for name in state.params if name in by_name}


def optimizer_groups(state: TrainState) -> list[dict[str, Any]]:
    """The optimizer's hyperparameters by group, with the names of the group's parameters under ``params``."""
    names = {id(param): name for name, param in state.params.items()}
    return [
        {
            **{key: value for key, value in group.items() if key not in _NOT_STORED},
            "params": [names[id(param)] for param in group["params"]],
        }
        for group in state.optimizer.param_groups
    ]


def check_equal_on_ranks(contents: Contents) -> None:
    """Refuse contents whose shared part differs between ranks: one rank's values would be saved for all.

    Values are compared, and names, shapes and dtypes of tensors; not the data of tensors.

    Collective: one exchange of JSON.

    Raises:
        ConfigError: on all ranks alike, with the first part that differs.
    """
    mine = {path: hashlib.sha256(closed.canonical(values)).hexdigest() for path, values in _parts(contents.shared)}
    everyone = cast(list[dict[str, str]], all_gather_json(cast(Any, mine)))
    for rank, theirs in enumerate(everyone):
        differing = [path for path in {**everyone[0], **theirs} if everyone[0].get(path) != theirs.get(path)]
        if differing:
            raise ConfigError(
                f"save_sharded: {differing[0]} differs between rank 0 and rank {rank}; what a checkpoint holds must be the "
                "same on all ranks, or it could not be resumed at another world size (a tensor that differs is a DTensor)"
            )


def _parts(shared: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections, those with several contributors by contributor. Dicts in the encoded form of ``plain``."""
    for section, values in shared.items():
        if section in ("slices", "extra") and plain.TAG not in values:
            yield from ((plain.join(section, name), part) for name, part in values.items())
        else:
            yield section, values
