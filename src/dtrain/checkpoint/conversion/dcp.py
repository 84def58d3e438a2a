"""Writes the folder of ``torch.distributed.checkpoint``, by torch's own writer, which gets one tensor at a time."""

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
    """Plans with tensors that have no data, and reads them when they are about to be written."""

    def __init__(self, given: WeightStream, names: dict[str, str]) -> None:
        super().__init__()
        self._weights, self._names = given, names
        refs = given.files.refs
        sizes = {name: nbytes(refs[name]) for name in given.dtypes}
        together = [{name: tensor_region(refs[name]) for name in group} for group in group_by_size(sizes)]
        self._regions = {name: group for group in together for name in group}
        self._batch: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of one item; that of the item before has been written."""
        if self._last is not None:
            # The writer keeps a reference to every tensor until the end of its file.
            self._last.untyped_storage().resize_(0)
        name = self._names[write_item.index.fqn]
        if name not in self._batch:
            # Neighbours together: each alone would fetch all of the chunk that it lies in.
            self._batch = read_batch(self._weights.files, self._regions[name], self._weights.dtypes)
        self._last = self._batch.pop(name).clone()  # memory that NumPy has seen cannot be given back
        self._weights.on_bytes_written(self._last.nbytes)
        return self._last


def write_dcp(folder: Path, given: WeightStream, *, key: str | None) -> None:
    """Write the folder's files, on the disk when this returns.

    Args:
        folder: there, and empty.
        given: what is written.
        key: name of a dict that the tensors are in, as ``"model"`` for ``load({"model": model.state_dict()})``; None for
            ``load(model.state_dict())``.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: torch refuses, or a tensor cannot be read.
    """
    tensors: dict[str, Any] = {
        name: torch.empty(given.files.refs[name].shape, dtype=DTYPES[dtype], device="meta")
        for name, dtype in given.dtypes.items()
    }
    names = {name if key is None else f"{key}.{name}": name for name in tensors}
    # With one thread and nothing copied ahead, an item is written before the next one is asked for.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(
                tensors if key is None else {key: tensors},
                storage_writer=writer,
                planner=_StreamingSavePlanner(given, names),
                no_dist=True,
            )
        except CheckpointException as error:  # which is no Exception
            cause, _ = next(iter(error.failures.values()))
            raise cause if isinstance(cause, CheckpointError | OSError) else CheckpointError(f"convert: {cause}") from None
    storage.sync_folder(folder)
