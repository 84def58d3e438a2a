"""``WorkerBatch``: the message from a loader worker to its rank, a batch or the reason of a failure, pickled by the worker.

torch pickles results in a thread of the worker. If that pickling fails, torch prints the error, and the rank waits for ever.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.batch import pin_memory
from dtrain.typing import Batch, Plain

INLINE_TENSOR_BYTES = 2**17
SHARED_MEMORY = Path("/dev/shm")


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True, kw_only=True)
class Payload:
    """Result of one request.

    Args:
        batch: samples of this rank; None if no sample could be read, or on failure.
        skipped: index or position of each skipped sample, with the error.
        failure: reason of a failure, in one line.
        trace: traceback of the failure.
        dataset_state: state of an iterable dataset after this batch, if the dataset has a state.
        sample_count: samples of the global batch, for iterable datasets, whose length is unknown before reading.
        changed_by_reading: names of attributes of the dataset, transform or collate that a worker changed as it read the batch.
    """

    batch: Batch = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    trace: str = ""
    dataset_state: Plain = None
    sample_count: int = 0
    changed_by_reading: frozenset[str] = frozenset()


class WorkerBatch:
    """A ``Payload`` on its way between processes. torch calls ``pin_memory`` in its pin-memory thread."""

    __slots__ = ("_packed", "_payload")

    def __init__(self, payload: Payload | None, packed: bytes = b"") -> None:
        self._payload, self._packed = payload, packed

    @classmethod
    def pack(cls, payload: Payload) -> WorkerBatch:
        """Pack a payload for the rank. A worker pickles it, and replaces a payload that cannot be pickled by a failure."""
        if get_worker_info() is None:
            return cls(payload)
        try:
            return cls(None, _pickle_payload(payload))
        # Pickling runs the user's classes, so any exception can occur.
        except Exception as error:  # noqa: BLE001
            shortage = describe_shared_memory_error(error)
            if shortage is not None:
                return cls(None, _pickle_payload(Payload(failure=shortage)))
            where = find_unpicklable(payload, "")
            reason = f"{where} cannot be pickled ({type(error).__name__}: {' '.join(str(error).split())}); return it as data"
            return cls(None, _pickle_payload(Payload(failure=reason)))

    def unpack(self) -> Payload:
        """Unpickle and return the payload."""
        if self._payload is None:
            self._payload, self._packed = pickle.loads(self._packed), b""
        return self._payload

    def pin_memory(self, device: Any = None) -> WorkerBatch:
        """Copy the tensors to page-locked memory."""
        payload = self.unpack()
        self._payload = replace(payload, batch=pin_memory(payload.batch))
        return self


def _pickle_payload(payload: Payload) -> bytes:
    file = io.BytesIO()
    _BatchPickler(file).dump(payload)
    return file.getvalue()


class _BatchPickler(ForkingPickler):
    """Pickler that sends small tensors as bytes. A piece of shared memory per tensor takes longer than a copy."""

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of a small plain tensor; ``NotImplemented`` for every other object."""
        if type(value) is not Tensor or not 0 < value.nbytes <= INLINE_TENSOR_BYTES or not _is_plain_tensor(value):
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (data, value.dtype, tuple(value.shape))


def _is_plain_tensor(tensor: Tensor) -> bool:
    is_cpu_strided = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return is_cpu_strided and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def describe_shared_memory_error(error: BaseException | None) -> str | None:
    """Describe an error of torch about shared memory in one line, with advice; None for an error of another kind.

    A collate function may have wrapped torch's error, so the causes of the error count as well.
    """
    while error is not None and not re.match("unable to .*shared memory", str(error)):
        error = error.__cause__
    if error is None:
        return None
    if os.strerror(errno.ENOSPC) in str(error):
        return (
            f"shared memory is too small: {_measure_shared_memory()}, and each worker keeps its prepared batches in it. Lower "
            "num_workers, prefetch_factor or the batch size, or enlarge it (docker run --shm-size=8g or --ipc=host)"
        )
    hint = ". Raise the limit (ulimit -n), or lower num_workers" if os.strerror(errno.EMFILE) in str(error) else ""
    return f"a tensor cannot be put into shared memory ({' '.join(str(error).split())}){hint}"


def _measure_shared_memory() -> str:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return "the system has no more"
    total, free = (blocks * status.f_frsize // 2**20 for blocks in (status.f_blocks, status.f_bavail))
    return f"{SHARED_MEMORY} has {total} MiB, {free} MiB free"


def find_unpicklable(value: Any, path: str) -> str | None:
    """Return the path of the innermost part of ``value`` that cannot be pickled, prefixed with ``path``; None if all can."""
    try:
        ForkingPickler.dumps(value)
    # Pickling runs the user's classes, so any exception can occur.
    except Exception:  # noqa: BLE001
        inner = (find_unpicklable(item, path + step) for step, item in _children(value))
        return next((part_path for part_path in inner if part_path is not None), path.removeprefix(".") or type(value).__name__)
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
