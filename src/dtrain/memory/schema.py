"""What an operation's schema says of memory: which arguments it may enlarge, and how large the result of a collective is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Shape", "bytes_of_collective", "shapes_before"]

_RESIZING = ("resize_", "resize_as_", "resize_as_sparse_", "set_")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """How an argument was laid out before an operation that may enlarge it."""

    tensor: Tensor
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    storage: torch.UntypedStorage
    nbytes: int

    def restore(self) -> None:
        """Give the argument its storage, its layout and its size in bytes back; the values may be new.

        Mutates: ``tensor`` and ``storage``.
        """
        with torch.no_grad():
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)


def shapes_before(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape]:
    """The arguments that ``func`` may enlarge, as they are now: those of ``resize_`` and its like, and of ``out=``."""
    found = []
    for position, name in _may_enlarge(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                found.append(_shape(tensor))
    return found


def _shape(tensor: Tensor) -> Shape:
    storage = tensor.untyped_storage()
    return Shape(
        tensor=tensor,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        storage=storage,
        nbytes=storage.nbytes(),
    )


@cache
def _may_enlarge(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None:
        return ()
    resizes = schema.name.split("::")[-1] in _RESIZING
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_out or (resizes and i == 0))


def bytes_of_collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """What a functional collective will allocate for its result; 0 for all other operations.

    The others' results are known when they are there. c10d's own collectives write into tensors that are given.
    """
    if not _is_functional_collective(func):
        return 0
    value = args[0] if args else kwargs.get("input", kwargs.get("inputs"))
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    given = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    name = func._schema.name.split("::")[-1]
    if name.startswith("all_gather"):
        return given * int(args[1])
    if name.startswith("reduce_scatter"):
        return given // int(args[2])
    return given


_NO_RESULT = ("wait_tensor", "isend", "irecv", "batch_p2p_ops")


@cache
def _is_functional_collective(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("_c10d_functional::"):
        return False
    name = schema.name.split("::")[-1]
    return not name.endswith(("_", "_out", *_NO_RESULT))
