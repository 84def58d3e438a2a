"""The option ``ignore``: patterns of names in the model, and of parts of a checkpoint, that a load leaves as they are.

Where the tensors of a checkpoint go: whether it fits a state, and which part of each tensor this rank needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.mismatch_report import MismatchRow, mismatch_error, missing_row, unequal_row, unexpected_row
from dtrain.checkpoint.optimizer_state import TensorBuilder, compare_groups, find_unknown_state, plan_optimizer
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.reshard import Region
from dtrain.checkpoint.tree_json import TensorRef
from dtrain.clock import Clock, EpochPosition
from dtrain.dtensor import shard_box
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.state import TrainState

OPTIMIZER, RNG, SLICES = "optimizer", "rng", "slices"
_PART_PATTERN = re.compile(rf"{OPTIMIZER}|{RNG}|({layout.EXTRA}|{SLICES}|{layout.STATES})/.*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnorePatterns:
    """The patterns of ``ignore``. A pattern is for parts or for names of the model: ``"**"`` fits every name and no part.

    Args:
        patterns: the patterns as they were given.
        name: returns True if a name of the model is ignored.
        part: returns True if a part is ignored: ``"optimizer"``, ``"rng"``, or a key such as ``"extra/loader"``,
            ``"slices/ema"`` and ``"states/critic"``.
    """

    patterns: tuple[str, ...]
    name: Callable[[str], bool]
    part: Callable[[str], bool]

    def check_used(self, names: Iterable[str], parts: Iterable[str], *, where: str) -> None:
        """Refuse a pattern that fits none of the names and parts that the state or the checkpoint has.

        Raises:
            ConfigError: the first such pattern.
        """
        known_names, known_parts = list(names), list(parts)
        for pattern in self.patterns:
            if not any(map(compile_patterns([pattern], caller=where), known_parts if _is_part(pattern) else known_names)):
                raise ConfigError(
                    f"{where}: nothing here or in the checkpoint fits {pattern!r}; write a name of the model, 'extra/<name>', "
                    "'slices/<transform>', 'states/<name>', 'optimizer' or 'rng' (* is text without a dot, ** any text)"
                )


def parse_ignore(patterns: Sequence[str], *, where: str) -> IgnorePatterns:
    """Sort the patterns by what they are for.

    Raises:
        ConfigError: a text instead of a list, or a pattern that is no text.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"{where} takes a list of patterns, got the text {patterns!r}; write [{patterns!r}]")
    compile_patterns(patterns, caller=where)
    return IgnorePatterns(
        patterns=tuple(patterns),
        name=compile_patterns([pattern for pattern in patterns if not _is_part(pattern)], caller=where),
        part=compile_patterns([pattern for pattern in patterns if _is_part(pattern)], caller=where),
    )


def _is_part(pattern: str) -> bool:
    return _PART_PATTERN.fullmatch(pattern) is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadOptions:
    """What the caller of a load has asked for.

    Args:
        model_only: parameters and buffers, and nothing else.
        strict: whether names that only one side has are an error.
        ignore: names of the model and parts of the checkpoint that are left out, whatever is stored under them.
        cast: whether floating-point tensors may be stored in another dtype than they have here.
    """

    model_only: bool
    strict: bool
    ignore: IgnorePatterns
    cast: bool

    def summary(self, extra: Iterable[str]) -> str:
        """What is asked for, in a line, which must be equal on all ranks."""
        only = "only=('model',), " if self.model_only else ""
        return f"{only}extra={sorted(extra)}, ignore={sorted(self.ignore.patterns)}, strict={self.strict}, cast={self.cast}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadPlan:
    """How a checkpoint fits a state.

    Args:
        regions: which part of each stored tensor this rank needs, by key.
        targets: for those that the state has already, its tensor.
        builders: for the others, what makes the state's tensor of the one that was read.
        optimizer: the optimizer's tree; None if the optimizer stays as it is, with ``model_only`` or because it is ignored.
        slices: the tree of the slices, without ignored ones; None with ``model_only``, as are clock and seed.
        skipped: names in the model that are neither written nor removed.
        missing: names that only the state has.
        unexpected: names that only the checkpoint has.
    """

    regions: Mapping[str, Region]
    targets: Mapping[str, Tensor]
    builders: Mapping[str, TensorBuilder]
    optimizer: dict[str, Any] | None
    slices: dict[str, Any] | None
    clock: Clock | None
    seed: int | None
    skipped: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def plan_load(opened: CheckpointReader, state: TrainState, asked: LoadOptions, *, where: str, first: bool = True) -> LoadPlan:
    """The targets of a checkpoint in ``state``; nothing is changed.

    Args:
        opened: the checkpoint, or the part of it that belongs to one of several states.
        state: what it is to go into.
        asked: what is wanted.
        where: begins a message.
        first: of several states, the one whose step is that of the checkpoint.

    Raises:
        CheckpointMismatchError: names, shapes, dtypes or hyperparameters that differ, the first ten in a table.
        CorruptCheckpointError: values that make no sense.
    """
    found = _StateComparison(asked, partial=opened.manifest.only == ("trainable",))
    for section, tensors in (("params", state.params), ("buffers", buffers_by_fqn(state.model, persistent_only=True))):
        found.compare_model(section, _section_refs(opened, section), tensors)
    optimizer = slices = clock = seed = None
    if not asked.model_only:
        slices = dict(_section_dict(opened, SLICES))
        found.compare_slices(_section_refs(opened, SLICES), slices, state)
        if not asked.ignore.part(OPTIMIZER):
            optimizer = strict_json.read_object(
                _section_dict(opened, OPTIMIZER), f"{layout.index_name(0)}: {OPTIMIZER}", ("state", "groups")
            )
            found.rows.extend(find_unknown_state(optimizer, state, found.skipped, strict=asked.strict))
            found.rows.extend(compare_groups(optimizer, state, found.skipped))
    if found.rows:
        raise mismatch_error(where, found.rows, source="checkpoint", advice=_advice(found.rows, asked))
    if not asked.model_only:
        clock, seed = _read_clock(opened, check_step=first), _read_seed(opened)
    if optimizer is not None:
        kept = {
            name: content for name, content in optimizer["state"].items() if name in state.params and name not in found.skipped
        }
        optimizer = {**optimizer, "state": kept}
        plan_optimizer(optimizer, state, opened.refs, found, cast=asked.cast)
    return LoadPlan(
        regions=found.regions,
        targets=found.targets,
        builders=found.builders,
        optimizer=optimizer,
        slices=slices,
        clock=clock,
        seed=seed,
        skipped=frozenset(found.skipped),
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
    )


