"""What a load needs of a checkpoint, read and verified into memory that is not yet the state's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.load_plan import OPTIMIZER, RNG, SLICES, IgnorePatterns, LoadOptions, LoadPlan, plan_load
from dtrain.checkpoint.mismatch_report import mismatch_error, missing_row, unexpected_row
from dtrain.checkpoint.read_tensors import read_tensors
from dtrain.checkpoint.reader import CheckpointReader, open_checkpoint, with_buffers_of
from dtrain.checkpoint.reshard import ReadItem, Region, StoredShard, full_region, plan_reads
from dtrain.checkpoint.tree_json import decode_structure, fill_tensors, iter_placeholders
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import check_rng_state
from dtrain.errors import CheckpointMismatchError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn
from dtrain.state import TrainState
from dtrain.storage import AnyPath

_WHERE = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedCheckpoint:
    """What was read and verified: a checkpoint that is sound, as far as this rank needs it, and fits.

    Args:
        reader: the checkpoint.
        plans: by the name of each state.
        tensors: the tensors, by their key in the checkpoint, on the CPU.
        extra: what was asked for of ``extra``, without ignored names.
        rng: the random state of this rank; None if the checkpoint is of another number of ranks, if it is ignored, or with
            ``only``.
        skipped_states: the states of the checkpoint that are not loaded, as ``states/<name>``.
    """

    reader: CheckpointReader
    plans: Mapping[str, LoadPlan]
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    rng: dict[str, Any] | None
    skipped_states: tuple[str, ...]


def read_checkpoint(
    folder: AnyPath, states: Mapping[str, TrainState], extra: Mapping[str, Any], asked: LoadOptions
) -> LoadedCheckpoint:
    """Everything this rank needs is there, is as it was written, fits, and is in memory. Changes nothing."""
    opened = open_checkpoint(folder)
    if asked.ignore.patterns:
        asked.ignore.check_used(*_known_names(opened, states, extra), where=f"{_WHERE}: ignore")
    left = _check_states(opened, states, asked)
    work = _ReadBatch(opened)
    fits = {}
    for name, state in states.items():
        part = opened.select_state(name) if name else opened
        # Ranks that do not keep buffers of their own must have equal ones: all take those of rank 0.
        part = with_buffers_of(part, get_dist_info().rank % opened.world_size if state.spec.buffers == "local" else 0)
        where = f"{_WHERE}: {folder}{f': {name}' if name else ''}"
        with torch.no_grad():  # in which a look at a shard costs next to nothing
            fits[name] = plan_load(part, state, asked, where=where, first=name in ("", *opened.manifest.states[:1]))
        work.add(part, fits[name].regions, prefix=key_prefix(name))
    outline = {} if asked.model_only else _extra_structure(opened, extra, asked.ignore)
    for tree in outline.values():
        work.add_full(opened.shards, tree)
    random = None if asked.model_only or asked.ignore.part(RNG) else _rng_structure(opened, states)
    if random is not None:
        work.add_full({key: [box] for key, box in opened.per_rank[get_dist_info().rank].items()}, random)
    landed = work.run()
    return LoadedCheckpoint(
        reader=opened,
        plans=fits,
        tensors=landed,
        extra={name: fill_tensors(tree, lambda key, ref: landed[key]) for name, tree in outline.items()},
        rng=None if random is None else _check_rng(fill_tensors(random, lambda key, ref: landed[key])),
        skipped_states=left,
    )


def _known_names(
    opened: CheckpointReader, states: Mapping[str, TrainState], extra: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """The names of models, and the parts, that the states and the checkpoint have."""
    names = {name for state in states.values() for name in (*state.params, *buffers_by_fqn(state.model, persistent_only=True))}
    parts = {OPTIMIZER, RNG, *(tree_json.join_key(layout.EXTRA, name) for name in extra)}
    parts |= {tree_json.join_key(SLICES, name) for state in states.values() for name in state.transform_states}
    saved = [opened.structures] if not opened.manifest.states else list(opened.structures[layout.STATES].values())
    for tree in saved:
        for section in ("params", "buffers"):
            names.update(_dict_keys(tree.get(section)))
        parts |= {tree_json.join_key(SLICES, name) for name in _dict_keys(tree.get(SLICES))}
    parts |= {tree_json.join_key(layout.EXTRA, name) for name in _dict_keys(opened.structures.get(layout.EXTRA))}
    return names, parts | {tree_json.join_key(layout.STATES, name) for name in (*states, *opened.manifest.states)}


def _dict_keys(tree: Any) -> list[str]:
    """The keys of a dict, as text; none of what is no dict, which is refused where it is used."""
    return [str(key) for key in tree] if type(tree) is dict else []


def _check_states(opened: CheckpointReader, states: Mapping[str, TrainState], asked: LoadOptions) -> tuple[str, ...]:
    """Refuse a load that wants another kind of thing than was saved; return the states that ``strict=False`` leaves."""
    where, there = f"{_WHERE}: {opened.folder}", opened.manifest.states
    if opened.manifest.only and not asked.model_only:
        raise CheckpointMismatchError(
            f"{where}: holds only weights (it was saved with only={opened.manifest.only}); pass only=('model',) to load them"
        )
    if "" in states and there:
        raise CheckpointMismatchError(f"{where}: holds the states {', '.join(there)}; pass a dict of states with these names")
    if "" not in states and not there:
        raise CheckpointMismatchError(f"{where}: holds one state without a name, got {sorted(states)}; pass the state itself")
    strange = sorted(set(states) - set(there)) if there else []
    if strange:
        raise CheckpointMismatchError(
            f"{where}: has no state {strange[0]!r}; it holds {', '.join(there)}, got {', '.join(states)}"
        )
    keys = [] if asked.model_only else [tree_json.join_key(layout.STATES, name) for name in there if name not in states]
    left = tuple(key for key in keys if not asked.ignore.part(key))
    if left and asked.strict:
        name = tree_json.unescape_key(left[0].partition("/")[2])
        raise CheckpointMismatchError(
            f"{where}: holds the state {name!r}, too; it holds {', '.join(there)}, got {', '.join(states)}; pass it, or "
            f'ignore=["{left[0]}"] to leave it'
        )
    return left


def key_prefix(name: str) -> str:
    """What the keys of a state's tensors begin with in the checkpoint."""
    return f"{tree_json.join_key(layout.STATES, name)}/" if name else ""


