"""What one rank writes of a checkpoint: which boxes of which tensors, in which files, and what its index says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from dtrain.checkpoint import layout
from dtrain.checkpoint.contents import Contents
from dtrain.checkpoint.data_file import Box, Placed, place
from dtrain.checkpoint.plan import choose_writers
from dtrain.checkpoint.rank_index import Entry, RankIndex
from dtrain.tensors import Extent, extent, is_distributed, local, whole_extent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Share:
    """One rank's part of a save.

    Args:
        rank: whose.
        files: what lies where in each data file, by its name; the first one is there in any case.
        boxes: by key, the box of each tensor of the run that this rank writes.
        own: by key, the box of each tensor that the rank has for itself.
        tensors: the data by key, on any device: the state's own memory, not a copy.
        values: the rank's own encoded values.
        shared: the encoded values of the run; None on all ranks but the first.
    """

    rank: int
    files: Mapping[str, Placed]
    boxes: Mapping[str, Extent]
    own: Mapping[str, Extent]
    tensors: Mapping[str, Tensor]
    values: Any
    shared: dict[str, Any] | None

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(placed.size for placed in self.files.values())


def share_of(contents: Contents, rank: int, world_size: int, *, frozen_apart: bool) -> Share:
    """The part of ``contents`` that a rank writes: of each box that several ranks hold, one of them writes it.

    Args:
        contents: what is to be saved.
        rank: whose part.
        world_size: among how many ranks.
        frozen_apart: whether parameters that are not trained get a file of their own, which then never changes.
    """
    boxes = _boxes(contents.tensors, rank, world_size)
    own = {key: extent(tensor) for key, tensor in contents.own.items()}
    tensors = {**{key: local(contents.tensors[key]) for key in boxes}, **contents.own}
    extents = {**boxes, **own}
    apart = contents.frozen if frozen_apart else frozenset[str]()
    files = {
        layout.data_name(rank, frozen=frozen): place(
            Box.of(key, layout.DTYPE_NAMES[tensors[key].dtype], extents[key].size)
            for key in extents
            if (key in apart) is frozen
        )
        for frozen in ((False, True) if apart else (False,))
    }
    shared = contents.shared if rank == 0 else None
    return Share(rank=rank, files=files, boxes=boxes, own=own, tensors=tensors, values=contents.values, shared=shared)


def _boxes(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Extent]:
    """The boxes that this rank stores; empty ones nobody does."""
    extents = {
        # Of a plain tensor all ranks hold all.
        key: extent(tensor) if is_distributed(tensor) else whole_extent(tuple(tensor.shape), rank, world_size)
        for key, tensor in tensors.items()
    }
    held = {key: box for key, box in extents.items() if box.copies > 1}
    sizes = {key: prod(box.shape) * tensors[key].itemsize for key, box in held.items()}
    # The largest first: what comes last evens out what went before.
    order = sorted(held, key=lambda key: -sizes[key])
    writers = choose_writers((key, sizes[key], held[key].copies) for key in order)
    return {key: box for key, box in extents.items() if writers.get(key, box.copy) == box.copy and 0 not in box.size}


def index_of(share: Share, chunks: Sequence[tuple[str, ...]]) -> RankIndex:
    """The index of a share whose files have these digests, in their order."""
    where = {key: (number, *span) for number, placed in enumerate(share.files.values()) for key, span in placed.ranges.items()}
    names = {box.key: box.dtype for placed in share.files.values() for box in placed.boxes}

    def entries(extents: Mapping[str, Extent]) -> tuple[Entry, ...]:
        return tuple(
            Entry(key, names[key], e.shape, e.offset, e.size, where[key][1], where[key][2], where[key][0])
            for key, e in extents.items()
        )

    return RankIndex(
        rank=share.rank,
        boxes=entries(share.boxes),
        own=entries(share.own),
        chunks=tuple(chunks),
        values=share.values,
        shared=share.shared,
    )
