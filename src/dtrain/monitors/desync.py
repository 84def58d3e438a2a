"""Check that replicated parts of the training state are bitwise equal on all ranks that hold a copy."""

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
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Plain

DesyncPart: TypeAlias = Literal["params", "buffers", "optimizer", "transform_states", "rng", "position"]
_DEFAULT_PARTS: tuple[DesyncPart, ...] = ("params", "buffers", "rng", "position")

# words per block; the factor of a word is the factor of its position in the block times the factor of the block
_BLOCK = 2**15
# odd number without a pattern (2**64 over the golden ratio), as int64
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
# two arbitrary odd numbers
_PER_BLOCK = 0xD1B54A32D192ED03 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def check_desync(
    state: TrainState,
    *,
    of: Sequence[DesyncPart] = _DEFAULT_PARTS,
    same_rng: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Raise on every rank if two replicas of a part of the training state differ; name the first part that differs.

    Ranks diverge silently if an operation runs on some ranks only: a parameter written by hand, an initial value from a
    different seed, faulty memory. Sharded parts have no replica to compare with (``full_shard`` shards nearly all parameters)
    and cost nothing.

    Args:
        state: newest state of the run.
        of: parts to compare: ``params``; persistent ``buffers`` (skipped with ``shard_model(buffers="local")``); state of the
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
    parts = _check_parts("check_desync", of)
    state._check_not_stale("check_desync")
    state._check_replicas_joined("check_desync")
    if get_dist_info().world_size > 1:
        _compare_ranks(state, [*_tensor_entries(state, parts), *_host_entries(state, parts, same_rng=same_rng, extra=extra)])


def desync_guard(
    interval: Duration | int | str, *, of: Sequence[DesyncPart] = _DEFAULT_PARTS, same_rng: bool = False
) -> Transform:
    """Run ``check_desync`` at the end of each step that ends an interval, except while replicas train separately.

    The transform checks the result of the transforms listed after it, so list ``desync_guard`` first.

    Formula: ``hash(part on this rank) == hash(part on each rank that holds it)`` with ``hash_tensors``

    Args:
        interval: interval such as ``"1000ba"``, ``"1ep"`` or ``"10m"``.
        of: parts to compare, as in ``check_desync``.
        same_rng: if True, all ranks were seeded alike, as in ``check_desync``.

    Mutates: nothing.
    Collective: at the end of an interval, that of ``check_desync``.
    Host sync: one at the end of an interval, on several ranks.

    Source: majority vote among replicas, von Neumann 1956, Probabilistic logics and the synthesis of reliable organisms.

    Example:
        >>> import dtrain as dt
        >>> dt.monitors.desync_guard("1000ba", of=("params", "optimizer")).name
        'desync_guard'

    Raises:
        ConfigError: invalid ``interval`` or unknown ``of``.
        DesyncError: in a step, on all ranks, a part differs.
    """
    length, parts = Duration.parse(interval), _check_parts("desync_guard", of)

    def init(state: TrainState) -> dict[str, Any]:
        state.clock.reached(length)
        return {}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            if ends_interval(state, length) and state.spec.replica_info is None:
                check_desync(state, of=parts, same_rng=same_rng)
            return state, metrics

        return update_fn

    return Transform(name="desync_guard", init=init, update=update, uses_grad=False, read_only=True)


def _check_parts(caller: str, of: Sequence[DesyncPart]) -> tuple[DesyncPart, ...]:
    known = get_args(DesyncPart)
    if isinstance(of, str) or not of or any(part not in known for part in of):
        raise ConfigError(f"{caller}: of must be a list of names from {', '.join(known)}, got {of!r}. Choose from these names.")
    return tuple(of)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplicatedEntry:
    """Entry that several ranks hold: all ranks with the same ``shard_key``. An empty ``shard_key`` means all ranks."""

    name: str
    shard_key: str = ""
    tensor: Tensor | None = None
    hash: int = 0


def _tensor_entries(state: TrainState, parts: Sequence[DesyncPart]) -> Iterator[_ReplicatedEntry]:
    """Yield the tensors to compare, in order of report."""
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
    if "transform_states" in parts:
        yield from _entries_of_tensors(_flatten(dict(state.transform_states), "transform state"))


def _flatten(tree: Any, path: str) -> dict[str, Tensor]:
    """Return the tensors of nested dicts by path. Other values become tensors, so that all values are hashed alike."""
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
    """Yield the entries stored on the host."""
    if "rng" in parts and same_rng:
        for key, stream in rng_state().items():
            yield _ReplicatedEntry(name=f"random numbers of {key}", hash=_digest(stream))
    elif "rng" in parts and state.spec.ranks_per_batch > 1:
        shard_key = f"data rank {state.spec.data_rank}"
        yield _ReplicatedEntry(name="random numbers of torch", shard_key=shard_key, hash=hash_rng_state(state.device))
    if "position" in parts:
        for field, count in _clock_counts(state.clock).items():
            yield _ReplicatedEntry(name=f"clock {field}", hash=_digest(count))
    for key, value in sorted((extra or {}).items()):
        yield _ReplicatedEntry(name=f"extra {key}", hash=_digest(_plain_content(key, value)))


def _clock_counts(clock: Clock) -> dict[str, Any]:
    return {key: value for key, value in clock.state_dict().items() if key != "previous"}


def _plain_content(key: str, value: Any) -> Plain:
    content: Plain = value.state_dict() if hasattr(value, "state_dict") else value
    try:
        json.dumps(content)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"check_desync: extra[{key!r}] must be plain data or have a state_dict() of plain data, got {type(value).__name__} "
            f"({error}). "
            "Pass the result of its state_dict()."
        ) from None
    return content


