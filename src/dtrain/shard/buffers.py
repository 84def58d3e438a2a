"""Compare and broadcast a model before it is sharded, and find, snapshot and restore the buffers that change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.dist.collectives import all_gather_json
from dtrain.errors import ConfigError
from dtrain.fqn import buffer_slots, buffers_by_fqn, modules_by_fqn, parameters_by_fqn
from dtrain.shard.wrapping import WrapPlan
from dtrain.typing import Plain


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
        for expected, actual in zip_longest(rows_of_ranks[0], other_rows, fillvalue="nothing"):
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


BufferSlot: TypeAlias = tuple[str, nn.Module, str]
"""Clean name, owner and key of a buffer."""

_Version: TypeAlias = tuple[Tensor | None, int]
"""A buffer and its version counter. Keeps the tensor alive, because ids of freed tensors are reused."""


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

    def changed_modules(self) -> list[str]:
        """Return the names of modules with a changed buffer, in the order of the model."""
        return list(dict.fromkeys(map(owner_name, self.changed_buffers())))

    def changed(self) -> list[tuple[BufferSlot, Tensor | None]]:
        """Return the slots of modules with a changed buffer, and their recorded tensors."""
        modules = set(self.changed_modules())
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