@dataclass(slots=True, eq=False, repr=False)
class _StateComparison:
    """What was found so far; ``skipped`` are the names in the model about which the two sides do not agree."""

    options: LoadOptions
    partial: bool
    rows: list[MismatchRow] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    builders: dict[str, TensorBuilder] = field(default_factory=dict)
    _regions_by_layout: dict[Any, Region] = field(default_factory=dict)

    def region_of(self, tensor: Tensor) -> Region:
        """The part of a tensor that this rank has; computed once for all that lie alike."""
        lies = (tensor.shape, getattr(tensor, "placements", None), id(getattr(tensor, "device_mesh", None)))
        region = self._regions_by_layout.get(lies)
        if region is None:
            box = shard_box(tensor)
            region = self._regions_by_layout[lies] = Region(offset=box.offset, size=box.size)
        return region

    def compare_model(self, section: str, stored: Mapping[str, TensorRef], here: Mapping[str, Tensor]) -> None:
        """Parameters, or buffers."""
        left = {tree_json.join_key(section, name): name for name in here}
        for key, ref in stored.items():
            name = left.pop(key, None)
            if name is not None and not self.options.ignore.name(name):
                if self._matches(key, ref, here[name]):
                    self._add_target(key, here[name])
                else:
                    self.skipped.add(name)
            elif name is not None:
                self.skipped.add(name)
            else:
                stored_name = tree_json.unescape_key(key.partition("/")[2])
                self._unexpected(stored_name, key, str(ref), ignored=self.options.ignore.name(stored_name))
        for key, name in left.items():
            if self.options.ignore.name(name):
                self.skipped.add(name)
            elif not self.partial or (section == "params" and here[name].requires_grad):
                self._missing(name, key, str(tree_json.ref_of(here[name])))

    def compare_slices(self, stored: Mapping[str, TensorRef], tree: dict[str, Any], state: TrainState) -> None:
        """Transforms by name, and the tensors of those that are on both sides.

        Mutates: ``tree``, which loses the transforms that are not taken over.
        """
        for name in {**state.transform_states, **tree}:
            key = tree_json.join_key(SLICES, name)
            if self.options.ignore.part(key):
                self.skipped.add(name)
            elif name not in tree:
                self._missing(name, key, "a transform")
            elif name not in state.transform_states:
                self._unexpected(name, key, "a transform", ignored=False)
            else:
                continue
            tree.pop(name, None)
        here = tree_json.encode({name: content for name, content in state.transform_states.items() if name in tree}, "slices")[
            1
        ]
        for key in {**stored, **here}:
            if self._is_skipped(key):
                continue
            ref, tensor = stored.get(key), here.get(key)
            if ref is None:
                self.rows.append(missing_row(key, str(tree_json.ref_of(here[key]))))
            elif tensor is None:
                self.rows.append(unexpected_row(key, str(ref)))
            elif self._matches(key, ref, tensor):
                self._add_target(key, tensor)

    def _is_skipped(self, key: str) -> bool:
        """Whether a tensor of a slice belongs to something about which enough was said."""
        return bool(self.skipped) and not self.skipped.isdisjoint(map(tree_json.unescape_key, key.split("/")[1:]))

    def _matches(self, key: str, ref: TensorRef, tensor: Tensor) -> bool:
        dtype = layout.DTYPES[ref.dtype]
        if ref.shape == tuple(tensor.shape):
            if dtype == tensor.dtype:
                return True
            if self.options.cast and dtype.is_floating_point and tensor.dtype.is_floating_point:
                return True
        self.rows.append(unequal_row(key, ref, tree_json.ref_of(tensor)))
        return False

    def _add_target(self, key: str, tensor: Tensor) -> None:
        self.regions[key], self.targets[key] = self.region_of(tensor), tensor

    def _missing(self, name: str, key: str, here: str) -> None:
        self.skipped.add(name)
        if self.options.strict:
            self.rows.append(missing_row(key, here))
        else:
            self.missing.append(name)

    def _unexpected(self, name: str, key: str, stored: str, *, ignored: bool) -> None:
        self.skipped.add(name)
        if ignored:
            return
        if self.options.strict:
            self.rows.append(unexpected_row(key, stored))
        else:
            self.unexpected.append(name)


