"""How operations are seen: every one that this thread runs, whatever it is hidden in, and the group that a collective is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
