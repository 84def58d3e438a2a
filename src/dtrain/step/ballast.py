"""Reserve memory for optimizer state before the optimizer allocates it, so that the microbatch search accounts for it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.rng import KeptRandomness
from dtrain.memory.failure import is_out_of_memory
from dtrain.state import TrainState
from dtrain.step.hopeless import raise_hopeless
from dtrain.tensors import local

_PROBE = (2, 2)  # the smallest shape that optimizers for matrices take too
_KNOWN = ("torch.optim.", "dtrain.")  # modules whose optimizers change nothing in a step but state and parameters
_ASSUMED = 2  # state tensors for each parameter of any other optimizer: as many as Adam has
_HARMLESS = {"__init__", "__repr__"}  # a step calls neither


def agreed_ballast(where: str, state: TrainState) -> list[Tensor]:
    """``ballast_for`` the optimizer of ``state`` on every rank, or on none.

    Assumed state that has no room is left out: the optimizer may need less.

    Collective: one small record.

    Raises:
        DoesNotFitError: there is no room for it; on all ranks.
    """
    ballast, refused = [], ""
    try:
        ballast = ballast_for(state.optimizer)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        refused = str(problem) or type(problem).__name__
    if any(row[0] for row in all_gather_numbers([bool(refused)], where=where.partition(":")[0])):
        ballast.clear()
        if is_assumed(state.optimizer):
            return ballast
        raise_hopeless(where, device=state.device, strategy=state.spec.strategy, asked=refused, what="the optimizer's state")
    return ballast


def ballast_for(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors as large as the state that ``optimizer`` does not have yet; none when it has all of it.

    The state of an optimizer of torch or dtrain is found by a step of a twin on a parameter of four numbers. The optimizer
    itself is not touched: state of zeros is not the same as none if the first step is special (SGD with dampening). A step of
    any other optimizer may change whatever its code can reach, so none is made: two tensors are assumed for each parameter.

    Raises:
        torch.OutOfMemoryError: there is no room for it.
    """
    ballast: list[Tensor] = []
    for group in optimizer.param_groups:
        new = [param for param in group["params"] if param.requires_grad and not optimizer.state.get(param)]
        find = _assumed if is_assumed(optimizer) else _state_of
        copies = {param.dtype: find(optimizer, group, param) for param in {p.dtype: p for p in new}.values()}
        for param in new:
            shard = local(param)
            ballast += [torch.empty_like(shard, dtype=dtype) for dtype in copies[param.dtype]]
    return ballast


def is_assumed(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state of ``optimizer`` is not known before its first step: some of its methods are the user's."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith(_KNOWN):
            return False
        if any(callable(value) and name not in _HARMLESS for name, value in vars(base).items()):
            return True
    return True


def _assumed(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    return [param.dtype] * _ASSUMED


def _state_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    """The dtypes of the state tensors that have a parameter's shape, for a parameter like ``param``."""
    probe = torch.nn.Parameter(torch.zeros(_PROBE, dtype=param.dtype, device=local(param).device))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{**group, "params": [probe]}])
    step: Any = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # past the hooks: nobody has asked for a step
    randomness = KeptRandomness()  # an optimizer may draw
    try:
        with torch.no_grad():
            step(twin)
    except Exception:  # noqa: BLE001  # an optimizer that needs more than this to make a step: its state is not known before
        return []
    finally:
        randomness.put_back()
    return [value.dtype for value in twin.state[probe].values() if isinstance(value, Tensor) and value.shape == probe.shape]