def _advice(rows: list[MismatchRow], asked: LoadOptions) -> str:
    """What to do, by what there is to be done."""
    kinds = {row.kind for row in rows}
    ways = ["build model, optimizer and transforms as in the run that wrote it, or load another checkpoint"]
    if asked.strict and kinds <= {"missing", "unexpected"}:
        ways.append("strict=False leaves what only one side has")
    if all(row.name.startswith(f"{OPTIMIZER}/") for row in rows):
        ways.append('ignore=["optimizer"] leaves the optimizer as it is here')
    elif kinds <= {"missing", "unexpected"}:
        ways.append('ignore=[...] leaves the names that it lists, as in ignore=["head.*", "slices/ema"]')
    if kinds == {"dtype"} and not asked.cast:
        ways.append("cast=True converts floating-point dtypes")
    return "; ".join(ways)


def _section_refs(opened: CheckpointReader, name: str) -> dict[str, TensorRef]:
    begin = f"{name}/"
    return {key: ref for key, ref in opened.refs.items() if key.startswith(begin)}


def _section_dict(opened: CheckpointReader, section: str) -> dict[str, Any]:
    """A section with a ``Leaf`` in place of each tensor, which must be a dict with text keys."""
    found = opened.structures[section]
    if type(found) is not dict or not all(type(key) is str for key in found):
        raise CorruptCheckpointError(
            f"{layout.index_name(0)}: {section}: needs a dict, got {strict_json.describe_value(found)}"
        )
    return found


def _read_clock(opened: CheckpointReader, *, check_step: bool) -> Clock:
    where = f"{layout.index_name(0)}: clock"
    raw = {"previous": None, "step_start": None, **_section_dict(opened, "clock")}  # they may be missing
    previous, start = raw.pop("previous"), raw.pop("step_start")
    if previous is not None and type(previous) is not dict:
        raise CorruptCheckpointError(f"{where}: previous: needs a dict, got {strict_json.describe_value(previous)}")
    counts = _read_counts(raw, where)
    if check_step and counts["step"] != opened.manifest.step:
        raise CorruptCheckpointError(f"{where}: is at step {counts['step']}, the manifest at step {opened.manifest.step}")
    return Clock(
        **counts,
        previous=None if previous is None else Clock(**_read_counts(previous, f"{where}: previous")),
        step_start=None if start is None else _read_place(start, f"{where}: step_start"),
    )


def _read_place(raw: Any, where: str) -> EpochPosition:
    numbers = [strict_json.read_int(value, where) for value in raw] if type(raw) is list else []
    if len(numbers) != 2:
        raise CorruptCheckpointError(f"{where}: needs two whole numbers, got {strict_json.describe_value(raw)}")
    return EpochPosition(*numbers)


def _read_counts(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The counts of a clock, checked."""
    strict_json.read_object(raw, where, tuple(name for name in Clock().state_dict() if name != "previous"))
    seconds = raw["seconds"]
    if type(seconds) is not float:
        raise CorruptCheckpointError(f"{where}: seconds: needs a float, got {strict_json.describe_value(seconds)}")
    return {
        **{name: strict_json.read_int(value, f"{where}: {name}") for name, value in raw.items() if name != "seconds"},
        "seconds": seconds,
    }


def _read_seed(opened: CheckpointReader) -> int:
    seed = opened.shared["seed"]
    if type(seed) is not int:
        raise CorruptCheckpointError(
            f"{layout.index_name(0)}: seed: needs a whole number, got {strict_json.describe_value(seed)}"
        )
    return seed
