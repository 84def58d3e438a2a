"""Whether ranks that hold copies of the same still hold the same."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from dtrain import spans
from dtrain.clock import Clock
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed, hash_rng_state, rng_state
from dtrain.dtensor import is_dtensor, shard_box, to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError, DesyncError
from dtrain.fqn import buffers_by_fqn
from dtrain.monitors.tensor_hash import hash_tensors
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Plain

DesyncPart: TypeAlias = Literal["params", "buffers", "optimizer", "slices", "rng", "position"]
_DEFAULT_PARTS: tuple[DesyncPart, ...] = ("params", "buffers", "rng", "position")


def check_desync(
    state: TrainState,
    *,
    of: Sequence[DesyncPart] = _DEFAULT_PARTS,
    same_rng: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every rank if two ranks that hold the same part of the run hold other bits; name the first part that differs.

    Ranks drift apart without an error when something is done on some of them only: a parameter written by hand, an initial
    value drawn from another seed, memory at fault. What each rank holds alone (``full_shard`` cuts nearly all) has no copy to
    compare with, and costs nothing.

    Args:
        state: the newest state of the run.
        of: ``params``; persistent ``buffers`` (not with ``shard_model(buffers="local")``); the ``optimizer``'s state; the
            transforms' ``slices``; ``rng``, torch's generators on ranks that work on one batch together (``tp``, ``cp``);
            ``position``, the clock's counts.
        same_rng: all ranks were seeded alike, so the generators of Python, NumPy and torch are the same on all.
        extra: by name what else must be the same on all ranks: plain data, or objects whose ``state_dict()`` is plain data,
            such as ``{"loader": loader}``.

    Collective: one all-gather of three numbers on the control group; where something differs, two of JSON.
    Host sync: one, to read the hashes.

    Raises:
        ConfigError: an unknown ``of``, something in ``extra`` that is no plain data, or copies of the model are training apart.
        StaleStateError: ``state`` was stepped already.
        DesyncError: on all ranks: something differs; it names the first such, and the ranks that are fewer.

    Source: a vote among replicas, von Neumann 1956, Probabilistic logics and the synthesis of reliable organisms.
    """
    parts = _check_parts("check_desync", of)
    state._check_not_stale("check_desync")
    state._check_replicas_joined("check_desync")
    if get_dist_info().world_size > 1:
        _compare_ranks(state, [*_tensor_entries(state, parts), *_host_entries(state, parts, same_rng=same_rng, extra=extra)])


def desync_guard(
    interval: Duration | int | str, *, of: Sequence[DesyncPart] = _DEFAULT_PARTS, same_rng: bool = False
) -> Transform:
    """Run ``check_desync`` at the end of each step that ends an interval; not while copies of the model train apart.

    It looks at what the step has left, so list it first: what is listed before it has its turn later.

    Formula: ``hash(part on this rank) == hash(part on each rank that holds it)`` with ``hash_tensors``

    Args:
        interval: ``"1000ba"``, ``"1ep"``, ``"10m"``.
        of: as in ``check_desync``.
        same_rng: likewise.

    Mutates: nothing.
    Collective: at the end of an interval, that of ``check_desync``.
    Host sync: one at the end of an interval, on several ranks.

    Raises:
        ConfigError: no interval, an unknown ``of``.
        DesyncError: in a step, on all ranks: something differs.

    Source: a vote among replicas, von Neumann 1956, Probabilistic logics and the synthesis of reliable organisms.

    Example:
        >>> desync_guard("1000ba", of=("params", "optimizer")).name
        'desync_guard'
    """
    each, parts = Duration.parse(interval), _check_parts("desync_guard", of)

    def init(state: TrainState) -> dict[str, Any]:
        state.clock.reached(each)
        return {}

    def update(inner: UpdateFn) -> UpdateFn:
        def guarded(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            if ends_interval(state, each) and state.spec.replica_info is None:
                check_desync(state, of=parts, same_rng=same_rng)
            return state, metrics

        return guarded

    return Transform(name="desync_guard", init=init, update=update, uses_grad=False, read_only=True)


def _check_parts(where: str, of: Sequence[DesyncPart]) -> tuple[DesyncPart, ...]:
    known = get_args(DesyncPart)
    if isinstance(of, str) or not of or any(part not in known for part in of):
        raise ConfigError(f"{where}: of lists some of {', '.join(known)}, got {of!r}")
    return tuple(of)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplicatedEntry:
    """Something that other ranks hold, too: those whose ``shard_key`` is the same. ``shard_key`` is empty for what all ranks hold."""

    name: str
    shard_key: str = ""
    tensor: Tensor | None = None
    hash: int = 0


def _tensor_entries(state: TrainState, parts: Sequence[DesyncPart]) -> Iterator[_ReplicatedEntry]:
    """The tensors that are to be compared, in the order in which they are told."""
    if "params" in parts:
        yield from _entries_of_tensors(state.params)
    if "buffers" in parts and state.spec.buffers != "local":
        yield from _entries_of_tensors(
            {f"buffer {name}": b for name, b in buffers_by_fqn(state.model, persistent_only=True).items()}
        )
    if "optimizer" in parts:
        for name, param in state.params.items():
            content = state.optimizer.state.get(param, {})
            yield from _entries_of_tensors(_flatten({key: content[key] for key in sorted(content)}, f"optimizer {name}"))
    if "slices" in parts:
        yield from _entries_of_tensors(_flatten(dict(state.transform_states), "slice"))


def _flatten(tree: Any, path: str) -> dict[str, Tensor]:
    """The tensors of nested dicts; other numbers as tensors, so that they are compared alike."""
    if isinstance(tree, Tensor):
        return {path: tree}
    if isinstance(tree, Mapping):
        return {name: leaf for key, each in tree.items() for name, leaf in _flatten(each, f"{path} {key}").items()}
    if isinstance(tree, bool | int | float):
        return {path: torch.tensor(tree, dtype=torch.float64, device="cpu")}
    return {path: torch.frombuffer(bytearray(repr(tree).encode()), dtype=torch.uint8)}


def _entries_of_tensors(named: Mapping[str, Tensor]) -> Iterator[_ReplicatedEntry]:
    for name, tensor in named.items():
        if not is_dtensor(tensor):
            yield _ReplicatedEntry(name=name, tensor=tensor)
            continue
        box = shard_box(tensor)
        if box.num_replicas == get_dist_info().world_size:
            yield _ReplicatedEntry(name=name, tensor=to_local(tensor))
        elif box.num_replicas > 1:
            yield _ReplicatedEntry(name=name, tensor=to_local(tensor), shard_key=f"{box.offset} {box.size}")


def _host_entries(
    state: TrainState, parts: Sequence[DesyncPart], *, same_rng: bool, extra: Mapping[str, Any] | None
) -> Iterator[_ReplicatedEntry]:
    """What is known on the host."""
    if "rng" in parts and same_rng:
        for key, stream in rng_state().items():
            yield _ReplicatedEntry(name=f"random numbers of {key}", hash=_digest(stream))
    elif "rng" in parts and state.spec.ranks_per_batch > 1:
        place = f"data rank {state.spec.data_rank}"
        yield _ReplicatedEntry(name="random numbers of torch", shard_key=place, hash=hash_rng_state(state.device))
    if "position" in parts:
        for field, count in _clock_counts(state.clock).items():
            yield _ReplicatedEntry(name=f"clock {field}", hash=_digest(count))
    for key, thing in sorted((extra or {}).items()):
        yield _ReplicatedEntry(name=f"extra {key}", hash=_digest(_plain_content(key, thing)))


def _clock_counts(clock: Clock) -> dict[str, Any]:
    return {key: value for key, value in clock.state_dict().items() if key != "previous"}


def _plain_content(key: str, thing: Any) -> Plain:
    content: Plain = thing.state_dict() if hasattr(thing, "state_dict") else thing
    try:
        json.dumps(content)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"check_desync: extra[{key!r}] must be plain data, or have a state_dict() of such: {error}") from None
    return content


