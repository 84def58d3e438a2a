"""What one rank writes of a checkpoint: which boxes of which tensors, in which files, and what its index says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import FileLayout, TensorSlot, plan_file_layout
from dtrain.checkpoint.rank_index import RankIndex, TensorShardEntry
from dtrain.checkpoint.reshard import assign_writers
from dtrain.checkpoint.state_dict import CheckpointContents
from dtrain.dtensor import ShardBox, full_box, is_dtensor, shard_box, to_local


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RankWritePlan:
    """One rank's part of a save.

    Args:
        rank: whose.
        files: what lies where in each data file, by its name; the first one is there in any case.
        shards: by key, the box of each tensor of the run that this rank writes.
        per_rank: by key, the box of each tensor that the rank has for itself.
        tensors: the data by key, on any device: the state's own memory, not a copy.
        values: the rank's own encoded values.
        shared: the encoded values of the run; None on all ranks but the first.
    """

    rank: int
    files: Mapping[str, FileLayout]
    shards: Mapping[str, ShardBox]
    per_rank: Mapping[str, ShardBox]
    tensors: Mapping[str, Tensor]
    values: Any
    shared: dict[str, Any] | None

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(placed.size for placed in self.files.values())


def plan_rank_write(contents: CheckpointContents, rank: int, world_size: int, *, separate_frozen: bool) -> RankWritePlan:
    """The part of ``contents`` that a rank writes: of each box that several ranks hold, one of them writes it.

    Args:
        contents: what is to be saved.
        rank: whose part.
        world_size: among how many ranks.
        separate_frozen: whether parameters that are not trained get a file of their own, which then never changes.
    """
    boxes = _select_shards(contents.tensors, rank, world_size)
    own = {key: shard_box(tensor) for key, tensor in contents.per_rank.items()}
    tensors = {**{key: to_local(contents.tensors[key]) for key in boxes}, **contents.per_rank}
    extents = {**boxes, **own}
    apart = contents.frozen if separate_frozen else frozenset[str]()
    files = {
        layout.data_name(rank, frozen=frozen): plan_file_layout(
            TensorSlot.of(key, layout.DTYPE_NAMES[tensors[key].dtype], extents[key].size)
            for key in extents
            if (key in apart) is frozen
        )
        for frozen in ((False, True) if apart else (False,))
    }
    shared = contents.shared if rank == 0 else None
    return RankWritePlan(
        rank=rank, files=files, shards=boxes, per_rank=own, tensors=tensors, values=contents.values, shared=shared
    )


def _select_shards(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, ShardBox]:
    """The boxes that this rank stores; empty ones nobody does."""
    extents = {
        # Of a plain tensor all ranks hold all.
        key: shard_box(tensor) if is_dtensor(tensor) else full_box(tuple(tensor.shape), rank, world_size)
        for key, tensor in tensors.items()
    }
    held = {key: box for key, box in extents.items() if box.num_replicas > 1}
    sizes = {key: prod(box.shape) * tensors[key].itemsize for key, box in held.items()}
    # The largest first: what comes last evens out what went before.
    order = sorted(held, key=lambda key: -sizes[key])
    writers = assign_writers((key, sizes[key], held[key].num_replicas) for key in order)
    return {key: box for key, box in extents.items() if writers.get(key, box.replica) == box.replica and 0 not in box.size}


def build_rank_index(share: RankWritePlan, chunks: Sequence[tuple[str, ...]]) -> RankIndex:
    """The index of a share whose files have these digests, in their order."""
    where = {key: (number, *span) for number, placed in enumerate(share.files.values()) for key, span in placed.ranges.items()}
    names = {box.key: box.dtype for placed in share.files.values() for box in placed.slots}

    def entries(extents: Mapping[str, ShardBox]) -> tuple[TensorShardEntry, ...]:
        return tuple(
            TensorShardEntry(key, names[key], e.shape, e.offset, e.size, where[key][1], where[key][2], where[key][0])
            for key, e in extents.items()
        )

    return RankIndex(
        rank=share.rank,
        shards=entries(share.shards),
        per_rank=entries(share.per_rank),
        chunks=tuple(chunks),
        values=share.values,
        shared=share.shared,
    )
