"""Check the state of an optimizer: a checkpoint can hold it, and all ranks that hold a tensor hold equal values.

A checkpoint stores one copy of what is equal on all ranks. Without the check, the state of an optimizer that keeps a part on
each rank would be saved as the part of rank 0. The check runs in the first update and at each save. The numbers among the
options, such as the learning rate, are compared in each step.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from dtrain.arguments import format_error_line, warn
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, raise_if_any_failed
from dtrain.dist.dtensor import is_dtensor, shard_box
from dtrain.dist.incident_protocol import format_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, DesyncError, DtrainError
from dtrain.memory.device_memory import is_out_of_memory
from dtrain.shard.replica_check import ReplicatedEntry, hash_tensors, replicated_entries, wraps_tensors
from dtrain.state import TrainState

# These options choose the implementation of a step, not its result. They may differ after a resume on another machine.
MACHINE_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_STORED = MACHINE_OPTIONS | {"params", "param_names"}
_PLAIN = (bool, int, str, type(None))
_DICTS = (dict, OrderedDict, Counter)
_BITS = 2**52 - 1  # a float64 holds these numbers exactly
# First word of the line that ranks compare in each step.
_OPTIONS = "options"
_NUMBERS = frozenset({float, int, bool, np.float64, np.float32})


def stored_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that checkpoints hold: not the parameters, options of the machine, and pieces of code.

    A dtype, a device, a class or a function is code of the script: a resumed run keeps its own.
    """
    return {
        key: value
        for key, value in group.items()
        if key not in _NOT_STORED
        and not isinstance(value, torch.dtype | torch.device | type)
        and (not callable(value) or isinstance(value, nn.Module | Tensor))
    }


def describe_options(state: TrainState) -> str:
    """Return a line that is equal on all ranks if the numbers among the optimizer's options are, such as ``lr`` and ``betas``.

    The line is constant while replicas train apart. Host sync: none; options that are tensors are compared in the first update
    and by saves.
    """
    if state.spec.replica_info is not None:
        return f"{_OPTIONS} apart -"
    numbers = [
        number
        for group in state.optimizer.param_groups
        for key, value in group.items()
        if key not in _NOT_STORED
        for number in (value if type(value) is tuple else (value,))
        if type(number) in _NUMBERS
    ]
    return f"{_OPTIONS} {xxhash.xxh3_64_hexdigest(array('d', numbers).tobytes())} -"


def raise_if_options_differ(state: TrainState, facts: Sequence[Sequence[str]], caller: str) -> None:
    """Refuse options that differ between ranks, because each rank updates its part of a parameter, or its replica.

    Args:
        state: state of the step.
        facts: facts of each rank, the last of which is ``describe_options``.
        caller: function named in the error.

    Collective: one exchange of JSON if options differ.

    Raises:
        DesyncError: on all ranks, the first option that differs.
    """
    if len({lines[-1] for lines in facts}) < 2:
        return
    groups = {f"group {index}": stored_options(group) for index, group in enumerate(state.optimizer.param_groups)}
    mine: Any = {f"{key!r} of {owner}": repr(value) for owner, options in groups.items() for key, value in options.items()}
    gathered: Any = all_gather_json(mine, caller=caller)
    for path in dict.fromkeys(path for options in gathered for path in options):
        by_rank = {rank: options.get(path, "no value") for rank, options in enumerate(gathered)}
        if len(set(by_rank.values())) > 1:
            _raise_option(path, by_rank, type(state.optimizer).__name__, caller)


def _raise_option(path: str, by_rank: Mapping[int, str], optimizer: str, caller: str) -> NoReturn:
    ranks: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        ranks.setdefault(text, []).append(rank)
    values = " and ".join(f"{text} on ranks {format_ranks(same)}" for text, same in list(ranks.items())[:3])
    raise DesyncError(
        f"{caller}: the option {path} of {optimizer} must be equal on all ranks, got {values}. Set it from values that all "
        "ranks share: a scheduler such as ReduceLROnPlateau from dt.reduce_metrics(metrics)['loss'], not from this rank's loss."
    )


