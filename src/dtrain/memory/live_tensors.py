"""Count the bytes held by the tensors of this process, by storage, as tensors are allocated and freed.

A storage is the memory behind tensors. Views and reshaped tensors share a storage, and FSDP2 empties and fills a storage while
its tensors stay. So each storage counts once, with its current bytes. torch keeps one Python object per storage while anything
holds the storage, including C++ code and autograd's saved tensors. So the end of the object is the end of the memory.

Operations are seen by a dispatch mode. FSDP2 empties and fills gathered parameters by resizing their storages, which no
dispatch mode sees, so ``UntypedStorage.resize_`` is replaced while a count runs.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

AdmitFn = Callable[[int], BaseException | None]
"""``bytes of an allocation -> error``, called before the bytes are counted; an error replaces the allocation."""

ChangeFn = Callable[[int, int], None]
"""``(storage key, change in bytes)``; the key of a freed storage is used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """One storage in memory, as plain data.

    Args:
        bytes: current size in bytes.
        shape: shape of the first tensor seen with the storage; empty if no tensor was seen.
        dtype: dtype of this tensor, such as ``"float32"``.
        made_by: operation that allocated the storage, such as ``"aten.mm.default"``; ``"before"`` for an existing storage.
        stack: call stack of the allocation, innermost line first; empty if stacks are not recorded.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    stack: tuple[str, ...]


class _TrackedStorage(weakref.ref[UntypedStorage]):
    """One counted storage: its counted bytes and its origin."""

    __slots__ = ("dtype", "key", "made_by", "nbytes", "shape", "stack")
    key: int
    nbytes: int
    shape: Sequence[int]
    dtype: torch.dtype | None
    # An operation, or a name.
    made_by: Any
    stack: tuple[str, ...]


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of the tensors that this thread and its backwards use.

    A storage counts from its allocation to its end, also after the context. A storage from elsewhere (before the
    context, another thread, NumPy) counts from the first operation that receives it, or from ``count``. Two kinds of memory are
    not counted: temporary memory inside one operation, and buffers of a collective's backend. Inside the context
    ``torch.compile`` compiles nothing, and compiled code runs uncompiled.

    Args:
        fake: if True, count ``FakeTensor`` s in place of real tensors, with the bytes that they stand for.
        device_type: type of the counted device, such as ``"cuda"``; None counts all. Tensors on ``meta`` hold nothing.
        admit: function called before an allocation is counted, see ``AdmitFn``. The allocation is dropped before its error is
            raised.
        on_change: function called for every counted change, see ``ChangeFn``.
        stack_depth: number of recorded call-stack lines per storage, in ``storages()``; 0 is fastest.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        fake: bool = False,
        device_type: str | None = None,
        admit: AdmitFn | None = None,
        on_change: ChangeFn | None = None,
        stack_depth: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._device_type, self._admit, self._stack_depth = fake, device_type, admit, stack_depth
        self._on_change = on_change
        self._live = self._peak = 0
        self._table: dict[int, _TrackedStorage] = {}
        # Storages end in any thread and at any moment, also during garbage collection. The callback only appends here, which
        # needs no lock. The next read counts the ended storages.
        self._ended: deque[_TrackedStorage] = deque()
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

    @property
    def live(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._process_ended()
            return self._live

    @property
    def peak(self) -> int:
        """Most bytes held at once since the last ``reset``."""
        return self._peak

    def reset(self) -> None:
        """Start the peak again from the bytes in use."""
        with self._lock:
            self._peak = self.live

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` from now on, unless they are counted already. They are never refused."""
        self._count_existing(tensors)

    def storages(self) -> list[LiveStorage]:
        """Return all storages in memory, the largest first."""
        with self._lock:
            self._process_ended()
            tracked = [entry for entry in self._table.values() if entry.nbytes]
        rows = [
            LiveStorage(
                bytes=entry.nbytes,
                shape=tuple(int(n) for n in entry.shape),
                dtype=str(entry.dtype).removeprefix("torch.") if entry.dtype else "none",
                made_by=str(entry.made_by),
                stack=entry.stack,
            )
            for entry in tracked
        ]
        return sorted(rows, key=lambda storage: -storage.bytes)

    def __enter__(self) -> LiveBytes:
        self.observe_resizes()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.ignore_resizes()

    def observe_resizes(self) -> None:
        """Count resized storages from now on, until ``ignore_resizes``. Mutates: a method of torch's storages."""
        self._thread = threading.get_ident()
        with _resize_lock:
            _resize_observers.append(self)
            UntypedStorage.resize_ = _observed_resize  # type: ignore[method-assign, assignment]

    def ignore_resizes(self) -> None:
        """Undo one ``observe_resizes``."""
        with _resize_lock:
            del _resize_observers[next(i for i in reversed(range(len(_resize_observers))) if _resize_observers[i] is self)]
            if not _resize_observers:
                del UntypedStorage.resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # C++ asks a fake tensor for its device about once per operation. The other modes need not see that.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        for kind in types:
            if kind is FakeTensor:
                # DTensor computes the shape of a result with fake tensors, which hold no memory.
                if not self._fake:
                    return func(*args, **kwargs)
            # A DTensor or similar unpacks itself, and its inner operations come back here.
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented
        before = self.count_arguments(func, args, kwargs)
        # Other ranks wait in a collective, so it can only be refused before it begins.
        refusal = self._check_admission(collective_result_bytes(func, args, kwargs))
        if refusal is None:
            out = func(*args, **kwargs)
            refusal = self.count_result(func, out, before)
            if refusal is None:
                return out
            del out, before
        # The error's traceback keeps this frame. The frame must not keep the tensors of the failed operation, nor the error.
        del args, kwargs
        try:
            raise refusal
        finally:
            del refusal

    def count_arguments(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SavedLayout]:
        """Count the arguments of an operation as existing tensors. Return the layouts of those that it may enlarge."""
        if func is not _LIFT_FRESH:
            self._count_existing((args, tuple(kwargs.values())))
        return save_layouts(func, args, kwargs)

    def before_resize(self, storage: UntypedStorage, size: int) -> BaseException | None:
        """Return the error that refuses ``size`` bytes for a storage, or None."""
        return self._check_admission(size) if size > storage.nbytes() and self._is_counted_here(storage) else None

    def after_resize(self, storage: UntypedStorage, size: int) -> None:
        """Count the new size of a storage."""
        tracked = self._lookup(storage)
        if tracked.nbytes != size if tracked else self._is_counted_here(storage):
            self._record_sizes([(storage, None, size)], "aten.resize_")

    def _is_counted_here(self, storage: UntypedStorage) -> bool:
        if self._lookup(storage) is not None:
            return True
        # The storage of a fake tensor is always on meta.
        kind = storage.device.type
        counted = kind == "meta" if self._fake else kind != "meta" and self._device_type in (None, kind)
        return counted and threading.get_ident() == self._thread

    def count_result(self, func: Any, out: Any, before: list[SavedLayout]) -> BaseException | None:
        """Count the storages that an operation allocated or enlarged; undo them and return the error if they are refused."""
        grown: dict[int, _Growth] = {}
        for tensor in _collect_tensors((out, [layout.tensor for layout in before]), []):
            for storage in self._storages(tensor):
                size, tracked = storage.nbytes(), self._lookup(storage)
                if tracked is None or size != tracked.nbytes:
                    grown[id(storage)] = (storage, tensor, size)
        if grown:
            refusal = self._check_admission(sum(size for _, _, size in grown.values()))
            if refusal is not None:
                for layout in before:
                    layout.restore()
                return refusal
            self._record_sizes(grown.values(), func)
        return None

    def _count_existing(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors in ``values`` that are not counted yet, as existing ones."""
        for tensor in _collect_tensors(values, []):
            for storage in self._storages(tensor):
                if self._lookup(storage) is None:
                    self._record_sizes([(storage, tensor, storage.nbytes())], _PREEXISTING)

    def _storages(self, tensor: Tensor) -> list[UntypedStorage]:
        """Return the counted kind of storages of ``tensor``."""
        if isinstance(tensor, FakeTensor) is not self._fake:
            return []
        # device and is_meta would run an operation on a fake tensor.
        kind = (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type
        if kind == "meta" or (self._device_type is not None and kind != self._device_type):
            return []
        if tensor.layout is torch.strided:
            return [tensor.untyped_storage()]
        return [part.untyped_storage() for part in _dense_components(tensor)]

    def _lookup(self, storage: UntypedStorage) -> _TrackedStorage | None:
        # Python reuses the id of a freed storage.
        tracked = self._table.get(id(storage))
        return tracked if tracked is not None and tracked() is storage else None

    def _check_admission(self, size: int) -> BaseException | None:
        if not size or self._admit is None:
            return None
        with self._lock:
            self._process_ended()
            return self._admit(size)

    def _record_sizes(self, grown: Iterable[_Growth], made_by: Any) -> None:
        """Count storages with their new sizes. While a storage is enlarged, its old and new memory exist together."""
        with self._lock:
            self._process_ended()
            self._peak = max(self._peak, self._live + sum(size for _, _, size in grown))
            for storage, tensor, size in grown:
                tracked = self._lookup(storage) or self._track(storage, made_by)
                change, tracked.nbytes = size - tracked.nbytes, size
                self._live += change
                if self._on_change is not None:
                    self._on_change(tracked.key, change)
                if tensor is not None:
                    tracked.shape, tracked.dtype = tensor.shape, tensor.dtype

    def _track(self, storage: UntypedStorage, made_by: Any) -> _TrackedStorage:
        tracked = _TrackedStorage(storage, self._ended.append)
        tracked.key, tracked.nbytes, tracked.shape, tracked.dtype = id(storage), 0, (), None
        tracked.made_by = made_by
        tracked.stack = self._calling_lines()
        self._table[tracked.key] = tracked
        return tracked

    def _calling_lines(self) -> tuple[str, ...]:
        """Return the calling lines, innermost first, without those of torch and of ``dtrain.memory``."""
        lines: list[str] = []
        frame: FrameType | None = sys._getframe(1) if self._stack_depth else None
        while frame is not None and len(lines) < self._stack_depth:
            code = frame.f_code
            if not code.co_filename.startswith(_HIDDEN_FOLDERS):
                lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
            frame = frame.f_back
        return tuple(lines)

    def _process_ended(self) -> None:
        """Subtract the storages that have ended."""
        while self._ended:
            tracked = self._ended.popleft()
            self._live -= tracked.nbytes
            if self._on_change is not None:
                self._on_change(tracked.key, -tracked.nbytes)
            if self._table.get(tracked.key) is tracked:
                del self._table[tracked.key]


_Growth = tuple[UntypedStorage, Tensor | None, int]
_PREEXISTING = "before"

_DEVICE = torch.ops.prim.device.default

# lift_fresh wraps memory that was allocated outside of the dispatcher, so its argument counts as new.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


def _collect_tensors(values: Iterable[Any], found: list[Tensor]) -> list[Tensor]:
    """Append all tensors in nested lists and tuples to ``found``; a generator would be slow for each operation."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect_tensors(value, found)
    return found


def _dense_components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors of a sparse tensor; nothing for an opaque layout (MKL-DNN)."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


_HIDDEN_FOLDERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


# Counts that are running, in the order of their start. The replaced method of torch is one for the process and is called by
# threads of autograd as well, so the counts that it tells cannot be a fact of a thread. Contexts may end in any order.
_resize_observers: list[LiveBytes] = []
_resize_lock = threading.Lock()
_original_resize: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]


def _observed_resize(self: UntypedStorage, size: int) -> Any:
    observers = tuple(_resize_observers)
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


class SavedLayout:
    """Layout of an argument before an operation that may enlarge it."""

    __slots__ = ("layout", "nbytes", "storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.storage = tensor, tensor.untyped_storage()
        self.layout = (int(tensor.storage_offset()), tensor.size(), tensor.stride())
        self.nbytes = self.storage.nbytes()

    def restore(self) -> None:
        """Restore the argument's storage, layout and size in bytes; its values may have changed.

        Mutates: ``tensor`` and ``storage``.
        """
        with torch.no_grad():
            self.tensor.set_(self.storage, *self.layout)
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)


def save_layouts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SavedLayout]:
    """Return the layouts of the arguments that ``func`` may enlarge: the tensor of ``resize_`` and similar, and ``out=``."""
    layouts = []
    for position, name in _resizable_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                layouts.append(SavedLayout(tensor))
    return layouts


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
