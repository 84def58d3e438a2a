"""Describe a collective without its tensors: to compare it with others, and to issue it again with zeros."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from dtrain.dist.rng import derive_seed

EXACT = 2**52  # whole numbers below are exact in float64

# Operations whose sizes may differ between ranks. A run with one of them has no trace.
_UNEVEN = {
    "allgather_",
    "allgather_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_scatter_",
    "scatter_",
    "send",
}
_POINT_TO_POINT = {"recv_", "recv_any_source_", "send"}


@dataclass(frozen=True, slots=True)
class _Hole:
    """The place of a tensor among the arguments of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One collective without its tensors: those of a step are large.

    Args:
        operation: a c10d operation.
        args: its arguments, with a hole for each tensor.
        group: its process group.
        kind: operation, group, root, shapes, dtypes and devices: collectives of one kind may stand for each other.
    """

    operation: Any
    args: tuple[Any, ...]
    group: dist.ProcessGroup
    kind: tuple[object, ...]

    def issue_zeros(self) -> None:
        """Issue the collective with zeros, and wait for it. Collective."""
        _wait(self.operation(*tree_map(lambda value: value.zeros() if isinstance(value, _Hole) else value, self.args)))

    @property
    def uneven(self) -> bool:
        """True if ranks may pass tensors of different sizes."""
        return _name(self.operation) in _UNEVEN

    def identity(self) -> list[float]:
        """Numbers that are equal on all ranks of the group if their collectives belong together: group, its size, call."""
        name = _name(self.operation)
        call = "point to point" if name in _POINT_TO_POINT else name if self.uneven else f"{name} {self.kind[2:]}"
        return [derive_seed(self.group.group_name) % EXACT, self.group.size(), derive_seed(call) % EXACT]

    def __str__(self) -> str:
        holes: list[_Hole] = []
        tree_map(lambda value: holes.append(value) if isinstance(value, _Hole) else None, self.args)
        sizes = ", ".join(f"{str(hole.dtype).removeprefix('torch.')}{list(hole.shape)}" for hole in holes)
        return f"{_name(self.operation).strip('_')} of {sizes} in a group of {self.group.size()}"


@lru_cache(maxsize=64)
def _name(operation: Any) -> str:
    return str(operation.name()).removeprefix("c10d::")


@lru_cache(maxsize=64)
def _positions(operation: Any) -> tuple[int, int | None]:
    """The positions of the group and of the root among the arguments of ``operation``."""
    names = [argument.name for argument in operation._schema.arguments]
    return names.index("process_group"), names.index("root_rank") if "root_rank" in names else None


def group_of_call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    """The process group of a collective."""
    at, _ = _positions(operation)
    handle: Any = args[at] if at < len(args) else kwargs["process_group"]
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def kind_of(operation: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[object, ...]:
    """The ``kind`` of a collective; see ``Call``. Cheap, since it is on the path of every collective of a step."""
    _, root = _positions(operation)
    kind: list[object] = [operation, group.group_name, None if root is None else args[root]]
    for value in args:
        _add_tensors(kind, value)
    return tuple(kind)


def _add_tensors(kind: list[object], value: Any) -> None:
    if isinstance(value, Tensor):
        kind += (tuple(value.shape), value.dtype, value.device.type)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_tensors(kind, item)


def call_of(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, kind: tuple[object, ...]
) -> Call:
    """A collective as a ``Call``."""
    names = [argument.name for argument in operation._schema.arguments]
    whole = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    holed = tree_map(lambda v: _Hole(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v, whole)
    return Call(operation, holed, group, kind)


def sequence_of(group: dist.ProcessGroup) -> int:
    """The number of collectives that this rank has issued on ``group``; torch's types do not have it."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _wait(result: Any) -> None:
    """Wait for a collective that was issued: its tensors must live so long."""
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, list | tuple):
            _wait(value)
