"""What fake tensors cannot say, answered: values that are read on the host, and shapes that depend on values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.dist.dispatch import is_collective
from dtrain.errors import ConfigError
from dtrain.host_scalar import HostScalar
from dtrain.testing.collectives import Collective, described

_aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """A context in which a number that is read from a fake tensor is 1, and what a mask selects is everything.

    So a plan goes on where a model looks at its data, and assumes the most memory that the data can ask for. Collectives, which
    do nothing, are noted in ``collectives``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and kind is not FakeTensor for kind in types):
            return NotImplemented
        if is_collective(func):
            self.collectives.extend(described(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is _aten._local_scalar_dense.default:
                return _one(args[0].dtype)
            raise _unknown(func) from None
        except DynamicOutputShapeException:
            answer = _everything(func, args)
            if answer is None:
                raise _unknown(func) from None
            return answer


def _one(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1


def _everything(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The result of ``func`` when nothing is left out by its mask; None for an operation that this does not know."""
    if func is _aten.nonzero.default:
        made: Tensor = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return made
    if func is _aten.masked_select.default:
        made = args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
        return made.reshape(-1)
    if func is _aten.index.Tensor:
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                indices += index.new_empty((index.ndim, index.numel()), dtype=torch.int64).unbind(0)
            else:
                indices.append(index)
        return func(args[0], indices)  # type: ignore[no-any-return]
    return None


def _unknown(func: Any) -> ConfigError:
    return ConfigError(
        f"plan: the result of {func} depends on values, which a plan does not have; let the model compute it with shapes that "
        "do not depend on the data"
    )


class Unread(HostScalar):
    """A scalar on its way to the host that never arrives, as on a GPU that is busy."""

    def __init__(self) -> None:
        """Nothing is kept."""

    def post(self, value: Tensor) -> None:
        """Does nothing."""

    def clear(self) -> None:
        """Does nothing."""

    def peek(self) -> float | None:
        """None: it has not arrived."""
        return None
