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

from dtrain.batch import pin_memory
from dtrain.typing import Batch, Plain

INLINE_TENSOR_BYTES = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What became of one ticket.

    Args:
        batch: this rank's samples; None when none of them could be read, or on failure.
        skipped: what was left out: index or position, and error.
        failure: why there is no batch, in one line; with ``trace``, where.
        dataset_state: of an iterable dataset after this batch, if it has one.
        sample_count: of the global batch, where only reading tells (iterable datasets).
    """

    batch: Batch = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    trace: str = ""
    dataset_state: Plain = None
    sample_count: int = 0


class WorkerBatch:
    """A ``Content`` on its way between processes. ``pin_memory`` is called by torch, in the thread that it keeps for that."""

    __slots__ = ("_content", "_packed")

    def __init__(self, content: Payload) -> None:
        self._content: Payload | None = content
        self._packed = b""

    def pickle_batch(self) -> WorkerBatch:
        """Ready for another process; a batch that cannot be pickled becomes a failure that says which part of it."""
        content = self.unpack()
        try:
            self._packed = _pickle_payload(content)
        except Exception as error:  # noqa: BLE001  # whatever the user's objects raise
            where = find_unpicklable(content, "")
            reason = f"{where} cannot be pickled ({type(error).__name__}: {' '.join(str(error).split())}); return it as data"
            self._packed = _pickle_payload(Payload(failure=reason))
        self._content = None
        return self

    def unpack(self) -> Payload:
        """What was sent."""
        if self._content is None:
            self._content, self._packed = pickle.loads(self._packed), b""
        return self._content

    def pin_memory(self, device: Any = None) -> WorkerBatch:
        """Its tensors in page-locked memory."""
        content = self.unpack()
        self._content = replace(content, batch=pin_memory(content.batch))
        return self


def _pickle_payload(content: Payload) -> bytes:
    file = io.BytesIO()
    _BatchPickler(file).dump(content)
    return file.getvalue()


class _BatchPickler(ForkingPickler):
    """Small tensors go as bytes: the rank has to ask for each piece of shared memory, which takes longer than copying them."""

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is pickled; ``NotImplemented`` for what is pickled as usual."""
        if type(value) is not Tensor or not 0 < value.nbytes <= INLINE_TENSOR_BYTES or not _is_plain_tensor(value):
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (data, value.dtype, tuple(value.shape))


def _is_plain_tensor(tensor: Tensor) -> bool:
    usual = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return usual and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def find_unpicklable(value: Any, path: str) -> str | None:
    """The path of the innermost part of ``value`` that cannot be pickled, from ``path`` on; None if it can."""
    try:
        ForkingPickler.dumps(value)
    except Exception:  # noqa: BLE001  # whatever the user's objects raise
        inner = (find_unpicklable(item, path + step) for step, item in _children(value))
        return next((found for found in inner if found is not None), path.removeprefix(".") or type(value).__name__)
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{at}]", item) for at, item in enumerate(value))
    elif not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]
        yield from ((f".{name}", getattr(value, name)) for name in names)
