"""Collect the contents of a checkpoint from a ``TrainState``: plain values and named tensors.

Sections, which are also the prefixes of tensor keys::

    params/<name>                       model parameters, each tied parameter once
    buffers/<name>                      persistent buffers that are equal on all ranks
    optimizer/state/<name>/<key>        per parameter name
    optimizer/global/<key>/...          state that belongs to no parameter: its key in the optimizer's state is a text
    optimizer/groups                    hyperparameters, with "params" as names
    transforms/<transform>/...  clock  seed
    extra/<name>/...                    objects of the caller, equal on all ranks, without sharded tensors

Sections of each rank::

    rng/...                             random state
    buffers/<name>                      persistent buffers, if each rank has its own (``buffers="local"``)

Several named states are stored below ``states/<name>/``; the keys of ``extra`` and ``rng`` do not change.
"""

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
from dtrain.checkpoint.layout import SaveScope
from dtrain.dist.rng import rng_state
from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn
from dtrain.state import TrainState
from dtrain.step.optimizer_state import stored_options


@runtime_checkable
class Stateful(Protocol):
    """Protocol of an object that returns its state as plain data and tensors, and loads this state again."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointContents:
    """Contents of a checkpoint, as seen by one rank.

    Args:
        shared: encoded values of the run by section, equal on all ranks.
        tensors: tensors of the run by key: DTensors, and plain tensors that are equal on all ranks.
        values: encoded values of this rank.
        per_rank: tensors of this rank by key.
        frozen: keys of parameters without ``requires_grad``.
    """

    shared: dict[str, Any]
    tensors: dict[str, Tensor]
    values: Any
    per_rank: dict[str, Tensor]
    frozen: frozenset[str]


States = Mapping[str, TrainState]
"""Named states of one checkpoint. A single unnamed state has the name ``""``."""


def content_key(states: States, what: SaveScope, cast: torch.dtype | None) -> object:
    """Return a key of the contents of a save. Two saves with equal keys have the same contents."""
    return (tuple((name, state.step) for name, state in states.items()), what, cast)


def collect_contents(
    states: States, extra: Mapping[str, Any], *, what: SaveScope = "all", cast: torch.dtype | None = None
) -> CheckpointContents:
    """Collect the contents of a checkpoint of ``states``. Tensors are not copied unless ``cast`` changes their dtype.

    Args:
        states: states by name.
        extra: objects of the run; ignored unless ``what`` is "all".
        what: scope of the contents; see ``layout.SECTIONS``.
        cast: dtype of floating-point parameters.

    Raises:
        ConfigError: a value that is neither a tensor nor plain data, named by its path; a name in ``extra`` that is not a
            string.
    """
    bad = next((name for name in extra if type(name) is not str), None)
    if bad is not None:
        raise ConfigError(
            f"save_sharded: extra must have string names, got {type(bad).__name__} {bad!r}. "
            f"Use texts as keys, such as extra={{'loader': loader}}."
        )
    shared: dict[str, Any] = {}
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    per_rank: dict[str, Tensor] = {}
    for name, state in states.items():
        path = tree_json.join_key(layout.STATES, name) if name else ""
        section_values = shared.setdefault(layout.STATES, {}).setdefault(name, {}) if name else shared
        for section, tree in _sections(state, what, cast).items():
            section_values[section], found = tree_json.encode(tree, f"{path}/{section}".lstrip("/"))
            tensors.update(found)
        rank_values = values.setdefault(layout.STATES, {}).setdefault(name, {}) if name else values
        buffers = _per_rank_buffers(state, what)
        rank_values["buffers"], found = tree_json.encode(buffers, f"{path}/buffers".lstrip("/"))
        per_rank.update(found)
    if what == "all":
        plain_extra = {name: value.state_dict() if _is_stateful(value) else value for name, value in extra.items()}
        shared[layout.EXTRA], found = tree_json.encode(plain_extra, layout.EXTRA)
        sharded = next((key for key, tensor in found.items() if is_dtensor(tensor)), None)
        if sharded is not None:
            raise ConfigError(
                f"save_sharded: {sharded} must be a plain tensor, got a DTensor. Store sharded tensors in a transform's state."
            )
        tensors.update(found)
    values["rng"], found = tree_json.encode(rng_state() if what == "all" else {}, "rng")
    frozen = frozenset(
        tree_json.join_key(f"{tree_json.join_key(layout.STATES, name)}/params" if name else "params", key)
        for name, state in states.items()
        for key, param in state.params.items()
        if not param.requires_grad
    )
    return CheckpointContents(shared=shared, tensors=tensors, values=values, per_rank={**per_rank, **found}, frozen=frozen)


def _sections(state: TrainState, what: SaveScope, cast: torch.dtype | None) -> dict[str, Any]:
    """Return the stored trees of a state that are equal on all ranks, by section."""
    params = {name: param for name, param in state.params.items() if what != "trainable" or param.requires_grad}
    tree: dict[str, Callable[[], Any]] = {
        "params": lambda: {name: _cast(param, cast) for name, param in params.items()},
        "buffers": lambda: {} if state.spec.buffers == "local" else buffers_by_fqn(state.model, persistent_only=True),
        "optimizer": lambda: {
            "state": _optimizer_state(state),
            "global": _global_optimizer_state(state),
            "groups": optimizer_groups(state),
        },
        "transforms": lambda: dict(state.transform_states),
        "clock": lambda: state.clock.state_dict(),
        "seed": lambda: state.seed,
    }
    return {section: tree[section]() for section in layout.SECTIONS[what]}


def _per_rank_buffers(state: TrainState, what: SaveScope) -> dict[str, Tensor]:
    local = state.spec.buffers == "local" and "buffers" in layout.SECTIONS[what]
    return buffers_by_fqn(state.model, persistent_only=True) if local else {}


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


def stateful_extra(extra: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the objects in ``extra`` that have ``state_dict`` and ``load_state_dict``."""
    return {name: cast(Stateful, value) for name, value in extra.items() if _is_stateful(value)}


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the order of the parameters."""
    names = {id(param): name for name, param in state.params.items()}
    by_name = {}
    for param, content in state.optimizer.state.items():
        if isinstance(param, str):
            continue
        if id(param) not in names:
            shown = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            raise ConfigError(
                f"save_sharded: optimizer state must belong to parameters of the model, got state for {shown}. "
                "Build the optimizer from model.parameters() after shard_model."
            )
        by_name[names[id(param)]] = content
    return {name: dict(by_name[name]) for name in state.params if name in by_name}


def _global_optimizer_state(state: TrainState) -> dict[str, Any]:
    """Return the optimizer's state that belongs to no parameter: its keys are texts."""
    keys: dict[Any, Any] = state.optimizer.state
    return {key: content for key, content in keys.items() if isinstance(key, str)}