def _digest(content: Any) -> int:
    """Hash plain data and arrays to 52 bits, which a float64 represents exactly."""
    text = json.dumps(content, sort_keys=True, default=_encode_array)
    return derive_seed(text) >> 11


def _encode_array(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        raw = value.numpy() if isinstance(value, Tensor) else value
        return hashlib.blake2b(raw.tobytes()).hexdigest()
    return repr(value)


def _compare_ranks(state: TrainState, entries: Sequence[_ReplicatedEntry]) -> None:
    """Compare a hash of the entries on all ranks and a hash of the sharded entries. Gather details only on mismatch."""
    entries = _with_hashes(entries, state.device)
    replicated, sharded = ([e for e in entries if bool(e.shard_key) is has_key] for has_key in (False, True))
    shard_keys = derive_seed(*(f"{e.name} {e.shard_key}" for e in sharded)) >> 11
    hashes = [shard_keys, *(derive_seed(*(f"{e.name} {e.hash}" for e in some)) >> 11 for some in (replicated, sharded))]
    rows = all_gather_numbers(hashes, caller="check_desync")
    distinct = {(row[0], row[2]) for row in rows}
    if len({row[1] for row in rows}) == 1 and len(distinct) == len({keys for keys, _ in distinct}):
        return
    _raise_first_difference(state, all_gather_json([[e.name, e.shard_key, e.hash] for e in entries], caller="check_desync"))


def _with_hashes(entries: Sequence[_ReplicatedEntry], device: torch.device) -> list[_ReplicatedEntry]:
    tensors = [entry.tensor for entry in entries if entry.tensor is not None]
    # This read is the only wait for the device.
    hashes = iter(hash_tensors(tensors, device).tolist())
    return [entry if entry.tensor is None else replace(entry, tensor=None, hash=next(hashes)) for entry in entries]


def _raise_first_difference(state: TrainState, gathered: Sequence[Any]) -> None:
    """Raise with the first entry that differs. The result depends only on gathered data, so all ranks raise the same error."""
    by_entry: dict[tuple[str, str], dict[int, int | None]] = {}
    for rank, entries in enumerate(gathered):
        for name, shard_key, value in entries:
            by_entry.setdefault((name, shard_key), {})[rank] = value
    for (_, shard_key), values in by_entry.items():
        # A rank without the entry differs from the ranks with the entry.
        if not shard_key:
            values.update({rank: None for rank in range(len(gathered)) if rank not in values})
    differing = {name: values for (name, _), values in by_entry.items() if len(set(values.values())) > 1}
    if not differing:
        return
    name, values = next(iter(differing.items()))
    (majority, _), *_ = Counter(values[rank] for rank in sorted(values)).most_common()
    minority_ranks = [rank for rank in sorted(values) if values[rank] != majority]
    majority_ranks = [rank for rank in sorted(values) if values[rank] == majority]
    spans.record_event("desync", step=state.step, tensor=name, ranks=minority_ranks)
    parts = len({key for key, _ in by_entry})
    raise DesyncError(
        f"check_desync: step {state.step}: {name!r} must be equal on all ranks, got a different value on "
        f"{_format_ranks(minority_ranks)} than on {_format_ranks(majority_ranks)}. {len(differing)} of {parts} parts differ. "
        "Resume from the last checkpoint, and look for code that runs on some ranks only or for a faulty device."
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as text: ``rank 3``, ``ranks 0..2, 5``."""
    starts = [0, *(index + 1 for index, (rank, after) in enumerate(pairwise(ranks)) if after != rank + 1), len(ranks)]
    runs = [(ranks[start], ranks[stop - 1]) for start, stop in pairwise(starts)]
    text = ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{', ...' if len(runs) > 8 else ''}"


def hash_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Hash the bits of each tensor in the order of its elements: int64 ``[n]`` on ``device``.

    A change of a single bit always changes the hash, including the sign of zero and NaN payloads. Any other change is missed
    with probability about ``2**-33`` or less. The shape is ignored. Equal bits give equal hashes on every device.

    Formula: ``sum_i word_i * odd_i  mod 2**64`` with the 32-bit words of a tensor (of 1- and 2-byte dtypes its elements) and
    an odd number for each position: the factor of the position within a block times the factor of the block

    Args:
        tensors: dense, plain tensors of any dtype except float4.
        device: device of the hashes.

    Host sync: none, except for tensors on another device.

    Source: multiply-add hashing, Dietzfelbinger 1996, Universal hashing and k-wise independent random variables.

    Example:
        >>> first, second = hash_tensors([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])], torch.device("cpu"))
        >>> bool(first == second), bool(first == hash_tensors([torch.tensor([0.0, 1.0])], torch.device("cpu"))[0])
        (False, True)
    """
    words = [_to_words(tensor.detach()) for tensor in tensors]
    blocks = 1 + max((len(each) for each in words), default=0) // _BLOCK
    factors: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for place in {each.device for each in words}:
        factors[place] = _odd_factors(_BLOCK, _STRIDE, place), _odd_factors(blocks, _PER_BLOCK, place)
    hashes = [_hash_words(each, *factors[each.device]).to(device) for each in words]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def _to_words(tensor: Tensor) -> Tensor:
    """View the bits of a tensor as flat integers of at most 32 bits. A sum of wider products would lose the upper bits."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def _odd_factors(count: int, stride: int, device: torch.device) -> Tensor:
    """Compute odd numbers without a pattern, one per position. With multiples of one number, regular changes could cancel."""
    mixed = torch.arange(1, count + 1, device=device, dtype=torch.int64).mul_(stride)
    for shift in (32, 29):
        mixed.bitwise_xor_(mixed >> shift).mul_(_MIX)
    return mixed.bitwise_or_(1)


def _hash_words(words: Tensor, position_factors: Tensor, block_factors: Tensor) -> Tensor:
    num_blocks = len(words) // _BLOCK
    rest = words[num_blocks * _BLOCK :]
    last = (rest * position_factors[: len(rest)]).sum() * block_factors[num_blocks]
    if not num_blocks:
        return last
    # One block fits in the cache of a CPU. A GPU needs many blocks to be busy.
    blocks_at_once = 1 if words.device.type == "cpu" else 256
    blocks = words[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).split(blocks_at_once)
    sums = torch.cat([(some * position_factors).sum(dim=1) for some in blocks])
    return (sums * block_factors[:num_blocks]).sum() + last
