"""Read and verify the parts of a checkpoint that a load needs, into new memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.load_plan import OPTIMIZER, RNG, TRANSFORMS, IgnorePatterns, LoadOptions, LoadPlan, plan_load
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

_CALLER = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadedCheckpoint:
    """Checkpoint that was read, verified and fits the states, as far as this rank needs the checkpoint.

    Args:
        reader: the open checkpoint.
        plans: plans by the names of the states.
        tensors: tensors by their key in the checkpoint, on the CPU.
        extra: requested values of ``extra``, without ignored names.
        rng: random state of this rank; None if the checkpoint has another number of ranks, if ignored, or with
            ``what="weights"``.
        skipped_states: states of the checkpoint that are not loaded, as ``states/<name>``.
    """

    reader: CheckpointReader
    plans: Mapping[str, LoadPlan]
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    rng: dict[str, Any] | None
    skipped_states: tuple[str, ...]


def read_checkpoint(
    folder: AnyPath, states: Mapping[str, TrainState], extra: Mapping[str, Any], options: LoadOptions
) -> LoadedCheckpoint:
    """Read the tensors that this rank needs, after a check that the checkpoint fits the states. Changes nothing."""
    reader = open_checkpoint(folder)
    if options.ignore.patterns:
        options.ignore.check_used(*_known_names(reader, states, extra), caller=f"{_CALLER}: ignore")
    skipped_states = _check_states(reader, states, options)
    batch = _ReadBatch(reader)
    plans = {}
    for name, state in states.items():
        part = reader.select_state(name) if name else reader
        # Ranks without buffers of their own must have equal buffers, so all load the buffers of rank 0.
        part = with_buffers_of(part, get_dist_info().rank % reader.world_size if state.spec.buffers == "local" else 0)
        caller = f"{_CALLER}: {folder}{f': {name}' if name else ''}"
        # Without autograd, local shards are obtained faster.
        with torch.no_grad():
            plans[name] = plan_load(part, state, options, caller=caller, first=name in ("", *reader.manifest.states[:1]))
        batch.add(part, plans[name].regions, prefix=key_prefix(name))
    structures = {} if options.model_only else _extra_structure(reader, extra, options.ignore)
    for tree in structures.values():
        batch.add_full(reader.shards, tree)
    random = None if options.model_only or options.ignore.part(RNG) else _rng_structure(reader, states)
    if random is not None:
        batch.add_full({key: [shard] for key, shard in reader.per_rank[get_dist_info().rank].items()}, random)
    tensors = batch.run()
    return LoadedCheckpoint(
        reader=reader,
        plans=plans,
        tensors=tensors,
        extra={name: fill_tensors(tree, lambda key, ref: tensors[key]) for name, tree in structures.items()},
        rng=None if random is None else _check_rng(fill_tensors(random, lambda key, ref: tensors[key])),
        skipped_states=skipped_states,
    )


def _known_names(
    reader: CheckpointReader, states: Mapping[str, TrainState], extra: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """Return the names of models, and the parts, that the states and the checkpoint have."""
    names = {name for state in states.values() for name in (*state.params, *buffers_by_fqn(state.model, persistent_only=True))}
    parts = {OPTIMIZER, RNG, *(tree_json.join_key(layout.EXTRA, name) for name in extra)}
    parts |= {tree_json.join_key(TRANSFORMS, name) for state in states.values() for name in state.transform_states}
    saved = [reader.structures] if not reader.manifest.states else list(reader.structures[layout.STATES].values())
    for tree in saved:
        for section in ("params", "buffers"):
            names.update(_dict_keys(tree.get(section)))
        parts |= {tree_json.join_key(TRANSFORMS, name) for name in _dict_keys(tree.get(TRANSFORMS))}
    parts |= {tree_json.join_key(layout.EXTRA, name) for name in _dict_keys(reader.structures.get(layout.EXTRA))}
    return names, parts | {tree_json.join_key(layout.STATES, name) for name in (*states, *reader.manifest.states)}


def _dict_keys(tree: Any) -> list[str]:
    """Return the keys of a dict as strings. Other values have none, and are refused when they are used."""
    return [str(key) for key in tree] if type(tree) is dict else []


def _check_states(reader: CheckpointReader, states: Mapping[str, TrainState], options: LoadOptions) -> tuple[str, ...]:
    """Check that the checkpoint holds the requested states. Return the states to skip with ``strict=False``."""
    caller, stored = f"{_CALLER}: {reader.folder}", reader.manifest.states
    if reader.manifest.what != "all" and not options.model_only:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint was saved with what={reader.manifest.what!r}. Pass what='weights' to load it."
        )
    if "" in states and stored:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint holds the states {', '.join(stored)}. Pass a dict of states with these names."
        )
    if "" not in states and not stored:
        raise CheckpointMismatchError(
            f"{caller}: the checkpoint holds one state without a name, got {sorted(states)}. Pass the state itself."
        )
    unknown = sorted(set(states) - set(stored)) if stored else []
    if unknown:
        raise CheckpointMismatchError(
            f"{caller}: states must be among the stored states {', '.join(stored)}, got {', '.join(states)}. "
            f"Leave out {unknown[0]!r}."
        )
    keys = [] if options.model_only else [tree_json.join_key(layout.STATES, name) for name in stored if name not in states]
    skipped = tuple(key for key in keys if not options.ignore.part(key))
    if skipped and options.strict:
        name = tree_json.unescape_key(skipped[0].partition("/")[2])
        raise CheckpointMismatchError(
            f"{caller}: states must be the stored states {', '.join(stored)}, got {', '.join(states)}. "
            f'Pass the state {name!r}, too, or ignore=["{skipped[0]}"] to skip the state.'
        )
    return skipped


def key_prefix(name: str) -> str:
    """Return the prefix of the keys of a state's tensors in the checkpoint."""
    return f"{tree_json.join_key(layout.STATES, name)}/" if name else ""


