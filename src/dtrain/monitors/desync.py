"""Check that replicated parts of the training state are bitwise equal on all ranks that hold a copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from dtrain.arguments import check_choices
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed, hash_rng_state, rng_state
from dtrain.errors import ConfigError
from dtrain.shard.buffers import persistent_buffers
from dtrain.shard.replica_check import ReplicatedEntry, hash_entries, raise_first_difference, replicated_entries
from dtrain.state import TrainState
from dtrain.typing import Plain

DesyncPart: TypeAlias = Literal["params", "buffers", "optimizer", "transform_states", "rng", "position"]
_DEFAULT_PARTS: tuple[DesyncPart, ...] = ("params", "buffers", "rng", "position")


def check_desync(
    state: TrainState,
    *,
    of: Sequence[DesyncPart] = _DEFAULT_PARTS,
    same_rng: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every rank if two replicas of a part of the training state differ; name the first part that differs.

    A step compares the parameters by itself (``Step.init(replica_check_every=)``). This function compares further parts, at
    any time. Sharded parts have no replica to compare with (``full_shard`` shards nearly all parameters) and cost nothing.

    Args:
        state: newest state of the run.
        of: parts to compare: ``params``; persistent ``buffers`` (except with ``shard_model(buffers="own")``); state of the
            ``optimizer``; ``transform_states``; ``rng``, torch's generators on ranks that share a batch (``tp``, ``cp``);
            ``position``, the counts of the clock.
        same_rng: if True, all ranks were seeded alike, and the generators of Python, NumPy and torch must be equal.
        extra: further parts by name: plain data, or objects with a ``state_dict()`` of plain data, such as ``{"loader":
            loader}``.

    Collective: one all-gather of three numbers on the control channel; if a part differs, two of JSON.
    Host sync: one, to read the hashes.

    Example:
        import dtrain as dt

        if state.crossed("1ep"):
            dt.monitors.check_desync(state, of=("params", "optimizer"), extra={"loader": loader})

    Raises:
        ConfigError: unknown ``of``, ``extra`` without plain data, or replicas that train separately.
        StaleStateError: ``state`` was stepped already.
        DesyncError: on all ranks, a part differs; the error names the first part and the minority of ranks.

    Source: majority vote among replicas, von Neumann 1956, Probabilistic logics and the synthesis of reliable organisms.
    """
    parts = check_choices("check_desync", "of", of, get_args(DesyncPart))
    state._check_not_stale("check_desync")
    state._check_replicas_joined("check_desync")
    if get_dist_info().world_size > 1:
        _compare_ranks(state, [*_tensor_entries(state, parts), *_host_entries(state, parts, same_rng=same_rng, extra=extra)])


def _tensor_entries(state: TrainState, parts: Sequence[DesyncPart]) -> Iterator[ReplicatedEntry]:
    """Yield the tensors to compare, in order of report."""
    if "params" in parts:
        yield from replicated_entries(state.params)
    if "buffers" in parts:
        buffers = persistent_buffers(state.model, state.spec, own=False)
        yield from replicated_entries({f"buffer {name}": buffer for name, buffer in buffers.items()})
    if "optimizer" in parts:
        for name, param in state.params.items():
            content = state.optimizer.state.get(param, {})
            yield from replicated_entries(_flatten({key: content[key] for key in sorted(content)}, f"optimizer {name}"))
    if "transform_states" in parts:
        yield from replicated_entries(_flatten(dict(state.transform_states), "transform state"))


def _flatten(tree: Any, path: str) -> dict[str, Tensor]:
    """Return the tensors of nested dicts by path. Other values become tensors, so that all values are hashed alike."""
    if isinstance(tree, Tensor):
        return {path: tree}
    if isinstance(tree, Mapping):
        return {name: leaf for key, each in tree.items() for name, leaf in _flatten(each, f"{path} {key}").items()}
    if isinstance(tree, bool | int | float):
        return {path: torch.tensor(tree, dtype=torch.float64, device="cpu")}
    return {path: torch.frombuffer(bytearray(repr(tree).encode()), dtype=torch.uint8)}


def _host_entries(
    state: TrainState, parts: Sequence[DesyncPart], *, same_rng: bool, extra: Mapping[str, Any] | None
) -> Iterator[ReplicatedEntry]:
    """Yield the entries stored on the host."""
    if "rng" in parts and same_rng:
        for key, stream in rng_state().items():
            yield ReplicatedEntry(name=f"random numbers of {key}", hash=_digest(stream))
    elif "rng" in parts and state.spec.ranks_per_batch > 1:
        shard_key = f"data rank {state.spec.data_rank}"
        yield ReplicatedEntry(name="random numbers of torch", shard_key=shard_key, hash=hash_rng_state(state.device))
    if "position" in parts:
        for field, count in state.clock.state_dict().items():
            if field != "previous":
                yield ReplicatedEntry(name=f"clock {field}", hash=_digest(count))
    for key, value in sorted((extra or {}).items()):
        content: Plain = value.state_dict() if hasattr(value, "state_dict") else value
        try:
            json.dumps(content)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise ConfigError(
                f"check_desync: extra[{key!r}] must be plain data or have a state_dict() of plain data, got {kind} ({error}). "
                "Pass the result of its state_dict()."
            ) from None
        yield ReplicatedEntry(name=f"extra {key}", hash=_digest(content))


def _digest(content: Any) -> int:
    """Hash plain data and arrays to 52 bits, which a float64 represents exactly."""
    text = json.dumps(content, sort_keys=True, default=_encode_array)
    return derive_seed(text) >> 11


def _encode_array(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        raw = value.numpy() if isinstance(value, Tensor) else value
        return hashlib.blake2b(raw.tobytes()).hexdigest()
    return repr(value)


def _compare_ranks(state: TrainState, entries: Sequence[ReplicatedEntry]) -> None:
    """Compare a hash of the entries on all ranks and a hash of the sharded entries. Gather details only on mismatch."""
    entries = hash_entries(entries, state.device)
    replicated, sharded = ([e for e in entries if bool(e.shard_key) is has_key] for has_key in (False, True))
    shard_keys = derive_seed(*(f"{e.name} {e.shard_key}" for e in sharded)) >> 11
    hashes = [shard_keys, *(derive_seed(*(f"{e.name} {e.hash}" for e in some)) >> 11 for some in (replicated, sharded))]
    rows = all_gather_numbers(hashes, caller="check_desync")
    distinct = {(row[0], row[2]) for row in rows}
    if len({row[1] for row in rows}) == 1 and len(distinct) == len({keys for keys, _ in distinct}):
        return
    details = all_gather_json([[e.name, e.shard_key, e.hash] for e in entries], caller="check_desync")
    raise_first_difference("check_desync", state.step, details)
