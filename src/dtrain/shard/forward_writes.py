"""Find parameters that a forward writes in place (``ForwardWrites``).

In one process such a write stays (``weight.clamp_()``, a momentum encoder). FSDP2 computes with unsharded copies and loses the
write. Replicas keep the write, but they differ if the write depends on the samples.

torch's version counters show writes in place. A write through ``.data`` leaves the counter, so the first step also compares a
digest of each parameter before and after the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.dtensor import to_local
from dtrain.errors import StepError
from dtrain.shard.fsdp2_forward import unit_forwards
from dtrain.shard.fsdp2_private import fsdp_param_groups, sharded_and_unsharded_params

# Replicas that part later show in the comparison of replicas. The copies of FSDP2 are watched in every step.
_STEPS_OF_REPLICAS = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPY, _REPLICA = "copy", "replica"


@dataclass(slots=True, eq=False)
class _Snapshot:
    """Version counters of tensors, and digests if ``digests`` is not None."""

    tensors: Mapping[str, Tensor]
    versions: list[int]
    digests: Tensor | None = None

    @classmethod
    def take(cls, tensors: Mapping[str, Tensor], *, digests: bool = False) -> _Snapshot:
        # A simulated step has no values.
        real = all(type(to_local(tensor)) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors.values())
        found = _digest(tensors) if digests and tensors and real else None
        return cls(tensors, [tensor._version for tensor in tensors.values()], found)

    def changed(self) -> dict[str, None]:
        """Return the names of the tensors that were written since. Host sync: one with digests."""
        versions = [tensor._version for tensor in self.tensors.values()]
        if versions == self.versions and self.digests is None:
            return {}
        pairs = zip(self.tensors, versions, self.versions, strict=True)
        names = {name: None for name, now, before in pairs if now != before}
        if self.digests is not None:
            different = (_digest(self.tensors) != self.digests).tolist()
            names |= {name: None for name, flag in zip(self.tensors, different, strict=True) if flag}
        return names


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the bits of each tensor as integers: int64 ``[n]``, equal for equal values."""
    with torch.no_grad():
        return torch.stack([_sum_of_bits(to_local(tensor.detach())) for tensor in tensors.values()])


def _sum_of_bits(shard: Tensor) -> Tensor:
    integers, per_word = _INTEGERS.get(shard.itemsize, torch.int64), max(1, 8 // shard.itemsize)
    if not shard.is_contiguous() or shard.storage_offset() % per_word:
        return shard.view(integers).sum(dtype=torch.int64)
    # A sum of shorter integers would first copy the whole tensor to int64.
    flat = shard.view(-1)
    words = flat[: len(flat) // per_word * per_word]
    return words.view(torch.int64).sum() + flat[len(words) :].view(integers).sum(dtype=torch.int64)


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
        self._replicas, self._copies = _Snapshot.take({}), _Snapshot.take({})
        self._of_units: dict[int, _Snapshot] = {}
        self._written_copies: dict[str, None] = {}
        self._written_replicas: dict[str, None] = {}
        for number, unit in enumerate(unit_forwards(model)):
            unit.watch(partial(self._before_unit, number), partial(self._after_unit, number))

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
        self._copies = _Snapshot.take(copies)
        self._replicas = _Snapshot.take({})
        if compare and self._ranks > 1 and self._steps <= _STEPS_OF_REPLICAS:
            sharded = {id(param) for group in self._groups for param, _ in sharded_and_unsharded_params(group)}
            whole = {name: param for name, param in params.items() if id(param) not in sharded and not param.is_inference()}
            self._replicas = _Snapshot.take(whole, digests=self._steps == 1)

    def abort(self) -> None:
        """Discard a failed attempt of a step, so that the next attempt is watched alike."""
        self._steps = max(0, self._steps - 1)

    def after_forward(self) -> None:
        """Look for writes since ``begin_step``. Host sync: one in the first step, if parameters are on a device."""
        if self._steps:
            self._written_copies |= self._copies.changed()
            self._written_replicas |= self._replicas.changed()

    def _copies_of(self, group: object) -> dict[str, Tensor]:
        return {
            self._names.get(id(param), "?"): copy for param, copy in sharded_and_unsharded_params(group) if copy is not None
        }

    def _before_unit(self, number: int, group: object) -> None:
        # FSDP2 makes the copies in the first forward, so no version is known from before.
        if self._steps == 1:
            self._of_units.setdefault(number, _Snapshot.take(self._copies_of(group), digests=True))

    def _after_unit(self, number: int) -> None:
        if self._of_units and (snapshot := self._of_units.pop(number, None)) is not None:
            self._written_copies |= snapshot.changed()

    def describe(self) -> list[str]:
        """Return the written parameters as text that ranks compare: copies by name, replicas with their digest.

        Host sync: one if replicas were written on a device.
        """
        lines = [f"{_COPY} 0 {name}" for name in self._written_copies]
        if self._written_replicas:
            written = {name: self._replicas.tensors[name] for name in self._written_replicas}
            lines += [f"{_REPLICA} {value} {name}" for name, value in zip(written, _digest(written).tolist(), strict=True)]
        return lines


def raise_if_written(descriptions: Sequence[Sequence[str]], strategy: str) -> None:
    """Refuse writes that are lost, or that differ between ranks.

    Args:
        descriptions: result of ``describe`` of each rank.
        strategy: strategy of the model, for messages.

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
            if kind == _REPLICA and any(set(lines) != set(others) for others in descriptions):
                raise StepError(
                    f"step: the forward must not write the parameter {name!r} in place with values that differ between ranks, "
                    f"because the replicas would differ from now on. {advice}"
                )
