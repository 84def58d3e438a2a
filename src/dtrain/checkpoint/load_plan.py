"""Plan a load: compare a checkpoint with a state, and determine the region of each tensor that this rank needs.

``IgnorePatterns`` implements the option ``ignore``: patterns of names in the model, and of parts of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.layout import TensorRef
from dtrain.checkpoint.mismatch_report import MismatchRow, mismatch_error, missing_row, unequal_row, unexpected_row
from dtrain.checkpoint.module_state import extra_state_modules, extra_state_names
from dtrain.checkpoint.optimizer_state import TensorBuilder, compare_groups, find_unknown_state, plan_optimizer
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.reshard import Region
from dtrain.checkpoint.targets import check_targets
from dtrain.dist.dtensor import shard_box
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.run_objects import LOADER, STATEFUL
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.state import TrainState

OPTIMIZER, RNG, TRANSFORMS = "optimizer", "rng", "transforms"
_PART_PATTERN = re.compile(
    rf"{OPTIMIZER}|{RNG}|{LOADER}|({STATEFUL}|{layout.EXTRA}|{TRANSFORMS}|{layout.STATES})/.*", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnorePatterns:
    """Patterns of ``ignore``. A pattern matches parts or names of the model: ``"**"`` matches every name and no part.

    Args:
        patterns: patterns of the caller.
        name: returns True if a name of the model is ignored.
        part: returns True if a part is ignored: ``"optimizer"``, ``"rng"``, ``"loader"``, or a key such as
            ``"stateful/stop"``, ``"transforms/ema"`` and ``"states/critic"``.
    """

    patterns: tuple[str, ...]
    name: Callable[[str], bool]
    part: Callable[[str], bool]

    def check_used(self, names: Iterable[str], parts: Iterable[str], *, caller: str) -> None:
        """Raise if a pattern matches no name and no part of the state or the checkpoint.

        Raises:
            ConfigError: the first such pattern.
        """
        known_names, known_parts = list(names), list(parts)
        for pattern in self.patterns:
            if not any(map(compile_patterns([pattern], caller=caller), known_parts if _is_part(pattern) else known_names)):
                raise ConfigError(
                    f"{caller}: a pattern must match a name in the model or the checkpoint, got {pattern!r}. Use a name of the "
                    "model, 'loader', 'stateful/<name>', 'extra/<name>', 'transforms/<transform>', 'states/<name>', "
                    "'optimizer' or 'rng' (* matches text without a dot, ** any text)."
                )


def parse_ignore(patterns: Sequence[str], *, caller: str) -> IgnorePatterns:
    """Split the patterns into patterns of names and patterns of parts.

    Raises:
        ConfigError: a string instead of a list, or a pattern that is not a string.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"{caller} must be a list of patterns, got the string {patterns!r}. Write [{patterns!r}].")
    compile_patterns(patterns, caller=caller)
    return IgnorePatterns(
        patterns=tuple(patterns),
        name=compile_patterns([pattern for pattern in patterns if not _is_part(pattern)], caller=caller),
        part=compile_patterns([pattern for pattern in patterns if _is_part(pattern)], caller=caller),
    )


