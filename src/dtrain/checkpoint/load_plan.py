"""Plan a load: compare a checkpoint with a state, and determine the region of each tensor that this rank needs.

``IgnorePatterns`` implements the option ``ignore``: patterns of names in the model, and of parts of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import asdict
from torch import Tensor

from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.layout import DTYPES, Count, TensorRef
from dtrain.checkpoint.mismatch import MismatchRow, check_targets, compare_tensor, mismatch_error, missing_row, unexpected_row
from dtrain.checkpoint.model_state import (
    compare_optimizer,
    extra_state_modules,
    extra_state_names,
    read_dict,
)
from dtrain.checkpoint.plan import Region, full_region, local_region
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.tree_json import TensorPlaceholder, list_placeholders
from dtrain.dist.dtensor import (
    from_local_like,
    is_dtensor,
    is_placed_like,
    replicate_like,
    row_group,
    to_local,
)
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.named_optimizers import list_members
from dtrain.run_objects import LOADER, STATEFUL
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.state import TrainState

OPTIMIZER, RNG, TRANSFORMS = "optimizer", "rng", "transforms"
_PART_PATTERN = re.compile(
    rf"{OPTIMIZER}|{RNG}|{LOADER}|({STATEFUL}|{layout.EXTRA}|{TRANSFORMS}|{layout.STATES})/.*", re.DOTALL
)
TensorBuilder = Callable[[Tensor], Tensor]
"""Function that builds a tensor of the state from a tensor on the CPU, which the state may keep."""


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
        candidates = {True: list(parts), False: list(names)}
        for pattern in self.patterns:
            if not any(map(compile_patterns([pattern], caller=caller), candidates[_is_part(pattern)])):
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


@dataclass(slots=True, eq=False, repr=False)
class LoadPlan:
    """Plan of a load.

    Args:
        regions: region of each stored tensor that this rank needs, by key.
        targets: tensors that the state has already, by key.
        builders: functions that build all other tensors of the state from the tensor that was read, by key.
        adopted: keys of tensors that the state lacks and keeps as they are read, so that reading them takes no more memory.
        optimizer: the optimizer's tree; None if the optimizer does not change (``model_only`` or ignored).
        transforms: states of the transforms without ignored ones; None with ``model_only``, like clock and seed.
        modules: names of the extra states of modules to load.
        skipped: names in the model that do not change.
    """

    regions: dict[str, Region] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    builders: dict[str, TensorBuilder] = field(default_factory=dict)
    adopted: set[str] = field(default_factory=set)
    optimizer: dict[str, Any] | None = None
    transforms: dict[str, Any] | None = None
    modules: list[str] = field(default_factory=list)
    clock: Clock | None = None
    seed: int | None = None
    skipped: set[str] = field(default_factory=set)


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
    plan = LoadPlan()
    comparison = _StateComparison(plan, options, partial=reader.manifest.scope == "trainable")
    for section, tensors in (("params", state.params), ("buffers", buffers_by_fqn(state.model, persistent_only=True))):
        comparison.compare_model(section, reader.section_refs(section), tensors)
    comparison.compare_modules(extra_state_names(reader.structures), extra_state_modules(state.model))
    if not options.model_only:
        plan.transforms = dict(reader.section_dict(TRANSFORMS))
        updated = read_dict(reader.section_dict(OPTIMIZER).get("state"), f"{OPTIMIZER}/state")
        comparison.compare_transforms(reader.section_refs(TRANSFORMS), plan.transforms, state, updated)
        if not options.ignore.part(OPTIMIZER):
            location = f"{layout.INDEX}: {OPTIMIZER}"
            plan.optimizer = layout.read_object(reader.section_dict(OPTIMIZER), location, ("state", "global", "groups"))
            comparison.rows.extend(compare_optimizer(plan.optimizer, state, plan.skipped))
    check_targets(plan.targets, caller)
    if comparison.rows:
        raise mismatch_error(caller, comparison.rows, source="checkpoint", advice=_advice(comparison.rows, options))
    if not options.model_only:
        plan.clock, plan.seed = _read_clock(reader, check_step=first), reader.shared["seed"]
        if type(plan.seed) is not int:
            raise CorruptCheckpointError(f"{layout.INDEX}: seed: must be an integer, got {layout.describe_value(plan.seed)}")
    if plan.optimizer is not None:
        loaded = {
            name: content
            for name, content in plan.optimizer["state"].items()
            if name in state.params and name not in plan.skipped
        }
        plan.optimizer = {**plan.optimizer, "state": loaded}
        _plan_optimizer(plan.optimizer, state, reader.refs, plan, allow_cast=options.allow_cast)
    return plan


@dataclass(slots=True, eq=False, repr=False)
class _StateComparison:
    """Comparison of a checkpoint with a state. Adds the tensors of both to the plan, and a row for each difference.

    The plan skips names that differ or are ignored.
    """

    plan: LoadPlan
    options: LoadOptions
    partial: bool
    rows: list[MismatchRow] = field(default_factory=list)
    _regions_by_layout: dict[Any, Region] = field(default_factory=dict)

    def compare_model(self, section: str, stored: Mapping[str, TensorRef], here: Mapping[str, Tensor]) -> None:
        """Compare parameters or buffers."""
        unmatched = {tree_json.join_key(section, name): name for name in here}
        for key, ref in stored.items():
            name = unmatched.pop(key, None)
            if name is None:
                stored_name = tree_json.unescape_key(key.partition("/")[2])
                self._unexpected(stored_name, key, str(ref), ignored=self.options.ignore.name(stored_name))
            elif self.options.ignore.name(name) or not self._add_target(key, ref, here[name]):
                self.plan.skipped.add(name)
        for key, name in unmatched.items():
            if self.options.ignore.name(name):
                self.plan.skipped.add(name)
            elif not self.partial or (section == "params" and here[name].requires_grad):
                self._missing(name, key, str(tree_json.ref_of(here[name])))

    def compare_modules(self, stored: Sequence[str], here: Collection[str]) -> None:
        """Compare the extra states of modules by name."""
        ignored = self.options.ignore.name
        for name in dict.fromkeys([*here, *stored]):
            key = tree_json.join_key("modules", name)
            if name not in here:
                self._unexpected(name, key, "an extra state", ignored=ignored(name))
            elif name not in stored and not (self.partial or ignored(name)):
                self._missing(name, key, "an extra state")
        self.plan.modules += [name for name in stored if name in here and not ignored(name)]

    def compare_transforms(
        self, stored: Mapping[str, TensorRef], tree: dict[str, Any], state: TrainState, updated: Collection[str]
    ) -> None:
        """Compare the transforms by name, and the tensors of transforms that are on both sides.

        Averages hold trainable parameters. A stored average of a parameter that is frozen here is loaded, because the parameter
        may have been trained before. A parameter that was frozen at the save has no average, and gets one in the next step.

        Args:
            stored: stored tensors of transforms, by key.
            tree: stored states of transforms.
            state: the state to load into.
            updated: names of the parameters for which the optimizer had state at the save.

        Mutates: ``tree``: transforms that are not loaded are removed.
        """
        for name in {**state.transform_states, **tree}:
            key = tree_json.join_key(TRANSFORMS, name)
            if self.options.ignore.part(key):
                self.plan.skipped.add(name)
            elif name not in tree:
                self._missing(name, key, "a transform")
            elif name not in state.transform_states:
                self._unexpected(name, key, "a transform", ignored=False)
            else:
                continue
            tree.pop(name, None)
        content = {name: content for name, content in state.transform_states.items() if name in tree}
        here = tree_json.encode(content, TRANSFORMS)[1]
        skipped = self.plan.skipped
        for key in {**stored, **here}:
            # A tensor of a skipped name has been reported with the name.
            if skipped and not skipped.isdisjoint(map(tree_json.unescape_key, key.split("/")[1:])):
                continue
            ref, tensor = stored.get(key), here.get(key)
            if ref is not None and tensor is not None:
                self._add_target(key, ref, tensor)
                continue
            averaged = _averaged_param(key, content) or ""
            param = state.params.get(averaged)
            if ref is None and not (param is not None and averaged not in updated):
                self.rows.append(missing_row(key, str(tree_json.ref_of(here[key]))))
            elif ref is not None and param is not None and not param.requires_grad and ref.shape == param.shape:
                self.plan.regions[key], self.plan.builders[key] = local_region(param), partial(_place_like, param)
            elif ref is not None:
                self.rows.append(unexpected_row(key, str(ref)))

    def _add_target(self, key: str, ref: TensorRef, tensor: Tensor) -> bool:
        """Add a tensor of the state to the plan if shape and dtype fit. Return False if they differ."""
        row = compare_tensor(key, ref, tensor, allow_cast=self.options.allow_cast)
        if row is not None:
            self.rows.append(row)
            return False
        # Tensors of equal layout share one computation.
        tensor_layout = (tensor.shape, getattr(tensor, "placements", None), id(getattr(tensor, "device_mesh", None)))
        region = self._regions_by_layout.get(tensor_layout)
        if region is None:
            region = self._regions_by_layout[tensor_layout] = local_region(tensor)
        self.plan.regions[key], self.plan.targets[key] = region, tensor
        return True

    def _missing(self, name: str, key: str, here: str) -> None:
        self.plan.skipped.add(name)
        self.rows.append(missing_row(key, here))

    def _unexpected(self, name: str, key: str, stored: str, *, ignored: bool) -> None:
        self.plan.skipped.add(name)
        if not ignored:
            self.rows.append(unexpected_row(key, stored))


def _averaged_param(key: str, transform_states: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter whose average is the tensor ``key``; None if the tensor is no average."""
    _, transform, *path = map(tree_json.unescape_key, key.split("/"))
    is_average = len(path) == 2 and path[0] == "params" and "averaged" in transform_states[transform]
    return path[1] if is_average else None


