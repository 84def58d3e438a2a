"""Find, restore and synchronize the buffers that forwards change: rank 0's values, means, sums of what ranks added, or none.

``shard_model(buffers=)`` chooses for each buffer, persistent or not. A class of modules that knows the only right choice for
its buffers states it in ``dtrain_buffers``, such as ``{"load": "sum"}``. Without a choice persistent buffers and counters in
whole numbers are broadcast, and other buffers stay each rank's own. A buffer outside of the state dict that a forward replaces
is a cache of what this rank's forwards need, and stays its own too. If the ranks change another buffer differently in the first
steps, a warning names the buffer, because no rank has what one process would have. Normalizations of torch are the exception:
their statistics are estimates on every rank.

A rank without samples runs no forward. Its buffers are not broadcast, and do not count in a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dtrain.arguments import check_choice, warn
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.fqn import buffer_slots, buffers_by_fqn, compile_patterns, unwrap_module
from dtrain.shard.replica_check import hash_tensors
from dtrain.shard.spec import Buffers, ShardSpec
from dtrain.typing import Plain

# The model attribute that stores its ``BufferSync``.
_BUFFER_SYNC_ATTRIBUTE = "_dtrain_buffers"
# Steps with changed buffers in which ranks compare the buffers without a choice.
_COMPARED_STEPS = 4
BufferSlot: TypeAlias = tuple[str, nn.Module, str]
"""Clean name, owner and key of a buffer."""

_Version: TypeAlias = tuple[Tensor | None, int]
"""A buffer and its version counter. Keeps the tensor alive, because ids of freed tensors are reused."""


def check_buffer_choices(model: nn.Module, buffers: Buffers | Mapping[str, Buffers] | None) -> None:
    """Check the argument ``buffers`` of ``shard_model``.

    Raises:
        ConfigError: an unknown choice, a pattern without a buffer, or a sum of values that have no sum.
    """
    choices = [buffers] if isinstance(buffers, str) else list(buffers.values()) if isinstance(buffers, Mapping) else []
    if buffers is not None and not isinstance(buffers, str | Mapping):
        choices = [cast(Buffers, buffers)]
    for choice in choices:
        check_choice("shard_model", "buffers", choice, get_args(Buffers))
    names = list(buffers_by_fqn(model))
    for pattern in buffers if isinstance(buffers, Mapping) else ():
        if not any(map(compile_patterns([pattern], caller="shard_model: buffers"), names)):
            raise ConfigError(
                f"shard_model: buffers must name buffers of the model, got {pattern!r}; the model has "
                f"{', '.join(names[:5]) or 'none'}{', ...' if len(names) > 5 else ''}. Print dict(model.named_buffers())."
            )
    spec = ShardSpec(buffers=buffers)
    for name, module, key in buffer_slots(model):
        buffer = module._buffers[key]
        if module_choice(spec, name, module, key) != "sum" or buffer is None:
            continue
        if isinstance(module, _NormBase) or buffer.dtype == torch.bool:
            kind = f"a statistic of {type(module).__name__}" if isinstance(module, _NormBase) else "a bool buffer"
            raise ConfigError(f"shard_model: buffers must not be 'sum' for {name!r}, {kind}. Choose 'mean' or 'broadcast'.")


def buffer_choice(spec: ShardSpec, name: str) -> Buffers | None:
    """Return the choice for the buffer ``name``, that of the first pattern that matches; None without a choice."""
    if not isinstance(spec.buffers, Mapping):
        return spec.buffers
    for pattern, choice in spec.buffers.items():
        if compile_patterns([pattern], caller="shard_model: buffers")(name):
            return choice
    return None


def module_choice(spec: ShardSpec, name: str, module: nn.Module, key: str) -> Buffers | None:
    """Return the choice for a buffer of ``module``: that of its class in ``dtrain_buffers``, else ``buffer_choice``."""
    stated: Mapping[str, Buffers] = getattr(type(module), "dtrain_buffers", {})
    return stated.get(key) or buffer_choice(spec, name)


def persistent_buffers(model: nn.Module, spec: ShardSpec, *, own: bool) -> dict[str, Tensor]:
    """Return the persistent buffers by name that each rank has for itself (``own``), or the other persistent buffers."""
    buffers = buffers_by_fqn(model, persistent_only=True)
    return {name: buffer for name, buffer in buffers.items() if (buffer_choice(spec, name) == "own") is own}


class BufferVersions:
    """Finds the buffers that changed since ``record``.

    torch's version counter shows in-place changes, and identity shows new tensors. torch's normalizations update statistics
    without incrementing the counter, but increment the counter of the batch count. One changed buffer therefore marks all
    buffers of its module. Before the first ``record`` all buffers count as changed.
    """

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self.slots = slots
        self._versions: list[_Version] = [(None, -1)] * len(slots)

    def record(self) -> None:
        """Record the current buffers."""
        self._versions = self._current()

    def changed_buffers(self) -> dict[str, bool]:
        """Return the changed buffers by name, in the order of the model: True if another tensor took the place of the first."""
        if not self.slots:
            return {}
        pairs = zip(self.slots, self._versions, self._current(), strict=True)
        return {slot[0]: was[0] is not now[0] for slot, was, now in pairs if was[0] is not now[0] or was[1] != now[1]}

    def changed(self) -> list[tuple[BufferSlot, Tensor | None]]:
        """Return the slots of modules with a changed buffer, and their recorded tensors."""
        modules = set(map(owner_name, self.changed_buffers()))
        pairs = zip(self.slots, self._versions, strict=True)
        return [(slot, tensor) for slot, (tensor, _) in pairs if owner_name(slot[0]) in modules]

    def _current(self) -> list[_Version]:
        buffers = (module._buffers[key] for _, module, key in self.slots)
        return [(buffer, 0 if buffer is None else buffer._version) for buffer in buffers]


def owner_name(buffer: str) -> str:
    """Return the name of the module of a buffer."""
    return buffer.rpartition(".")[0]


class BufferSnapshot:
    """Copies of a model's buffers, updated before each attempt of a step and restored after a failed attempt.

    Only buffers of modules with a changed buffer are copied again, because most buffers never change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = BufferVersions(list(buffer_slots(model, include_none=True)))
        self._complete = False
        self._copies: dict[str, Tensor | None] = {}

    def capture(self) -> None:
        """Copy the changed buffers. Mutates: the copies, on the buffers' device, which may run out of memory."""
        if not self._versions.slots:
            return
        self._complete = False
        for (name, module, key), _ in self._versions.changed():
            buffer = module._buffers[key]
            self._copies[name] = None if buffer is None else buffer.detach().clone()
        self._versions.record()
        self._complete = True

    def restore(self) -> None:
        """Restore the tensors and values of the last ``capture``; no effect if ``capture`` was interrupted.

        Mutates: buffers.
        """
        if not self._complete:
            return
        with torch.no_grad():
            for (name, module, key), buffer in self._versions.changed():
                copy = self._copies[name]
                module._buffers[key] = buffer
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
        self._versions.record()


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the original buffers and their values at exit, also after an exception.

    Mutates: the buffers of modules that changed or replaced a buffer, and no other buffers.
    """
    snapshot = BufferSnapshot(model)
    snapshot.capture()
    try:
        yield
    finally:
        snapshot.restore()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slot:
    """Buffer that is synchronized.

    Args:
        name: clean name.
        module: module that owns the buffer.
        key: name within the module.
        choice: synchronization.
        shape: shape when the model was sharded; None if the buffer was None.
        may_differ: if True, nobody chose, and the buffer is no statistic of a normalization.
        must_agree: if True, ranks must not have different shapes: the user chose, or the buffer is in the state dict.
        transient: if True, nobody chose, and the buffer is neither persistent nor a statistic of a normalization.
    """

    name: str
    module: nn.Module
    key: str
    choice: Buffers
    shape: torch.Size | None
    may_differ: bool
    must_agree: bool
    transient: bool

    @property
    def owner(self) -> str:
        """Name of the module."""
        return owner_name(self.name)

    @property
    def buffer(self) -> Tensor:
        """Buffer as it is now, empty if it is None."""
        buffer = self.module._buffers[self.key]
        return torch.empty(0, device="cpu") if buffer is None else buffer

    @property
    def stays_own(self) -> bool:
        """True if each rank keeps its own value, however a forward changes it."""
        dtype = self.buffer.dtype
        return self.transient and (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)

    @property
    def current_shape(self) -> torch.Size | None:
        """Shape of the buffer as it is now; None if the buffer is None."""
        buffer = self.module._buffers[self.key]
        return None if buffer is None else buffer.shape


class BufferSync:
    """Finds the buffers that the forwards of a step changed, and synchronizes the buffers."""

    def __init__(self, model: nn.Module, spec: ShardSpec) -> None:
        self._slots = list(_synchronized_slots(model, spec)) if spec.data_ranks * spec.ranks_per_batch > 1 else []
        self._versions = BufferVersions([(slot.name, slot.module, slot.key) for slot in self._slots])
        self._summed = [slot for slot in self._slots if slot.choice == "sum"]
        self._starts: dict[str, Tensor] = {}
        self._counts = spec.counts_in_loss
        self._compared_steps = 0
        self._synchronized: set[str] = set()
        # Names of transient buffers that a forward replaced on some rank, equal on all ranks.
        self._caches: set[str] = set()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # A copy of the model is a plain model.
        return type(None), ()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the buffers that are likely to be synchronized in this step."""
        changed = self._versions.changed_buffers()
        modules = {*map(owner_name, changed), *self._synchronized}
        sent = (slot for slot in self._slots if slot.owner in modules and slot.name not in self._caches)
        return sum(slot.buffer.nbytes for slot in sent if not slot.stays_own)

    def begin_step(self) -> None:
        """Start a step. Mutates: copies of the buffers that are summed."""
        if self._slots:
            self._versions.record()
        for slot in self._summed:
            self._starts[slot.name] = slot.buffer.detach().clone()

    def changed_modules(self) -> list[str]:
        """Return the names of modules whose buffers changed since ``begin_step``, in the order of the model.

        Marks of buffers follow: ``module|buffer=`` for a transient buffer that was replaced, ``module|buffer+`` for one that
        was changed in place, and ``module|buffer[2, 3]`` for a buffer whose shape is not that of the sharded model.
        """
        changed = self._versions.changed_buffers()
        if not changed:
            return []
        reported = {slot.name: slot for slot in self._slots if slot.name in changed and not self._is_settled(slot)}
        modules = dict.fromkeys(slot.owner for slot in reported.values())
        marks = [f"{slot.owner}|{slot.key}{'=' if changed[name] else '+'}" for name, slot in reported.items() if slot.transient]
        for slot in self._slots:
            # Caches may have another shape on each rank.
            is_sent = not slot.transient or (slot.name in reported and not changed[slot.name])
            if is_sent and slot.owner in modules and slot.current_shape != slot.shape:
                marks.append(f"{slot.owner}|{slot.key}{list(slot.buffer.shape)}")
        return [*modules, *marks]

    def _is_settled(self, slot: _Slot) -> bool:
        """Return True if the other ranks need not know that the buffer changed."""
        return slot.name in self._caches or (slot.stays_own and self._compared_steps >= _COMPARED_STEPS)

    def sum_(self, names: Sequence[str]) -> None:
        """Set the buffers ``names``, all with the choice ``"sum"``, to their start plus what all ranks have added since.

        Mutates: buffers. Collective: one all-reduce per dtype; every rank must call.
        """
        by_dtype: dict[torch.dtype, list[_Slot]] = {}
        for slot in self._summed:
            if slot.name in names:
                by_dtype.setdefault(slot.buffer.dtype, []).append(slot)
        for slots in by_dtype.values():
            self._sum_slots_(slots)

    def _sum_slots_(self, slots: Sequence[_Slot]) -> None:
        buffers = [slot.buffer for slot in slots]
        # A buffer that was None has no start.
        starts = [self._starts[slot.name] for slot in slots]
        starts = [old if old.shape == new.shape else new * 0 for old, new in zip(starts, buffers, strict=True)]
        _reduce_(buffers, starts, counts=self._counts)

    def compare_again(self) -> None:
        """Compare the buffers of the ranks again, as in the first steps."""
        self._compared_steps = 0

    def sync_(self, owners: Sequence[str], *, ranks_differ: bool = False, has_samples: bool | None = None) -> None:
        """Synchronize the buffers of the modules ``owners``.

        Args:
            owners: result of ``changed_modules`` of all ranks together, equal on all ranks.
            ranks_differ: if True, the result of some rank differs.
            has_samples: whether this rank has samples in this step; None if all ranks have.

        Mutates: buffers.
        Collective: one broadcast, and one all-reduce per dtype of the buffers with a mean or a sum. In the first steps one
            exchange of JSON for buffers without a choice, and one exchange of numbers if some rank has no samples.

        Raises:
            StepError: a buffer has different shapes on the ranks; on all ranks.

        Warns: UserWarning, once, on rank 0: ranks changed a buffer without a choice differently.
        """
        if not owners:
            return
        marks = set(owners)
        self._caches.update(slot.name for slot in self._slots if f"{slot.owner}|{slot.key}=" in marks)
        slots = [
            slot
            for slot in self._slots
            if slot.owner in marks
            and slot.name not in self._caches
            and (not slot.transient or f"{slot.owner}|{slot.key}+" in marks)
        ]
        if not slots:
            return
        self._synchronized.update(slot.owner for slot in slots)
        active = list(range(get_dist_info().world_size))
        if has_samples is not None:
            active = [rank for rank, (has,) in enumerate(all_gather_numbers([has_samples], caller="step")) if has]
        if ranks_differ and any(owner.endswith("]") and "|" in owner for owner in owners):
            slots = _without_different_shapes(slots)
        slots = [slot for slot in slots if slot.current_shape is not None]
        if self._compared_steps < _COMPARED_STEPS and any(slot.may_differ for slot in slots):
            different = _warn_if_different([slot for slot in slots if slot.may_differ], active)
            self._compared_steps = _COMPARED_STEPS if different else self._compared_steps + 1
        slots = [slot for slot in slots if not slot.stays_own]
        with torch.no_grad():
            by_kind: dict[tuple[str, torch.dtype | None], list[_Slot]] = {}
            for slot in slots:
                how: Buffers = slot.choice if slot.choice != "mean" or slot.buffer.is_floating_point() else "broadcast"
                by_kind.setdefault((how, None if how == "broadcast" else slot.buffer.dtype), []).append(slot)
            for (kind, _), same in by_kind.items():
                buffers = [slot.buffer for slot in same]
                if kind == "mean":
                    _reduce_(buffers, counts=get_dist_info().rank in active, divisor=len(active))
                elif kind == "sum":
                    self._sum_slots_(same)
                else:
                    _broadcast_(buffers, src=active[0])