class _ReadBatch:
    """Batch of reads from several parts of a checkpoint."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._reads: list[ReadItem] = []
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._refs: dict[str, tree_json.TensorRef] = {}

    def add(self, part: CheckpointReader, regions: Mapping[str, Region], *, prefix: str) -> None:
        """Add the regions of one state's tensors."""
        reads = plan_reads(part.shards, regions)
        self._reads += [read._replace(key=prefix + read.key) for read in reads] if prefix else reads
        self._sizes.update((prefix + key, region.size) for key, region in regions.items())
        self._refs.update((prefix + key, part.refs[key]) for key in regions)

    def add_full(self, shards: Mapping[str, Sequence[StoredShard]], tree: Any) -> None:
        """Add all tensors of a tree, each completely."""
        refs = {placeholder.key: placeholder.ref for placeholder in iter_placeholders(tree)}
        self._reads += plan_reads(shards, {key: full_region(ref.shape) for key, ref in refs.items()})
        self._sizes.update((key, ref.shape) for key, ref in refs.items())
        self._refs.update(refs)

    def run(self) -> dict[str, Tensor]:
        """Read and verify the tensors."""
        # In the order of the files.
        self._reads.sort(key=itemgetter(0, 1))
        return read_tensors(self._sizes, self._reads, self._refs, self._reader.open_data)


def _extra_structure(reader: CheckpointReader, extra: Mapping[str, Any], ignore: IgnorePatterns) -> dict[str, Any]:
    """Return the stored values of ``extra`` without ignored names, with placeholders for tensors.

    Raises:
        CheckpointMismatchError: a name that only the caller or only the checkpoint has.
    """
    stored = reader.structures[layout.EXTRA]
    if type(stored) is not dict:
        raise CorruptCheckpointError(f"{layout.index_name(0)}: extra: must be a dict, got {strict_json.describe_value(stored)}")
    keys = {name: tree_json.join_key(layout.EXTRA, str(name)) for name in (*extra, *stored)}
    requested = {name: key for name, key in keys.items() if not ignore.part(key)}
    missing = [key for name, key in requested.items() if name not in stored]
    unexpected = {name: key for name, key in requested.items() if name not in extra}
    if missing or unexpected:
        rows = [missing_row(key, "a value") for key in missing]
        rows += [unexpected_row(key, "a value") for key in unexpected.values()]
        raise mismatch_error(
            f"{_CALLER}: {reader.folder}", rows, source="checkpoint", advice=_extra_advice(missing, unexpected, stored)
        )
    return {name: stored[name] for name in extra if name in requested}


def _extra_advice(missing: Sequence[str], unexpected: Mapping[str, str], stored: Mapping[str, Any]) -> str:
    """Return the advice for a difference in ``extra``."""
    advice = []
    if missing:
        names = ", ".join(map(str, stored)) or "no extra"
        advice.append(f"The checkpoint holds {names}. Leave out other names, or pass them in ignore=.")
    if unexpected:
        objects, patterns = ", ".join(f'"{name}": ...' for name in unexpected), ", ".join(f'"{k}"' for k in unexpected.values())
        advice.append(f"Pass extra={{{objects}}} to load stored values, or ignore=[{patterns}] to skip them.")
    return " ".join(advice)


def _rng_structure(reader: CheckpointReader, states: Mapping[str, TrainState]) -> dict[str, Any] | None:
    """Return the random state of this rank with placeholders for tensors, or None if the state does not apply.

    The random state applies if the number of ranks, and the number of ranks that share a batch and a random stream, are equal.
    """
    info = get_dist_info()
    ranks_per_batch = next(iter(states.values())).spec.ranks_per_batch
    if (reader.world_size, reader.manifest.layout.ranks_per_batch) != (info.world_size, ranks_per_batch):
        return None
    values = reader.values[info.rank]
    structure = decode_structure(values.get("rng") if type(values) is dict else None, "rng")
    if type(structure) is not dict:
        raise CorruptCheckpointError(f"{layout.index_name(info.rank)}: values: no rng")
    return structure


def _check_rng(random: dict[str, Any]) -> dict[str, Any]:
    """Check that the generators will accept ``random``. They are set last, when all other parts have changed."""
    try:
        check_rng_state(random)
    except ValueError as error:
        raise CorruptCheckpointError(f"{layout.index_name(get_dist_info().rank)}: values: rng: {error}") from None
    return random
