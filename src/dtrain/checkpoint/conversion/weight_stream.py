"""Read named tensors from files in batches of limited size, and write them to files of another format.

Memory does not grow with the size of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.data_file import TensorSlot, plan_file_layout
from dtrain.checkpoint.layout import DTYPES, TensorRef
from dtrain.checkpoint.read_tensors import read_tensors
from dtrain.checkpoint.reshard import Region, plan_reads
from dtrain.checkpoint.tensor_files import TensorFiles, rename_shards
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.storage import Buffer, FileWriter

# Limit of the tensors in memory. Larger batches read less twice: a chunk that two batches need is fetched for each of them.
BUFFER_BYTES = 128 * 2**20


def nbytes(ref: TensorRef) -> int:
    """Return the size of a tensor's data in bytes."""
    return prod(ref.shape) * DTYPES[ref.dtype].itemsize


def batch_regions(
    refs: Mapping[str, TensorRef], names: Iterable[str], *, limit: int = BUFFER_BYTES
) -> Iterator[dict[str, Region]]:
    """Split the tensors in order into batches of at most ``limit`` bytes: whole tensors, or rows of a larger tensor.

    One row may be larger than ``limit``. The data of all regions in order are the data of all tensors in row-major order.
    """
    for group in group_by_size({name: nbytes(refs[name]) for name in names}, limit=limit):
        if len(group) == 1 and nbytes(refs[group[0]]) > limit:
            yield from ({group[0]: rows} for rows in _row_regions(refs[group[0]], limit))
        else:
            yield {name: tensor_region(refs[name]) for name in group}


def group_by_size(sizes: Mapping[str, int], *, limit: int = BUFFER_BYTES) -> Iterator[list[str]]:
    """Split the names in order into groups of at most ``limit`` bytes. A larger tensor is alone in its group."""
    group: list[str] = []
    remaining = limit
    for name, size in sizes.items():
        if group and size > remaining:
            yield group
            group, remaining = [], limit
        group.append(name)
        remaining -= size
    if group:
        yield group


def tensor_region(ref: TensorRef) -> Region:
    """Return the region of a whole tensor."""
    return Region(offset=(0,) * len(ref.shape), size=ref.shape)


