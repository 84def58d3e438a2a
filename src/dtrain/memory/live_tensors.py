"""How many bytes the tensors of this process hold: counted by storage, as they are made and dropped.

A storage is the memory behind tensors: views of one another share it, a reshaped tensor has the same one, and FSDP2 empties and
fills it while the tensors stay. So storages are counted, each once, by the bytes that it has now. torch keeps one Python object
per storage for as long as anything holds the storage, C++ code and autograd's saved tensors included, so the end of that object
is the end of the memory.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.memory.storage_resize import (
    SavedLayout,
    add_resize_observer,
    collective_result_bytes,
    remove_resize_observer,
    save_layouts,
)

__all__ = ["LiveBytes", "LiveStorage"]

AdmitFn = Callable[[int], BaseException | None]
"""Gets the bytes of an allocation, before they are counted; an error that it returns is raised in place of the allocation."""

ChangeFn = Callable[[int, int], None]
"""Gets the number of a storage, and by how many bytes it has changed; the number of one that has ended is used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """One storage that is held. Its fields are plain data.

    Args:
        bytes: how large it is now.
        shape: of the tensor through which it was seen first, empty for one that was seen as a bare storage.
        dtype: of that tensor, ``"float32"``.
        made_by: the operation that made it, ``"aten.mm.default"``; ``"before"`` for one that was there when it was first seen.
        stack: the lines of code that led there, innermost first; empty when stacks are not recorded.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    stack: tuple[str, ...]


class _TrackedStorage(weakref.ref[UntypedStorage]):
    """One counted storage: how many bytes of it are counted, and where it came from."""

    __slots__ = ("dtype", "key", "made_by", "nbytes", "shape", "stack")
    key: int
    nbytes: int
    shape: Sequence[int]
    dtype: torch.dtype | None
    made_by: Any  # an operation, or what to call it
    stack: tuple[str, ...]


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes held by the tensors that this thread uses, and by the backwards it starts.

    A storage counts from the operation that makes it, and until nothing holds it any more, also after the context. One that was
    made elsewhere (before the context, by another thread, from NumPy) counts from the first operation that is given it, or from
    ``count``. Not seen: what one operation allocates and frees again inside itself, and the buffers of a collective's backend.
    Inside the context ``torch.compile`` compiles nothing, and what it compiled before runs uncompiled.

    Args:
        fake: count ``FakeTensor`` s in place of real ones: with the bytes that they stand for.
        device_type: count what is on this type of device only, ``"cuda"``; None counts all. Tensors on ``meta`` hold nothing.
        admit: asked before an allocation is counted; see ``Admit``. What was allocated is dropped before its error is raised.
        on_change: told of every change as it is counted; see ``Changed``.
        stack_depth: how many lines of code to record for each storage, in ``storages()``; 0 is fastest.
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
        # Storages end in any thread and at any moment, in the middle of a garbage collection too. Their end is only noted
        # there, which needs no lock, and counted at the next look.
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
        """The most bytes held at once since the last ``reset``."""
        return self._peak

    def reset(self) -> None:
        """Let the peak start again from what is held now."""
        with self._lock:
            self._peak = self.live

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` from now on, where they are not counted already. They are never refused."""
        self._count_existing(tensors)

    def storages(self) -> list[LiveStorage]:
        """All storages that are held now, the largest first."""
        with self._lock:
            self._process_ended()
            held = [h for h in self._table.values() if h.nbytes]
        return sorted(map(_describe, held), key=lambda storage: -storage.bytes)

    def __enter__(self) -> LiveBytes:
        self._thread = threading.get_ident()
        add_resize_observer(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        remove_resize_observer(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is FakeTensor:
                if not self._fake:
                    return func(*args, **kwargs)  # nothing is computed: DTensor finds out the shape of a result
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # a DTensor or the like unpacks itself, and what it runs for that comes back here
        if func is not _LIFT_FRESH:
            self._count_existing((args, tuple(kwargs.values())))
        # The peers of a collective wait in it: it is refused before it begins, or not at all.
        refusal = self._check_admission(collective_result_bytes(func, args, kwargs))
        if refusal is None:
            before = save_layouts(func, args, kwargs)
            out = func(*args, **kwargs)
            refusal = self._count_result(func, out, before)
            if refusal is None:
                return out
            del out, before
        # The error's traceback keeps this frame, which is not to keep the tensors of what failed, nor the error itself: a ring.
        del args, kwargs
        try:
            raise refusal
        finally:
            del refusal

    def before_resize(self, storage: UntypedStorage, size: int) -> BaseException | None:
        """A storage is about to be given ``size`` bytes: the error that refuses it."""
        return self._check_admission(size) if size > storage.nbytes() and self._is_counted_here(storage) else None

    def after_resize(self, storage: UntypedStorage, size: int) -> None:
        """A storage has been given ``size`` bytes."""
        held = self._lookup(storage)
        if held.nbytes != size if held else self._is_counted_here(storage):
            self._record_sizes([(storage, None, size)], "aten.resize_")

    def _is_counted_here(self, storage: UntypedStorage) -> bool:
        if self._lookup(storage) is not None:
            return True
        kind = storage.device.type  # that of a fake tensor's storage is always meta
        wanted = kind == "meta" if self._fake else kind != "meta" and self._device_type in (None, kind)
        return wanted and threading.get_ident() == self._thread

    def _count_result(self, func: Any, out: Any, before: list[SavedLayout]) -> BaseException | None:
        """Count what an operation has made and enlarged, or undo it and say why."""
        grown: dict[int, _Growth] = {}
        for tensor in _collect_tensors((out, [shape.tensor for shape in before]), []):
            for storage in self._storages(tensor):
                size, held = storage.nbytes(), self._lookup(storage)
                if held is None or size != held.nbytes:
                    grown[id(storage)] = (storage, tensor, size)
        if grown:
            refusal = self._check_admission(sum(size for _, _, size in grown.values()))
            if refusal is not None:
                for shape in before:
                    shape.restore()
                return refusal
            self._record_sizes(grown.values(), func)
        return None

    def _count_existing(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors in ``values`` that are not counted: they were there before."""
        for tensor in _collect_tensors(values, []):
            for storage in self._storages(tensor):
                if self._lookup(storage) is None:
                    self._record_sizes([(storage, tensor, storage.nbytes())], _PREEXISTING)

    def _storages(self, tensor: Tensor) -> list[UntypedStorage]:
        """The storages of ``tensor`` that are of the kind that is counted here."""
        # Not is_meta, which is an operation of its own on a fake tensor.
        if isinstance(tensor, FakeTensor) is not self._fake or tensor.device.type == "meta":
            return []
        if self._device_type is not None and tensor.device.type != self._device_type:
            return []
        if tensor.layout is torch.strided:
            return [tensor.untyped_storage()]
        return [part.untyped_storage() for part in _dense_components(tensor)]

    def _lookup(self, storage: UntypedStorage) -> _TrackedStorage | None:
        held = self._table.get(id(storage))
        return held if held is not None and held() is storage else None  # an id is used again after the end

    def _check_admission(self, wanted: int) -> BaseException | None:
        if not wanted or self._admit is None:
            return None
        with self._lock:
            self._process_ended()
            return self._admit(wanted)

    def _record_sizes(self, grown: Iterable[_Growth], made_by: Any) -> None:
        """Count storages with their new sizes. While one is enlarged, both its old memory and its new one are there."""
        with self._lock:
            self._process_ended()
            self._peak = max(self._peak, self._live + sum(size for _, _, size in grown))
            for storage, tensor, size in grown:
                held = self._lookup(storage) or self._track(storage, made_by)
                change, held.nbytes = size - held.nbytes, size
                self._live += change
                if self._on_change is not None:
                    self._on_change(held.key, change)
                if tensor is not None:
                    held.shape, held.dtype = tensor.shape, tensor.dtype

    def _track(self, storage: UntypedStorage, made_by: Any) -> _TrackedStorage:
        held = _TrackedStorage(storage, self._ended.append)
        held.key, held.nbytes, held.shape, held.dtype, held.made_by = id(storage), 0, (), None, made_by
        held.stack = _call_lines(self._stack_depth)
        self._table[held.key] = held
        return held

    def _process_ended(self) -> None:
        """Take what has ended off the count."""
        while self._ended:
            held = self._ended.popleft()
            self._live -= held.nbytes
            if self._on_change is not None:
                self._on_change(held.key, -held.nbytes)
            if self._table.get(held.key) is held:
                del self._table[held.key]


_Growth = tuple[UntypedStorage, Tensor | None, int]
_PREEXISTING = "before"

# It wraps memory that came from outside of the dispatcher, which is the allocation: its argument was not there before.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


def _collect_tensors(values: Iterable[Any], found: list[Tensor]) -> list[Tensor]:
    """All tensors in nested lists and tuples, appended to ``found``: no generator, because it runs for each operation."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect_tensors(value, found)
    return found


def _dense_components(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the memory of a sparse one; nothing for an opaque layout (MKL-DNN), which shows none."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _call_lines(depth: int) -> tuple[str, ...]:
    """The lines of code that led here, innermost first, without torch's and this room's."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2) if depth else None
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(_HIDDEN_FOLDERS):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return tuple(lines)


_HIDDEN_FOLDERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def _describe(held: _TrackedStorage) -> LiveStorage:
    return LiveStorage(
        bytes=held.nbytes,
        shape=tuple(int(n) for n in held.shape),
        dtype=str(held.dtype).removeprefix("torch.") if held.dtype else "none",
        made_by=str(held.made_by),
        stack=held.stack,
    )
