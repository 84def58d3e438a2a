"""Record the collectives that a piece of code runs, with their sizes, so that a test can limit communication."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtrain.dist.collective_replay import OpObserver, group_from_arguments, is_collective, named_arguments
from dtrain.dist.control_plane import Channel, observe_exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective issued by this rank, as plain data.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``broadcast``, ``reduce``, ``gather``, ``scatter``,
            ``all_to_all``, ``permute`` (an ``all_to_all`` in which each rank sends all of its data to one rank), ``send``,
            ``recv``, ``barrier``; torch's own name for any other collective.
        group: ``"training"`` (the default group), ``"control"``, ``"background"``, the axis of a mesh (``"dp_shard"``), or
            ``"other"``. torch creates no new group for an axis over all ranks, so its group is ``"training"``.
        group_size: number of ranks in the group, this rank included.
        bytes: *logical* size of the whole buffer, regardless of the backend: of the input for ``reduce_scatter``,
            ``all_to_all`` and ``permute``, of the output for ``all_gather``, of the buffers of all ranks for ``gather`` and
            ``scatter``, of the tensor for ``all_reduce``, ``broadcast``, ``reduce``, ``send`` and ``recv``, 0 for ``barrier``.
        dtype: dtype of the elements, such as ``"float32"``.
    """

    op: str
    group: str
    group_size: int
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CollectiveRecords:
    """Records of ``count_collectives`` so far, in the order of issue."""

    records: list[CollectiveCall] = field(default_factory=list)

    def select(self, *, op: str | None = None, group: str | None = None) -> list[CollectiveCall]:
        """Return the records of one operation and one group; None selects all."""
        return [r for r in self.records if op in (None, r.op) and group in (None, r.group)]

    def count(self, *, op: str | None = None, group: str | None = None) -> int:
        """Return the number of collectives."""
        return len(self.select(op=op, group=group))

    def bytes(self, *, op: str | None = None, group: str | None = None) -> int:
        """Return the sum of the logical bytes."""
        return sum(r.bytes for r in self.select(op=op, group=group))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number by group and operation: ``{"training": {"all_gather": 4, "reduce_scatter": 3}}``; plain data."""
        table: dict[str, dict[str, int]] = {}
        for record in self.records:
            row = table.setdefault(record.group, {})
            row[record.op] = row.get(record.op, 0) + 1
        return table


@contextmanager
def count_collectives() -> Iterator[CollectiveRecords]:
    """Record every collective that this thread issues inside the context: of FSDP2, DTensor, dtrain and the user.

    Recorded are calls through torch's dispatcher, on every backend: the ``torch.distributed`` functions and the functional
    collectives. Collectives of a backward are recorded, too: on a CPU backward runs in the calling thread, and autograd's
    device threads inherit the context. Not recorded are collectives of other threads, such as a background save, of a graph
    that ``torch.compile`` compiled before, of symmetric memory, and the records of a step. An exchange of the control plane is
    recorded as ``all_gather`` or ``gather`` of group ``"control"`` or ``"background"``.

    Collective: none of its own.

    Example:
        >>> import dtrain as dt
        >>> with dt.init_dist(device="cpu"), dt.testing.count_collectives() as records:
        ...     torch.distributed.all_reduce(torch.ones(3))
        >>> records.counts(), records.bytes(op="all_reduce", group="training")
        ({'training': {'all_reduce': 1}}, 12)
    """
    records = CollectiveRecords()

    def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_collective(func):
            records.records.extend(describe_collective(func, args, kwargs))

    thread = threading.get_ident()

    def record_exchange(channel: Channel, op: str, size: int) -> None:
        if threading.get_ident() == thread:
            world_size = channel.layout.world_size
            records.records.append(CollectiveCall(op=op, group=channel.name, group_size=world_size, bytes=size, dtype="uint8"))

    with OpObserver(record), observe_exchanges(record_exchange):
        yield records


@dataclass(frozen=True, slots=True)
class _OpArguments:
    """Position and meaning of the arguments of one operation.

    Args:
        op: name of the operation.
        tensor_argument: position of the counted tensors.
        per_rank: if True, the counted tensors are one rank's part of the whole.
    """

    op: str
    tensor_argument: int = 0
    per_rank: bool = False


# c10d takes (outputs, inputs, ...) or (tensors, ...), the functional collectives (input, ...).
_OP_ARGUMENTS = {
    "c10d::_allgather_base_": _OpArguments("all_gather"),
    "c10d::allgather_": _OpArguments("all_gather"),
    "c10d::allgather_coalesced_": _OpArguments("all_gather"),
    "c10d::allgather_into_tensor_coalesced_": _OpArguments("all_gather"),
    "c10d::_reduce_scatter_base_": _OpArguments("reduce_scatter", 1),
    "c10d::reduce_scatter_": _OpArguments("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": _OpArguments("reduce_scatter", 1),
    "c10d::allreduce_": _OpArguments("all_reduce"),
    "c10d::allreduce_coalesced_": _OpArguments("all_reduce"),
    "c10d::broadcast_": _OpArguments("broadcast"),
    "c10d::reduce_": _OpArguments("reduce"),
    "c10d::gather_": _OpArguments("gather", 1, per_rank=True),
    "c10d::scatter_": _OpArguments("scatter", 0, per_rank=True),
    "c10d::alltoall_": _OpArguments("all_to_all", 1),
    "c10d::alltoall_base_": _OpArguments("all_to_all", 1),
    "c10d::send": _OpArguments("send"),
    "c10d::recv_": _OpArguments("recv"),
    "c10d::recv_any_source_": _OpArguments("recv"),
    "c10d::barrier": _OpArguments("barrier"),
    "c10d::monitored_barrier_": _OpArguments("barrier"),
    "_c10d_functional::all_gather_into_tensor": _OpArguments("all_gather", per_rank=True),
    "_c10d_functional::all_gather_into_tensor_out": _OpArguments("all_gather", per_rank=True),
    "_c10d_functional::all_gather_into_tensor_coalesced": _OpArguments("all_gather", per_rank=True),
    "_c10d_functional::reduce_scatter_tensor": _OpArguments("reduce_scatter"),
    "_c10d_functional::reduce_scatter_tensor_out": _OpArguments("reduce_scatter"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _OpArguments("reduce_scatter"),
    "_c10d_functional::all_reduce": _OpArguments("all_reduce"),
    "_c10d_functional::all_reduce_": _OpArguments("all_reduce"),
    "_c10d_functional::all_reduce_coalesced": _OpArguments("all_reduce"),
    "_c10d_functional::all_reduce_coalesced_": _OpArguments("all_reduce"),
    "_c10d_functional::broadcast": _OpArguments("broadcast"),
    "_c10d_functional::broadcast_": _OpArguments("broadcast"),
    "_c10d_functional::all_to_all_single": _OpArguments("all_to_all"),
    "_c10d_functional::isend": _OpArguments("send"),
    "_c10d_functional::irecv": _OpArguments("recv"),
}


def describe_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[CollectiveCall]:
    """Yield the record of one collective call; nothing for a helper operation without a process group."""
    arguments = named_arguments(func, args, kwargs)
    group = group_from_arguments(arguments)
    if group is None:
        return
    kind = _OP_ARGUMENTS.get(func.name().removesuffix(".default"), _OpArguments(func.name()))
    tensors = list(_iter_tensors(list(arguments.values())[kind.tensor_argument]))
    size = sum(t.numel() * t.element_size() for t in tensors) * (group.size() if kind.per_rank else 1)
    is_permute = func.name().startswith("_c10d_functional::all_to_all_single") and _is_permute(arguments)
    yield CollectiveCall(
        op="permute" if is_permute else kind.op,
        group=_group_name(group),
        group_size=group.size(),
        bytes=0 if kind.op == "barrier" else size,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
    )


def _is_permute(arguments: dict[str, Any]) -> bool:
    """Return True if this rank sends all of its data to one rank, and receives from one rank."""
    sizes = [arguments.get(name) for name in ("input_split_sizes", "output_split_sizes")]
    return all(isinstance(each, (list, tuple)) and sum(bool(size) for size in each) == 1 for each in sizes)


def _group_name(group: dist.ProcessGroup) -> str:
    if group == dist.group.WORLD:
        return "training"
    return _mesh_axis(group)


def _mesh_axis(group: dist.ProcessGroup) -> str:
    """Return the axis of the mesh that ``group`` was created for, from the group's description."""
    description = group.group_desc
    return description.removeprefix("mesh_") if description.startswith("mesh_") else "other"


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iter_tensors(item)
