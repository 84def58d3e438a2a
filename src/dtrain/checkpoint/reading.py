"""What a load needs of a checkpoint, read and verified into memory that is not yet the state's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import closed, layout, plain
from dtrain.checkpoint.differences import mismatch, missing, unexpected
from dtrain.checkpoint.fill import land
from dtrain.checkpoint.ignored import OPTIMIZER, RNG, SLICES, Ignored
from dtrain.checkpoint.opened import Opened, open_checkpoint, with_buffers_of
from dtrain.checkpoint.plan import Read, Region, StoredBox, plan_reads, whole
from dtrain.checkpoint.targets import Asked, Fit, fit
from dtrain.checkpoint.tree import completed, leaves, outlined
from dtrain.dist.init import current
from dtrain.dist.rng import check_rng_state
from dtrain.errors import CheckpointMismatchError, DamagedCheckpointError
from dtrain.names import clean_buffers
from dtrain.state import TrainState
from dtrain.storage import Place

_WHERE = "load_sharded"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Found:
    """What was read and verified: a checkpoint that is sound, as far as this rank needs it, and fits.

    Args:
        opened: the checkpoint.
        fits: by the name of each state.
        landed: the tensors, by their key in the checkpoint, on the CPU.
        extra: what was asked for of ``extra``, without ignored names.
        rng: the random state of this rank; None if the checkpoint is of another number of ranks, if it is ignored, or with
            ``only``.
        left: the states of the checkpoint that are not loaded, as ``states/<name>``.
    """

    opened: Opened
    fits: Mapping[str, Fit]
    landed: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    rng: dict[str, Any] | None
    left: tuple[str, ...]


def read_checkpoint(folder: Place, states: Mapping[str, TrainState], extra: Mapping[str, Any], asked: Asked) -> Found:
    """Everything this rank needs is there, is as it was written, fits, and is in memory. Changes nothing."""
    opened = open_checkpoint(folder)
    if asked.ignored.patterns:
        asked.ignored.check_used(*_known(opened, states, extra), where=f"{_WHERE}: ignore")
    left = _check_holds(opened, states, asked)
    work = _Work(opened)
    fits = {}
    for name, state in states.items():
        part = opened.of_state(name) if name else opened
        # Ranks that do not keep buffers of their own must have equal ones: all take those of rank 0.
        part = with_buffers_of(part, current().rank % opened.world_size if state.spec.buffers == "local" else 0)
        where = f"{_WHERE}: {folder}{f': {name}' if name else ''}"
        with torch.no_grad():  # in which a look at a shard costs next to nothing
            fits[name] = fit(part, state, asked, where=where, first=name in ("", *opened.manifest.states[:1]))
        work.add(part, fits[name].regions, prefix=prefix_of(name))
    outline = {} if asked.model_only else _outline_of_extra(opened, extra, asked.ignored)
    for tree in outline.values():
        work.add_whole(opened.boxes, tree)
    random = None if asked.model_only or asked.ignored.part(RNG) else _outline_of_rng(opened, states)
    if random is not None:
        work.add_whole({key: [box] for key, box in opened.own[current().rank].items()}, random)
    landed = work.done()
    return Found(
        opened=opened,
        fits=fits,
        landed=landed,
        extra={name: completed(tree, lambda key, ref: landed[key]) for name, tree in outline.items()},
        rng=None if random is None else _sound_rng(completed(random, lambda key, ref: landed[key])),
        left=left,
    )


def _known(opened: Opened, states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The names of models, and the parts, that the states and the checkpoint have."""
    names = {name for state in states.values() for name in (*state.params, *clean_buffers(state.model, persistent_only=True))}
    parts = {OPTIMIZER, RNG, *(plain.join(layout.EXTRA, name) for name in extra)}
    parts |= {plain.join(SLICES, name) for state in states.values() for name in state.slices}
    saved = [opened.outlines] if not opened.manifest.states else list(opened.outlines[layout.STATES].values())
    for tree in saved:
        for section in ("params", "buffers"):
            names.update(_keys(tree.get(section)))
        parts |= {plain.join(SLICES, name) for name in _keys(tree.get(SLICES))}
    parts |= {plain.join(layout.EXTRA, name) for name in _keys(opened.outlines.get(layout.EXTRA))}
    return names, parts | {plain.join(layout.STATES, name) for name in (*states, *opened.manifest.states)}


def _keys(tree: Any) -> list[str]:
    """The keys of a dict, as text; none of what is no dict, which is refused where it is used."""
    return [str(key) for key in tree] if type(tree) is dict else []


