"""Write a memory snapshot when an out-of-memory error occurs (``snapshot_on_oom``)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dtrain import spans, storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import OutOfMemoryError
from dtrain.memory.device_memory import is_out_of_memory, snapshot_suffix, write_snapshot
from dtrain.state import TrainState
from dtrain.step.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSnapshotTransform(Transform):
    """Transform that is also a context manager. See ``snapshot_on_oom``."""

    folder: storage.AnyPath

    def __enter__(self) -> OomSnapshotTransform:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _write_snapshot_if_oom(error, self.folder, spans.position()[0])


def snapshot_on_oom(path: str | Path) -> OomSnapshotTransform:
    """Write a memory snapshot after an out-of-memory error, as a transform or as a context manager.

    The file is ``oom-rank-00003-step-00000120.pickle`` on CUDA, with lines of code after
    ``torch.cuda.memory._record_memory_history()``, and ``.json`` inside ``testing.memory_budget``; see ``write_snapshot``. The
    snapshot is written while the frames of the step and their tensors are alive. The error propagates.

    List the transform first. A failed attempt of ``auto_microbatch`` that is repeated with a smaller size writes no snapshot.
    If the smallest size fails (``OutOfMemoryError``), the memory of the attempt is already free. On a CPU without a budget,
    memory use is unknown, and a warning is given.

    Args:
        path: local folder or, on a CPU, a folder on a server; created if missing. Reports read ``run / "memory"``.

    Example:
        >>> import tempfile
        >>> import dtrain as dt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         with dt.testing.memory_budget(100), dt.profiling.snapshot_on_oom(folder):
        ...             _ = torch.zeros(1000)
        ...     except torch.OutOfMemoryError:
        ...         [path.name[:14] for path in Path(folder).iterdir()]
        ['oom-rank-00000']
    """
    folder = storage.resolve_path(path)

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            try:
                return inner(state, batch, microbatch_size=microbatch_size)
            except BaseException as error:
                _write_snapshot_if_oom(error, folder, state.step)
                raise

        return grad_fn

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step = state.step
            try:
                return inner(state, metrics)
            except BaseException as error:
                _write_snapshot_if_oom(error, folder, step)
                raise

        return update_fn

    return OomSnapshotTransform(
        name="snapshot_on_oom", grad=grad, update=update, uses_grad=False, read_only=True, folder=folder
    )


def _write_snapshot_if_oom(error: BaseException, folder: storage.AnyPath, step: int) -> None:
    """Write the snapshot after an out-of-memory error. A failure here must not replace the error."""
    if not is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
        return
    try:
        suffix, rank = snapshot_suffix(), get_dist_info().rank
        if suffix is None:
            raise OSError("CPU memory is counted only inside testing.memory_budget")
        storage.make_folders(folder)
        path = write_snapshot(folder / f"oom-rank-{rank:05d}-step-{step:08d}{suffix}")
        spans.record_event("out_of_memory", step=step, snapshot=path)
    except Exception as failure:  # noqa: BLE001 - for example a full disk, or no memory for the file
        spans.record_event("dropped", logger="snapshot_on_oom", error=f"{type(failure).__name__}: {failure}")
        warnings.warn(f"snapshot_on_oom: {failure}. No snapshot is written.", stacklevel=2)
