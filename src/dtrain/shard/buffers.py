"""Replicas start equal, and buffers that a forward changes stay so: what ranks hold whole, outside of FSDP2's reach."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.fqn import buffer_slots, buffers_by_fqn, modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.shard.wrapping import WrapPlan
from dtrain.state import ShardSpec
from dtrain.typing import Plain

_BUFFER_SYNC_ATTRIBUTE = "_dtrain_buffers"  # the attribute of a model that shard_model leaves its BufferSync in


def check_same_model(model: nn.Module, layout: WrapPlan, options: Sequence[object]) -> None:
    """Refuse models and options that differ between ranks, before a collective pairs wrong tensors.

    Collective: an exchange of one hash; of the rows behind it when they differ.

    Raises:
        ConfigError: on all ranks alike, with the first row that differs.
    """
    names = {id(module): name or "model" for name, module in modules_by_fqn(model)}
    rows = [f"option {option}" for option in options]
    rows += [f"unit {[names.get(id(module), 'model') for module in modules]}" for modules in layout.units]
    rows.append(f"left out {sorted(layout.ignored_params)}")
    tensors = {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}
    for name, tensor in tensors.items():
        kind = "meta " if tensor.is_meta else ""
        kind += "frozen " if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        rows.append(f"{name} {list(tensor.shape)} {kind}{str(tensor.dtype).removeprefix('torch.')}")
    hashes = all_gather_json(hashlib.sha256("\n".join(rows).encode()).hexdigest())
    if len(set(cast("list[str]", hashes))) == 1:
        return
    everyone = cast("list[list[str]]", all_gather_json(cast(Plain, rows)))
    for rank, theirs in enumerate(everyone):
        length = max(len(theirs), len(everyone[0]))
        ours, other = ([*each, *["nothing"] * (length - len(each))] for each in (everyone[0], theirs))
        for mine, there in zip(ours, other, strict=True):
            if mine != there:
                raise ConfigError(
                    f"shard_model: rank {rank} has another model than rank 0: {there!r}, where rank 0 has {mine!r}; build it "
                    "from the same config, with the same options, on all ranks"
                )


def broadcast_params_and_buffers(model: nn.Module, device: torch.device, *, sync: bool) -> None:
    """Move what is not on meta to ``device`` and, with ``sync``, give every rank rank 0's values.

    Mutates: parameters and buffers. Collective: with ``sync``, one broadcast per tensor.
    """
    for tensor in [*parameters_by_fqn(model)[0].values(), *buffers_by_fqn(model).values()]:
        if tensor.is_meta:
            continue
        if not sync:
            tensor.data = tensor.data.to(device)
            continue
        # As bytes, since gloo does not know every dtype; of a dense copy, since it ignores strides.
        dense = tensor.data.to(device).contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        tensor.data = torch.empty_like(tensor.data, device=device).copy_(dense)


class BufferSync:
    """Finds the persistent buffers that a step's forwards changed, and makes them equal again.

    In-place changes are seen by torch's version counter, and new tensors by their identity. torch's normalisations change their
    statistics past that counter, but count batches within its sight: so a module with one changed buffer counts as a whole.
    """

    __slots__ = ("_marks", "_slots", "_spec")

    def __init__(self, model: nn.Module, spec: ShardSpec) -> None:
        watch = spec.buffers != "local" and spec.data_ranks * spec.ranks_per_batch > 1
        self._slots = list(buffer_slots(model, persistent_only=True)) if watch else []
        self._spec = spec
        self._marks: list[tuple[Tensor | None, int]] = []

    @property
    def num_bytes(self) -> int:
        """What all watched buffers take together."""
        tensors = (module._buffers[key] for _, module, key in self._slots)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def begin_step(self) -> None:
        """Start a step."""
        self._marks = self._current_versions()

    def changed_modules(self) -> list[str]:
        """Names of the modules whose buffers changed since ``begin``, in the order of the model."""
        pairs = zip(self._slots, self._marks, self._current_versions(), strict=True)
        return list({_owner_name(name): None for (name, _, _), was, now in pairs if was[0] is not now[0] or was[1] != now[1]})

    def sync_(self, owners: Sequence[str]) -> None:
        """Give all ranks the same values in the buffers of the modules ``owners``: rank 0's, or the mean.

        Mutates: buffers. Collective: one broadcast, or one all-reduce per floating-point dtype (and a broadcast for the rest).
        """
        chosen = set(owners)
        buffers = [module._buffers[key] for name, module, key in self._slots if _owner_name(name) in chosen]
        found = [buffer for buffer in buffers if buffer is not None]
        mean = [b for b in found if self._spec.buffers == "mean" and b.is_floating_point()]
        averaged = {id(buffer) for buffer in mean}
        for dtype in {buffer.dtype: None for buffer in mean}:
            _average_([buffer for buffer in mean if buffer.dtype == dtype])
        _broadcast_([buffer for buffer in found if id(buffer) not in averaged])

    def _current_versions(self) -> list[tuple[Tensor | None, int]]:
        # The tensor itself, which so stays alive: the id of a freed one is soon that of another.
        tensors = (module._buffers[key] for _, module, key in self._slots)
        return [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]


def attach_buffer_sync(model: nn.Module, spec: ShardSpec) -> None:
    """Give a sharded ``model`` its ``BufferSync``. Mutates: ``model`` (one attribute)."""
    setattr(unwrap_module(model), _BUFFER_SYNC_ATTRIBUTE, BufferSync(model, spec))


def buffer_sync_of(model: nn.Module) -> BufferSync:
    """The ``BufferSync`` of a model; one that watches nothing when ``shard_model`` never saw it."""
    found = unwrap_module(model).__dict__.get(_BUFFER_SYNC_ATTRIBUTE)
    return found if isinstance(found, BufferSync) else _NO_SYNC


_NO_SYNC = BufferSync(nn.Identity(), ShardSpec())


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers are, on leaving, also after an exception, the tensors from before with the values from before.

    Mutates: the buffers of modules that have changed or replaced one of theirs in between, and no others.
    """
    kept = [
        (name, module, key, tensor, tensor._version, tensor.clone())
        for name, module, key in buffer_slots(model)
        if (tensor := module._buffers[key]) is not None
    ]
    try:
        yield
    finally:
        touched = {
            _owner_name(name)
            for name, module, key, tensor, version, _ in kept
            if module._buffers[key] is not tensor or tensor._version != version
        }
        for name, module, key, tensor, _, value in kept:
            if _owner_name(name) in touched:
                module._buffers[key] = tensor
                tensor.copy_(value)


