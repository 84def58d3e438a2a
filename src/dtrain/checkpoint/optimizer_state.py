"""Compare a stored optimizer with the current optimizer, and plan the load of its state and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dtrain.arguments import format_count
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.layout import DTYPES, TensorRef
from dtrain.checkpoint.mismatch_report import MismatchRow, other_row, unexpected_row
from dtrain.checkpoint.reshard import Region, full_region
from dtrain.checkpoint.state_dict import ADDED_OPTIONS, optimizer_groups
from dtrain.checkpoint.tree_json import TensorPlaceholder, list_placeholders
from dtrain.dist.dtensor import (
    from_local_like,
    is_dtensor,
    is_placed_like,
    replicate_like,
    row_group,
    shard_box,
    to_local,
)
from dtrain.errors import CorruptCheckpointError
from dtrain.state import TrainState

TensorBuilder = Callable[[Tensor], Tensor]
"""Function that builds a tensor of the state from a tensor on the CPU, which the state may keep."""

# Hyperparameters that a schedule adds to a group on its first use, after the optimizer of a resumed run was built.
_ADDED_BY_SCHEDULES = frozenset({"initial_lr"})


class PlanBuilder(Protocol):
    """Protocol of an object that collects the regions, targets and builders of a load.

    Args:
        regions: region of each tensor to read, by key.
        targets: tensors of the state that are filled, by key.
        builders: functions that build all other tensors, by key.
        adopted: keys of tensors that the state lacks and keeps as they are read, so that reading them takes no more memory.
    """

    regions: dict[str, Region]
    targets: dict[str, Tensor]
    builders: dict[str, TensorBuilder]
    adopted: set[str]


def find_unknown_state(optimizer: dict[str, Any], state: TrainState, skipped: Collection[str]) -> Iterator[MismatchRow]:
    """Return a row for each stored state of an unknown parameter, except for ``skipped`` names."""
    for name, content in _dict(optimizer["state"], "optimizer/state").items():
        _dict(content, f"optimizer/state/{name}")
        if name not in state.params and name not in skipped:
            yield unexpected_row(tree_json.join_key("optimizer/state", name), "state")


def compare_groups(optimizer: dict[str, Any], state: TrainState, skipped: Collection[str]) -> Iterator[MismatchRow]:
    """Return rows for groups with other parameters, except for ``skipped``, and for unknown stored hyperparameters."""
    stored_groups, groups = optimizer["groups"], optimizer_groups(state)
    if type(stored_groups) is not list or len(stored_groups) != len(groups):
        count = len(stored_groups) if type(stored_groups) is list else 0
        yield other_row("optimizer/groups", format_count(count, "group"), format_count(len(groups), "group"))
        return
    for at, (saved, group) in enumerate(zip(stored_groups, groups, strict=True)):
        location = f"optimizer/groups/{at}"
        _dict(saved, location)
        stored, here = _param_names(saved.get("params"), skipped), _param_names(group["params"], skipped)
        if stored != here:
            first = next((a or b for a, b in _pairs(stored, here) if a != b), "?")
            yield other_row(f"{location}/params", f"{len(stored)} (first difference: {first})", f"{len(here)}")
        added = saved.get(ADDED_OPTIONS)
        known = {*group, *_ADDED_BY_SCHEDULES, ADDED_OPTIONS, *(added if type(added) is list else ())}
        for key in saved:
            if key not in known:
                yield unexpected_row(f"{location}/{key}", "a hyperparameter")


def _param_names(names: Any, skipped: Collection[str]) -> list[Any]:
    return [name for name in names if type(name) is not str or name not in skipped] if type(names) is list else []


def _pairs(a: list[Any], b: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)


def _dict(value: Any, location: str) -> dict[str, Any]:
    """Return ``value`` as a dict.

    Raises:
        CorruptCheckpointError: a value of another type.
    """
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{layout.INDEX}: {location}: must be a dict, got {layout.describe_value(value)}")
    return value


def plan_optimizer(
    optimizer: dict[str, Any], state: TrainState, refs: Mapping[str, TensorRef], plan: PlanBuilder, *, allow_cast: bool
) -> None:
    """Add the region and the builder of each tensor of the optimizer to ``plan``, which has the regions of the parameters.

    A current tensor of the optimizer that needs new values only becomes a target instead.

    Mutates: ``plan``.
    """
    on_device = _params_with_device_step(state)
    shards = {name: to_local(param) for name, param in state.params.items()}
    used = {shard.untyped_storage().data_ptr() for shard in shards.values()}
    for name, content in optimizer["state"].items():
        param = state.params[name]
        local = shards[name]
        key = tree_json.join_key("params", name)
        placement = _ParamPlacement(
            param=param,
            local=local,
            shape=tuple(param.shape),
            region=plan.regions[key],
            saved_ref=refs[key],
            adopts_read=local.is_cpu and local.is_contiguous(),
            step_device=param.device if id(param) in on_device else torch.device("cpu"),
            allow_cast=allow_cast,
            by_rows=getattr(state.optimizer, "shards_state_by_rows", False) and row_group(param) is not None,
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


def _plan_whole(stored: Any, current: Any, params: Sequence[Tensor], plan: PlanBuilder) -> None:
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
    shape: tuple[int, ...]
    region: Region
    saved_ref: TensorRef
    adopts_read: bool
    step_device: torch.device
    allow_cast: bool
    by_rows: bool

    def plan(self, leaf: TensorPlaceholder) -> tuple[Region, TensorBuilder]:
        """Return the region of a stored tensor that this rank needs, and its builder."""
        ref = leaf.ref
        if self._is_like_param(leaf):
            if self.adopts(leaf):
                return self.region, partial(from_local_like, self.param)
            return self.region, partial(_copy_with_layout, self.param, self._built_dtype(ref))
        if self.by_rows and ref.shape:
            box = shard_box(self.param, ref.shape)
            return Region(offset=box.offset, size=box.size), partial(self._by_rows, ref.shape)
        if _is_step(leaf):
            return full_region(ref.shape), partial(_move_to, self.step_device)
        if ref.distributed or (ref.shape and not self.saved_ref.distributed):
            return full_region(ref.shape), self._replicate_like_param
        return full_region(ref.shape), partial(_move_to, self.param.device)

    def adopts(self, leaf: TensorPlaceholder) -> bool:
        """Return True if the state keeps the tensor that is read, without a copy."""
        if self._is_like_param(leaf):
            return self.adopts_read and not (self.allow_cast and leaf.ref.dtype == self.saved_ref.dtype)
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
        return leaf.ref.shape == self.shape and not _is_step(leaf) and not stays_plain

    def _built_dtype(self, ref: TensorRef) -> torch.dtype:
        follows = self.allow_cast and ref.dtype == self.saved_ref.dtype and DTYPES[ref.dtype].is_floating_point
        return self.param.dtype if follows else DTYPES[ref.dtype]

    def _by_rows(self, shape: tuple[int, ...], rows: Tensor) -> Tensor:
        return from_local_like(self.param, rows.to(self.param.device), shape)

    def _replicate_like_param(self, tensor: Tensor) -> Tensor:
        return _replicate(self.param, tensor)


def _is_step(leaf: TensorPlaceholder) -> bool:
    return leaf.key.endswith("/step") and not leaf.ref.distributed


def _copy_with_layout(param: Tensor, dtype: torch.dtype, shard: Tensor) -> Tensor:
    local = to_local(param)
    # Like ``zeros_like`` of the parameter, the copy has its strides, which fused kernels need.
    return from_local_like(param, torch.empty_like(local, dtype=dtype, requires_grad=False).copy_(shard))


def _move_to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def _params_with_device_step(state: TrainState) -> set[int]:
    """Return the ids of parameters whose steps the optimizer counts on the device."""
    groups = (group for group in state.optimizer.param_groups if group.get("capturable") or group.get("fused"))
    return {id(param) for group in groups for param in group["params"]}


def clear_optimizer_(state: TrainState, skipped: Collection[str]) -> None:
    """Clear the optimizer's state, except for the parameters ``skipped``.

    Mutates: ``state.optimizer``.
    """
    current, params = state.optimizer.state, state.params
    skipped_state = {params[name]: current[params[name]] for name in skipped if name in params and params[name] in current}
    current.clear()
    current.update(skipped_state)


def set_optimizer_(state: TrainState, saved: dict[str, Any]) -> None:
    """Assign the saved state of the optimizer. ``Optimizer.load_state_dict`` would cast the state to the parameter's dtype.

    Mutates: ``state.optimizer``.
    """
    for name, content in saved["state"].items():
        state.optimizer.state[state.params[name]] = content
    # An optimizer may keep state that belongs to no parameter under a text.
    by_text: dict[Any, Any] = state.optimizer.state
    by_text.update(saved["global"])
    for group, values in zip(state.optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key not in ("params", ADDED_OPTIONS)})
