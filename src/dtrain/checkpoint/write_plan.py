"""Plan the part of a checkpoint that one rank writes: the shards, the data files or links, and the index of the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import read_manifest
from dtrain.checkpoint.data_file import FileLayout, TensorSlot, VerifiedReader, plan_file_layout
from dtrain.checkpoint.rank_index import RankIndex, StoredShard, parse_index, shard_kind
from dtrain.checkpoint.reshard import assign_writers
from dtrain.checkpoint.state_dict import CheckpointContents
from dtrain.dtensor import ShardBox, full_box, is_dtensor, shard_box, to_local
from dtrain.errors import CheckpointError
from dtrain.storage import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RankWritePlan:
    """One rank's part of a save.

    Args:
        rank: the rank that writes.
        files: layout of each data file by name; the first file always exists.
        shards: box of each tensor of the run that this rank writes, by key.
        per_rank: box of each tensor that only this rank has, by key.
        tensors: data by key, on any device: the memory of the state, not a copy.
        values: encoded values of the rank.
        shared: encoded values of the run; None on all ranks but rank 0.
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
        """Total size of all data files in bytes."""
        return sum(placed.size for placed in self.files.values())


def plan_rank_write(contents: CheckpointContents, rank: int, world_size: int, *, separate_frozen: bool) -> RankWritePlan:
    """Plan the part of ``contents`` that a rank writes. One rank writes each shard that several ranks hold.

    Args:
        contents: contents of the checkpoint.
        rank: the rank that writes.
        world_size: number of ranks.
        separate_frozen: if True, parameters that are not trained get a file of their own, which never changes.
    """
    shards = _select_shards(contents.tensors, rank, world_size)
    per_rank = {key: shard_box(tensor) for key, tensor in contents.per_rank.items()}
    tensors = {**{key: to_local(contents.tensors[key]) for key in shards}, **contents.per_rank}
    boxes = {**shards, **per_rank}
    separate = contents.frozen if separate_frozen else frozenset[str]()
    files = {
        layout.data_name(rank, frozen=frozen): plan_file_layout(
            TensorSlot.of(key, layout.DTYPE_NAMES[tensors[key].dtype], boxes[key].size)
            for key in boxes
            if (key in separate) is frozen
        )
        for frozen in ((False, True) if separate else (False,))
    }
    shared = contents.shared if rank == 0 else None
    return RankWritePlan(
        rank=rank, files=files, shards=shards, per_rank=per_rank, tensors=tensors, values=contents.values, shared=shared
    )


def _select_shards(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, ShardBox]:
    """Return the boxes that this rank stores. Empty boxes are not stored."""
    boxes = {
        # Every rank holds the whole of a plain tensor.
        key: shard_box(tensor) if is_dtensor(tensor) else full_box(tuple(tensor.shape), rank, world_size)
        for key, tensor in tensors.items()
    }
    replicated = {key: box for key, box in boxes.items() if box.num_replicas > 1}
    sizes = {key: prod(box.shape) * tensors[key].itemsize for key, box in replicated.items()}
    writers = assign_writers({key: (sizes[key], box.num_replicas) for key, box in replicated.items()})
    return {key: box for key, box in boxes.items() if writers.get(key, box.replica) == box.replica and 0 not in box.size}


def build_rank_index(write_plan: RankWritePlan, chunks: Sequence[tuple[str, ...]]) -> RankIndex:
    """Build the index of a write plan from the chunk digests of its files, in the order of the files."""
    files = enumerate(write_plan.files.values())
    begins = {key: (number, begin) for number, file in files for key, (begin, _) in file.ranges.items()}
    dtypes = {slot.key: slot.dtype for file in write_plan.files.values() for slot in file.slots}

    def shards(boxes: Mapping[str, ShardBox]) -> dict[str, StoredShard]:
        return {
            key: StoredShard(*begins[key], shard_kind(dtypes[key], box.shape, box.offset, box.size))
            for key, box in boxes.items()
        }

    return RankIndex(
        rank=write_plan.rank,
        shards=shards(write_plan.shards),
        per_rank=shards(write_plan.per_rank),
        chunks=tuple(chunks),
        values=write_plan.values,
        shared=write_plan.shared,
    )


def link_equal_file(previous: AnyPath, staging: AnyPath, name: str, size: int, digests: tuple[str, ...], rank: int) -> bool:
    """Link a file of an earlier step into the staging folder if its content is equal. Return True if linked.

    If the earlier step is being removed, or the file system has no links, the file is written instead.
    """
    try:
        manifest = read_manifest(previous)
        files = manifest.ranks[rank] if rank < len(manifest.ranks) else None
        sizes = [] if files is None else [file.bytes for file in files.data]
        names = [] if files is None else [file.name for file in files.data]
        if files is None or name not in names or sizes[names.index(name)] != size:
            return False
        index = parse_index(storage.read_file(previous / files.index, limit=files.index_bytes), rank, sizes)
        if index.chunks[names.index(name)] != digests:
            return False
        # A linked file is read once, so that a corrupt file is not linked from step to step.
        with storage.FileReader(previous / name) as file:
            if file.size != size:
                return False
            VerifiedReader(file, name, digests).verify(range(len(digests)))
        storage.link_file(previous / name, staging / name)
    except (OSError, CheckpointError):
        return False
    return True