class BufferSnapshot:
    """Copies of a model's buffers, brought up to date before each try of a step, and put back after one that failed.

    Only the buffers of modules that have changed one of theirs since the last time are copied again: most never change.
    """

    __slots__ = ("_complete", "_copies", "_marks", "_slots")

    def __init__(self, model: nn.Module) -> None:
        self._slots = list(buffer_slots(model))
        self._complete = False  # what was kept is what there was
        self._marks: dict[str, tuple[Tensor | None, int]] = {}
        self._copies: dict[str, Tensor | None] = {}

    def capture(self) -> None:
        """Take note of the buffers as they are. Mutates: the copies, on the buffers' device, for which memory may run out."""
        self._complete = False
        for name, module, key in self._changed_slots():
            tensor = module._buffers[key]
            self._copies[name] = None if tensor is None else tensor.detach().clone()
        self._record_versions()
        self._complete = True

    def restore(self) -> None:
        """Give the model the tensors that ``keep`` has seen, with the values they had; nothing if it came to no end.

        Mutates: buffers.
        """
        if not self._complete:
            return
        touched = list(self._changed_slots())
        with torch.no_grad():
            for name, module, key in touched:
                (tensor, _), copy = self._marks[name], self._copies[name]
                module._buffers[key] = tensor
                if tensor is not None and copy is not None:
                    tensor.copy_(copy)
        self._record_versions()

    def _changed_slots(self) -> list[tuple[str, nn.Module, str]]:
        """The slots of the modules in which a buffer is another, or was written to; torch's normalisations count in sight."""
        changed = {
            _owner_name(name)
            for name, module, key in self._slots
            if not _is_unchanged(self._current_version(module, key), self._marks.get(name))
        }
        return [slot for slot in self._slots if _owner_name(slot[0]) in changed]

    def _record_versions(self) -> None:
        self._marks = {name: self._current_version(module, key) for name, module, key in self._slots}

    @staticmethod
    def _current_version(module: nn.Module, key: str) -> tuple[Tensor | None, int]:
        tensor = module._buffers[key]
        return tensor, 0 if tensor is None else tensor._version


def _is_unchanged(now: tuple[Tensor | None, int], mark: tuple[Tensor | None, int] | None) -> bool:
    return mark is not None and now[0] is mark[0] and now[1] == mark[1]


def _owner_name(name: str) -> str:
    return name.rpartition(".")[0]


def _average_(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wide = flat if flat.dtype.itemsize >= 4 else flat.float()
    dist.all_reduce(wide)
    _copy_from_flat_(tensors, (wide / get_dist_info().world_size).to(flat.dtype))


def _broadcast_(tensors: list[Tensor]) -> None:
    if tensors:
        flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, src=0)
        pieces = flat.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view_as(tensor))  # a copy: a piece may start where its dtype cannot


def _copy_from_flat_(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
