"""Plan the part of a checkpoint that one rank writes, the shards and the data files or links, and write the indexes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import FileLayout, SerializedFile, TensorSlot, plan_file_layout, verify_file
from dtrain.checkpoint.index import RankIndex, RankParts, RunIndex, merge_parts
from dtrain.checkpoint.layout import Blocks, Manifest, RankFiles
from dtrain.checkpoint.plan import assign_writers
from dtrain.checkpoint.reader import open_checkpoint
from dtrain.dist.dtensor import ShardBox, full_box, is_dtensor, shard_box, to_local
from dtrain.errors import CheckpointError
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.state_dict import CheckpointContents

INLINE = "inline"
"""Name, among the files of rank 0, of the small tensors that are written into the index of the run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RankWritePlan:
    """One rank's part of a save.

    Args:
        rank: the rank that writes.
        files: layout of each data file by name; the first file always exists. On rank 0 also ``INLINE``, if there is any.
        keys: all tensors of the run, in the order that is equal on all ranks.
        inline: tensors of the run that are in the index of the run.
        shards: box of each tensor of the run that this rank writes, by key.
        per_rank: box of each tensor that only this rank has, by key.
        tensors: data by key, on any device: the memory of the state, not a copy.
        values: encoded values of the rank.
        shared: encoded values of the run; None on all ranks but rank 0.
    """

    rank: int
    files: Mapping[str, FileLayout]
    keys: tuple[str, ...]
    inline: frozenset[str]
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
    boxes = {
        # Every rank holds the whole of a plain tensor.
        key: shard_box(tensor) if is_dtensor(tensor) else full_box(tuple(tensor.shape), rank, world_size)
        for key, tensor in contents.tensors.items()
    }
    # Tensors of one element that all ranks hold are in the index. Parameters and buffers stay in files that others can read.
    inline = frozenset(
        key for key, box in boxes.items() if prod(box.shape) == 1 and box.num_replicas == world_size and not _is_weight(key)
    )
    shards = _select_shards(contents.tensors, boxes, inline)
    per_rank = {key: shard_box(tensor) for key, tensor in contents.per_rank.items()}
    tensors = {**{key: to_local(contents.tensors[key]) for key in shards}, **contents.per_rank}
    slots = {
        key: TensorSlot.of(key, layout.DTYPE_NAMES[tensors[key].dtype], box.size) for key, box in {**shards, **per_rank}.items()
    }
    separate = contents.frozen if separate_frozen else frozenset[str]()
    files = {
        layout.data_name(rank, frozen=frozen): plan_file_layout(slots[key] for key in slots if (key in separate) is frozen)
        for frozen in ((False, True) if separate else (False,))
    }
    if rank == 0 and inline:
        tensors |= {key: to_local(contents.tensors[key]) for key in inline}
        # All of these tensors have one element.
        inline_slots = [TensorSlot.of(key, layout.DTYPE_NAMES[tensors[key].dtype], (1,)) for key in inline]
        files[INLINE] = plan_file_layout(inline_slots, with_header=False)
    return RankWritePlan(
        rank=rank,
        files=files,
        keys=tuple(contents.tensors),
        inline=inline,
        shards=shards,
        per_rank=per_rank,
        tensors=tensors,
        values=contents.values,
        shared=contents.shared if rank == 0 else None,
    )


def _select_shards(tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardBox], inline: frozenset[str]) -> dict[str, ShardBox]:
    """Return the boxes that this rank stores. Empty boxes are not stored."""
    replicated = {key: box for key, box in boxes.items() if box.num_replicas > 1 and key not in inline}
    sizes = {key: prod(box.shape) * tensors[key].itemsize for key, box in replicated.items()}
    writers = assign_writers({key: (sizes[key], box.num_replicas) for key, box in replicated.items()})
    return {
        key: box
        for key, box in boxes.items()
        if writers.get(key, box.replica) == box.replica and 0 not in box.size and key not in inline
    }


