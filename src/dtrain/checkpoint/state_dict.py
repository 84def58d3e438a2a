"""Collect the contents of a checkpoint from a ``TrainState``: plain values and named tensors.

Sections, which are also the prefixes of tensor keys::

    params/<name>                       model parameters, each tied parameter once
    buffers/<name>                      persistent buffers that are equal on all ranks
    modules                             names of modules' extra states, and True if all ranks have equal extra states
    optimizer/state/<name>/<key>        per parameter name
    optimizer/global/<key>/...          state that belongs to no parameter: its key in the optimizer's state is a text
    optimizer/groups                    hyperparameters, with "params" as names
    transforms/<transform>/...  clock  seed
    objects/<key>/...                   loader and stateful objects of the states, equal on all ranks, without sharded tensors
    extra/<name>/...                    objects of the caller, the same

Sections of each rank::

    rng/...                             random state
    buffers/<name>                      persistent buffers, if each rank has its own (``buffers="own"``)
    modules/<name>/...                  extra state of modules (``get_extra_state``)
    objects/<key>/..., extra/<name>/... objects marked by ``per_rank``, and loaders of other libraries

Several named states are stored below ``states/<name>/``; the keys of ``objects``, ``extra`` and ``rng`` do not change.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import as_bytes
from dtrain.checkpoint.extra import check_plain_tensors, saved_entries, short_key, split_entries
from dtrain.checkpoint.layout import SaveScope
from dtrain.checkpoint.mismatch import check_own_memory
from dtrain.checkpoint.model_state import check_state_dicts, extra_state_modules, get_extra_states, optimizer_section
from dtrain.dist.dtensor import to_local
from dtrain.dist.incident_protocol import format_ranks
from dtrain.dist.rng import rng_state
from dtrain.errors import ConfigError
from dtrain.shard.buffers import persistent_buffers
from dtrain.state import TrainState
from dtrain.step.optimizer_state import stored_options
from dtrain.step.step_clock import check_all_params

# Sections whose tensors a load writes into tensors of the state.
_FILLED_IN_PLACE = ("params", "buffers", "transforms")
# A write through ``.data`` and a batch norm do not change the version counter of a tensor, but most of its elements.
_SAMPLED_ELEMENTS = 64


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


def content_key(states: States, scope: SaveScope, dtype: torch.dtype | None, entry_digests: Sequence[str]) -> object:
    """Return a key of the contents of a save. Two saves with equal keys have the same contents.

    A step changes the parameters. Between two saves of one step the loop may change objects of the run, and parameters,
    buffers or the optimizer, which the run context counts.

    Args:
        states: states by name.
        scope: scope of the save.
        dtype: dtype of the stored parameters.
        entry_digests: ``digest_entries`` of each rank.
    """
    numbers = tuple((name, state.step, state._run_context.changes) for name, state in states.items())
    return (numbers, scope, dtype, tuple(entry_digests))


class StateMark(NamedTuple):
    """Mark that shows a later change of a state's tensors or options.

    Args:
        facts: the step, plain values, and the version counter and the address of each tensor.
        samples: some bytes of each parameter and buffer, by device: batch norm, and writes to ``.data``, count no version.
    """

    facts: list[object]
    samples: dict[torch.device, Tensor]


def mark_state(state: TrainState) -> StateMark:
    """Return the mark of a state: parameters, persistent buffers, the optimizer's state and options, and transform states.

    The caller must disable autograd. Host sync: none.
    """
    facts: list[object] = [state.step]
    samples: dict[torch.device, list[Tensor]] = {}
    buffers = [persistent_buffers(state.model, state.spec, own=own) for own in (False, True)]
    options = [stored_options(group) for group in state.optimizer.param_groups]
    weights = tree_leaves([dict(state.params), buffers])
    others = tree_leaves([*state.optimizer.state.values(), options, dict(state.transform_states)])
    for number, leaf in enumerate([*weights, *others]):
        if not isinstance(leaf, Tensor):
            facts.append(repr(leaf))
            continue
        local = to_local(leaf)
        facts += [tensor._version for tensor in (leaf, local) if not tensor.is_inference()]
        if tree_json.storage_problem(local) is None:
            facts.append(local.data_ptr())
            if number < len(weights):
                samples.setdefault(local.device, []).append(_sample(local))
    return StateMark(facts, {device: torch.cat(parts) for device, parts in samples.items()})


def _sample(tensor: Tensor) -> Tensor:
    """Return the bytes of elements that are spread evenly over the memory of a plain tensor."""
    in_storage = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    count = max(0, min(tensor.numel(), in_storage))
    spread = tensor.detach().as_strided((min(count, _SAMPLED_ELEMENTS),), (max(1, count // _SAMPLED_ELEMENTS),))
    return spread.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def has_changed(state: TrainState, mark: StateMark) -> bool:
    """Return True if ``mark`` of ``state`` differs from its mark at the last save or load.

    Host sync: one per device, if the last save or load was of the same step.
    """
    last: StateMark | None = state._run_context.mark
    return (
        last is None
        or last.facts != mark.facts
        or not all(torch.equal(sample, last.samples[device]) for device, sample in mark.samples.items())
    )


def collect_contents(
    states: States, extra: Mapping[str, Any], *, scope: SaveScope = "all", dtype: torch.dtype | None = None
) -> CheckpointContents:
    """Collect the contents of a checkpoint of ``states``. Tensors are not copied unless ``dtype`` changes their dtype.

    Args:
        states: states by name.
        extra: objects of the caller; ignored unless ``scope`` is "all".
        scope: scope of the contents; see ``layout.SECTIONS``.
        dtype: dtype of floating-point parameters.

    Raises:
        ConfigError: a value that is neither a tensor nor plain data, named by its path; a name in ``extra`` that is not a
            string.
        StepError: the model or the optimizer got a parameter after ``step.init``.
    """
    entries = saved_entries(states, extra, "save_sharded")
    sections = layout.SECTIONS[scope]
    shared: dict[str, Any] = {}
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    per_rank: dict[str, Tensor] = {}

    def encode(tree: Any, path: str, into: dict[str, Tensor], *, advice: str = "", is_filled: bool = False) -> Any:
        encoded, tensors_of_tree = tree_json.encode(tree, path)
        if is_filled:
            check_own_memory(tensors_of_tree, "save_sharded")
        if advice:
            check_plain_tensors(tensors_of_tree, advice)
        into.update(tensors_of_tree)
        return encoded

    for name, state in states.items():
        prefix = tree_json.state_prefix(name)
        section_values = shared.setdefault(layout.STATES, {}).setdefault(name, {}) if name else shared
        for section, tree in _sections(state, scope, dtype).items():
            section_values[section] = encode(tree, f"{prefix}{section}", tensors, is_filled=section in _FILLED_IN_PLACE)
        rank_values = values.setdefault(layout.STATES, {}).setdefault(name, {}) if name else values
        buffers = persistent_buffers(state.model, state.spec, own=True) if "buffers" in sections else {}
        rank_values["buffers"] = encode(buffers, f"{prefix}buffers", per_rank, is_filled=True)
        extra_states = get_extra_states(state.model) if "modules" in sections else {}
        advice = "Return its local part from get_extra_state."
        rank_values["modules"] = encode(extra_states, f"{prefix}modules", per_rank, advice=advice)
    values["rng"] = encode(rng_state() if scope == "all" else {}, "rng", per_rank)
    trees = split_entries(entries if scope == "all" else {})
    advice = "Store sharded tensors in a transform's state."
    for section in (layout.EXTRA, layout.OBJECTS):
        values[section] = encode(trees.of_rank[section], section, per_rank, advice=advice)
        if scope == "all":
            shared[section] = encode(trees.of_run[section], section, tensors, advice=advice)
    frozen = frozenset(
        tree_json.join_key(f"{tree_json.state_prefix(name)}params", key)
        for name, state in states.items()
        for key, param in state.params.items()
        if not param.requires_grad
    )
    return CheckpointContents(shared=shared, tensors=tensors, values=values, per_rank=per_rank, frozen=frozen)


def _sections(state: TrainState, scope: SaveScope, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the stored trees of a state that are equal on all ranks, by section."""
    check_all_params(state, "save_sharded")
    params = {name: param for name, param in state.params.items() if scope != "trainable" or param.requires_grad}
    if "modules" in layout.SECTIONS[scope]:
        check_state_dicts(state.model)
    tree: dict[str, Callable[[], Any]] = {
        "params": lambda: {
            name: param.detach().to(dtype) if dtype is not None and param.is_floating_point() else param
            for name, param in params.items()
        },
        "buffers": lambda: persistent_buffers(state.model, state.spec, own=False),
        # The exchange of digests may find that the ranks differ.
        "modules": lambda: {"names": [*extra_state_modules(state.model)], "equal": True},
        "optimizer": lambda: optimizer_section(state),
        "transforms": lambda: dict(state.transform_states),
        "clock": lambda: state.clock.state_dict(),
        "seed": lambda: state.seed,
    }
    return {section: tree[section]() for section in layout.SECTIONS[scope]}