def _row_regions(ref: TensorRef, limit: int) -> Iterator[Region]:
    # A scalar has no rows.
    if not ref.shape:
        yield tensor_region(ref)
        return
    rows, *inner = ref.shape
    run = max(1, limit * rows // nbytes(ref))
    for row in range(0, rows, run):
        yield Region(offset=(row, *(0 for _ in inner)), size=(min(run, rows - row), *inner))


def read_batch(files: TensorFiles, batch: Mapping[str, Region], dtypes: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Read regions as tensors of the stored dtypes, or cast to ``dtypes``.

    Raises:
        CorruptCheckpointError: bytes that were changed, as far as the files can tell.
    """
    sizes = {name: region.size for name, region in batch.items()}
    tensors = read_tensors(sizes, plan_reads(files.find_shards(batch), batch), files.refs, files.open_file)
    return {name: tensors[name].to(DTYPES[(dtypes or {}).get(name, files.refs[name].dtype)]) for name in batch}


CAST_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_CALLER = "convert"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WeightStream:
    """Stream of tensors from files, with the dtypes to write.

    Args:
        files: files of the tensors.
        dtypes: dtypes to write, by name.
        on_bytes_written: called with the number of bytes written since the last call.
    """

    files: TensorFiles
    dtypes: Mapping[str, str]
    on_bytes_written: Callable[[int], None]

    @property
    def slots(self) -> list[TensorSlot]:
        """Slots of the tensors to write."""
        return [TensorSlot.of(name, dtype, self.files.refs[name].shape) for name, dtype in self.dtypes.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each tensor to write in bytes, by name."""
        return {slot.key: slot.nbytes for slot in self.slots}

    @property
    def bytes(self) -> int:
        """Total size of the tensors to write in bytes."""
        return sum(self.sizes.values())

    def iter_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Iterate over the data of these tensors in row-major order, in tensors of limited size."""
        for batch in batch_regions(self.files.refs, names):
            yield from read_batch(self.files, batch, self.dtypes).values()


def stream_weights(files: TensorFiles, *, dtype: str | None, on_bytes_written: Callable[[int], None]) -> WeightStream:
    """Stream all tensors of ``files``; floating-point tensors are cast to ``fp32``, ``bf16`` or ``fp16`` unless None.

    Raises:
        ConfigError: another value of ``dtype``.
    """
    if dtype is not None and dtype not in CAST_DTYPES:
        raise ConfigError(
            f"{_CALLER}: dtype must be one of {', '.join(CAST_DTYPES)}, got {dtype!r}. Leave out dtype to keep the dtypes."
        )
    dtypes = {
        name: CAST_DTYPES[dtype] if dtype is not None and DTYPES[ref.dtype].is_floating_point else ref.dtype
        for name, ref in files.refs.items()
    }
    return WeightStream(files=files, dtypes=dtypes, on_bytes_written=on_bytes_written)


def write_safetensors(
    path: Path, weights: WeightStream, names: Iterable[str], on_data: Callable[[Buffer], Any] | None = None
) -> int:
    """Write tensors as one safetensors file, which is on the disk when the function returns.

    Args:
        path: a name that does not exist.
        weights: stream of the tensors.
        names: names of the tensors to write.
        on_data: called with every part of the file, in order.

    Returns:
        The size of the file in bytes.
    """
    selected = set(names)
    layout = plan_file_layout(slot for slot in weights.slots if slot.key in selected)

    with FileWriter(path) as file:
        for data in _iter_buffers(layout.header, weights.iter_tensors(slot.key for slot in layout.slots)):
            file.write(data)
            if on_data is not None:
                on_data(data)
            weights.on_bytes_written(len(data))
        file.sync()
    return file.written


def _iter_buffers(header: bytes, tensors: Iterable[Tensor]) -> Iterator[Buffer]:
    yield header
    for tensor in tensors:
        yield cpu_bytes(tensor)


def cpu_bytes(tensor: Tensor) -> memoryview:
    """Return the data of a CPU tensor in row-major order; a contiguous tensor shares its memory."""
    return memoryview(raw_bytes(tensor).numpy().data)


def rename_tensors(files: TensorFiles, names: Mapping[str, str]) -> TensorFiles:
    """Return ``files`` with new names: new name -> stored name. Stored names without new name are left out."""
    return replace(
        files,
        refs={new: files.refs[old] for new, old in names.items()},
        find_shards=rename_shards(files.find_shards, names),
    )


def apply_ties(files: TensorFiles, tie: Mapping[str, str], *, once: bool) -> TensorFiles:
    """Return ``files`` with tied tensors (a further name -> the first) under both names, or ``once`` under the first.

    Raises:
        ConfigError: none of two tied names is stored.
        CheckpointMismatchError: both names are stored, and their tensors differ.
    """
    names = {name: name for name in files.refs}
    for alias, first in tie.items():
        stored = next((name for name in (first, alias) if name in files.refs), None)
        if stored is None or alias == first:
            raise ConfigError(
                f"{_CALLER}: tie must map a name to another, one of which is stored, got {alias!r}: {first!r}. "
                f"Pass tie={{'lm_head.weight': 'embed.weight'}}, for example, with names of the source."
            )
        if alias in files.refs and first in files.refs and not _are_equal(files, alias, first):
            raise CheckpointMismatchError(
                f"{_CALLER}: tie must map equal tensors, but {alias!r} and {first!r} are both stored and differ. Leave out tie."
            )
        names |= {alias: stored, first: stored}
        if once:
            del names[alias]
    return rename_tensors(files, names)


def _are_equal(files: TensorFiles, a: str, b: str) -> bool:
    if files.refs[a].shape != files.refs[b].shape or files.refs[a].dtype != files.refs[b].dtype:
        return False
    return all(
        torch.equal(raw_bytes(read_batch(files, batch)[a]), raw_bytes(read_batch(files, {b: batch[a]})[b]))
        for batch in batch_regions(files.refs, [a])
    )


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the data of a tensor as flat bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