def _is_part(pattern: str) -> bool:
    return _PART_PATTERN.fullmatch(pattern) is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadOptions:
    """Options of a load.

    Args:
        model_only: if True, only parameters and buffers are loaded.
        ignore: names of the model and parts of the checkpoint that are not loaded.
        allow_cast: if True, floating-point tensors may be stored in another dtype than in the model.
    """

    model_only: bool
    ignore: IgnorePatterns
    allow_cast: bool

    def summary(self, entries: Iterable[str]) -> str:
        """Format the options, which must be equal on all ranks, in one line."""
        what = "scope='weights', " if self.model_only else ""
        return f"{what}objects={sorted(entries)}, ignore={sorted(self.ignore.patterns)}, cast={self.allow_cast}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LoadPlan:
    """Plan of a load.

    Args:
        regions: region of each stored tensor that this rank needs, by key.
        targets: tensors that the state has already, by key.
        builders: functions that build all other tensors of the state from the tensor that was read, by key.
        adopted: keys of tensors that the state lacks and keeps as they are read.
        optimizer: the optimizer's tree; None if the optimizer does not change (``model_only`` or ignored).
        transforms: states of the transforms without ignored ones; None with ``model_only``, like clock and seed.
        modules: names of the extra states of modules to load.
        skipped: names in the model that do not change.
    """

    regions: Mapping[str, Region]
    targets: Mapping[str, Tensor]
    builders: Mapping[str, TensorBuilder]
    adopted: Set[str]
    optimizer: dict[str, Any] | None
    transforms: dict[str, Any] | None
    modules: tuple[str, ...]
    clock: Clock | None
    seed: int | None
    skipped: frozenset[str]


def plan_load(
    reader: CheckpointReader, state: TrainState, options: LoadOptions, *, caller: str, first: bool = True
) -> LoadPlan:
    """Plan the load of a checkpoint into ``state``, which does not change.

    Args:
        reader: checkpoint, or the part of one of several states.
        state: the state to load into.
        options: options of the load.
        caller: prefix of messages.
        first: if True, the step of the state must be the step of the checkpoint.

    Raises:
        CheckpointMismatchError: names, shapes, dtypes or hyperparameters that differ, the first ten in a table.
        CorruptCheckpointError: invalid values.
    """
    comparison = _StateComparison(options, partial=reader.manifest.scope == "trainable")
    for section, tensors in (("params", state.params), ("buffers", buffers_by_fqn(state.model, persistent_only=True))):
        comparison.compare_model(section, _section_refs(reader, section), tensors)
    modules = comparison.compare_modules(extra_state_names(reader.structures), extra_state_modules(state.model))
    optimizer = transforms = clock = seed = None
    if not options.model_only:
        transforms = dict(_section_dict(reader, TRANSFORMS))
        comparison.compare_transforms(_section_refs(reader, TRANSFORMS), transforms, state)
        if not options.ignore.part(OPTIMIZER):
            optimizer = layout.read_object(
                _section_dict(reader, OPTIMIZER), f"{layout.INDEX}: {OPTIMIZER}", ("state", "global", "groups")
            )
            comparison.rows.extend(find_unknown_state(optimizer, state, comparison.skipped))
            comparison.rows.extend(compare_groups(optimizer, state, comparison.skipped))
    check_targets(comparison.targets, caller)
    if comparison.rows:
        raise mismatch_error(caller, comparison.rows, source="checkpoint", advice=_advice(comparison.rows, options))
    if not options.model_only:
        clock, seed = _read_clock(reader, check_step=first), _read_seed(reader)
    if optimizer is not None:
        loaded = {
            name: content
            for name, content in optimizer["state"].items()
            if name in state.params and name not in comparison.skipped
        }
        optimizer = {**optimizer, "state": loaded}
        plan_optimizer(optimizer, state, reader.refs, comparison, allow_cast=options.allow_cast)
    return LoadPlan(
        regions=comparison.regions,
        targets=comparison.targets,
        builders=comparison.builders,
        adopted=comparison.adopted,
        optimizer=optimizer,
        transforms=transforms,
        modules=tuple(modules),
        clock=clock,
        seed=seed,
        skipped=frozenset(comparison.skipped),
    )


