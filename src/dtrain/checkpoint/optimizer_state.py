"""Where an optimizer's state and hyperparameters go, parameter by parameter and group by group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dtrain.checkpoint import closed, layout, plain
from dtrain.checkpoint.contents import optimizer_groups
from dtrain.checkpoint.differences import Difference, other, unexpected
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import Region, whole
from dtrain.checkpoint.tree import Leaf, leaves
from dtrain.errors import DamagedCheckpointError
from dtrain.state import TrainState
from dtrain.tensors import copied_like, local, with_shard

Make = Callable[[Tensor], Tensor]
"""Makes a tensor of the state of one on the CPU that nobody else has."""

# Hyperparameters that a schedule adds to a group on its first use, after the optimizer of a resumed run was built.
_ADDED_LATER = frozenset({"initial_lr"})


class Places(Protocol):
    """Collects what goes where."""

    regions: dict[str, Region]
    make: dict[str, Make]

    def region_of(self, tensor: Tensor) -> Region:
        """The part of a tensor that this rank has."""


def stray_state(
    optimizer: dict[str, Any], state: TrainState, touched: Collection[str], *, strict: bool
) -> Iterator[Difference]:
    """Saved state of what is no parameter here, and not one of ``touched``; with ``strict`` off there may be some."""
    for name, content in _dict(optimizer["state"], "optimizer/state").items():
        _dict(content, f"optimizer/state/{name}")
        if name not in state.params and name not in touched and strict:
            yield unexpected(plain.join("optimizer/state", name), "state")


def group_differences(optimizer: dict[str, Any], state: TrainState, touched: Collection[str]) -> Iterator[Difference]:
    """Groups must hold the same parameters but for ``touched``; hyperparameters may be new here, but not unknown here."""
    theirs, ours = optimizer["groups"], optimizer_groups(state)
    if type(theirs) is not list or len(theirs) != len(ours):
        count = len(theirs) if type(theirs) is list else 0
        yield other("optimizer/groups", f"{count} groups", f"{len(ours)} groups")
        return
    for at, (saved, group) in enumerate(zip(theirs, ours, strict=True)):
        where = f"optimizer/groups/{at}"
        _dict(saved, where)
        there, here = _names(saved.get("params"), touched), _names(group["params"], touched)
        if there != here:
            first = next((a or b for a, b in _pairs(there, here) if a != b), "?")
            yield other(f"{where}/params", f"{len(there)} (first difference: {first})", f"{len(here)}")
        for key in saved:
            if key not in group and key not in _ADDED_LATER:
                yield unexpected(f"{where}/{key}", "a hyperparameter")


def _names(names: Any, touched: Collection[str]) -> list[Any]:
    return [name for name in names if type(name) is not str or name not in touched] if type(names) is list else []


def _pairs(a: list[Any], b: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)


def _dict(value: Any, where: str) -> dict[str, Any]:
    """``value`` as a dict of the decoded values.

    Raises:
        DamagedCheckpointError: it is none.
    """
    if type(value) is not dict:
        raise DamagedCheckpointError(f"{layout.index_name(0)}: {where}: needs a dict, got {closed.kind(value)}")
    return value


def place_optimizer(
    optimizer: dict[str, Any], state: TrainState, refs: Mapping[str, TensorRef], places: Places, *, cast: bool
) -> None:
    """Add to ``places`` where each tensor of the optimizer goes; the tree fits the state.

    Mutates: ``places``.
    """
    on_device = _counted_on_device(state)
    for name, content in optimizer["state"].items():
        param = state.params[name]
        mine = local(param)
        here = _Param(
            param=param,
            shape=tuple(param.shape),
            region=places.region_of(param),
            saved=refs[plain.join("params", name)],
            as_read=mine.is_cpu and mine.is_contiguous(),
            counts_on=param.device if id(param) in on_device else torch.device("cpu"),
            cast=cast,
        )
        for leaf in leaves(content):
            places.regions[leaf.key], places.make[leaf.key] = here.place(leaf)
    for group, content in zip(state.optimizer.param_groups, optimizer["groups"], strict=True):
        for name, value in content.items():
            there = group.get(name)
            device = there.device if isinstance(there, Tensor) else torch.device("cpu")
            for leaf in leaves(value):
                places.regions[leaf.key], places.make[leaf.key] = whole(leaf.ref.shape), partial(_to, device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Param:
    """What the optimizer's tensors of a parameter are laid out by, as the optimizer itself would.

    What has the parameter's shape lies like the parameter. ``step`` does not, even for a scalar parameter, and stays on
    the CPU unless the optimizer counts on the device: both are torch's own convention. What lay with the parameter in
    another shape (a factored second moment, the codes of an 8-bit one) is whole on every rank, a DTensor if the parameter is
    one.
    """

    param: Tensor
    shape: tuple[int, ...]
    region: Region
    saved: TensorRef
    as_read: bool
    counts_on: torch.device
    cast: bool

    def place(self, leaf: Leaf) -> tuple[Region, Make]:
        """The part of a stored tensor that this rank needs, and what becomes of it."""
        key, ref = leaf
        counts = key.endswith("/step") and not ref.distributed
        if ref.shape == self.shape and not counts:
            return self.region, self._like_param(ref)
        if counts:
            return whole(ref.shape), partial(_to, self.counts_on)
        if ref.distributed or (ref.shape and not self.saved.distributed):
            return whole(ref.shape), self._beside
        return whole(ref.shape), partial(_to, self.param.device)

    def _like_param(self, ref: TensorRef) -> Make:
        if self.as_read and not (self.cast and ref.dtype == self.saved.dtype):
            return partial(with_shard, self.param)
        follows = self.cast and ref.dtype == self.saved.dtype and DTYPES[ref.dtype].is_floating_point
        return partial(_laid_out, self.param, self.param.dtype if follows else DTYPES[ref.dtype])

    def _beside(self, tensor: Tensor) -> Tensor:
        return copied_like(self.param, tensor.to(self.param.device))


def _laid_out(param: Tensor, dtype: torch.dtype, shard: Tensor) -> Tensor:
    mine = local(param)
    # As zeros_like of the parameter is: strided like it, too, which fused kernels need.
    return with_shard(param, torch.empty_like(mine, dtype=dtype, requires_grad=False).copy_(shard))


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def _counted_on_device(state: TrainState) -> set[int]:
    """The parameters whose steps the optimizer counts on the device."""
    groups = (group for group in state.optimizer.param_groups if group.get("capturable") or group.get("fused"))
    return {id(param) for group in groups for param in group["params"]}


def clear_optimizer_(state: TrainState, left: Collection[str]) -> None:
    """Forget the optimizer's state, but that of the parameters ``left``.

    Mutates: ``state.optimizer``.
    """
    held, params = state.optimizer.state, state.params
    kept = {params[name]: held[params[name]] for name in left if name in params and params[name] in held}
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
