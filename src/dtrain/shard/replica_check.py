"""Keep what several ranks hold equal: hashes, a digest that rides on the record of a step, writes of a forward, errors.

A step sends one number for all parameters of a rank (``ReplicaCheck``). The replicas of a shard send numbers whose sum is 0 if
the replicas are equal, so the sum over all ranks is enough. Only if the sum is not 0, the ranks exchange a hash of each
parameter, and name the parameter and the ranks (``raise_first_difference``).

``ForwardWrites`` finds parameters that a forward writes in place. In one process such a write stays (``weight.clamp_()``, a
momentum encoder). FSDP2 computes with unsharded copies and loses the write. Replicas keep the write, but they differ if the
write depends on the samples, or if ranks run different numbers of forwards. torch's version counters show writes in place. A
write through ``.data`` leaves the counter, so the first step also compares a hash of each parameter before and after its
forwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import spans
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.dtensor import is_dtensor, shard_box, to_local
from dtrain.dist.incident_protocol import format_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import DesyncError, StepError
from dtrain.memory.device_memory import is_out_of_memory
from dtrain.run_context import AsyncScalar
from dtrain.shard.fsdp2_private import fsdp_param_groups, sharded_and_unsharded_params, unit_forwards
from dtrain.state import TrainState

# words per block; the factor of a word is the factor of its position in the block times the factor of the block
_BLOCK = 2**15
# odd number without a pattern (2**64 over the golden ratio), as int64
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
# two arbitrary odd numbers
_PER_BLOCK = 0xD1B54A32D192ED03 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
# A float64 holds the sum over 100,000 ranks of numbers below this bound exactly.
_DIGEST_MASK = 2**36 - 1
# Ranks differ from the beginning, or after the first update, or after a resume, in most cases.
_FIRST_STEPS = 4
# Replicas that part later show in the comparison of replicas. The copies of FSDP2 are watched in every step, and a replica that
# a forward has written is watched from then on.
_STEPS_OF_REPLICAS = 3
_COPY, _REPLICA = "copy", "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedEntry:
    """Entry that several ranks hold: all ranks with the same ``shard_key``. An empty ``shard_key`` means all ranks."""

    name: str
    shard_key: str = ""
    tensor: Tensor | None = None
    hash: int = 0


def wraps_tensors(tensor: Tensor) -> bool:
    """Return True for a subclass that keeps its data in other tensors (quantized weights), and for a DTensor of such shards."""
    # A view of such a shard may not be defined, so this does not call to_local.
    return hasattr(tensor._local_tensor if is_dtensor(tensor) else tensor, "__tensor_flatten__")


def replicated_entries(named: Mapping[str, Tensor]) -> Iterator[ReplicatedEntry]:
    """Yield the tensors of which another rank holds a replica. A plain tensor is whole on all ranks.

    A tensor that wraps others is left out, because its bits cannot be read.
    """
    for name, tensor in named.items():
        if wraps_tensors(tensor):
            continue
        if not is_dtensor(tensor):
            yield ReplicatedEntry(name=name, tensor=tensor)
            continue
        box = shard_box(tensor)
        if box.num_replicas == get_dist_info().world_size:
            yield ReplicatedEntry(name=name, tensor=to_local(tensor))
        elif box.num_replicas > 1:
            yield ReplicatedEntry(name=name, tensor=to_local(tensor), shard_key=f"{box.offset} {box.size}")


def hash_entries(entries: Sequence[ReplicatedEntry], device: torch.device) -> list[ReplicatedEntry]:
    """Return the entries with hashes instead of tensors. Host sync: one."""
    tensors = [entry.tensor for entry in entries if entry.tensor is not None]
    # This read is the only wait for the device.
    hashes = iter(hash_tensors(tensors, device).tolist())
    return [entry if entry.tensor is None else replace(entry, tensor=None, hash=next(hashes)) for entry in entries]


def raise_first_difference(caller: str, step: int, gathered: Sequence[Any]) -> None:
    """Raise with the first entry that differs. The result depends only on gathered data, so all ranks raise the same error.

    Args:
        caller: prefix of the message.
        step: step of the state.
        gathered: for each rank, rows of name, shard key and hash.

    Raises:
        DesyncError: an entry differs between ranks with the same shard key.
    """
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
    minority = [rank for rank in sorted(values) if values[rank] != majority]
    others = [rank for rank in sorted(values) if values[rank] == majority]
    spans.record_event("desync", step=step, tensor=name, ranks=minority)
    parts = len({key for key, _ in by_entry})
    raise DesyncError(
        f"{caller}: step {step}: {name!r} must be equal on all ranks, got a different value on ranks "
        f"{format_ranks(minority)} than on ranks {format_ranks(others)}. {len(differing)} of {parts} parts differ. "
        "Look for code that runs on some ranks only, for random numbers of global generators (dt.step.random_like draws "
        "equal numbers) or for a faulty device, and resume from an earlier checkpoint."
    )


@dataclass(slots=True, eq=False)
class ReplicaCheck:
    """Comparison of the parameters of a run with those of other ranks, in some steps, without a wait for a device.

    The digest of a step is sent with the record of the first later step in which the digests of all ranks are on the host; on
    a CPU with the record of the same step.

    Args:
        every: number of steps between two digests after the first steps; 0 compares nothing.
    """

    every: int
    _steps: int = 0
    _last_step: int | None = None
    _host: AsyncScalar | None = None
    _pending: bool = False
    _lost: bool = False
    _groups: list[_Group] | None = None

    def begin_step(self, state: TrainState) -> float:
        """Return the number that this rank sends: 0 without a digest, NaN if the digest is not on the host yet.

        All ranks must call this in the same steps. Host sync: none.
        """
        step = state.clock.step
        # A step may compute several gradients, and a method may move the parameters between them.
        if self.every and step != self._last_step and state.spec.replica_info is None:
            self._last_step = step
            self._steps += 1
            due = (self._steps <= _FIRST_STEPS or step % self.every == 0) and not self._pending
            if due or self._lost:
                try:
                    self._lost = False
                    self._copy_digest(state)
                # This rank alone may have too little memory. It sends NaN, and tries again in the next step.
                except torch.OutOfMemoryError:
                    self._lost = self._pending = True
        if self._lost:
            return math.nan
        if not self._pending or self._host is None:
            return 0.0
        value = self._host.try_read()
        return math.nan if value is None else value

    def end_exchange(self, total: float, state: TrainState) -> None:
        """Take the sum of the numbers of all ranks.

        Collective: one exchange of JSON if replicas differ.

        Raises:
            DesyncError: replicas of a parameter differ; on all ranks.
        """
        if not self._pending or math.isnan(total):
            return
        self._pending = False
        if total and state.spec.replica_info is None:
            raise_if_params_differ(state, "step")

    def digest(self, state: TrainState) -> float:
        """Return the number of this rank for the parameters as they are now. Host sync: one on a device."""
        # All ranks drop a digest that waits to be sent, also if this one fails.
        self._pending = self._lost = False
        if not self.every or not self._copy_digest(state) or self._host is None:
            return 0.0
        self._pending = False
        value = self._host.wait()
        assert value is not None, "the wait has completed the copy"
        return value

    def _copy_digest(self, state: TrainState) -> bool:
        """Start a copy of the digest to the host. Return False if no other rank holds a parameter of this rank."""
        if self._groups is None:
            self._groups = _group_params(state)
        if not self._groups:
            self.every = 0
            return False
        self._host = self._host or AsyncScalar(state.device)
        self._host.copy_from(_digest(self._groups, state.device))
        self._pending = True
        return True


@dataclass(slots=True, eq=False)
class _Group:
    """Parameters that the same ranks hold.

    Args:
        weight: weight of this rank's digest. The weights of the replicas add up to 0, and those of fewer replicas never do.
        params: parameters, plain or DTensor.
    """

    weight: int
    params: list[Tensor] = field(default_factory=list)


def replica_check_of(state: TrainState) -> ReplicaCheck:
    """Return the ``ReplicaCheck`` of the run. Mutates: ``state._run_context``, in the first call."""
    context = state._run_context
    if context.replica_check is None:
        context.replica_check = ReplicaCheck(context.replica_check_every)
    check: ReplicaCheck = context.replica_check
    return check


def _group_params(state: TrainState) -> list[_Group]:
    groups: dict[object, _Group] = {}
    info = get_dist_info()
    for param in state.params.values():
        if wraps_tensors(param):
            continue
        if is_dtensor(param):
            box, key = shard_box(param), (param.device_mesh, param.placements)
            replica, num_replicas = box.replica, box.num_replicas
        else:
            replica, num_replicas, key = info.rank, info.world_size, None
        if num_replicas > 1:
            weight = -1 if replica else num_replicas - 1
            groups.setdefault(key, _Group(weight)).params.append(param)
    return list(groups.values())


def _digest(groups: Sequence[_Group], device: torch.device) -> Tensor:
    """Return the weighted digest of the parameters of all groups: float64 ``[]``, a whole number. Host sync: none."""
    terms: list[Tensor] = []
    with torch.no_grad():
        for group in groups:
            hashes = hash_tensors(_merge_small([to_local(param) for param in group.params]), device)
            total = (hashes * _odd_factors(len(hashes), _STRIDE, device)).sum()
            # The hashes are linear. Unless they are mixed, equal changes in opposite directions would cancel.
            mixed = total ^ (total >> 29)
            mixed = mixed * _MIX
            terms.append(((mixed ^ (mixed >> 32)) & _DIGEST_MASK) * group.weight)
        return torch.stack(terms).sum().double()


def _merge_small(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate small tensors of one dtype and device. The hash of a small tensor takes as long as its ten operations."""
    merged: list[Tensor] = []
    small: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() < _BLOCK and tensor.is_floating_point() and tensor.element_size() > 1:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
        else:
            merged.append(tensor)
    return [*merged, *(torch.cat(same) for same in small.values())]