@dataclass(slots=True, eq=False, repr=False)
class _StateComparison:
    """Comparison of a checkpoint with a state; ``skipped`` are the names in the model that differ or are ignored."""

    options: LoadOptions
    partial: bool
    rows: list[MismatchRow] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    regions: dict[str, Region] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    builders: dict[str, TensorBuilder] = field(default_factory=dict)
    adopted: set[str] = field(default_factory=set)
    _regions_by_layout: dict[Any, Region] = field(default_factory=dict)

    def region_of(self, tensor: Tensor) -> Region:
        """Return the region of a tensor that this rank has. Tensors of equal layout share one computation."""
        tensor_layout = (tensor.shape, getattr(tensor, "placements", None), id(getattr(tensor, "device_mesh", None)))
        region = self._regions_by_layout.get(tensor_layout)
        if region is None:
            box = shard_box(tensor)
            region = self._regions_by_layout[tensor_layout] = Region(offset=box.offset, size=box.size)
        return region

    def compare_model(self, section: str, stored: Mapping[str, TensorRef], here: Mapping[str, Tensor]) -> None:
        """Compare parameters or buffers."""
        unmatched = {tree_json.join_key(section, name): name for name in here}
        for key, ref in stored.items():
            name = unmatched.pop(key, None)
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
        for key, name in unmatched.items():
            if self.options.ignore.name(name):
                self.skipped.add(name)
            elif not self.partial or (section == "params" and here[name].requires_grad):
                self._missing(name, key, str(tree_json.ref_of(here[name])))

    def compare_modules(self, stored: Sequence[str], here: Collection[str]) -> list[str]:
        """Compare the extra states of modules by name, and return the names to load."""
        ignored = self.options.ignore.name
        for name in dict.fromkeys([*here, *stored]):
            key = tree_json.join_key("modules", name)
            if name not in here:
                self._unexpected(name, key, "an extra state", ignored=ignored(name))
            elif name not in stored and not (self.partial or ignored(name)):
                self._missing(name, key, "an extra state")
        return [name for name in stored if name in here and not ignored(name)]

    def compare_transforms(self, stored: Mapping[str, TensorRef], tree: dict[str, Any], state: TrainState) -> None:
        """Compare the transforms by name, and the tensors of transforms that are on both sides.

        Mutates: ``tree``: transforms that are not loaded are removed.
        """
        for name in {**state.transform_states, **tree}:
            key = tree_json.join_key(TRANSFORMS, name)
            if self.options.ignore.part(key):
                self.skipped.add(name)
            elif name not in tree:
                self._missing(name, key, "a transform")
            elif name not in state.transform_states:
                self._unexpected(name, key, "a transform", ignored=False)
            else:
                continue
            tree.pop(name, None)
        content = {name: content for name, content in state.transform_states.items() if name in tree}
        here = tree_json.encode(content, TRANSFORMS)[1]
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
        """Return True if a tensor of a transform belongs to a skipped name, which has been reported."""
        return bool(self.skipped) and not self.skipped.isdisjoint(map(tree_json.unescape_key, key.split("/")[1:]))

    def _matches(self, key: str, ref: TensorRef, tensor: Tensor) -> bool:
        dtype = layout.DTYPES[ref.dtype]
        if ref.shape == tuple(tensor.shape):
            if dtype == tensor.dtype:
                return True
            if self.options.allow_cast and dtype.is_floating_point and tensor.dtype.is_floating_point:
                return True
        self.rows.append(unequal_row(key, ref, tree_json.ref_of(tensor)))
        return False

    def _add_target(self, key: str, tensor: Tensor) -> None:
        self.regions[key], self.targets[key] = self.region_of(tensor), tensor

    def _missing(self, name: str, key: str, here: str) -> None:
        self.skipped.add(name)
        self.rows.append(missing_row(key, here))

    def _unexpected(self, name: str, key: str, stored: str, *, ignored: bool) -> None:
        self.skipped.add(name)
        if not ignored:
            self.rows.append(unexpected_row(key, stored))