class _ReadBatch:
    """What is to be read, from several parts of a checkpoint, at once."""

    def __init__(self, opened: CheckpointReader) -> None:
        self._reader = opened
        self._reads: list[ReadItem] = []
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._refs: dict[str, tree_json.TensorRef] = {}

    def add(self, part: CheckpointReader, regions: Mapping[str, Region], *, prefix: str) -> None:
        """The regions of one state's tensors."""
        reads = plan_reads(part.shards, regions)
        self._reads += [read._replace(key=prefix + read.key) for read in reads] if prefix else reads
        self._sizes.update((prefix + key, region.size) for key, region in regions.items())
        self._refs.update((prefix + key, part.refs[key]) for key in regions)

    def add_full(self, boxes: Mapping[str, Sequence[StoredShard]], tree: Any) -> None:
        """All of each tensor of a tree."""
        found = {leaf.key: leaf.ref for leaf in iter_placeholders(tree)}
        self._reads += plan_reads(boxes, {key: full_region(ref.shape) for key, ref in found.items()})
        self._sizes.update((key, ref.shape) for key, ref in found.items())
        self._refs.update(found)

    def run(self) -> dict[str, Tensor]:
        """The tensors, read and verified."""
        self._reads.sort(key=itemgetter(0, 1))  # in the order of the files
        return read_tensors(self._sizes, self._reads, self._refs, self._reader.open_data)


def _extra_structure(opened: CheckpointReader, extra: Mapping[str, Any], ignored: IgnorePatterns) -> dict[str, Any]:
    """The stored values of ``extra`` without ignored names, their tensors not read yet.

    Raises:
        CheckpointMismatchError: a name that is given and not stored, or stored and not given.
    """
    outline = opened.structures[layout.EXTRA]
    if type(outline) is not dict:
        raise CorruptCheckpointError(f"{layout.index_name(0)}: extra: needs a dict, got {strict_json.describe_value(outline)}")
    keys = {name: tree_json.join_key(layout.EXTRA, str(name)) for name in (*extra, *outline)}
    asked = {name: key for name, key in keys.items() if not ignored.part(key)}
    absent = [key for name, key in asked.items() if name not in outline]
    left = {name: key for name, key in asked.items() if name not in extra}
    if absent or left:
        rows = [*(missing_row(key, "given") for key in absent), *(unexpected_row(key, "a value") for key in left.values())]
        raise mismatch_error(
            f"{_WHERE}: {opened.folder}", rows, source="checkpoint", advice=_extra_advice(absent, left, outline)
        )
    return {name: outline[name] for name in extra if name in asked}


def _extra_advice(absent: Sequence[str], left: Mapping[str, str], stored: Mapping[str, Any]) -> str:
    """The ways out of a difference in ``extra``."""
    ways = []
    if absent:
        ways.append(f"it holds {', '.join(map(str, stored)) or 'no extra'}: leave out what it lacks, or name it in ignore=")
    if left:
        them = "it" if len(left) == 1 else "them"
        given, patterns = (", ".join(f'"{name}": ...' for name in left), ", ".join(f'"{key}"' for key in left.values()))
        ways.append(f"pass extra={{{given}}} to restore {them}, or ignore=[{patterns}] to leave {them}")
    return "; ".join(ways)


def _rng_structure(opened: CheckpointReader, states: Mapping[str, TrainState]) -> dict[str, Any] | None:
    """The random state of this rank, its tensors not read yet; None when the checkpoint is of another number of ranks.

    Or of ranks of which others work on one batch together, and so draw alike.
    """
    info = get_dist_info()
    copies = next(iter(states.values())).spec.ranks_per_batch
    if (opened.world_size, opened.manifest.layout.ranks_per_batch) != (info.world_size, copies):
        return None
    values = opened.values[info.rank]
    found = decode_structure(values.get("rng") if type(values) is dict else None, "rng")
    if type(found) is not dict:
        raise CorruptCheckpointError(f"{layout.index_name(info.rank)}: values: no rng")
    return found


def _check_rng(random: dict[str, Any]) -> dict[str, Any]:
    """``random``, once it is sure that the generators will take it: they come last, when all else has changed."""
    try:
        check_rng_state(random)
    except ValueError as error:
        raise CorruptCheckpointError(f"{layout.index_name(get_dist_info().rank)}: values: rng: {error}") from None
    return random