def _check_holds(opened: Opened, states: Mapping[str, TrainState], asked: Asked) -> tuple[str, ...]:
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
    keys = [] if asked.model_only else [plain.join(layout.STATES, name) for name in there if name not in states]
    left = tuple(key for key in keys if not asked.ignored.part(key))
    if left and asked.strict:
        name = plain.unescaped(left[0].partition("/")[2])
        raise CheckpointMismatchError(
            f"{where}: holds the state {name!r}, too; it holds {', '.join(there)}, got {', '.join(states)}; pass it, or "
            f'ignore=["{left[0]}"] to leave it'
        )
    return left


def prefix_of(name: str) -> str:
    """What the keys of a state's tensors begin with in the checkpoint."""
    return f"{plain.join(layout.STATES, name)}/" if name else ""


class _Work:
    """What is to be read, from several parts of a checkpoint, at once."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._reads: list[Read] = []
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._refs: dict[str, plain.TensorRef] = {}

    def add(self, part: Opened, regions: Mapping[str, Region], *, prefix: str) -> None:
        """The regions of one state's tensors."""
        reads = plan_reads(part.boxes, regions)
        self._reads += [read._replace(key=prefix + read.key) for read in reads] if prefix else reads
        self._sizes.update((prefix + key, region.size) for key, region in regions.items())
        self._refs.update((prefix + key, part.refs[key]) for key in regions)

    def add_whole(self, boxes: Mapping[str, Sequence[StoredBox]], tree: Any) -> None:
        """All of each tensor of a tree."""
        found = {leaf.key: leaf.ref for leaf in leaves(tree)}
        self._reads += plan_reads(boxes, {key: whole(ref.shape) for key, ref in found.items()})
        self._sizes.update((key, ref.shape) for key, ref in found.items())
        self._refs.update(found)

    def done(self) -> dict[str, Tensor]:
        """The tensors, read and verified."""
        self._reads.sort(key=itemgetter(0, 1))  # in the order of the files
        return land(self._sizes, self._reads, self._refs, self._opened.data)


def _outline_of_extra(opened: Opened, extra: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    """The stored values of ``extra`` without ignored names, their tensors not read yet.

    Raises:
        CheckpointMismatchError: a name that is given and not stored, or stored and not given.
    """
    outline = opened.outlines[layout.EXTRA]
    if type(outline) is not dict:
        raise DamagedCheckpointError(f"{layout.index_name(0)}: extra: needs a dict, got {closed.kind(outline)}")
    keys = {name: plain.join(layout.EXTRA, str(name)) for name in (*extra, *outline)}
    asked = {name: key for name, key in keys.items() if not ignored.part(key)}
    absent = [key for name, key in asked.items() if name not in outline]
    left = {name: key for name, key in asked.items() if name not in extra}
    if absent or left:
        rows = [*(missing(key, "given") for key in absent), *(unexpected(key, "a value") for key in left.values())]
        raise mismatch(f"{_WHERE}: {opened.folder}", rows, source="checkpoint", advice=_advice(absent, left, outline))
    return {name: outline[name] for name in extra if name in asked}


def _advice(absent: Sequence[str], left: Mapping[str, str], stored: Mapping[str, Any]) -> str:
    """The ways out of a difference in ``extra``."""
    ways = []
    if absent:
        ways.append(f"it holds {', '.join(map(str, stored)) or 'no extra'}: leave out what it lacks, or name it in ignore=")
    if left:
        them = "it" if len(left) == 1 else "them"
        given, patterns = (", ".join(f'"{name}": ...' for name in left), ", ".join(f'"{key}"' for key in left.values()))
        ways.append(f"pass extra={{{given}}} to restore {them}, or ignore=[{patterns}] to leave {them}")
    return "; ".join(ways)


def _outline_of_rng(opened: Opened, states: Mapping[str, TrainState]) -> dict[str, Any] | None:
    """The random state of this rank, its tensors not read yet; None when the checkpoint is of another number of ranks.

    Or of ranks of which others work on one batch together, and so draw alike.
    """
    info = current()
    copies = next(iter(states.values())).spec.copies
    if (opened.world_size, opened.manifest.layout.copies) != (info.world_size, copies):
        return None
    values = opened.values[info.rank]
    found = outlined(values.get("rng") if type(values) is dict else None, "rng")
    if type(found) is not dict:
        raise DamagedCheckpointError(f"{layout.index_name(info.rank)}: values: no rng")
    return found


def _sound_rng(random: dict[str, Any]) -> dict[str, Any]:
    """``random``, once it is sure that the generators will take it: they come last, when all else has changed."""
    try:
        check_rng_state(random)
    except ValueError as error:
        raise DamagedCheckpointError(f"{layout.index_name(current().rank)}: values: rng: {error}") from None
    return random
