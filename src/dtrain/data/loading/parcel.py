"""What goes from a loader worker to its rank: a batch or the reason why there is none, pickled where it was made.

torch pickles results in a thread of the worker, and one that cannot be pickled is printed and lost: the rank would wait for it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from dtrain.batch import pinned
from dtrain.types import Batch, Plain

SMALL_BYTES = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What became of one ticket.

    Args:
        batch: this rank's samples; None when none of them could be read, or on failure.
        unreadable: what was left out: index or position, and error.
        failure: why there is no batch, in one line; with ``trace``, where.
        state: of an iterable dataset after this batch, if it has one.
        samples: of the global batch, where only reading tells (iterable datasets).
    """

    batch: Batch = None
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    trace: str = ""
    state: Plain = None
    samples: int = 0


class Parcel:
    """A ``Content`` on its way between processes. ``pin_memory`` is called by torch, in the thread that it keeps for that."""

    __slots__ = ("_content", "_packed")

    def __init__(self, content: Content) -> None:
        self._content: Content | None = content
        self._packed = b""

    def packed(self) -> Parcel:
        """Ready for another process; a batch that cannot be pickled becomes a failure that says which part of it."""
        content = self.open()
        try:
            self._packed = _packed(content)
        except Exception as error:  # noqa: BLE001  # whatever the user's objects raise
            where = unpicklable(content, "")
            reason = f"{where} cannot be pickled ({type(error).__name__}: {' '.join(str(error).split())}); return it as data"
            self._packed = _packed(Content(failure=reason))
        self._content = None
        return self

    def open(self) -> Content:
        """What was sent."""
        if self._content is None:
            self._content, self._packed = pickle.loads(self._packed), b""
        return self._content

    def pin_memory(self, device: Any = None) -> Parcel:
        """Its tensors in page-locked memory."""
        content = self.open()
        self._content = replace(content, batch=pinned(content.batch))
        return self


def _packed(content: Content) -> bytes:
    file = io.BytesIO()
    _Packing(file).dump(content)
    return file.getvalue()


class _Packing(ForkingPickler):
    """Small tensors go as bytes: the rank has to ask for each piece of shared memory, which takes longer than copying them."""

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is pickled; ``NotImplemented`` for what is pickled as usual."""
        if type(value) is not Tensor or not 0 < value.nbytes <= SMALL_BYTES or not _is_plain(value):
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    usual = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return usual and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def unpicklable(value: Any, path: str) -> str | None:
    """The path of the innermost part of ``value`` that cannot be pickled, from ``path`` on; None if it can."""
    try:
        ForkingPickler.dumps(value)
    except Exception:  # noqa: BLE001  # whatever the user's objects raise
        inner = (unpicklable(item, path + step) for step, item in _parts(value))
        return next((found for found in inner if found is not None), path.removeprefix(".") or type(value).__name__)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{at}]", item) for at, item in enumerate(value))
    elif not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]
        yield from ((f".{name}", getattr(value, name)) for name in names)