def attach_buffer_sync(model: nn.Module, spec: ShardSpec) -> None:
    """Give a sharded ``model`` its ``BufferSync``. Mutates: ``model`` (one attribute)."""
    setattr(unwrap_module(model), _BUFFER_SYNC_ATTRIBUTE, BufferSync(model, spec))


def buffer_sync_of(model: nn.Module) -> BufferSync:
    """Return the ``BufferSync`` of a model; for a plain model, an instance without effect."""
    attached = unwrap_module(model).__dict__.get(_BUFFER_SYNC_ATTRIBUTE)
    return attached if isinstance(attached, BufferSync) else _NO_SYNC


_NO_SYNC = BufferSync(nn.Identity(), ShardSpec())


def _synchronized_slots(model: nn.Module, spec: ShardSpec) -> Iterator[_Slot]:
    for name, module, key in buffer_slots(model, include_none=True):
        buffer, choice, is_norm = module._buffers[key], module_choice(spec, name, module, key), isinstance(module, _NormBase)
        # A normalization without statistics keeps None.
        if choice == "own" or (buffer is None and is_norm):
            continue
        persistent = key not in module._non_persistent_buffers_set
        # A mean of whole numbers is no choice: they are broadcast.
        chosen = choice is not None and not (choice == "mean" and buffer is not None and not buffer.is_floating_point())
        yield _Slot(
            name=name,
            module=module,
            key=key,
            choice=choice or "broadcast",
            shape=None if buffer is None else buffer.shape,
            may_differ=not chosen and not is_norm,
            must_agree=choice is not None or persistent,
            transient=choice is None and not persistent and not is_norm,
        )


