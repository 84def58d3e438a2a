"""Record the operations that make the host wait for a device, so that a test can limit them, also on a CPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.dist import collective_replay
from dtrain.dist.collective_replay import OpObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync:
    """One wait of the host for values of a tensor, as plain data.

    Args:
        kind: ``item`` (also ``float()``, ``int()``, ``bool()``, an ``if``, ``torch.equal``), ``tolist``, ``numpy``, ``cpu``,
            ``copy`` (any other blocking copy from a device), or the name of an operation that reads values to know a size.
        location: nearest caller outside of torch, ``file:line in function``.
    """

    kind: str
    location: str


@dataclass(frozen=True, slots=True)
class HostSyncRecords:
    """Records of ``count_host_syncs`` so far, in order."""

    calls: list[HostSync] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of waits."""
        return len(self.calls)


@contextmanager
def count_host_syncs() -> Iterator[HostSyncRecords]:
    """Record every call of this thread inside the context that makes the host wait for a device, or would on a GPU.

    Recorded, also on a CPU, where nothing waits:

    - reads of a value (``item``, ``float(t)``, an ``if`` on a tensor, also in torch's own code)
    - ``tolist``, ``numpy`` and ``cpu`` of any tensor, and blocking copies from a device
    - operations whose output size depends on values (``nonzero``, ``masked_select``, ``unique``, an index by a mask)
    - writes to a tensor through a mask, except of a single number

    Not recorded are ``torch.cuda.synchronize`` and waits for an event, because they are explicit, copies to a CPU tensor with
    ``non_blocking=True``, and ``.to("cpu")`` of a CPU tensor.

    Torch's optimizers may wait for the device, so compare with the same loop and a ``fused`` optimizer.

    Mutates: three methods of ``torch.Tensor``, until the context ends.

    Example:
        >>> import dtrain as dt
        >>> with dt.testing.count_host_syncs() as records:
        ...     positive = [float(x) for x in torch.ones(2)] + torch.zeros(1).tolist()
        >>> records.count, [call.kind for call in records.calls]
        (3, ['item', 'item', 'tolist'])
    """
    records = HostSyncRecords()
    recorder = _SyncRecorder(records.calls)
    with _patch_tensor_methods(recorder), OpObserver(recorder.record_op):
        yield records


class _SyncRecorder:
    """Recorder of operations (``record_op``) and of methods that run no operation (``wrap_method``)."""

    def __init__(self, calls: list[HostSync]) -> None:
        self._calls = calls
        self._thread = threading.get_ident()
        self._inside = False

    def record_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = _classify_sync(func, args, kwargs)
        if kind is not None and not self._inside:
            self._calls.append(HostSync(kind=kind, location=_caller_location()))

    def wrap_method(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._calls.append(HostSync(kind=kind, location=_caller_location()))
            # The copies and reads inside of the method count once.
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return wrapper


_READ_METHODS = ("cpu", "numpy", "tolist")
_INDEX_WRITES = (
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
)


@contextmanager
def _patch_tensor_methods(recorder: _SyncRecorder) -> Iterator[None]:
    """Replace the methods of ``Tensor`` that read memory without an operation on a CPU, and restore them at the end."""
    own = {name: vars(Tensor)[name] for name in _READ_METHODS if name in vars(Tensor)}
    try:
        for name in _READ_METHODS:
            setattr(Tensor, name, recorder.wrap_method(name, getattr(Tensor, name)))
        yield
    finally:
        for name in _READ_METHODS:
            if name in own:
                setattr(Tensor, name, own[name])
            elif name in vars(Tensor):
                delattr(Tensor, name)


def _classify_sync(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the kind of wait of ``func``, from torch's own tags if possible; None without a wait."""
    if func is torch.ops.aten._to_copy.default:
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
        return "copy" if to_host and not kwargs.get("non_blocking") else None
    if func is torch.ops.aten.copy_.default:
        to_host = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        return "copy" if to_host and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")) else None
    if torch.Tag.data_dependent_output in func.tags:
        return "item"
    if func in _INDEX_WRITES:
        # The number of written elements is read first, except if a single number of the host fills all of them.
        filled = args[2].numel() == 1 and args[2].device.type == "cpu"
        return "index_put" if _has_mask(args[1]) and not filled else None
    if torch.Tag.dynamic_output_shape in func.tags and _reads_values(func, args, kwargs):
        # For example, "unique" calls "_unique2".
        return str(func.name()).removeprefix("aten::").split(".")[0].strip("_2")
    return None


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a tagged operation reads values in this call. An index by integers and a repeat of known size do not."""
    if func is torch.ops.aten.index.Tensor:
        return _has_mask(args[1])
    return kwargs.get("output_size") is None


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _caller_location() -> str:
    """Return the innermost frame outside of torch and ``dtrain.testing``, else the innermost frame."""
    hidden = (*(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__)), collective_replay.__file__)
    frame = first = sys._getframe(2)
    while frame.f_code.co_filename.startswith(hidden) and frame.f_back is not None:
        frame = frame.f_back
    caller = first if frame.f_code.co_filename.startswith(hidden) else frame
    return f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_qualname}"