def _place_like(param: Tensor, shard: Tensor) -> Tensor:
    return from_local_like(param, shard.to(to_local(param).device))


def _advice(rows: list[MismatchRow], options: LoadOptions) -> str:
    """Return the advice for these kinds of differences."""
    kinds = {row.kind for row in rows}
    advice = ["Build model, optimizer and transforms as in the run that wrote the checkpoint, or load another checkpoint."]
    if all(row.name.startswith(f"{OPTIMIZER}/") for row in rows):
        advice.append('Or pass ignore=["optimizer"] to keep the current optimizer.')
    elif kinds <= {"missing", "unexpected"}:
        transforms = {"/".join(row.name.split("/", 2)[:2]) for row in rows if row.name.startswith(f"{TRANSFORMS}/")}
        keys = [row.name.split("/") for row in rows if row.name.startswith(("params/", "buffers/", "modules/"))]
        names = dict.fromkeys(tree_json.unescape_key(key[1]) for key in keys)
        if len(names) > 4:
            names = dict.fromkeys(f"{name.partition('.')[0]}.**" if "." in name else name for name in names)
        patterns = ", ".join(f'"{pattern}"' for pattern in [*names, *sorted(transforms)])
        advice.append(f"Or skip names that only one side has: ignore=[{patterns}].")
    if kinds == {"dtype"} and not options.allow_cast:
        advice.append("Or pass allow_cast=True to convert floating-point dtypes.")
    return " ".join(advice)