def state_by_owner(state: TrainState) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state and options by owner: parameters by name, other keys, and groups, in an order of all ranks.

    Raises:
        ConfigError: a key that is neither a parameter of the model nor a text, or content that is not a dict.
    """
    kind = type(state.optimizer).__name__
    names = {id(param): name for name, param in state.params.items()}
    by_owner: dict[str, dict[str, Any]] = {}
    for key, content in state.optimizer.state.items():
        name = key if isinstance(key, str) else names.get(id(key))
        if name is None:
            shown = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ConfigError(
                f"{kind}: optimizer state must belong to a parameter of the model or to a text, got state for {shown}. Use the "
                "parameter as its key, and build the optimizer from model.parameters() after shard_model."
            )
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{kind}: the state of {name} must be a dict, got {type(content).__name__}. Use a dict of tensors."
            )
        by_owner[f"{name} of the optimizer" if isinstance(key, str) else name] = dict(content)
    groups = {f"group {index}": stored_options(group) for index, group in enumerate(state.optimizer.param_groups)}
    return {**dict(sorted(by_owner.items())), **groups}


def check_storable(state: TrainState) -> None:
    """Refuse state that a checkpoint cannot hold.

    Raises:
        ConfigError: the first such value, with the name of the parameter.
    """
    for owner, content in state_by_owner(state).items():
        for key, value in _leaves(content):
            problem = _problem(value)
            if problem is not None:
                raise ConfigError(
                    f"{type(state.optimizer).__name__}: state {key!r} of {owner} must {problem}. Store tensors (of partial "
                    "sums the full_tensor()) and plain data, and keep other objects in attributes of the optimizer."
                )


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of nested dicts, lists and tuples by path."""
    if type(tree) in _DICTS and all(type(key) in (str, int) for key in tree):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path, tree


def _problem(value: Any) -> str | None:
    """Return the reason why a checkpoint cannot hold a value; None if it can."""
    if not isinstance(value, Tensor):
        if type(value) in _PLAIN or isinstance(value, float):
            return None
        kind = "with other keys than texts and integers" if type(value) in _DICTS else ""
        return f"be a tensor or plain data, got {type(value).__qualname__} {kind}".rstrip()
    if wraps_tensors(value):
        inner = value._local_tensor if is_dtensor(value) else value
        return f"be a plain tensor, got {type(inner).__name__}, which wraps other tensors"
    if is_dtensor(value):
        try:
            shard_box(value)
        except ConfigError:
            return f"hold values, not partial sums, got placements {value.placements}"
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return f"be a dense tensor with data, got layout {value.layout} and dtype {value.dtype}"
    # A simulated step has fake tensors in place of all tensors.
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(value, FakeTensor):
        return f"be a plain tensor, got {type(value).__name__}, which wraps other tensors"
    return None


_READS = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__complex__),
        *(Tensor.equal, Tensor.allclose, Tensor.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero),
    }
)
# The values of these results are new. Each rank may draw its own random numbers, for example to round.
_NEW_VALUES = ("new_", "rand", "normal", "bernoulli", "multinomial", "poisson")