def _is_weight(key: str) -> bool:
    names = key.split("/")
    return names[2 if names[0] == layout.STATES else 0] in ("params", "buffers")


def write_rank_index(folder: AnyPath, write_plan: RankWritePlan, blocks: Sequence[Blocks]) -> list[Any]:
    """Write the index of a rank, with the blocks of its files in the order of the files.

    Returns:
        The report for ``write_run_index``, as JSON: ``RankFiles`` and encoded ``RankParts`` of the rank.
    """
    files = [file for name, file in write_plan.files.items() if name != INLINE]
    places = {key: (number, begin) for number, file in enumerate(files) for key, (begin, _) in file.ranges.items()}
    index = RankIndex(
        digest=layout.DIGEST,
        rank=write_plan.rank,
        begins=[places[key][1] for key in write_plan.keys if key in write_plan.shards],
        per_rank=[places[key][1] for key in write_plan.per_rank],
        blocks=tuple(blocks),
        values=write_plan.values,
    )
    name = layout.index_name(write_plan.rank)
    data = layout.encode_index(index, name)
    storage.write_file(folder / name, data)
    parts = {key: (places[key][0], box.offset, box.size) for key, box in write_plan.shards.items()}
    rank_files = RankFiles(len(data), hashlib.sha256(data).hexdigest(), tuple(file.size for file in files))
    return [msgspec.to_builtins(rank_files), RankParts.of(write_plan.keys, parts).encode()]


def write_run_index(
    folder: AnyPath, write_plan: RankWritePlan, inline: SerializedFile | None, reports: Sequence[Any], draft: Manifest
) -> Manifest:
    """Write the index of the run on rank 0. Return the manifest ``draft`` with the facts about the files.

    Args:
        folder: folder of the files.
        write_plan: write plan of rank 0.
        inline: content of ``INLINE``; None without any.
        reports: report of ``write_rank_index`` of each rank.
        draft: all other facts of the manifest.
    """
    assert write_plan.shared is not None, "only rank 0 has the values of the run"
    refs: dict[str, layout.TensorRef] = {}
    for section, values in write_plan.shared.items():
        refs |= tree_json.tensor_refs(values, section)
    assert tuple(refs) == write_plan.keys, "values name the tensors in the order in which they were collected"
    kinds, tensors = merge_parts(refs, write_plan.inline, [RankParts.decode(parts) for _, parts in reports])
    index = RunIndex(
        files=tuple(layout.convert(files, RankFiles, "rank files") for files, _ in reports),
        kinds=kinds,
        tensors=tensors,
        inline=b"" if inline is None else b"".join(inline.views(0, inline.size)),
        local_buffers=any(map(_is_weight, write_plan.per_rank)),
        shared=write_plan.shared,
    )
    data = layout.encode_index(index, layout.INDEX)
    storage.write_file(folder / layout.INDEX, data)
    total_bytes = len(data) + sum(index.sizes.values())
    return msgspec.structs.replace(
        draft, bytes=total_bytes, index_bytes=len(data), index_sha256=hashlib.sha256(data).hexdigest()
    )


def link_frozen_file(previous: AnyPath, staging: AnyPath, blocks: Blocks, rank: int) -> bool:
    """Link the file of frozen parameters of an earlier step into the staging folder if its content is equal.

    If the earlier step is being removed, or the file system has no links, the file is written instead.

    Returns:
        True if the file was linked.
    """
    name = layout.data_name(rank, frozen=True)
    try:
        reader = open_checkpoint(previous, check_files=False)
        if rank >= reader.world_size or blocks not in reader.ranks.placed(rank).blocks[1:]:
            return False
        # A linked file is read once, so that a corrupt file is not linked from step to step.
        with reader.open_data(2 + 2 * rank) as file:
            verify_file(file)
        storage.link_file(previous / name, staging / name)
    except (OSError, CheckpointError):
        return False
    return True