def content_hashes(contents: CheckpointContents) -> dict[str, str]:
    """Hash each part that must be equal on all ranks: values, and the names, shapes and dtypes of tensors.

    The data of tensors in ``extra`` and ``objects`` are hashed as well.
    Host sync: one per such tensor that is not on the CPU.
    """
    by_entry: dict[str, dict[str, Tensor]] = {}
    for key, tensor in contents.tensors.items():
        if key.startswith((f"{layout.EXTRA}/", f"{layout.OBJECTS}/")):
            by_entry.setdefault("/".join(key.split("/", 2)[:2]), {})[key] = tensor
    return {path: _hash(values, by_entry.get(path, {})) for path, values in _iter_parts(contents.shared)}


def rank_hashes(contents: CheckpointContents) -> dict[str, str]:
    """Hash the values that may differ between ranks by path: extra states of modules."""
    states = contents.values.get(layout.STATES)
    by_path = {
        f"{tree_json.state_prefix(name)}modules": values["modules"]
        for name, values in ({"": contents.values} if states is None else states).items()
    }
    return {path: _hash(values, _below(contents.per_rank, path)) for path, values in by_path.items()}


def digest_entries(contents: CheckpointContents, hashes: Mapping[str, str]) -> str:
    """Return a digest of the objects, of ``extra`` and of modules' extra states as a load on this rank would get them.

    Args:
        contents: contents of a save.
        hashes: their ``content_hashes``.
    """
    digests = rank_hashes(contents)
    for section in (layout.EXTRA, layout.OBJECTS):
        own = contents.values[section]
        for path, value in _iter_parts({section: contents.shared.get(section, {})}):
            name = tree_json.unescape_key(path.partition("/")[2])
            if path == section:
                # A name that begins with "$" makes the section one part.
                digests |= {path: hashes[path], f"{path}/": _hash(own, _below(contents.per_rank, path))}
            elif name in own:
                digests[path] = _hash(own[name], _below(contents.per_rank, path))
            elif type(value) is dict and value.get(tree_json.TAG) == "same":
                digests[path] = digests[tree_json.join_key(section, value["key"])]
            else:
                digests[path] = hashes[path]
    return _digest_of_hashes(digests)


