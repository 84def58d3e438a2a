"""Stored tensors read in an order, piece by piece: what is in memory does not grow with the checkpoint.

``Weights``: named tensors on their way from files of one format into files of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.data_file import TensorSlot, plan_file_layout
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.read_tensors import read_tensors
from dtrain.checkpoint.reshard import Region, plan_reads
from dtrain.checkpoint.tensor_files import TensorFiles
from dtrain.checkpoint.tree_json import TensorRef
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.storage import Buffer, FileWriter

# Of tensors in memory at a time. Larger batches read less twice: a chunk of a file that two batches need is fetched for each.
BUFFER_BYTES = 128 * 2**20


def nbytes(ref: TensorRef) -> int:
    """Bytes of a tensor's data."""
    return prod(ref.shape) * DTYPES[ref.dtype].itemsize


def batch_regions(
    refs: Mapping[str, TensorRef], names: Iterable[str], *, limit: int = BUFFER_BYTES
) -> Iterator[dict[str, Region]]:
    """The tensors in this order, in batches of at most ``limit`` bytes: whole ones, and rows of one that is larger.

    One row may be larger than ``limit``. The data of all regions in their order are the data of all tensors, row by row.
    """
    for group in group_by_size({name: nbytes(refs[name]) for name in names}, limit=limit):
        if len(group) == 1 and nbytes(refs[group[0]]) > limit:
            yield from ({group[0]: rows} for rows in _row_regions(refs[group[0]], limit))
        else:
            yield {name: tensor_region(refs[name]) for name in group}


def group_by_size(sizes: Mapping[str, int], *, limit: int = BUFFER_BYTES) -> Iterator[list[str]]:
    """The names in their order, in groups of at most ``limit`` bytes; what is larger is alone."""
    group: list[str] = []
    room = limit
    for name, size in sizes.items():
        if group and size > room:
            yield group
            group, room = [], limit
        group.append(name)
        room -= size
    if group:
        yield group


def tensor_region(ref: TensorRef) -> Region:
    """All of a tensor."""
    return Region(offset=(0,) * len(ref.shape), size=ref.shape)


