"""``snapshot_on_oom``: what held the memory when it ran out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dtrain import spans, storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import OutOfMemoryError
from dtrain.memory.oom import is_out_of_memory
from dtrain.memory.snapshot import snapshot_suffix, write_snapshot
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSnapshotTransform(Transform):
    """A transform that is a context, too; made by ``snapshot_on_oom``."""

    folder: storage.AnyPath

    def __enter__(self) -> OomSnapshotTransform:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _write_snapshot_if_oom(error, self.folder, spans.position()[0])


def snapshot_on_oom(path: str | Path) -> OomSnapshotTransform:
    """A transform, or a context around any code, that writes a snapshot when an out-of-memory error passes through it.

    The file is ``oom-rank-00003-step-00000120.pickle`` on CUDA (call ``torch.cuda.memory._record_memory_history()`` before, and
    it has the lines of code), and ``.json`` inside ``testing.memory_budget``; see ``write_snapshot``. It is written while the
    frames of the step, and so its tensors, are still there. The error goes on.

    List it first. The tries that ``auto_microbatch`` repeats with less leave none, since no such error leaves them; and when
    the smallest size has failed (``OutOfMemoryError``), the memory of that try is given back already. On a CPU without a
    budget nothing is known of the memory: there is a warning.

    Args:
        path: of this machine or, on the CPU, on a server; made if it is missing. ``run.folder / "memory"`` is where a report
            looks.

    Example:
        >>> import tempfile
        >>> from dtrain.testing import memory_budget
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         with memory_budget(100), snapshot_on_oom(folder):
        ...             _ = torch.zeros(1000)
        ...     except torch.OutOfMemoryError:
        ...         [path.name[:14] for path in Path(folder).iterdir()]
        ['oom-rank-00000']
    """
    place = storage.resolve_path(path)

    def grad(inner: GradFn) -> GradFn:
        def watched(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            try:
                return inner(state, batch, microbatch_size=microbatch_size)
            except BaseException as error:
                _write_snapshot_if_oom(error, place, state.step)
                raise

        return watched

    def update(inner: UpdateFn) -> UpdateFn:
        def watched(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step = state.step
            try:
                return inner(state, metrics)
            except BaseException as error:
                _write_snapshot_if_oom(error, place, step)
                raise

        return watched

    return OomSnapshotTransform(name="snapshot_on_oom", grad=grad, update=update, uses_grad=False, read_only=True, folder=place)


def _write_snapshot_if_oom(error: BaseException, folder: storage.AnyPath, step: int) -> None:
    """Write the snapshot, if it is that kind of error; whatever goes wrong here must not take its place."""
    if not is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
        return
    try:
        suffix, rank = snapshot_suffix(), get_dist_info().rank
        if suffix is None:
            raise OSError("nothing counts the tensors of a CPU outside of testing.memory_budget")
        storage.make_folders(folder)
        path = write_snapshot(folder / f"oom-rank-{rank:05d}-step-{step:08d}{suffix}")
        spans.record_event("out_of_memory", step=step, snapshot=path)
    except Exception as failure:  # noqa: BLE001  # a full disk, or no memory for the file either
        spans.record_event("dropped", sink="snapshot_on_oom", error=f"{type(failure).__name__}: {failure}")
        warnings.warn(f"snapshot_on_oom: no snapshot: {failure}", stacklevel=2)
