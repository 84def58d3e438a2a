"""Observe resizes of storages, and read from an operation's schema which memory the operation allocates.

FSDP2 empties and fills gathered parameters by resizing their storages, which no dispatch mode sees.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage


class ResizeObserver(Protocol):
    """Observer of all resizes of storages in this process."""

    def before_resize(self, storage: UntypedStorage, size: int) -> BaseException | None:
        """Return an error to refuse ``size`` bytes, or None."""

    def after_resize(self, storage: UntypedStorage, size: int) -> None:
        """Record that the storage has ``size`` bytes now."""


_observers: list[ResizeObserver] = []
_lock = threading.Lock()
_original_resize: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]


def add_resize_observer(observer: ResizeObserver) -> None:
    """Call ``observer`` for each resize, until ``remove_resize_observer``.

    Mutates: ``torch.UntypedStorage.resize_``, a method inherited from C++, while there are observers.
    """
    with _lock:
        _observers.append(observer)
        UntypedStorage.resize_ = _observed_resize  # type: ignore[method-assign, assignment]


def remove_resize_observer(observer: ResizeObserver) -> None:
    """Remove one registration of ``observer``; the order of removals does not matter."""
    with _lock:
        del _observers[next(i for i in reversed(range(len(_observers))) if _observers[i] is observer)]
        if not _observers:
            del UntypedStorage.resize_


def _observed_resize(self: UntypedStorage, size: int) -> Any:
    observers = tuple(_observers)
    for observer in observers:
        refusal = observer.before_resize(self, size)
        if refusal is not None:
            try:
                raise refusal
            finally:
                # A cycle of the error, its traceback and this frame would keep all outer frames until garbage collection.
                del refusal
    result = _original_resize(self, size)
    for observer in observers:
        observer.after_resize(self, size)
    return result


_RESIZE_OPS = ("resize_", "resize_as_", "resize_as_sparse_", "set_")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedLayout:
    """Layout of an argument before an operation that may enlarge it."""

    tensor: Tensor
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    storage: torch.UntypedStorage
    nbytes: int

    def restore(self) -> None:
        """Restore the argument's storage, layout and size in bytes; its values may have changed.

        Mutates: ``tensor`` and ``storage``.
        """
        with torch.no_grad():
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)


def save_layouts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SavedLayout]:
    """Return the layouts of the arguments that ``func`` may enlarge: the tensor of ``resize_`` and similar, and ``out=``."""
    layouts = []
    for position, name in _resizable_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                layouts.append(_save_layout(tensor))
    return layouts


def _save_layout(tensor: Tensor) -> SavedLayout:
    storage = tensor.untyped_storage()
    return SavedLayout(
        tensor=tensor,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        storage=storage,
        nbytes=storage.nbytes(),
    )


@cache
def _resizable_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    # A higher-order operator has no schema.
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    resizes = schema.name.split("::")[-1] in _RESIZE_OPS
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_out or (resizes and i == 0))


def collective_result_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the bytes that a functional collective will allocate for its result; 0 for all other operations.

    The result of any other operation is counted after the operation. c10d's own collectives write into existing tensors.
    """
    if not _is_functional_collective(func):
        return 0
    value = args[0] if args else kwargs.get("input", kwargs.get("inputs"))
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    name = func._schema.name.split("::")[-1]
    if name.startswith("all_gather"):
        return size * int(args[1])
    if name.startswith("reduce_scatter"):
        return size // int(args[2])
    return size


_OPS_WITHOUT_RESULT = ("wait_tensor", "isend", "irecv", "batch_p2p_ops")


@cache
def _is_functional_collective(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("_c10d_functional::"):
        return False
    name = schema.name.split("::")[-1]
    return not name.endswith(("_", "_out", *_OPS_WITHOUT_RESULT))
