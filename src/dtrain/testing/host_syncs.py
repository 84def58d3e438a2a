"""What makes the host wait for a device, as a number that a test can hold, on a CPU too."""

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

from dtrain.dist import dispatch
from dtrain.dist.dispatch import OpObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync:
    """One place where the host waited for values of a tensor. Its fields are plain data.

    Args:
        kind: ``item`` (also ``float()``, ``int()``, ``bool()``, an ``if``, ``torch.equal``), ``tolist``, ``numpy``, ``cpu``,
            ``copy`` (any other blocking copy from a device), or the name of an operation that reads values to know a size.
        location: the nearest caller outside torch, ``file:line in function``.
    """

    kind: str
    location: str


@dataclass(frozen=True, slots=True)
class HostSyncRecords:
    """What ``count_host_syncs`` has recorded so far, in order."""

    calls: list[HostSync] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.calls)


@contextmanager
def count_host_syncs() -> Iterator[HostSyncRecords]:
    """Record every call of this thread inside that makes the host wait for a device, or would on a GPU.

    These are reads of a value (``item``, ``float(t)``, an ``if`` on a tensor, also from torch's own code), ``tolist``,
    ``numpy`` and ``cpu`` of any tensor, blocking copies from a device, operations whose output size depends on values
    (``nonzero``, ``masked_select``, ``unique``, an index by a mask), and writing a tensor through a mask (a single number is
    written without waiting). On a CPU they are counted although nobody waits there, so that a test without a GPU can fail.
    Not counted: ``torch.cuda.synchronize`` and waiting for an event (explicit, and their purpose), copies to a CPU tensor with
    ``non_blocking=True``, and ``.to("cpu")`` of a tensor that is there.

    Torch's optimizers may sync by themselves, so hold code against the same loop with a bare ``fused`` optimizer.

    Mutates: three methods of ``torch.Tensor``, until the context is left.

    Example:
        >>> with count_host_syncs() as seen:
        ...     positive = [float(x) for x in torch.ones(2)] + torch.zeros(1).tolist()
        >>> seen.count, [call.what for call in seen.calls]
        (3, ['item', 'item', 'tolist'])
    """
    seen = HostSyncRecords()
    recorder = _SyncRecorder(seen.calls)
    with _patch_tensor_methods(recorder), OpObserver(recorder.record_op):
        yield seen


class _SyncRecorder:
    """Sees operations with ``record_op``; ``wrap_method`` makes it see a method that is none."""

    def __init__(self, calls: list[HostSync]) -> None:
        self._calls = calls
        self._thread = threading.get_ident()
        self._inside = False

    def record_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        what = _classify_sync(func, args, kwargs)
        if what is not None and not self._inside:
            self._calls.append(HostSync(kind=what, location=_caller_location()))

    def wrap_method(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._calls.append(HostSync(kind=what, location=_caller_location()))
            self._inside = True  # the copy and the reads that the method is made of are not counted once more
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return watched


_READ_METHODS = ("cpu", "numpy", "tolist")
_INDEX_WRITES = (
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
)


@contextmanager
def _patch_tensor_methods(recorder: _SyncRecorder) -> Iterator[None]:
    """Read a tensor's memory without an operation on a CPU: these are replaced on the class, and put back."""
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
    """What kind of wait ``func`` is, by torch's own tags where they say so."""
    if func is torch.ops.aten._to_copy.default:
        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
        return "copy" if leaves and not kwargs.get("non_blocking") else None
    if func is torch.ops.aten.copy_.default:
        leaves = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        return "copy" if leaves and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")) else None
    if torch.Tag.data_dependent_output in func.tags:
        return "item"
    if func in _INDEX_WRITES:
        # The places are counted first, except where one number of the host's fills all of them.
        filled = args[2].numel() == 1 and args[2].device.type == "cpu"
        return "index_put" if _has_mask(args[1]) and not filled else None
    if torch.Tag.dynamic_output_shape in func.tags and _reads_values(func, args, kwargs):
        return str(func.name()).removeprefix("aten::").split(".")[0].strip("_2")  # "_unique2" is what "unique" calls
    return None


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tagged operation reads values in this call: an index by integers does not, a repeat of known size neither."""
    if func is torch.ops.aten.index.Tensor:
        return _has_mask(args[1])
    return kwargs.get("output_size") is None


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _caller_location() -> str:
    """The innermost frame that is neither torch's nor this room's, or the innermost of all."""
    hidden = (*(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__)), dispatch.__file__)
    frame = first = sys._getframe(2)
    while frame.f_code.co_filename.startswith(hidden) and frame.f_back is not None:
        frame = frame.f_back
    found = first if frame.f_code.co_filename.startswith(hidden) else frame
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_qualname}"
