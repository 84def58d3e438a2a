"""See the operations of a program: every operation of a thread, or every collective of the process before it is issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

Look = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Gets the operation, its arguments and keyword arguments."""


class Watch(TorchDispatchMode):
    """A context in which ``look`` is called before each operation of this thread and of the backwards it starts."""

    supports_higher_order_operators = True  # of compiled code: torch refuses them inside of a mode that does not say so

    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or FakeTensor in types:
            return func(*args, **kwargs)  # compiled code; or nothing is computed: DTensor finds out the shape of a result
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A DTensor or the like comes first: it unpacks itself, and the operations that it runs for that come back here.
            return NotImplemented
        self._look(func, args, kwargs)
        return func(*args, **kwargs)


def is_collective(func: Any) -> bool:
    """Whether ``func`` is of the namespaces of torch's collectives; some operations there talk to nobody."""
    return func.namespace in ("c10d", "_c10d_functional")


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def group_of(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """The group that a c10d operation (boxed) or a functional one (by name, or itself) was given; None where there is none."""
    handle = given.get("process_group", given.get("group_name"))
    if handle is None or isinstance(handle, dist.ProcessGroup):
        return handle
    by_name: Any = dist.distributed_c10d._resolve_process_group
    found: dist.ProcessGroup = by_name(handle) if isinstance(handle, str) else dist.ProcessGroup.unbox(handle)
    return found


Issue = Callable[[], Any]
"""Runs the collective that was intercepted."""
Listener = Callable[[Any, tuple[Any, ...], dict[str, Any], Issue], Any]
"""Gets a c10d operation, its arguments and keyword arguments, and the call that issues it; returns its result."""


class Interceptor:
    """Python code in front of every c10d operation of this process, on any thread and at any depth.

    A ``TorchDispatchMode`` sees each operation of a step and costs microseconds for each. This costs nothing but for
    collectives. All of them pass here: those of ``torch.distributed``, functional ones, and those that C++ code issues.
    ``interceptor`` makes the only one.
    """

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        for operation in _operations():
            self._library.impl(operation, self._kernel(operation), "BackendSelect", with_keyset=True)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """A context in which ``listener`` stands in front of every c10d operation. Mutates: this interceptor, meanwhile."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def _kernel(self, operation: Any) -> Callable[..., Any]:
        here = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            def issue() -> Any:
                return operation.redispatch(keyset.remove(here), *args, **kwargs)

            listener = self._listener
            return issue() if listener is None else listener(operation, args, kwargs, issue)

        return kernel


@lru_cache(maxsize=1)
def interceptor() -> Interceptor:
    """The interceptor of this process; installed by the first call, for good."""
    return Interceptor()


def _operations() -> Iterator[Any]:
    """Every c10d operation that has a group: others communicate with nobody."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    for name in sorted(names):
        packet = getattr(torch.ops.c10d, name.removeprefix("c10d::"))
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            if any(argument.name == "process_group" for argument in operation._schema.arguments):
                yield operation