class _StoredCounts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of a clock in a checkpoint."""

    step: Count
    epoch: Count
    step_in_epoch: Count
    samples: Count
    tokens: Count
    seconds: float


@layout.compile_schema
class _StoredClock(_StoredCounts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clock in a checkpoint. Both further fields are optional."""

    previous: _StoredCounts | None = None
    step_start: tuple[Count, Count] | None = None


def _read_clock(reader: CheckpointReader, *, check_step: bool) -> Clock:
    location = f"{layout.INDEX}: clock"
    stored = layout.convert(reader.section_dict("clock"), _StoredClock, location)
    if check_step and stored.step != reader.manifest.step:
        raise CorruptCheckpointError(f"{location}: step must be {reader.manifest.step} as in the manifest, got {stored.step}")
    counts = asdict(stored)
    del counts["previous"], counts["step_start"]
    return Clock(
        **counts,
        _previous=None if stored.previous is None else Clock(**asdict(stored.previous)),
        _step_start=None if stored.step_start is None else EpochPosition(*stored.step_start),
    )


def _plan_optimizer(
    optimizer: dict[str, Any], state: TrainState, refs: Mapping[str, TensorRef], plan: LoadPlan, *, allow_cast: bool
) -> None:
    """Add the region and the builder of each tensor of the optimizer to ``plan``, which has the regions of the parameters.

    A current tensor of the optimizer that needs new values only becomes a target instead.

    Mutates: ``plan``.
    """
    counts_on_device = (group for group in state.optimizer.param_groups if group.get("capturable") or group.get("fused"))
    on_device = {id(param) for group in counts_on_device for param in group["params"]}
    row_sharding = [member for member in list_members(state.optimizer) if getattr(member, "shards_state_by_rows", False)]
    by_rows = {id(param) for member in row_sharding for group in member.param_groups for param in group["params"]}
    shards = {name: to_local(param) for name, param in state.params.items()}
    used = {shard.untyped_storage().data_ptr() for shard in shards.values()}
    for name, content in optimizer["state"].items():
        param, key = state.params[name], tree_json.join_key("params", name)
        placement = _ParamPlacement(
            param=param,
            local=shards[name],
            region=plan.regions[key],
            saved_ref=refs[key],
            step_device=param.device if id(param) in on_device else torch.device("cpu"),
            allow_cast=allow_cast,
            by_rows=id(param) in by_rows and row_group(param) is not None,
        )
        current = state.optimizer.state.get(param, {})
        for leaf in list_placeholders(content):
            existing = placement.find_reusable(leaf, current, used) if current else None
            if existing is None:
                plan.regions[leaf.key], plan.builders[leaf.key] = placement.plan(leaf)
                if not current and placement.adopts(leaf):
                    plan.adopted.add(leaf.key)
            else:
                plan.regions[leaf.key], plan.targets[leaf.key] = placement.region, existing
    for group, content in zip(state.optimizer.param_groups, optimizer["groups"], strict=True):
        for name, value in content.items():
            _plan_whole(value, group.get(name), group["params"], plan)
    for name, value in optimizer["global"].items():
        _plan_whole(value, state.optimizer.state.get(name), list(state.params.values()), plan)


