"""Stored tensors read in an order, piece by piece: what is in memory does not grow with the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from torch import Tensor

from dtrain.checkpoint.fill import land
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import Region, plan_reads
from dtrain.checkpoint.stored import Stored

# Of tensors in memory at a time. Larger batches read less twice: a chunk of a file that two batches need is fetched for each.
BUFFER_BYTES = 128 * 2**20


def nbytes(ref: TensorRef) -> int:
    """Bytes of a tensor's data."""
    return prod(ref.shape) * DTYPES[ref.dtype].itemsize


def cut(refs: Mapping[str, TensorRef], names: Iterable[str], *, limit: int = BUFFER_BYTES) -> Iterator[dict[str, Region]]:
    """The tensors in this order, in batches of at most ``limit`` bytes: whole ones, and rows of one that is larger.

    One row may be larger than ``limit``. The data of all regions in their order are the data of all tensors, row by row.
    """
    for group in groups({name: nbytes(refs[name]) for name in names}, limit=limit):
        if len(group) == 1 and nbytes(refs[group[0]]) > limit:
            yield from ({group[0]: rows} for rows in _rows(refs[group[0]], limit))
        else:
            yield {name: whole(refs[name]) for name in group}


def groups(sizes: Mapping[str, int], *, limit: int = BUFFER_BYTES) -> Iterator[list[str]]:
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


def whole(ref: TensorRef) -> Region:
    """All of a tensor."""
    return Region(offset=(0,) * len(ref.shape), size=ref.shape)


def _rows(ref: TensorRef, limit: int) -> Iterator[Region]:
    if not ref.shape:  # a scalar has no rows
        yield whole(ref)
        return
    rows, *inner = ref.shape
    run = max(1, limit * rows // nbytes(ref))
    for row in range(0, rows, run):
        yield Region(offset=(row, *(0 for _ in inner)), size=(min(run, rows - row), *inner))


def read(stored: Stored, batch: Mapping[str, Region], dtypes: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """These regions as tensors, of the stored dtypes, or cast to those that are given.

    Raises:
        DamagedCheckpointError: bytes that are not as they were written, as far as the files can tell.
    """
    sizes = {name: region.size for name, region in batch.items()}
    landed = land(sizes, plan_reads(stored.boxes, batch), stored.refs, stored.open_file)
    return {name: landed[name].to(DTYPES[(dtypes or {}).get(name, stored.refs[name].dtype)]) for name in batch}