class _NumberLog(TorchFunctionMode):
    """Context that records the numbers that Python reads from parameters and gradients, and from what is computed from them.

    Other numbers may differ between ranks, such as random seeds. A mode of dispatch would stop torch.compile for the whole run.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.numbers: list[str] = []
        # weak references, so that the update needs no more memory
        self._computed = WeakTensorKeyDictionary()
        for param in params:
            self._add(param)
            if param.grad is not None:
                self._add(param.grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling() or not any(map(self._is_computed, tree_leaves((args, kwargs)))):
            return result
        name = getattr(func, "__name__", "")
        if func in _READS:
            text = repr(result)
            self.numbers.append(text if len(text) <= 100 else f"{text[:60]}... (hash {derive_seed(text)})")
        elif not name.startswith(_NEW_VALUES) and not name.endswith("_like"):
            # An assignment to a part returns nothing.
            for leaf in tree_leaves((result, args[0] if name == "__setitem__" else None)):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
        return result

    def _is_computed(self, value: object) -> bool:
        return isinstance(value, Tensor) and (is_dtensor(value) or value in self._computed)

    def _add(self, tensor: Tensor) -> None:
        self._computed[tensor] = True
        if is_dtensor(tensor):
            self._computed[tensor._local_tensor] = True


def check_update(state: TrainState, update: Callable[[], object], *, caller: str) -> None:
    """Run the first update. The ranks agree about an error, about the numbers read from parameters, and about the state.

    State that no checkpoint can hold is reported by a warning on rank 0, and is not compared.
    Collective: on several ranks, two exchanges on the control channel; a third if the numbers or the state differ.
    Host sync: one for the gradients that several ranks hold, and one for the state.

    Raises:
        ConfigError: an optimizer that fails on sharded parameters.
        DesyncError: on all ranks, numbers or state that differ between ranks. If the gradients differed before, the error names
            the gradient.
        PeerError: another rank failed.
    """
    state._run_context.optimizer_checked = True
    together = get_dist_info().world_size > 1 and state.spec.mesh is not None and state.spec.replica_info is None
    log = _NumberLog(state.params.values()) if together else None
    grads = _hash_grads(state) if together else []
    error: Exception | None = None
    try:
        with log or nullcontext():
            update()
    except Exception as failure:  # noqa: BLE001 - raised below, on all ranks
        error = _explain(failure, state, caller)
    if log is not None:
        raise_if_any_failed(error, caller=caller)
    elif error is not None:
        raise error
    storable = _warn_if_not_storable(state)
    if log is None:
        return
    texts, entries = (_describe_leaves([state]), _entries([state])) if storable else ([], [])
    hashes = [_hash_of(log.numbers), _hash_of([f"{path} {text}" for path, text in texts])]
    rows = all_gather_numbers([*hashes, *_digest(_with_hashes(entries, state.device)), 0, *_digest(grads)], caller=caller)
    numbers_differ = len({row[0] for row in rows}) > 1
    of_state, of_grads = [row[1:5] for row in rows], [row[5:] for row in rows]
    # An optimizer may make different gradients equal. If not, its state is not the cause.
    if (numbers_differ or _differ(of_state)) and _differ(of_grads):
        _raise_gradient(grads, caller)
    if numbers_differ:
        _raise_first_number(log.numbers, type(state.optimizer).__name__, caller)
    _raise_if_different([state], of_state, texts, entries, caller)


def _hash_grads(state: TrainState) -> list[ReplicatedEntry]:
    """Return the gradients that several ranks hold, with hashes, before the update changes them."""
    grads = {name: grad for name, param in state.params.items() if (grad := param.grad) is not None}
    dense = {name: grad for name, grad in grads.items() if grad.layout is torch.strided}
    return _with_hashes(list(replicated_entries(dense)), state.device)


def _raise_gradient(hashed: Sequence[ReplicatedEntry], caller: str) -> None:
    """Raise with the first gradient that differs. Collective: one exchange of JSON."""
    difference = _find_difference([[e.name, e.shard_key, str(e.hash)] for e in hashed], caller)
    if difference is not None:
        raise DesyncError(
            f"{caller}: the gradient of {difference.path!r} must be equal on all ranks before the update, but rank "
            f"{difference.rank} has another gradient than rank {difference.first}. In a transform, draw random numbers with "
            "dt.step.random_like, and compute with nothing that differs between ranks."
        )


def _warn_if_not_storable(state: TrainState) -> bool:
    """Return False, with a warning on rank 0, if a checkpoint cannot hold the state. The run may need no checkpoint."""
    try:
        check_storable(state)
    except ConfigError as problem:
        if get_dist_info().rank == 0:
            warn(f"{problem} The run trains, but save_sharded refuses this state.")
        return False
    return True


def _raise_first_number(mine: Sequence[str], name: str, caller: str) -> None:
    """Raise with the first number that differs. Collective: one exchange of JSON."""
    gathered: Any = all_gather_json(list(mine), caller=caller)
    for number, read in enumerate(zip_longest(*gathered, fillvalue="nothing"), start=1):
        if (rank := _first_other(read)) is not None:
            raise DesyncError(
                f"{caller}: {name}.step must read equal numbers on all ranks, but rank {rank} has read {read[rank]} and rank 0 "
                f"{read[0]} (number {number} of the step). The norm of a shard is not the norm of the parameter. Compute with "
                "the DTensor, not with its to_local()."
            )


def check_saved_state(states: Sequence[TrainState], *, caller: str) -> None:
    """Raise on all ranks if optimizer state that several ranks hold differs between these ranks, because one copy is saved.

    Collective: one exchange on the control channel; a second if the state differs.
    Host sync: one for state on a device that several ranks hold.

    Raises:
        DesyncError: on all ranks, the first part that differs.
    """
    if get_dist_info().world_size == 1:
        return
    texts = _describe_leaves(states)
    entries = _entries(states)
    row = [_hash_of([f"{path} {text}" for path, text in texts]), *_digest(_with_hashes(entries, states[0].device))]
    _raise_if_different(states, all_gather_numbers(row, caller=caller), texts, entries, caller)


def _explain(failure: Exception, state: TrainState, caller: str) -> Exception:
    """Return an error that says that the optimizer does not run on sharded parameters, if that may be the reason."""
    sharded = any(map(is_dtensor, state.params.values()))
    if not sharded or isinstance(failure, DtrainError | OSError | torch.distributed.DistError) or is_out_of_memory(failure):
        return failure
    error = ConfigError(
        f"{caller}: the optimizer must run on sharded parameters (DTensors), but {type(state.optimizer).__name__}.step failed: "
        f"{format_error_line(failure)[:200]}. Build it on dt.optim.MatrixOptimizer if it needs whole matrices, set "
        "updates_elementwise = True on a class that updates each element by itself, or use strategy='replicate'."
    )
    error.__cause__ = failure
    return error


def _rows(states: Sequence[TrainState]) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of all states, with a path for messages."""
    for number, state in enumerate(states):
        for owner, content in state_by_owner(state).items():
            suffix = f"{owner} of state {number}" if len(states) > 1 else owner
            yield from ((f"{key!r} of {suffix}", value) for key, value in _leaves(content))


