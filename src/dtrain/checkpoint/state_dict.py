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

Several named states lie below ``states/<name>/``; ``extra`` and ``rng`` stay where they are.

Python's search for garbage, kept away from work that makes tens of thousands of objects and no cycles of them."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.dist.rng import rng_state
from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn
from dtrain.state import TrainState

# How torch computes a step, not what it computes: belongs to the machine and the program, which may differ after a resume.
MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_STORED = MACHINE_OPTIONS | {"params", "param_names"}


@runtime_checkable
class Stateful(Protocol):
    """Something whose state can be taken as plain data (and tensors), and given back."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointContents:
    """One rank's view of what is to be saved.

    Args:
        shared: encoded values of the run by section, the same on every rank.
        tensors: tensors of the run by key: DTensors, and plain ones that are equal on every rank.
        values: encoded values of this rank.
        per_rank: tensors of this rank by key.
        frozen: the keys of parameters that are not trained.
    """

    shared: dict[str, Any]
    tensors: dict[str, Tensor]
    values: Any
    per_rank: dict[str, Tensor]
    frozen: frozenset[str]


States = Mapping[str, TrainState]
"""Named states that are one checkpoint; a single one without a name has the name ``""``."""


def content_key(states: States, only: tuple[str, ...], cast: torch.dtype | None) -> object:
    """What a save of these states would hold: two saves of the same are one."""
    return (tuple((name, state.step) for name, state in states.items()), only, cast)


def collect_contents(
    states: States, extra: Mapping[str, Any], *, only: tuple[str, ...] = (), cast: torch.dtype | None = None
) -> CheckpointContents:
    """The contents of a checkpoint of ``states``; the tensors are those of the states, not copies (``cast`` ones are).

    Args:
        states: by name.
        extra: of the run as a whole; left out by ``only``.
        only: what to limit the contents to; see ``layout.sections_of``.
        cast: the dtype of floating-point parameters.

    Raises:
        ConfigError: something that is neither a tensor nor plain data, named by its path; a name in ``extra`` that is no text.
    """
    bad = next((name for name in extra if type(name) is not str), None)
    if bad is not None:
        raise ConfigError(f"extra: names are text, got {type(bad).__name__} {bad!r}")
    shared: dict[str, Any] = {}
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, state in states.items():
        path = tree_json.join_key(layout.STATES, name) if name else ""
        place = shared.setdefault(layout.STATES, {}).setdefault(name, {}) if name else shared
        for section, tree in _sections(state, only, cast).items():
            place[section], found = tree_json.encode(tree, f"{path}/{section}".lstrip("/"))
            tensors.update(found)
        place, mine = (
            values.setdefault(layout.STATES, {}).setdefault(name, {}) if name else values,
            _per_rank_buffers(state, only),
        )
        place["buffers"], found = tree_json.encode(mine, f"{path}/buffers".lstrip("/"))
        own.update(found)
    if not only:
        given = {name: thing.state_dict() if _is_stateful(thing) else thing for name, thing in extra.items()}
        shared[layout.EXTRA], found = tree_json.encode(given, layout.EXTRA)
        sharded = next((key for key, tensor in found.items() if is_dtensor(tensor)), None)
        if sharded is not None:
            raise ConfigError(f"{sharded}: extra holds plain tensors, got a sharded one (DTensor); put it into a slice")
        tensors.update(found)
    values["rng"], found = tree_json.encode({} if only else rng_state(), "rng")
    frozen = frozenset(
        tree_json.join_key(f"{tree_json.join_key(layout.STATES, name)}/params" if name else "params", key)
        for name, state in states.items()
        for key, param in state.params.items()
        if not param.requires_grad
    )
    return CheckpointContents(shared=shared, tensors=tensors, values=values, per_rank={**own, **found}, frozen=frozen)


def _sections(state: TrainState, only: tuple[str, ...], cast: torch.dtype | None) -> dict[str, Any]:
    """What is stored of a state and is the same on all ranks, by section."""
    params = {name: param for name, param in state.params.items() if only != ("trainable",) or param.requires_grad}
    tree: dict[str, Callable[[], Any]] = {
        "params": lambda: {name: _cast(param, cast) for name, param in params.items()},
        "buffers": lambda: {} if state.spec.buffers == "local" else buffers_by_fqn(state.model, persistent_only=True),
        "optimizer": lambda: {"state": _optimizer_state(state), "groups": optimizer_groups(state)},
        "slices": lambda: dict(state.transform_states),
        "clock": lambda: state.clock.state_dict(),
        "seed": lambda: state.seed,
    }
    return {section: tree[section]() for section in layout.sections_of(only)}


def _per_rank_buffers(state: TrainState, only: tuple[str, ...]) -> dict[str, Tensor]:
    local = state.spec.buffers == "local" and "buffers" in layout.sections_of(only)
    return buffers_by_fqn(state.model, persistent_only=True) if local else {}


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _is_stateful(thing: Any) -> bool:
    return isinstance(thing, Stateful) and not isinstance(thing, type)


def stateful_extra(extra: Mapping[str, Any]) -> dict[str, Stateful]:
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


def content_hashes(contents: CheckpointContents) -> dict[str, str]:
    """A digest of each part that must be the same on all ranks: values; of tensors names, shapes and dtypes, not data."""
    return {
        path: hashlib.sha256(strict_json.canonical_json(values)).hexdigest() for path, values in _iter_parts(contents.shared)
    }


def check_equal_on_all_ranks(hashes_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse contents whose shared part differs between ranks: one rank's values would be saved for all.

    Args:
        hashes_by_rank: the fingerprints of each rank.

    Raises:
        ConfigError: on all ranks alike, with the first part that differs.
    """
    for rank, theirs in enumerate(hashes_by_rank):
        differing = [path for path in {**hashes_by_rank[0], **theirs} if hashes_by_rank[0].get(path) != theirs.get(path)]
        if differing:
            raise ConfigError(
                f"save_sharded: {differing[0]} differs between rank 0 and rank {rank}; what a checkpoint holds must be the "
                "same on all ranks, or it could not be resumed at another world size (a tensor that differs is a DTensor)"
            )


def _iter_parts(shared: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The sections, those with several contributors by contributor. Dicts in the encoded form of ``plain``."""
    for section, values in shared.items():
        here = tree_json.join_key(path, section)
        if section == layout.STATES:
            for name, sections in values.items():
                yield from _iter_parts(sections, tree_json.join_key(here, name))
        elif section in ("slices", layout.EXTRA) and tree_json.TAG not in values:
            yield from ((tree_json.join_key(here, name), part) for name, part in values.items())
        else:
            yield here, values


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let Python not look for garbage inside. For the index of a large model that would take longer than all else.

    Mutates: the collector of this process, until the block is left.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
