"""Find parameters that a forward writes in place (``ForwardWrites``).

In one process such a write stays (``weight.clamp_()``, a momentum encoder). FSDP2 computes with unsharded copies and loses the
write. Replicas keep the write, but they differ if the write depends on the samples, or if ranks run different numbers of
forwards.

torch's version counters show writes in place. A write through ``.data`` leaves the counter, so the first step also compares a
hash of each parameter before and after its forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from dtrain.dist.dtensor import to_local
from dtrain.errors import StepError
from dtrain.memory.device_memory import is_out_of_memory
from dtrain.shard.fsdp2_forward import unit_forwards
from dtrain.shard.fsdp2_private import fsdp_param_groups, sharded_and_unsharded_params
from dtrain.shard.replica_check import hash_tensors

# Replicas that part later show in the comparison of replicas. The copies of FSDP2 are watched in every step, and a replica that
# a forward has written is watched from then on.
_STEPS_OF_REPLICAS = 3
_COPY, _REPLICA = "copy", "replica"


@dataclass(slots=True, eq=False)
class _Snapshot:
    """Version counters of tensors, and their hashes if ``hashes`` is not None."""

    tensors: Mapping[str, Tensor]
    versions: list[int]
    hashes: Tensor | None = None

    @classmethod
    def take(cls, tensors: Mapping[str, Tensor], *, hashes: bool = False) -> _Snapshot:
        # A simulated step has no values.
        real = hashes and all(type(to_local(each)) in (Tensor, nn.Parameter) and not each.is_meta for each in tensors.values())
        found = _hashes(tensors) if real and tensors else None
        return cls(tensors, [tensor._version for tensor in tensors.values()], found)

    def changed(self) -> dict[str, None]:
        """Return the names of the tensors that were written since. Host sync: one with hashes."""
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
        self._replicas, self._copies = _Snapshot.take({}), _Snapshot.take({})
        self._of_units: dict[int, _Snapshot] = {}
        self._written_copies: dict[str, None] = {}
        self._written_replicas: dict[str, None] = {}
        # Replicas that the forward of any step has written, by name.
        self._ever_written: dict[str, None] = {}
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
        self._replicas = _Snapshot.take({})
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

    def _before_unit(self, number: int, group: object) -> None:
        # FSDP2 makes the copies in the first forward, so no version is known from before.
        if self._steps == 1:
            self._of_units.setdefault(number, _Snapshot.take(self._copies_of(group), hashes=True))

    def _after_unit(self, number: int) -> None:
        if self._of_units and (snapshot := self._of_units.pop(number, None)) is not None:
            self._written_copies |= snapshot.changed()

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