def _without_different_shapes(slots: Sequence[_Slot]) -> list[_Slot]:
    """Return the slots whose buffers have one shape on all ranks. Collective: one exchange of JSON.

    A table that a forward makes longer may have its own length on each rank, and stays there if no checkpoint has it.

    Raises:
        StepError: a buffer that must be synchronized has different shapes; on all ranks.
    """
    shapes = all_gather_json(
        cast(Plain, [None if (shape := slot.current_shape) is None else list(shape) for slot in slots]), caller="step"
    )
    kept = []
    for slot, *by_rank in zip(slots, *cast("list[list[list[int] | None]]", shapes), strict=True):
        if all(shape == by_rank[0] for shape in by_rank):
            kept.append(slot)
        elif slot.must_agree:
            rank = next(rank for rank, shape in enumerate(by_rank) if shape != by_rank[0])
            raise StepError(
                f"step: the buffer {slot.name!r} must have one shape on all ranks, got {by_rank[0]} on rank 0 and "
                f"{by_rank[rank]} on rank {rank}. Let each rank have its own: shard_model(buffers={{{slot.name!r}: 'own'}})."
            )
    return kept


def _warn_if_different(slots: Sequence[_Slot], active: Sequence[int]) -> bool:
    """Compare buffers that nobody chose for on the ranks ``active``, and warn on rank 0 of the first difference.

    Collective: one exchange of JSON. Host sync: one, if all buffers are on one device.
    """
    hashes = hash_tensors([slot.buffer for slot in slots], slots[0].buffer.device).tolist()
    rows = cast("list[list[int]]", all_gather_json(hashes, caller="step"))
    by_slot = zip(slots, *(rows[rank] for rank in active), strict=True)
    different = [slot for slot, *by_rank in by_slot if len(set(by_rank)) > 1]
    if different and get_dist_info().rank == 0:
        name, own = different[0].name, different[0].stays_own
        result = "each rank keeps its own value" if own else f"all ranks get the value of rank {active[0]}"
        choice = f"shard_model(buffers={{{name!r}: {'own' if own else 'sum'!r}}})"
        choices = [f"{choice} for a cache, 'sum' for a counter"] if own else [f"{choice} for a counter"]
        choices += ["'mean' for an average", *([] if own else ["'own' for a value of each rank"]), "'broadcast' for rank 0's"]
        warn(f"step: the ranks changed the buffer {name!r} differently in forward, and {result}. Choose: {', '.join(choices)}.")
    return bool(different)