def _describe_leaves(states: Sequence[TrainState]) -> list[tuple[str, str]]:
    """Return the path and a text of each leaf, equal on all ranks: plain data, and dtype, shape and placement of tensors."""
    rows = []
    for path, value in _rows(states):
        placement = value.placements if isinstance(value, Tensor) and is_dtensor(value) else ""
        rows.append((path, f"{value.dtype} {tuple(value.shape)} {placement}" if isinstance(value, Tensor) else repr(value)))
    return rows


def _entries(states: Sequence[TrainState]) -> list[ReplicatedEntry]:
    return list(replicated_entries({path: value for path, value in _rows(states) if isinstance(value, Tensor)}))


def _hash_of(texts: Sequence[str]) -> int:
    return derive_seed(*texts) & _BITS


def _digest(hashed: Sequence[ReplicatedEntry]) -> tuple[int, int, int]:
    """Hash what all ranks hold, which shards of replicas this rank holds, and the shards."""
    whole, shards = ([entry for entry in hashed if bool(entry.shard_key) is cut] for cut in (False, True))
    keys = _hash_of([f"{entry.name} {entry.shard_key}" for entry in shards])
    return _hash_of([f"{e.name} {e.hash}" for e in whole]), keys, _hash_of([f"{e.name} {e.hash}" for e in shards])


def _with_hashes(entries: Sequence[ReplicatedEntry], device: torch.device) -> list[ReplicatedEntry]:
    """Return the entries with hashes instead of tensors. The hash of a device is slow on a CPU."""
    with torch.no_grad():
        tensors = [entry.tensor.detach() for entry in entries if entry.tensor is not None]
        elsewhere = iter(hash_tensors([tensor for tensor in tensors if not tensor.is_cpu], device).tolist())
        hashes = [_hash_bytes(tensor) if tensor.is_cpu else next(elsewhere) for tensor in tensors]
    return [replace(entry, tensor=None, hash=value) for entry, value in zip(entries, hashes, strict=True)]


def _hash_bytes(tensor: Tensor) -> int:
    return xxhash.xxh3_64(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).intdigest() if tensor.numel() else 0


def _first_other(values: Sequence[object]) -> int | None:
    """Return the first rank with another value than rank 0, None if all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _raise_if_different(
    states: Sequence[TrainState],
    rows: Sequence[Sequence[float]],
    texts: Sequence[tuple[str, str]],
    entries: Sequence[ReplicatedEntry],
    caller: str,
) -> None:
    """Raise if the rows of texts, whole tensors, keys and shards show a difference, and name the first part that differs.

    Collective: one exchange of JSON if the rows show a difference.
    """
    if not _differ(rows):
        return
    hashed = _with_hashes(entries, states[0].device)
    mine = [[path, "", text] for path, text in texts] + [[e.name, e.shard_key, str(e.hash)] for e in hashed]
    difference = _find_difference(mine, caller)
    if difference is None:
        return
    names = "/".join(dict.fromkeys(type(state.optimizer).__name__ for state in states))
    if " of group " in difference.path:
        _raise_option(difference.path, difference.by_rank, names, caller)
    raise DesyncError(
        f"{caller}: optimizer state {difference.path} of {names} must be equal on all ranks or a DTensor, but rank "
        f"{difference.rank} has another value than rank {difference.first}, and a checkpoint holds one. Build the optimizer on "
        "dt.optim.MatrixOptimizer, which places its state, or use strategy='shard_grad_op', which shards it."
    )


def _differ(rows: Sequence[Sequence[float]]) -> bool:
    """Return True if the rows of texts, whole tensors, keys and shards show a difference."""
    shards = {(row[2], row[3]) for row in rows}
    return len({(row[0], row[1]) for row in rows}) > 1 or len(shards) != len({keys for keys, _ in shards})


class _Difference(NamedTuple):
    """First part that differs: its path, its text by rank, the first rank that holds it, and the first with another text."""

    path: str
    by_rank: dict[int, str]
    first: int
    rank: int


def _find_difference(mine: Any, caller: str) -> _Difference | None:
    """Find the first part that differs among rows of path, shard and text. Collective: one exchange of JSON."""
    values: dict[tuple[str, str], dict[int, str]] = {}
    gathered: Any = all_gather_json(mine, caller=caller)
    for rank, leaves in enumerate(gathered):
        for path, key, text in leaves:
            held = values.setdefault((path, key), {})
            held[rank] = f"{held.get(rank, '')}{text}"
    for (path, key), by_rank in values.items():
        others = [rank for rank in range(len(gathered)) if rank in by_rank or not key]
        other = _first_other([by_rank.get(rank) for rank in others])
        if other is not None:
            return _Difference(path, by_rank, others[0], others[other])
    return None