def digest_stored_entries(entries: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the ``digest_entries`` of values that a load has read. Call before the load gives them to their objects.

    Args:
        entries: values of entries, by key.
        modules: extra states of modules, by the names of the states and the names of the extra states.
    """
    paths = {f"{tree_json.state_prefix(name)}modules": states for name, states in modules.items()}
    digests = {path: _hash(*tree_json.encode(states, path)) for path, states in paths.items()}
    for key, value in entries.items():
        path = key if key.startswith(f"{layout.EXTRA}/") else tree_json.join_key(layout.OBJECTS, key)
        digests[path] = _hash(*tree_json.encode(value, path))
    return _digest_of_hashes(digests)


def _digest_of_hashes(hashes: Mapping[str, str]) -> str:
    # 128 bits tell contents apart, and the ranks exchange the digest.
    return hashlib.sha256(layout.canonical_json(sorted(hashes.items()))).hexdigest()[:32]


def _below(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Return the tensors at ``path`` and below."""
    return {key: tensor for key, tensor in tensors.items() if key == path or key.startswith(f"{path}/")}


def _hash(values: Any, tensors: Mapping[str, Tensor]) -> str:
    """Hash encoded values and the data of their tensors."""
    sha = hashlib.sha256(layout.canonical_json(values))
    for key in sorted(tensors):
        sha.update(xxhash.xxh3_128_digest(as_bytes(tensors[key])))
    return sha.hexdigest()


def mark_unequal_values(shared: dict[str, Any], hashes_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Record in the values of the run which extra states of modules differ between ranks.

    Mutates: ``shared``.
    """
    unequal = {path for path in hashes_by_rank[0] if len({hashes.get(path) for hashes in hashes_by_rank}) > 1}
    for name, values in shared.get(layout.STATES, {"": shared}).items():
        if "modules" in values:
            values["modules"]["equal"] = f"{tree_json.state_prefix(name)}modules" not in unequal


def check_equal_on_all_ranks(hashes_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise if the shared contents differ between ranks, because only one rank's values are saved.

    Args:
        hashes_by_rank: content hashes of each rank.

    Raises:
        ConfigError: on all ranks, with the first part that differs.
    """
    first = hashes_by_rank[0]
    for theirs in hashes_by_rank:
        differing = next((path for path in {**first, **theirs} if first.get(path) != theirs.get(path)), None)
        if differing is None:
            continue
        ranks = [rank for rank, hashes in enumerate(hashes_by_rank) if hashes.get(differing) != first.get(differing)]
        section, _, name = differing.partition("/")
        name = tree_json.unescape_key(name)
        if section == layout.OBJECTS:
            differing = name
            section, _, name = short_key(name).partition("/")
        mark = "a DTensor"
        if section in (layout.EXTRA, "stateful"):
            mark = f'{section}={{"{name}": dt.checkpoint.per_rank(...)}} saves one value per rank'
        raise ConfigError(
            f"save_sharded: {differing} must be equal on all ranks, but ranks {format_ranks(ranks)} differ from rank 0. "
            f"Make it equal on all ranks, or {mark}."
        )


def _iter_parts(shared: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the sections by path; sections with several contributors are split by contributor."""
    for section, values in shared.items():
        here = tree_json.join_key(path, section)
        if section == layout.STATES:
            for name, sections in values.items():
                yield from _iter_parts(sections, tree_json.join_key(here, name))
        elif section in ("transforms", layout.EXTRA, layout.OBJECTS) and tree_json.TAG not in values:
            yield from ((tree_json.join_key(here, name), content) for name, content in values.items())
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
