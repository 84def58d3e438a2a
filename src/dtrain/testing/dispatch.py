"""How the counters see operations: every one that this thread runs, whatever it is hidden in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

Look = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Gets the operation, its arguments and keyword arguments."""


class Watch(TorchDispatchMode):
    """A context in which ``look`` is called before each operation of this thread and of the backwards it starts."""

    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # nothing is computed: DTensor finds out the shape of a result
        if any(kind is not Tensor for kind in types):
            # A DTensor or the like comes first: it unpacks itself, and the operations that it runs for that come back here.
            return NotImplemented
        self._look(func, args, kwargs)
        return func(*args, **kwargs)