def raise_if_params_differ(state: TrainState, caller: str) -> None:
    """Compare each parameter with its replicas. NaN equals NaN, and 0 equals -0.

    Collective: one exchange of JSON. Host sync: one.

    Raises:
        DesyncError: replicas of a parameter differ; on all ranks.
    """

    def canonical(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.element_size() == 1:
            return tensor
        return torch.where(tensor.isnan(), math.nan, tensor) + 0.0

    with torch.no_grad():
        entries = [replace(entry, tensor=canonical(entry.tensor)) for entry in replicated_entries(state.params)]
        entries = hash_entries(entries, state.device)
    rows = all_gather_json([[entry.name, entry.shard_key, entry.hash] for entry in entries], caller=caller)
    raise_first_difference(caller, state.step, rows)


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
        >>> first, second = hash_tensors(
        ...     [torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])], torch.device("cpu")
        ... )
        >>> (
        ...     bool(first == second),
        ...     bool(first == hash_tensors([torch.tensor([0.0, 1.0])], torch.device("cpu"))[0]),
        ... )
        (False, True)
    """
    words = [_to_words(tensor.detach()) for tensor in tensors]
    longest = max((len(flat) for flat in words), default=0)
    blocks = 1 + longest // _BLOCK
    factors: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for place in {flat.device for flat in words}:
        factors[place] = _odd_factors(min(_BLOCK, longest), _STRIDE, place), _odd_factors(blocks, _PER_BLOCK, place)
    hashes = [_hash_words(flat, *factors[flat.device]).to(device) for flat in words]
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


@dataclass(slots=True, eq=False)
class _Snapshot:
    """Version counters of tensors, and their hashes if ``hashes`` is not None."""

    tensors: Mapping[str, Tensor]
    versions: list[int]
    hashes: Tensor | None = None

    @classmethod
    def take(cls, tensors: Mapping[str, Tensor], *, hashes: bool = False) -> _Snapshot:
        # A simulated step has no values.
        real = all(type(to_local(tensor)) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors.values())
        values = _hashes(tensors) if hashes and real and tensors else None
        return cls(tensors, [tensor._version for tensor in tensors.values()], values)

    def changed(self) -> dict[str, None]:
        """Return the names of the tensors that were written since. Host sync: one with hashes."""
        if not self.tensors:
            return {}
        versions = [tensor._version for tensor in self.tensors.values()]
        if versions == self.versions and self.hashes is None:
            return {}
        pairs = zip(self.tensors, versions, self.versions, strict=True)
        names = {name: None for name, now, before in pairs if now != before}
        if self.hashes is not None:
            now_hashes = _hashes(self.tensors)
            different = [] if now_hashes is None else (now_hashes != self.hashes).tolist()
            names |= {name: None for name, flag in zip(self.tensors, different, strict=False) if flag}
        return names


_NOTHING = _Snapshot({}, [])


def _hashes(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return a hash of the bits of each tensor: int64 ``[n]``, equal for equal bits in the same order.

    Returns None if memory does not suffice: the step needs more than the hash, and its own failure reaches all ranks.
    """
    shards = [to_local(tensor.detach()) for tensor in tensors.values()]
    try:
        return hash_tensors(shards, shards[0].device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


class ForwardWrites:
    """Watches the forwards of a model's steps: ``begin_step`` before the first, ``after_forward`` after each.

    Args:
        model: model, with or without units of FSDP2.
        ranks: number of ranks that hold copies of whole parameters.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._groups, self._ranks, self._steps = fsdp_param_groups(model), ranks, 0
        self._num_sharded = sum(len(sharded_and_unsharded_params(group)) for group in self._groups)
        self._names: dict[int, str] = {}
        self._replicas = self._copies = _NOTHING
        self._of_units: dict[int, _Snapshot] = {}
        self._written_copies: dict[str, None] = {}
        self._written_replicas: dict[str, None] = {}
        # Replicas that the forward of any step has written, by name.
        self._ever_written: dict[str, None] = {}
        for number, unit in enumerate(unit_forwards(model)):
            unit.wrap(gathered=partial(self._before_unit, number, unit.group), leave=partial(self._after_unit, number))

    def begin_step(self, params: Mapping[str, Tensor], *, compare: bool) -> None:
        """Start a step.

        Args:
            params: all parameters of the model by name.
            compare: if True, whole parameters must stay equal on all ranks.
        """
        if not self._groups and self._ranks == 1:
            return
        self._steps += 1
        self._of_units.clear()
        self._written_copies, self._written_replicas = {}, {}
        if self._steps == 1:
            self._names = {id(param): name for name, param in params.items()}
        copies = self._copies.tensors
        # FSDP2 makes each copy once, in the first forward of its unit.
        if len(copies) < self._num_sharded:
            copies = {name: copy for group in self._groups for name, copy in self._copies_of(group).items()}
        self._copies = _Snapshot.take(copies) if copies else _NOTHING
        self._replicas = _NOTHING
        if not compare or self._ranks == 1:
            return
        if self._is_first:
            sharded = {id(param) for group in self._groups for param, _ in sharded_and_unsharded_params(group)}
            whole = {name: param for name, param in params.items() if id(param) not in sharded and not param.is_inference()}
            self._replicas = _Snapshot.take(whole, hashes=self._steps == 1)
        elif self._ever_written:
            self._replicas = _Snapshot.take({name: params[name] for name in self._ever_written})

    @property
    def _is_first(self) -> bool:
        return self._steps <= _STEPS_OF_REPLICAS

    def abort(self) -> None:
        """Discard a failed attempt of a step, so that the next attempt is watched alike."""
        self._steps = max(0, self._steps - 1)
        self._replicas = _NOTHING
        self._of_units.clear()

    def after_forward(self, *, last: bool) -> None:
        """Look for writes since ``begin_step`` after the ``last`` forward, before its backward, which may update parameters.

        Host sync: one in the first step, if parameters are on a device.
        """
        if self._steps and last:
            self._written_copies |= self._copies.changed()
            self._written_replicas |= self._replicas.changed()

    def _copies_of(self, group: object) -> dict[str, Tensor]:
        return {
            self._names.get(id(param), "?"): copy for param, copy in sharded_and_unsharded_params(group) if copy is not None
        }

    def _before_unit(self, number: int, group: object, begins: bool) -> None:
        # FSDP2 makes the copies in the first forward, so no version is known from before.
        if self._steps == 1:
            self._of_units.setdefault(number, _Snapshot.take(self._copies_of(group), hashes=True))

    def _after_unit(self, number: int, output: Any) -> Any:
        if self._of_units and (snapshot := self._of_units.pop(number, None)) is not None:
            self._written_copies |= snapshot.changed()
        return output

    def describe(self, *, uneven: bool) -> list[str]:
        """Return the written parameters as text that ranks compare: copies by name, replicas with their hash.

        After the first steps, replicas are described only if the step is ``uneven``: ranks ran different numbers of forwards.

        Host sync: one if replicas are described that are on a device.
        """
        lines = [f"{_COPY} 0 {name}" for name in self._written_copies]
        if self._written_replicas and (self._is_first or uneven):
            self._ever_written |= self._written_replicas
            written = {name: self._replicas.tensors[name] for name in self._written_replicas}
            hashes = _hashes(written)
            # Ranks that have no memory for the hash differ from the others, and the step raises.
            values = [0] * len(written) if hashes is None else hashes.tolist()
            lines += [f"{_REPLICA} {value} {name}" for name, value in zip(written, values, strict=True)]
        return lines


def raise_if_written(descriptions: Sequence[Sequence[str]], strategy: str, *, uneven: bool) -> None:
    """Refuse writes that are lost, or that differ between ranks.

    Args:
        descriptions: result of ``describe`` of each rank.
        strategy: strategy of the model, for messages.
        uneven: if True, ranks ran different numbers of forwards.

    Raises:
        StepError: a forward wrote a parameter, by name; on all ranks.
    """
    advice = "Write the parameter after the step, or keep the value in a buffer."
    for lines in descriptions:
        for kind, _, name in (line.split(" ", 2) for line in lines):
            if kind == _COPY:
                raise StepError(
                    f"step: the forward must not write the parameter {name!r} in place, because {strategy!r} computes with a "
                    f"copy and loses the write. {advice}"
                )
            if kind != _REPLICA or all(set(lines) == set(others) for others in descriptions):
                continue
            if uneven:
                raise StepError(
                    f"step: the forward wrote the parameter {name!r} in place, and ranks ran different numbers of forwards, so "
                    "the replicas would differ from now on. Pass last_batch='drop' to the loader, or write the parameter after "
                    "the step."
                )
            raise StepError(
                f"step: the forward must not write the parameter {name!r} in place with values that differ between ranks, "
                f"because the replicas would differ from now on. {advice}"
            )
