"""Intercept collectives and operations before they run, and describe a collective without its tensors."""

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
"""Called with the operation, its arguments and its keyword arguments."""


class OpObserver(TorchDispatchMode):
    """Context manager that calls ``callback`` before each operation of this thread, and of backwards started in this thread."""

    # torch refuses compiled code inside of a mode without this attribute.
    supports_higher_order_operators = True

    def __init__(self, callback: OpCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callback = callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or FakeTensor in types:
            # Compiled code, or DTensor's shape inference, which computes nothing.
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A tensor subclass such as DTensor unpacks itself first. The operations on its parts then reach this method.
            return NotImplemented
        self._callback(func, args, kwargs)
        return func(*args, **kwargs)


def is_collective(func: Any) -> bool:
    """Return True if ``func`` is in a namespace of torch's collectives. Some operations there do not communicate."""
    return func.namespace in ("c10d", "_c10d_functional")


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def group_from_arguments(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group among the named arguments of a c10d or functional collective, or None."""
    handle = arguments.get("process_group", arguments.get("group_name"))
    if handle is None or isinstance(handle, dist.ProcessGroup):
        return handle
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = by_name(handle) if isinstance(handle, str) else dist.ProcessGroup.unbox(handle)
    return group


IssueFn = Callable[[], Any]
"""Issues the intercepted collective."""
CollectiveListener = Callable[[Any, tuple[Any, ...], dict[str, Any], IssueFn], Any]
"""Called with a c10d operation, its arguments, its keyword arguments, and the function that issues the collective. Returns the
result of the collective."""


class CollectiveInterceptor:
    """Hook that runs Python code before every c10d operation of this process, on any thread.

    A ``TorchDispatchMode`` adds microseconds to every operation. This hook adds time only to collectives: collectives of
    ``torch.distributed``, functional collectives, and collectives issued by C++ code. ``get_interceptor`` returns the only one.
    """

    def __init__(self) -> None:
        self._listener: CollectiveListener | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for operation in _group_operations():
            self._library.impl(operation, self._make_kernel(operation), "BackendSelect", with_keyset=True)

    @contextmanager
    def listen(self, listener: CollectiveListener) -> Iterator[None]:
        """Call ``listener`` before every c10d operation inside of the context. Mutates: this interceptor."""
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
    """Return the interceptor of this process. The first call installs the interceptor permanently."""
    return CollectiveInterceptor()


def _group_operations() -> Iterator[Any]:
    """Yield every c10d operation with a process group. Operations without a group do not communicate."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    for name in sorted(names):
        packet = getattr(torch.ops.c10d, name.removeprefix("c10d::"))
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            if any(argument.name == "process_group" for argument in operation._schema.arguments):
                yield operation


# Float64 holds all smaller whole numbers exactly.
FLOAT64_EXACT = 2**52

# Operations whose tensor sizes may differ between ranks. A run with such an operation has no trace.
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
    """Shape, dtype and device of a tensor argument of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveSpec:
    """Description of one collective without its tensors.

    Args:
        operation: c10d operation.
        args: arguments, each tensor replaced by its shape, dtype and device.
        group: process group.
        signature: operation, group, root, shapes, dtypes and devices. Collectives with equal signatures are interchangeable.
    """

    operation: Any
    args: tuple[Any, ...]
    group: dist.ProcessGroup
    signature: tuple[object, ...]

    def issue_zeros(self) -> None:
        """Issue the collective with zeros and wait for the result. Collective."""
        _wait_for(
            self.operation(*tree_map(lambda value: value.zeros() if isinstance(value, _TensorSpec) else value, self.args))
        )

    @property
    def has_variable_sizes(self) -> bool:
        """True if ranks may pass tensors of different sizes."""
        return _op_name(self.operation) in _VARIABLE_SIZE_OPS

    def fingerprint(self) -> list[float]:
        """Return numbers for group, group size and call, equal on all ranks of the group if their collectives match."""
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
        specs: list[_TensorSpec] = []
        tree_map(lambda value: specs.append(value) if isinstance(value, _TensorSpec) else None, self.args)
        sizes = ", ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
        return f"{_op_name(self.operation).strip('_')} of {sizes} in a group of {self.group.size()}"


@lru_cache(maxsize=64)
def _op_name(operation: Any) -> str:
    return str(operation.name()).removeprefix("c10d::")


@lru_cache(maxsize=64)
def _argument_positions(operation: Any) -> tuple[int, int | None]:
    """Return the positions of the group and of the root among the arguments of ``operation``."""
    names = [argument.name for argument in operation._schema.arguments]
    return names.index("process_group"), names.index("root_rank") if "root_rank" in names else None


def group_from_call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group of a collective."""
    at, _ = _argument_positions(operation)
    handle: Any = args[at] if at < len(args) else kwargs["process_group"]
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def call_signature(operation: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[object, ...]:
    """Return the signature of a collective; see ``CollectiveSpec``. Fast, because every collective of a step needs one."""
    _, root = _argument_positions(operation)
    signature: list[object] = [operation, group.group_name, None if root is None else args[root]]
    for value in args:
        _add_tensors(signature, value)
    return tuple(signature)


def _add_tensors(signature: list[object], value: Any) -> None:
    if isinstance(value, Tensor):
        signature += (tuple(value.shape), value.dtype, value.device.type)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_tensors(signature, item)


def describe_collective(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, signature: tuple[object, ...]
) -> CollectiveSpec:
    """Describe a collective as a ``CollectiveSpec``."""
    names = [argument.name for argument in operation._schema.arguments]
    whole = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    described = tree_map(lambda v: _TensorSpec(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v, whole)
    return CollectiveSpec(operation, described, group, signature)


def sequence_number(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has issued on ``group``. torch's type stubs lack the method."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _wait_for(result: Any) -> None:
    """Wait for an issued collective, so that its tensors stay alive until then."""
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, list | tuple):
            _wait_for(value)