def _row_regions(ref: TensorRef, limit: int) -> Iterator[Region]:
    if not ref.shape:  # a scalar has no rows
        yield tensor_region(ref)
        return
    rows, *inner = ref.shape
    run = max(1, limit * rows // nbytes(ref))
    for row in range(0, rows, run):
        yield Region(offset=(row, *(0 for _ in inner)), size=(min(run, rows - row), *inner))


def read_batch(stored: TensorFiles, batch: Mapping[str, Region], dtypes: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """These regions as tensors, of the stored dtypes, or cast to those that are given.

    Raises:
        CorruptCheckpointError: bytes that are not as they were written, as far as the files can tell.
    """
    sizes = {name: region.size for name, region in batch.items()}
    landed = read_tensors(sizes, plan_reads(stored.shards, batch), stored.refs, stored.open_file)
    return {name: landed[name].to(DTYPES[(dtypes or {}).get(name, stored.refs[name].dtype)]) for name in batch}


CAST_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WHERE = "convert"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WeightStream:
    """Tensors by name, and what they become.

    Args:
        files: where they are.
        dtypes: that they are written in, by name.
        on_bytes_written: is told how many bytes have been written since it was told last.
    """

    files: TensorFiles
    dtypes: Mapping[str, str]
    on_bytes_written: Callable[[int], None]

    @property
    def slots(self) -> list[TensorSlot]:
        """What is written."""
        return [TensorSlot.of(name, dtype, self.files.refs[name].shape) for name, dtype in self.dtypes.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of what is written, by name."""
        return {box.key: box.nbytes for box in self.slots}

    @property
    def bytes(self) -> int:
        """Size of what is written."""
        return sum(self.sizes.values())

    def iter_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The data of these tensors, one after the other, row by row, in tensors of a handy size."""
        for batch in batch_regions(self.files.refs, names):
            yield from read_batch(self.files, batch, self.dtypes).values()


def stream_weights(stored: TensorFiles, *, cast: str | None, on_bytes_written: Callable[[int], None]) -> WeightStream:
    """All tensors of ``stored``, floating ones cast when ``cast`` is given: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: another cast.
    """
    if cast is not None and cast not in CAST_DTYPES:
        raise ConfigError(
            f"{_WHERE}: cast must be one of {', '.join(CAST_DTYPES)}, got {cast!r}; leave it out to keep the dtypes"
        )
    dtypes = {
        name: CAST_DTYPES[cast] if cast is not None and DTYPES[ref.dtype].is_floating_point else ref.dtype
        for name, ref in stored.refs.items()
    }
    return WeightStream(files=stored, dtypes=dtypes, on_bytes_written=on_bytes_written)


def write_safetensors(
    path: Path, weights: WeightStream, names: Iterable[str], on_data: Callable[[Buffer], Any] | None = None
) -> int:
    """Write these tensors as one safetensors file, on the disk when this returns.

    Args:
        path: a name that does not exist.
        weights: what they are taken from.
        names: which of them.
        on_data: gets every byte of the file, in order.

    Returns:
        Bytes of the file.
    """
    chosen = set(names)
    placed = plan_file_layout(box for box in weights.slots if box.key in chosen)

    with FileWriter(path) as file:
        for data in _iter_buffers(placed.header, weights.iter_tensors(box.key for box in placed.slots)):
            file.write(data)
            if on_data is not None:
                on_data(data)
            weights.on_bytes_written(len(data))
        file.sync()
    return file.written


def _iter_buffers(header: bytes, pieces: Iterable[Tensor]) -> Iterator[Buffer]:
    yield header
    for piece in pieces:
        yield cpu_bytes(piece)


def cpu_bytes(tensor: Tensor) -> memoryview:
    """The data of a tensor on the CPU, row by row; sharing memory where it lies so already."""
    return memoryview(raw_bytes(tensor).numpy().data)


def rename_tensors(stored: TensorFiles, names: Mapping[str, str]) -> TensorFiles:
    """``stored`` under new names: each new name -> the stored one. What no new name stands for is left out."""

    def boxes(new: str, old: str) -> list[Any]:
        return [box._replace(entry=box.entry._replace(key=new)) for box in stored.shards.get(old, ())]

    return replace(
        stored,
        refs={new: stored.refs[old] for new, old in names.items()},
        shards={new: boxes(new, old) for new, old in names.items()},
    )


def apply_ties(stored: TensorFiles, tie: Mapping[str, str], *, once: bool) -> TensorFiles:
    """``stored`` with what ``tie`` says is one tensor (a further name -> the first) under both names, or ``once``.

    Raises:
        ConfigError: neither of two names is stored.
        CheckpointMismatchError: both are, and differ.
    """
    names = {name: name for name in stored.refs}
    for alias, first in tie.items():
        there = next((name for name in (first, alias) if name in stored.refs), None)
        if there is None or alias == first:
            raise ConfigError(f"{_WHERE}: tie: {alias!r} and {first!r} must be two names of which one is stored, and are not")
        if alias in stored.refs and first in stored.refs and not _are_equal(stored, alias, first):
            raise CheckpointMismatchError(f"{_WHERE}: tie: {alias!r} and {first!r} are both stored, and differ; leave out tie")
        names |= {alias: there, first: there}
        if once:
            del names[alias]
    return rename_tensors(stored, names)


def _are_equal(stored: TensorFiles, a: str, b: str) -> bool:
    if stored.refs[a].shape != stored.refs[b].shape or stored.refs[a].dtype != stored.refs[b].dtype:
        return False
    return all(
        torch.equal(raw_bytes(read_batch(stored, batch)[a]), raw_bytes(read_batch(stored, {b: batch[a]})[b]))
        for batch in batch_regions(stored.refs, [a])
    )


def raw_bytes(tensor: Tensor) -> Tensor:
    """The data of a tensor as flat bytes, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