def _reduce_(tensors: Sequence[Tensor], starts: Sequence[Tensor] = (), *, counts: bool, divisor: int = 1) -> None:
    """Set tensors of one dtype to their start, 0 without ``starts``, plus what all ranks have added to it, over ``divisor``.

    Args:
        tensors: values of this rank.
        starts: values at the start of the step, equal on all ranks.
        counts: if False, this rank adds nothing: it has no samples, or another rank has computed with the same samples.
        divisor: number that the sum is divided by.

    Mutates: ``tensors``. Collective: one all-reduce.
    """
    new = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wide = new.dtype if new.dtype.itemsize >= 4 else torch.float32 if new.is_floating_point() else torch.int64
    old = torch.cat([tensor.reshape(-1) for tensor in starts]).to(wide) if starts else None
    # Not a product: a value that is not finite would reach the sum.
    added = torch.zeros_like(new, dtype=wide) if not counts else new.to(wide) if old is None else new.to(wide) - old
    dist.all_reduce(added)
    totals = (added / divisor if old is None else old + added).to(new.dtype)
    for tensor, piece in zip(tensors, totals.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def _broadcast_(tensors: list[Tensor], *, src: int) -> None:
    if tensors:
        flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, src=src)
        for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
            # A piece may start at an offset that its dtype does not allow, so clone the piece.
            tensor.copy_(piece.clone().view(tensor.dtype).view_as(tensor))
