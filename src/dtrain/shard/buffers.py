"""Keep buffers and initial parameters equal on all ranks, and snapshot and restore buffers."""

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

# The model attribute that stores its ``BufferSync``.
_BUFFER_SYNC_ATTRIBUTE = "_dtrain_buffers"


def check_same_model(model: nn.Module, wrap_plan: WrapPlan, options: Sequence[object]) -> None:
    """Check that model and options are equal on all ranks, before a collective pairs wrong tensors.

    Collective: an exchange of one hash, and of the hashed rows if hashes differ.

    Raises:
        ConfigError: ranks differ; on all ranks, with the first row that differs.
    """
    names = {id(module): name or "model" for name, module in modules_by_fqn(model)}
    rows = [f"option {option}" for option in options]
    rows += [f"unit {[names.get(id(module), 'model') for module in modules]}" for modules in wrap_plan.units]
    rows.append(f"ignored {sorted(wrap_plan.ignored_params)}")
    tensors = {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}
    for name, tensor in tensors.items():
        kind = "meta " if tensor.is_meta else ""
        kind += "frozen " if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        rows.append(f"{name} {list(tensor.shape)} {kind}{str(tensor.dtype).removeprefix('torch.')}")
    hashes = all_gather_json(hashlib.sha256("\n".join(rows).encode()).hexdigest())
    if len(set(cast("list[str]", hashes))) == 1:
        return
    rows_of_ranks = cast("list[list[str]]", all_gather_json(cast(Plain, rows)))
    for rank, other_rows in enumerate(rows_of_ranks):
        length = max(len(other_rows), len(rows_of_ranks[0]))
        padded_first, padded_other = (
            [*row_list, *["nothing"] * (length - len(row_list))] for row_list in (rows_of_ranks[0], other_rows)
        )
        for expected, actual in zip(padded_first, padded_other, strict=True):
            if expected != actual:
                raise ConfigError(
                    f"shard_model: the model of rank {rank} must equal the model of rank 0 ({expected!r}), got {actual!r}. "
                    "Build the model from the same config, with the same options, on all ranks."
                )


def broadcast_params_and_buffers(model: nn.Module, device: torch.device, *, sync: bool) -> None:
    """Move real tensors to ``device`` and, with ``sync``, broadcast rank 0's values.

    Mutates: parameters and buffers. Collective: with ``sync``, one broadcast per tensor.
    """
    for tensor in [*parameters_by_fqn(model)[0].values(), *buffers_by_fqn(model).values()]:
        if tensor.is_meta:
            continue
        if not sync:
            tensor.data = tensor.data.to(device)
            continue
        # gloo does not support every dtype and ignores strides, so broadcast the bytes of a dense copy.
        dense = tensor.data.to(device).contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        tensor.data = torch.empty_like(tensor.data, device=device).copy_(dense)