def _plan_whole(stored: Any, current: Any, params: Sequence[Tensor], plan: LoadPlan) -> None:
    """Add tensors that belong to no parameter. A tensor that was a DTensor is replicated on the mesh of the parameters.

    A plain tensor is placed on the device of the current tensor; without one, a scalar on the CPU, others with the parameters.

    Mutates: ``plan``.
    """
    sharded = next((param for param in params if is_dtensor(param)), None)
    for leaf in list_placeholders(stored):
        plan.regions[leaf.key] = full_region(leaf.ref.shape)
        on_cpu = not leaf.ref.shape or not params
        device = current.device if isinstance(current, Tensor) else torch.device("cpu") if on_cpu else params[0].device
        if leaf.ref.distributed and sharded is not None:
            plan.builders[leaf.key] = partial(_replicate, sharded)
        else:
            plan.builders[leaf.key] = partial(_move_to, device)


def _replicate(like: Tensor, whole: Tensor) -> Tensor:
    return replicate_like(like, whole.to(like.device))


class _ParamPlacement(NamedTuple):
    """Placement of the optimizer's tensors of a parameter, as the optimizer itself would place them.

    A tensor of the parameter's shape has the parameter's layout. ``step`` is an exception even for a scalar parameter, and is
    on the CPU unless the optimizer counts on the device: both are conventions of torch. A tensor of another shape (a factored
    second moment, the codes of an 8-bit optimizer) is replicated on every rank, as a DTensor if the parameter is a DTensor. A
    plain tensor of a parameter that was sharded at the save stays plain, of any shape: it was equal on all ranks. An optimizer
    with ``shards_state_by_rows`` gets the rows of tensors of any shape.

    A tuple, because every parameter has one.
    """

    param: Tensor
    local: Tensor
    region: Region
    saved_ref: TensorRef
    step_device: torch.device
    allow_cast: bool
    by_rows: bool

    def plan(self, leaf: TensorPlaceholder) -> tuple[Region, TensorBuilder]:
        """Return the region of a stored tensor that this rank needs, and its builder."""
        ref = leaf.ref
        if self._is_like_param(leaf):
            if self.adopts(leaf):
                return self.region, partial(from_local_like, self.param)
            return self.region, partial(self._copy, self._built_dtype(ref))
        if self.by_rows and ref.shape:
            return local_region(self.param, ref.shape), partial(self._by_rows, ref.shape)
        if _is_step(leaf):
            return full_region(ref.shape), partial(_move_to, self.step_device)
        if ref.distributed or (ref.shape and not self.saved_ref.distributed):
            return full_region(ref.shape), partial(_replicate, self.param)
        return full_region(ref.shape), partial(_move_to, self.param.device)

    def adopts(self, leaf: TensorPlaceholder) -> bool:
        """Return True if the state keeps the tensor that is read, without a copy."""
        if self._is_like_param(leaf):
            is_cast = self.allow_cast and leaf.ref.dtype == self.saved_ref.dtype
            return self.local.is_cpu and self.local.is_contiguous() and not is_cast
        return _is_step(leaf) and self.step_device.type == "cpu"

    def find_reusable(self, leaf: TensorPlaceholder, current: Mapping[str, Any], used: set[int]) -> Tensor | None:
        """Return the optimizer's current tensor if it equals the tensor to build in all but the values.

        Mutates: ``used``, the storages in use. A tensor that shares a storage is not reused.
        """
        if not self._is_like_param(leaf):
            return None
        tensor = current.get(tree_json.unescape_key(leaf.key.rpartition("/")[2]))
        if not isinstance(tensor, Tensor) or tensor.dtype != self._built_dtype(leaf.ref):
            return None
        local = to_local(tensor)
        if type(local) is not Tensor or tensor.shape != self.param.shape or not is_placed_like(tensor, self.param):
            return None
        storage = local.untyped_storage().data_ptr()
        if local.device != self.local.device or local.stride() != self.local.stride() or storage in used:
            return None
        used.add(storage)
        return tensor

    def _is_like_param(self, leaf: TensorPlaceholder) -> bool:
        stays_plain = not self.by_rows and self.saved_ref.distributed and not leaf.ref.distributed and is_dtensor(self.param)
        return leaf.ref.shape == self.param.shape and not _is_step(leaf) and not stays_plain

    def _built_dtype(self, ref: TensorRef) -> torch.dtype:
        follows = self.allow_cast and ref.dtype == self.saved_ref.dtype and DTYPES[ref.dtype].is_floating_point
        return self.param.dtype if follows else DTYPES[ref.dtype]

    def _copy(self, dtype: torch.dtype, shard: Tensor) -> Tensor:
        # Like ``zeros_like`` of the parameter, the copy has its strides, which fused kernels need.
        copy = torch.empty_like(self.local, dtype=dtype, requires_grad=False).copy_(shard)
        return from_local_like(self.param, copy)

    def _by_rows(self, shape: tuple[int, ...], rows: Tensor) -> Tensor:
        return from_local_like(self.param, rows.to(self.param.device), shape)


def _is_step(leaf: TensorPlaceholder) -> bool:
    return leaf.key.endswith("/step") and not leaf.ref.distributed


def _move_to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)
