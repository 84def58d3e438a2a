"""Record the collectives and the host syncs of a piece of code, so that a test can limit communication and waits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist import collective_replay
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
    # This rank sends all of its data to one rank, and receives from one rank.
    splits = [arguments.get(name) for name in ("input_split_sizes", "output_split_sizes")]
    to_one_rank = all(isinstance(sizes, (list, tuple)) and sum(map(bool, sizes)) == 1 for sizes in splits)
    is_permute = func.name().startswith("_c10d_functional::all_to_all_single") and to_one_rank
    # A group of a mesh is described by its axis.
    # Over gloo torch makes a second group of all ranks for a mesh if this machine has a GPU.
    is_training = group == dist.group.WORLD or group.group_desc == "mesh_default"
    description = "mesh_training" if is_training else group.group_desc
    yield CollectiveCall(
        op="permute" if is_permute else kind.op,
        group=description.removeprefix("mesh_") if description.startswith("mesh_") else "other",
        group_size=group.size(),
        bytes=0 if kind.op == "barrier" else size,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
    )


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iter_tensors(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync:
    """One wait of the host for values of a tensor, as plain data.

    Args:
        kind: ``item`` (also ``float()``, ``int()``, ``bool()``, an ``if``, ``torch.equal``), ``tolist``, ``numpy``, ``cpu``,
            ``copy`` (any other blocking copy from a device), or the name of an operation that reads values to know a size.
        location: nearest caller outside of torch, ``file:line in function``.
    """

    kind: str
    location: str


@dataclass(frozen=True, slots=True)
class HostSyncRecords:
    """Records of ``count_host_syncs`` so far, in order."""

    calls: list[HostSync] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of waits."""
        return len(self.calls)


@contextmanager
def count_host_syncs() -> Iterator[HostSyncRecords]:
    """Record every call of this thread inside the context that makes the host wait for a device, or would on a GPU.

    Recorded, also on a CPU, where nothing waits:

    - reads of a value (``item``, ``float(t)``, an ``if`` on a tensor, also in torch's own code)
    - ``tolist``, ``numpy`` and ``cpu`` of any tensor, and blocking copies from a device
    - operations whose output size depends on values (``nonzero``, ``masked_select``, ``unique``, an index by a mask)
    - writes to a tensor through a mask, except of a single number

    Not recorded are ``torch.cuda.synchronize`` and waits for an event, because they are explicit, copies to a CPU tensor with
    ``non_blocking=True``, and ``.to("cpu")`` of a CPU tensor.

    Torch's optimizers may wait for the device, so compare with the same loop and a ``fused`` optimizer.

    Mutates: three methods of ``torch.Tensor``, until the context ends.

    Example:
        >>> import dtrain as dt
        >>> with dt.testing.count_host_syncs() as records:
        ...     positive = [float(x) for x in torch.ones(2)] + torch.zeros(1).tolist()
        >>> records.count, [call.kind for call in records.calls]
        (3, ['item', 'item', 'tolist'])
    """
    records = HostSyncRecords()
    recorder = _SyncRecorder(records.calls)
    # These methods of a CPU tensor read memory without an operation.
    methods: dict[str, Any] = {name: recorder.wrap_method(name, getattr(Tensor, name)) for name in ("cpu", "numpy", "tolist")}
    with mock.patch.multiple(Tensor, **methods), OpObserver(recorder.record_op):
        yield records


class _SyncRecorder:
    """Recorder of operations (``record_op``) and of methods that run no operation (``wrap_method``)."""

    def __init__(self, calls: list[HostSync]) -> None:
        self._calls = calls
        self._thread = threading.get_ident()
        self._inside = False

    def record_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = _classify_sync(func, args, kwargs)
        if kind is not None and not self._inside:
            self._calls.append(HostSync(kind=kind, location=_caller_location()))

    def wrap_method(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._calls.append(HostSync(kind=kind, location=_caller_location()))
            # The copies and reads inside of the method count once.
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return wrapper


_INDEX_WRITES = (
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
)


def _classify_sync(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the kind of wait of ``func``, from torch's own tags if possible; None without a wait."""
    if func is torch.ops.aten._to_copy.default:
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
        return "copy" if to_host and not kwargs.get("non_blocking") else None
    if func is torch.ops.aten.copy_.default:
        to_host = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        return "copy" if to_host and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")) else None
    if torch.Tag.data_dependent_output in func.tags:
        return "item"
    if func in _INDEX_WRITES:
        # The number of written elements is read first, except if a single number of the host fills all of them.
        filled = args[2].numel() == 1 and args[2].device.type == "cpu"
        return "index_put" if _has_mask(args[1]) and not filled else None
    # An index by integers and a repeat of known size read no values.
    is_index = func is torch.ops.aten.index.Tensor
    reads_values = _has_mask(args[1]) if is_index else kwargs.get("output_size") is None
    if torch.Tag.dynamic_output_shape in func.tags and reads_values:
        # For example, "unique" calls "_unique2".
        return str(func.name()).removeprefix("aten::").split(".")[0].strip("_2")
    return None


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _caller_location() -> str:
    """Return the innermost frame outside of torch and ``dtrain.testing``, else the innermost frame."""
    hidden = (*(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__)), collective_replay.__file__)
    frame = first = sys._getframe(2)
    while frame.f_code.co_filename.startswith(hidden) and frame.f_back is not None:
        frame = frame.f_back
    caller = first if frame.f_code.co_filename.startswith(hidden) else frame
    return f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_qualname}"