class BufferSync:
    """Finds the persistent buffers that the forwards of a step changed, and synchronizes the buffers.

    torch's version counter shows in-place changes, and identity shows new tensors. torch's normalizations update statistics
    without incrementing the counter, but increment the counter of the batch count. One changed buffer therefore marks all
    buffers of its module.
    """

    __slots__ = ("_marks", "_slots", "_spec")

    def __init__(self, model: nn.Module, spec: ShardSpec) -> None:
        is_active = spec.buffers != "local" and spec.data_ranks * spec.ranks_per_batch > 1
        self._slots = list(buffer_slots(model, persistent_only=True)) if is_active else []
        self._spec = spec
        self._marks: list[tuple[Tensor | None, int]] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of all synchronized buffers in bytes."""
        tensors = (module._buffers[key] for _, module, key in self._slots)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def begin_step(self) -> None:
        """Start a step."""
        self._marks = self._current_versions()

    def changed_modules(self) -> list[str]:
        """Return the names of modules whose buffers changed since ``begin_step``, in the order of the model."""
        pairs = zip(self._slots, self._marks, self._current_versions(), strict=True)
        return list({_owner_name(name): None for (name, _, _), was, now in pairs if was[0] is not now[0] or was[1] != now[1]})

    def sync_(self, owners: Sequence[str]) -> None:
        """Broadcast rank 0's values, or average, the buffers of the modules ``owners``.

        Mutates: buffers. Collective: one broadcast, or one all-reduce per floating-point dtype (and a broadcast for other
        dtypes).
        """
        selected = set(owners)
        buffers = [module._buffers[key] for name, module, key in self._slots if _owner_name(name) in selected]
        present = [buffer for buffer in buffers if buffer is not None]
        mean = [b for b in present if self._spec.buffers == "mean" and b.is_floating_point()]
        averaged = {id(buffer) for buffer in mean}
        for dtype in {buffer.dtype: None for buffer in mean}:
            _average_([buffer for buffer in mean if buffer.dtype == dtype])
        _broadcast_([buffer for buffer in present if id(buffer) not in averaged])

    def _current_versions(self) -> list[tuple[Tensor | None, int]]:
        # Keep the tensors alive, because ids of freed tensors are reused.
        tensors = (module._buffers[key] for _, module, key in self._slots)
        return [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]


def attach_buffer_sync(model: nn.Module, spec: ShardSpec) -> None:
    """Give a sharded ``model`` its ``BufferSync``. Mutates: ``model`` (one attribute)."""
    setattr(unwrap_module(model), _BUFFER_SYNC_ATTRIBUTE, BufferSync(model, spec))


def buffer_sync_of(model: nn.Module) -> BufferSync:
    """Return the ``BufferSync`` of a model; for a plain model, an instance without effect."""
    attached = unwrap_module(model).__dict__.get(_BUFFER_SYNC_ATTRIBUTE)
    return attached if isinstance(attached, BufferSync) else _NO_SYNC


_NO_SYNC = BufferSync(nn.Identity(), ShardSpec())


@contextmanager
def restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the original buffers and their values at exit, also after an exception.

    Mutates: the buffers of modules that changed or replaced a buffer, and no other buffers.
    """
    saved = [
        (name, module, key, tensor, tensor._version, tensor.clone())
        for name, module, key in buffer_slots(model)
        if (tensor := module._buffers[key]) is not None
    ]
    try:
        yield
    finally:
        changed = {
            _owner_name(name)
            for name, module, key, tensor, version, _ in saved
            if module._buffers[key] is not tensor or tensor._version != version
        }
        for name, module, key, tensor, _, value in saved:
            if _owner_name(name) in changed:
                module._buffers[key] = tensor
                tensor.copy_(value)


class BufferSnapshot:
    """Copies of a model's buffers, updated before each attempt of a step and restored after a failed attempt.

    Only buffers of modules with a changed buffer are copied again, because most buffers never change.
    """

    __slots__ = ("_complete", "_copies", "_marks", "_slots")

    def __init__(self, model: nn.Module) -> None:
        self._slots = list(buffer_slots(model))
        self._complete = False
        self._marks: dict[str, tuple[Tensor | None, int]] = {}
        self._copies: dict[str, Tensor | None] = {}

    def capture(self) -> None:
        """Copy the changed buffers. Mutates: the copies, on the buffers' device, which may run out of memory."""
        self._complete = False
        for name, module, key in self._changed_slots():
            tensor = module._buffers[key]
            self._copies[name] = None if tensor is None else tensor.detach().clone()
        self._record_versions()
        self._complete = True

    def restore(self) -> None:
        """Restore the tensors and values of the last ``capture``; no effect if ``capture`` was interrupted.

        Mutates: buffers.
        """
        if not self._complete:
            return
        changed = list(self._changed_slots())
        with torch.no_grad():
            for name, module, key in changed:
                (tensor, _), copy = self._marks[name], self._copies[name]
                module._buffers[key] = tensor
                if tensor is not None and copy is not None:
                    tensor.copy_(copy)
        self._record_versions()

    def _changed_slots(self) -> list[tuple[str, nn.Module, str]]:
        """Return the slots of modules with a replaced or written buffer."""
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


def _is_unchanged(current: tuple[Tensor | None, int], mark: tuple[Tensor | None, int] | None) -> bool:
    return mark is not None and current[0] is mark[0] and current[1] == mark[1]


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
            # A piece may start at an offset that its dtype does not allow, so clone the piece.
            tensor.copy_(piece.clone().view(tensor.dtype).view_as(tensor))


def _copy_from_flat_(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
