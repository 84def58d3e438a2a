"""Where an optimizer's state and hyperparameters go, parameter by parameter and group by group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.mismatch_report import MismatchRow, other_row, unexpected_row
from dtrain.checkpoint.reshard import Region, full_region
from dtrain.checkpoint.state_dict import optimizer_groups
from dtrain.checkpoint.tree_json import TensorPlaceholder, TensorRef, iter_placeholders
from dtrain.dtensor import from_local_like, replicate_like, to_local
from dtrain.errors import CorruptCheckpointError
from dtrain.state import TrainState

TensorBuilder = Callable[[Tensor], Tensor]
"""Makes a tensor of the state of one on the CPU that nobody else has."""

# Hyperparameters that a schedule adds to a group on its first use, after the optimizer of a resumed run was built.
_ADDED_BY_SCHEDULES = frozenset({"initial_lr"})


class PlanBuilder(Protocol):
    """Collects what goes where."""

    regions: dict[str, Region]
    builders: dict[str, TensorBuilder]

    def region_of(self, tensor: Tensor) -> Region:
        """The part of a tensor that this rank has."""


def find_unknown_state(
    optimizer: dict[str, Any], state: TrainState, skipped: Collection[str], *, strict: bool
) -> Iterator[MismatchRow]:
    """Saved state of what is no parameter here, and not one of ``skipped``; with ``strict`` off there may be some."""
    for name, content in _dict(optimizer["state"], "optimizer/state").items():
        _dict(content, f"optimizer/state/{name}")
        if name not in state.params and name not in skipped and strict:
            yield unexpected_row(tree_json.join_key("optimizer/state", name), "state")


def compare_groups(optimizer: dict[str, Any], state: TrainState, skipped: Collection[str]) -> Iterator[MismatchRow]:
    """Groups must hold the same parameters but for ``skipped``; hyperparameters may be new here, but not unknown here."""
    theirs, ours = optimizer["groups"], optimizer_groups(state)
    if type(theirs) is not list or len(theirs) != len(ours):
        count = len(theirs) if type(theirs) is list else 0
        yield other_row("optimizer/groups", f"{count} groups", f"{len(ours)} groups")
        return
    for at, (saved, group) in enumerate(zip(theirs, ours, strict=True)):
        where = f"optimizer/groups/{at}"
        _dict(saved, where)
        there, here = _param_names(saved.get("params"), skipped), _param_names(group["params"], skipped)
        if there != here:
            first = next((a or b for a, b in _pairs(there, here) if a != b), "?")
            yield other_row(f"{where}/params", f"{len(there)} (first difference: {first})", f"{len(here)}")
        for key in saved:
            if key not in group and key not in _ADDED_BY_SCHEDULES:
                yield unexpected_row(f"{where}/{key}", "a hyperparameter")


def _param_names(names: Any, touched: Collection[str]) -> list[Any]:
    return [name for name in names if type(name) is not str or name not in touched] if type(names) is list else []


def _pairs(a: list[Any], b: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)


def _dict(value: Any, where: str) -> dict[str, Any]:
    """``value`` as a dict of the decoded values.

    Raises:
        CorruptCheckpointError: it is none.
    """
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{layout.index_name(0)}: {where}: needs a dict, got {strict_json.describe_value(value)}")
    return value


def plan_optimizer(
    optimizer: dict[str, Any], state: TrainState, refs: Mapping[str, TensorRef], plan: PlanBuilder, *, cast: bool
) -> None:
    """Add to ``plan`` where each tensor of the optimizer goes; the tree fits the state.

    Mutates: ``plan``.
    """
    on_device = _params_with_device_step(state)
    for name, content in optimizer["state"].items():
        param = state.params[name]
        mine = to_local(param)
        here = _ParamPlacement(
            param=param,
            shape=tuple(param.shape),
            region=plan.region_of(param),
            saved_ref=refs[tree_json.join_key("params", name)],
            adopts_read=mine.is_cpu and mine.is_contiguous(),
            step_device=param.device if id(param) in on_device else torch.device("cpu"),
            cast=cast,
        )
        for leaf in iter_placeholders(content):
            plan.regions[leaf.key], plan.builders[leaf.key] = here.plan(leaf)
    for group, content in zip(state.optimizer.param_groups, optimizer["groups"], strict=True):
        for name, value in content.items():
            there = group.get(name)
            device = there.device if isinstance(there, Tensor) else torch.device("cpu")
            for leaf in iter_placeholders(value):
                plan.regions[leaf.key], plan.builders[leaf.key] = full_region(leaf.ref.shape), partial(_move_to, device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _ParamPlacement:
    """What the optimizer's tensors of a parameter are laid out by, as the optimizer itself would.

    What has the parameter's shape lies like the parameter. ``step`` does not, even for a scalar parameter, and stays on
    the CPU unless the optimizer counts on the device: both are torch's own convention. What lay with the parameter in
    another shape (a factored second moment, the codes of an 8-bit one) is whole on every rank, a DTensor if the parameter is
    one.
    """

    param: Tensor
    shape: tuple[int, ...]
    region: Region
    saved_ref: TensorRef
    adopts_read: bool
    step_device: torch.device
    cast: bool

    def plan(self, leaf: TensorPlaceholder) -> tuple[Region, TensorBuilder]:
        """The part of a stored tensor that this rank needs, and what becomes of it."""
        key, ref = leaf
        counts = key.endswith("/step") and not ref.distributed
        if ref.shape == self.shape and not counts:
            return self.region, self._like_param(ref)
        if counts:
            return full_region(ref.shape), partial(_move_to, self.step_device)
        if ref.distributed or (ref.shape and not self.saved_ref.distributed):
            return full_region(ref.shape), self._replicate_like_param
        return full_region(ref.shape), partial(_move_to, self.param.device)

    def _like_param(self, ref: TensorRef) -> TensorBuilder:
        if self.adopts_read and not (self.cast and ref.dtype == self.saved_ref.dtype):
            return partial(from_local_like, self.param)
        follows = self.cast and ref.dtype == self.saved_ref.dtype and DTYPES[ref.dtype].is_floating_point
        return partial(_copy_with_layout, self.param, self.param.dtype if follows else DTYPES[ref.dtype])

    def _replicate_like_param(self, tensor: Tensor) -> Tensor:
        return replicate_like(self.param, tensor.to(self.param.device))


def _copy_with_layout(param: Tensor, dtype: torch.dtype, shard: Tensor) -> Tensor:
    mine = to_local(param)
    # As zeros_like of the parameter is: strided like it, too, which fused kernels need.
    return from_local_like(param, torch.empty_like(mine, dtype=dtype, requires_grad=False).copy_(shard))


def _move_to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def _params_with_device_step(state: TrainState) -> set[int]:
    """The parameters whose steps the optimizer counts on the device."""
    groups = (group for group in state.optimizer.param_groups if group.get("capturable") or group.get("fused"))
    return {id(param) for group in groups for param in group["params"]}


def clear_optimizer_(state: TrainState, skipped: Collection[str]) -> None:
    """Forget the optimizer's state, but that of the parameters ``skipped``.

    Mutates: ``state.optimizer``.
    """
    held, params = state.optimizer.state, state.params
    kept = {params[name]: held[params[name]] for name in skipped if name in params and params[name] in held}
    held.clear()
    held.update(kept)


def set_optimizer_(state: TrainState, saved: dict[str, Any]) -> None:
    """Assign the optimizer's state as it was saved. ``Optimizer.load_state_dict`` would cast it to the parameter's dtype.

    Mutates: ``state.optimizer``.
    """
    for name, content in saved["state"].items():
        state.optimizer.state[state.params[name]] = content
    for group, values in zip(state.optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
