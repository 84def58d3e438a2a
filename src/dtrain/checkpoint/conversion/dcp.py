"""Write a folder of ``torch.distributed.checkpoint`` with torch's own writer, one tensor at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dtrain import storage
from dtrain.checkpoint.conversion.weight_stream import WeightStream, group_by_size, nbytes, read_batch, tensor_region
from dtrain.checkpoint.layout import DTYPES
from dtrain.errors import CheckpointError


class _StreamingSavePlanner(DefaultSavePlanner):  # type: ignore[misc,unused-ignore]
    """Save planner that plans with meta tensors, and reads each tensor just before the writer writes the tensor."""

    def __init__(self, weights: WeightStream, names: dict[str, str]) -> None:
        super().__init__()
        self._weights, self._names = weights, names
        refs = weights.files.refs
        sizes = {name: nbytes(refs[name]) for name in weights.dtypes}
        together = [{name: tensor_region(refs[name]) for name in group} for group in group_by_size(sizes)]
        self._regions = {name: group for group in together for name in group}
        self._batch: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of one item. The tensor of the previous item has been written and is freed."""
        if self._last is not None:
            # The writer keeps a reference to every tensor until the end of its file.
            self._last.untyped_storage().resize_(0)
        name = self._names[write_item.index.fqn]
        if name not in self._batch:
            # Tensors of one chunk are read together, because each read fetches the whole chunk.
            self._batch = read_batch(self._weights.files, self._regions[name], self._weights.dtypes)
        # Memory that NumPy has exported cannot be resized, so the tensor is cloned.
        self._last = self._batch.pop(name).clone()
        self._weights.on_bytes_written(self._last.nbytes)
        return self._last


def write_dcp(folder: Path, weights: WeightStream, *, key: str | None) -> None:
    """Write the files of the folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        key: name of a dict for the tensors, as ``"model"`` for ``load({"model": model.state_dict()})``; None for
            ``load(model.state_dict())``.

    Raises:
        OSError: a failed file operation.
        CheckpointError: an error of torch, or an unreadable tensor.
    """
    tensors: dict[str, Any] = {
        name: torch.empty(weights.files.refs[name].shape, dtype=DTYPES[dtype], device="meta")
        for name, dtype in weights.dtypes.items()
    }
    names = {name if key is None else f"{key}.{name}": name for name in tensors}
    # With one thread and no copies ahead, an item is written before the next item is requested.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(
                tensors if key is None else {key: tensors},
                storage_writer=writer,
                planner=_StreamingSavePlanner(weights, names),
                no_dist=True,
            )
        # CheckpointException is not a subclass of Exception.
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause if isinstance(cause, CheckpointError | OSError) else CheckpointError(f"convert: {cause}") from None
    storage.sync_folder(folder)