def _advice(rows: list[MismatchRow], options: LoadOptions) -> str:
    """Return the advice for these kinds of differences."""
    kinds = {row.kind for row in rows}
    advice = ["Build model, optimizer and transforms as in the run that wrote the checkpoint, or load another checkpoint."]
    if all(row.name.startswith(f"{OPTIMIZER}/") for row in rows):
        advice.append('Or pass ignore=["optimizer"] to keep the current optimizer.')
    elif kinds <= {"missing", "unexpected"}:
        patterns = ", ".join(f'"{pattern}"' for pattern in _patterns_for(rows))
        advice.append(f"Or skip names that only one side has: ignore=[{patterns}].")
    if kinds == {"dtype"} and not options.allow_cast:
        advice.append("Or pass allow_cast=True to convert floating-point dtypes.")
    return " ".join(advice)


def _patterns_for(rows: list[MismatchRow]) -> list[str]:
    """Return patterns of ``ignore`` for rows that only one side has: transforms, and names or modules of the model."""
    parts = {"/".join(row.name.split("/", 2)[:2]) for row in rows if row.name.startswith(f"{TRANSFORMS}/")}
    keys = [row.name.split("/") for row in rows if row.name.startswith(("params/", "buffers/", "modules/"))]
    names = dict.fromkeys(tree_json.unescape_key(key[1]) for key in keys)
    if len(names) > 4:
        names = dict.fromkeys(f"{name.partition('.')[0]}.**" if "." in name else name for name in names)
    return [*names, *sorted(parts)]


def _section_refs(reader: CheckpointReader, name: str) -> dict[str, TensorRef]:
    prefix = f"{name}/"
    return {key: ref for key, ref in reader.refs.items() if key.startswith(prefix)}


def _section_dict(reader: CheckpointReader, section: str) -> dict[str, Any]:
    """Return a section, a dict with string keys, with a ``TensorPlaceholder`` in place of each tensor."""
    values = reader.structures[section]
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise CorruptCheckpointError(f"{layout.INDEX}: {section}: must be a dict, got {layout.describe_value(values)}")
    return values


def _read_clock(reader: CheckpointReader, *, check_step: bool) -> Clock:
    location = f"{layout.INDEX}: clock"
    # Both fields are optional in the file.
    raw = {"previous": None, "step_start": None, **_section_dict(reader, "clock")}
    previous, start = raw.pop("previous"), raw.pop("step_start")
    if previous is not None and type(previous) is not dict:
        raise CorruptCheckpointError(f"{location}: previous: must be a dict, got {layout.describe_value(previous)}")
    counts = _read_counts(raw, location)
    if check_step and counts["step"] != reader.manifest.step:
        raise CorruptCheckpointError(
            f"{location}: step must be {reader.manifest.step} as in the manifest, got {counts['step']}"
        )
    return Clock(
        **counts,
        _previous=None if previous is None else Clock(**_read_counts(previous, f"{location}: previous")),
        _step_start=None if start is None else _read_place(start, f"{location}: step_start"),
    )


def _read_place(raw: Any, location: str) -> EpochPosition:
    numbers = [layout.read_int(value, location) for value in raw] if type(raw) is list else []
    if len(numbers) != 2:
        raise CorruptCheckpointError(f"{location}: must be two integers, got {layout.describe_value(raw)}")
    return EpochPosition(*numbers)


def _read_counts(raw: dict[str, Any], location: str) -> dict[str, Any]:
    """Read and check the counts of a clock."""
    layout.read_object(raw, location, tuple(name for name in Clock().state_dict() if name != "previous"))
    seconds = raw["seconds"]
    if type(seconds) is not float:
        raise CorruptCheckpointError(f"{location}: seconds: must be a float, got {layout.describe_value(seconds)}")
    return {
        **{name: layout.read_int(value, f"{location}: {name}") for name, value in raw.items() if name != "seconds"},
        "seconds": seconds,
    }


def _read_seed(reader: CheckpointReader) -> int:
    seed = reader.shared["seed"]
    if type(seed) is not int:
        raise CorruptCheckpointError(f"{layout.INDEX}: seed: must be an integer, got {layout.describe_value(seed)}")
    return seed
