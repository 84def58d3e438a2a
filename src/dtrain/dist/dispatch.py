"""See the operations of a program: every operation of a thread, or every collective of the process before it is issued.

Describe a collective without its tensors: to compare it with others, and to issue it again with zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dtrain.dist.rng import derive_seed

OpCallback = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Gets the operation, its arguments and keyword arguments."""


class OpObserver(TorchDispatchMode):
    """A context in which ``callback`` is called before each operation of this thread and of the backwards it starts."""

    supports_higher_order_operators = True  # of compiled code: torch refuses them inside of a mode that does not say so

    def __init__(self, callback: OpCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callback = callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or FakeTensor in types:
            return func(*args, **kwargs)  # compiled code; or nothing is computed: DTensor finds out the shape of a result
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A DTensor or the like comes first: it unpacks itself, and the operations that it runs for that come back here.
            return NotImplemented
        self._callback(func, args, kwargs)
        return func(*args, **kwargs)


def is_collective(func: Any) -> bool:
    """Whether ``func`` is of the namespaces of torch's collectives; some operations there talk to nobody."""
    return func.namespace in ("c10d", "_c10d_functional")


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def group_from_arguments(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """The group that a c10d operation (boxed) or a functional one (by name, or itself) was given; None where there is none."""
    handle = given.get("process_group", given.get("group_name"))
    if handle is None or isinstance(handle, dist.ProcessGroup):
        return handle
    by_name: Any = dist.distributed_c10d._resolve_process_group
    found: dist.ProcessGroup = by_name(handle) if isinstance(handle, str) else dist.ProcessGroup.unbox(handle)
    return found


IssueFn = Callable[[], Any]
"""Runs the collective that was intercepted."""
CollectiveListener = Callable[[Any, tuple[Any, ...], dict[str, Any], IssueFn], Any]
"""Gets a c10d operation, its arguments and keyword arguments, and the call that issues it; returns its result."""


class CollectiveInterceptor:
    """Python code in front of every c10d operation of this process, on any thread and at any depth.

    A ``TorchDispatchMode`` sees each operation of a step and costs microseconds for each. This costs nothing but for
    collectives. All of them pass here: those of ``torch.distributed``, functional ones, and those that C++ code issues.
    ``interceptor`` makes the only one.
    """

    def __init__(self) -> None:
        self._listener: CollectiveListener | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for operation in _group_operations():
            self._library.impl(operation, self._make_kernel(operation), "BackendSelect", with_keyset=True)

    @contextmanager
    def listen(self, listener: CollectiveListener) -> Iterator[None]:
        """A context in which ``listener`` stands in front of every c10d operation. Mutates: this interceptor, meanwhile."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def _make_kernel(self, operation: Any) -> Callable[..., Any]:
        here = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            def issue() -> Any:
                return operation.redispatch(keyset.remove(here), *args, **kwargs)

            listener = self._listener
            return issue() if listener is None else listener(operation, args, kwargs, issue)

        return kernel


@lru_cache(maxsize=1)
def get_interceptor() -> CollectiveInterceptor:
    """The interceptor of this process; installed by the first call, for good."""
    return CollectiveInterceptor()


def _group_operations() -> Iterator[Any]:
    """Every c10d operation that has a group: others communicate with nobody."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    for name in sorted(names):
        packet = getattr(torch.ops.c10d, name.removeprefix("c10d::"))
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            if any(argument.name == "process_group" for argument in operation._schema.arguments):
                yield operation


FLOAT64_EXACT = 2**52  # whole numbers below are exact in float64

# Operations whose sizes may differ between ranks. A run with one of them has no trace.
_VARIABLE_SIZE_OPS = {
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
_POINT_TO_POINT_OPS = {"recv_", "recv_any_source_", "send"}


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """The place of a tensor among the arguments of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveSpec:
    """One collective without its tensors: those of a step are large.

    Args:
        operation: a c10d operation.
        args: its arguments, with a hole for each tensor.
        group: its process group.
        signature: operation, group, root, shapes, dtypes and devices: collectives of one kind may stand for each other.
    """

    operation: Any
    args: tuple[Any, ...]
    group: dist.ProcessGroup
    signature: tuple[object, ...]

    def issue_zeros(self) -> None:
        """Issue the collective with zeros, and wait for it. Collective."""
        _wait_for(
            self.operation(*tree_map(lambda value: value.zeros() if isinstance(value, _TensorSpec) else value, self.args))
        )

    @property
    def has_variable_sizes(self) -> bool:
        """True if ranks may pass tensors of different sizes."""
        return _op_name(self.operation) in _VARIABLE_SIZE_OPS

    def fingerprint(self) -> list[float]:
        """Numbers that are equal on all ranks of the group if their collectives belong together: group, its size, call."""
        name = _op_name(self.operation)
        call = (
            "point to point"
            if name in _POINT_TO_POINT_OPS
            else name
            if self.has_variable_sizes
            else f"{name} {self.signature[2:]}"
        )
        return [derive_seed(self.group.group_name) % FLOAT64_EXACT, self.group.size(), derive_seed(call) % FLOAT64_EXACT]

    def __str__(self) -> str:
        holes: list[_TensorSpec] = []
        tree_map(lambda value: holes.append(value) if isinstance(value, _TensorSpec) else None, self.args)
        sizes = ", ".join(f"{str(hole.dtype).removeprefix('torch.')}{list(hole.shape)}" for hole in holes)
        return f"{_op_name(self.operation).strip('_')} of {sizes} in a group of {self.group.size()}"


@lru_cache(maxsize=64)
def _op_name(operation: Any) -> str:
    return str(operation.name()).removeprefix("c10d::")


@lru_cache(maxsize=64)
def _argument_positions(operation: Any) -> tuple[int, int | None]:
    """The positions of the group and of the root among the arguments of ``operation``."""
    names = [argument.name for argument in operation._schema.arguments]
    return names.index("process_group"), names.index("root_rank") if "root_rank" in names else None


def group_from_call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    """The process group of a collective."""
    at, _ = _argument_positions(operation)
    handle: Any = args[at] if at < len(args) else kwargs["process_group"]
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def call_signature(operation: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[object, ...]:
    """The ``kind`` of a collective; see ``Call``. Cheap, since it is on the path of every collective of a step."""
    _, root = _argument_positions(operation)
    kind: list[object] = [operation, group.group_name, None if root is None else args[root]]
    for value in args:
        _add_tensors(kind, value)
    return tuple(kind)


def _add_tensors(signature: list[object], value: Any) -> None:
    if isinstance(value, Tensor):
        signature += (tuple(value.shape), value.dtype, value.device.type)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_tensors(signature, item)


def describe_collective(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, signature: tuple[object, ...]
) -> CollectiveSpec:
    """A collective as a ``Call``."""
    names = [argument.name for argument in operation._schema.arguments]
    whole = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    holed = tree_map(lambda v: _TensorSpec(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v, whole)
    return CollectiveSpec(operation, holed, group, signature)


def sequence_number(group: dist.ProcessGroup) -> int:
    """The number of collectives that this rank has issued on ``group``; torch's types do not have it."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _wait_for(result: Any) -> None:
    """Wait for a collective that was issued: its tensors must live so long."""
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, list | tuple):
            _wait_for(value)