def _digest(content: Any) -> int:
    """Of plain data and arrays, 52 bits: what a float64 holds."""
    text = json.dumps(content, sort_keys=True, default=_encode_array)
    return derive_seed(text) >> 11


def _encode_array(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        raw = value.numpy() if isinstance(value, Tensor) else value
        return hashlib.blake2b(raw.tobytes()).hexdigest()
    return repr(value)


def _compare_ranks(state: TrainState, entries: Sequence[_ReplicatedEntry]) -> None:
    """One record of what all ranks hold, and of what some of them do; only where it differs is more told."""
    entries = _with_hashes(entries, state.device)
    whole, cut = ([e for e in entries if bool(e.shard_key) is placed] for placed in (False, True))
    places = derive_seed(*(f"{e.name} {e.shard_key}" for e in cut)) >> 11
    mine = [places, *(derive_seed(*(f"{e.name} {e.hash}" for e in some)) >> 11 for some in (whole, cut))]
    rows = all_gather_numbers(mine, caller="check_desync")
    alike = {(row[0], row[2]) for row in rows}
    if len({row[1] for row in rows}) == 1 and len(alike) == len({place for place, _ in alike}):
        return
    _raise_first_difference(state, all_gather_json([[e.name, e.shard_key, e.hash] for e in entries], caller="check_desync"))


def _with_hashes(entries: Sequence[_ReplicatedEntry], device: torch.device) -> list[_ReplicatedEntry]:
    tensors = [entry.tensor for entry in entries if entry.tensor is not None]
    found = iter(hash_tensors(tensors, device).tolist())  # note: the one wait for the device
    return [entry if entry.tensor is None else replace(entry, tensor=None, hash=next(found)) for entry in entries]


def _raise_first_difference(state: TrainState, told: Sequence[Any]) -> None:
    """Raise with the first entry that differs. Pure in what all ranks have told, so all raise the same."""
    by_entry: dict[tuple[str, str], dict[int, int | None]] = {}
    for rank, entries in enumerate(told):
        for name, place, value in entries:
            by_entry.setdefault((name, place), {})[rank] = value
    for (_, place), values in by_entry.items():
        if not place:  # a rank that has no such thing differs from those that have
            values.update({rank: None for rank in range(len(told)) if rank not in values})
    differing = {name: values for (name, _), values in by_entry.items() if len(set(values.values())) > 1}
    if not differing:
        return
    name, values = next(iter(differing.items()))
    (usual, _), *_ = Counter(values[rank] for rank in sorted(values)).most_common()
    fewer = [rank for rank in sorted(values) if values[rank] != usual]
    others = [rank for rank in sorted(values) if values[rank] == usual]
    spans.record_event("desync", step=state.step, tensor=name, ranks=fewer)
    parts = len({key for key, _ in by_entry})
    raise DesyncError(
        f"check_desync: step {state.step}: {name!r} is another on {_format_ranks(fewer)} than on {_format_ranks(others)}; {len(differing)} "
        f"of {parts} parts differ. Go on from the last checkpoint, and look for what is done on some "
        "ranks only, or for a faulty device"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    """For people: ``rank 3``, ``ranks 0..2, 5``."""
    starts = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(ranks)) if other != one + 1), len(ranks)]
    runs = [(ranks[start], ranks[stop - 1]) for start, stop in pairwise(starts)]
    text = ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{', ...' if len(runs) > 8 else ''}"