ADDED_OPTIONS = "added_options"
"""Key, in the stored hyperparameters of a group, of the names that the optimizer has added since the beginning of the run."""


def optimizer_groups(state: TrainState) -> list[dict[str, Any]]:
    """Return the optimizer's hyperparameters by group, with the names of the group's parameters under ``params``."""
    names = {id(param): name for name, param in state.params.items()}
    at_the_beginning = state.run_context.group_options
    groups = []
    for at, group in enumerate(state.optimizer.param_groups):
        options = stored_options(group)
        known = at_the_beginning[at] if at < len(at_the_beginning) else options
        added = sorted(options.keys() - known)
        options["params"] = [names[id(param)] for param in group["params"]]
        groups.append({**options, ADDED_OPTIONS: added} if added else options)
    return groups


def content_hashes(contents: CheckpointContents) -> dict[str, str]:
    """Hash each part that must be equal on all ranks: values, and the names, shapes and dtypes of tensors, not their data."""
    return {
        path: hashlib.sha256(strict_json.canonical_json(values)).hexdigest() for path, values in _iter_parts(contents.shared)
    }


def check_equal_on_all_ranks(hashes_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise if the shared contents differ between ranks, because only one rank's values are saved.

    Args:
        hashes_by_rank: content hashes of each rank.

    Raises:
        ConfigError: on all ranks, with the first part that differs.
    """
    for rank, theirs in enumerate(hashes_by_rank):
        differing = [path for path in {**hashes_by_rank[0], **theirs} if hashes_by_rank[0].get(path) != theirs.get(path)]
        if differing:
            raise ConfigError(
                f"save_sharded: {differing[0]} must be equal on all ranks, but differs between rank 0 and rank {rank}. "
                "Make it equal on all ranks, or a DTensor."
            )


def _iter_parts(shared: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the sections by path; sections with several contributors are split by contributor."""
    for section, values in shared.items():
        here = tree_json.join_key(path, section)
        if section == layout.STATES:
            for name, sections in values.items():
                yield from _iter_parts(sections, tree_json.join_key(here, name))
        elif section in ("transforms", layout.EXTRA) and tree_json.TAG not in values:
            yield from ((tree_json.join_key(here, name), part) for name, part in values.items())
        else:
            yield here, values


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in the block. Its passes over the index of a large model take longer than the work.

    Mutates: the collector of this process, until the block is left.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
