"""Sees storages that are resized by themselves, which no dispatch mode does: FSDP2 empties and fills gathered parameters so.

What an operation's schema says of memory: which arguments it may enlarge, and how large the result of a collective is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

__all__ = ["ResizeObserver", "add_resize_observer", "remove_resize_observer"]


class ResizeObserver(Protocol):
    """Is asked before each resize of a storage in this process, and told after it."""

    def before_resize(self, storage: UntypedStorage, size: int) -> BaseException | None:
        """The error that refuses ``size`` bytes, or None."""

    def after_resize(self, storage: UntypedStorage, size: int) -> None:
        """The storage has ``size`` bytes now."""


_observers: list[ResizeObserver] = []
_lock = threading.Lock()
_original_resize: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]


def add_resize_observer(observer: ResizeObserver) -> None:
    """Let ``observer`` see resizes, until ``unwatch``.

    Mutates: ``torch.UntypedStorage.resize_``, a method inherited from C++, while anybody watches.
    """
    with _lock:
        _observers.append(observer)
        UntypedStorage.resize_ = _observed_resize  # type: ignore[method-assign, assignment]


def remove_resize_observer(observer: ResizeObserver) -> None:
    """Take back one ``watch``; the order does not matter."""
    with _lock:
        del _observers[next(i for i in reversed(range(len(_observers))) if _observers[i] is observer)]
        if not _observers:
            del UntypedStorage.resize_


def _observed_resize(self: UntypedStorage, size: int) -> Any:
    watching = tuple(_observers)
    for who in watching:
        refusal = who.before_resize(self, size)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # no ring of an error, its traceback and this frame: it would keep all frames above until collected
    found = _original_resize(self, size)
    for who in watching:
        who.after_resize(self, size)
    return found


__all__ = ["SavedLayout", "collective_result_bytes", "save_layouts"]

_RESIZE_OPS = ("resize_", "resize_as_", "resize_as_sparse_", "set_")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedLayout:
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


def save_layouts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SavedLayout]:
    """The arguments that ``func`` may enlarge, as they are now: those of ``resize_`` and its like, and of ``out=``."""
    found = []
    for position, name in _resizable_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                found.append(_save_layout(tensor))
    return found


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
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None:
        return ()
    resizes = schema.name.split("::")[-1] in _RESIZE_OPS
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_out or (resizes and i == 0))


def collective_result_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
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


_OPS_WITHOUT_RESULT = ("wait_tensor", "isend", "irecv", "batch_p2p_ops")


@cache
def _is_functional_collective(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.name.startswith("_c10d_functional::"):
        return False
    name = schema.name.split("::")[-1]
    return not name.endswith(("_", "_out", *_OPS_WITHOUT_RESULT))
