"""Checks of the two handles that a state is made of: a model and an optimizer that fit each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.typing import Params

_NOT_FOR_DTENSOR = (torch.optim.Adafactor, torch.optim.Rprop)  # they write in place what DTensor would have to place anew


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    """Refuse what is no model or no optimizer, and show the right call.

    Raises:
        ConfigError: another type, or the two swapped.
    """
    right = "`state = step.init(model, optimizer)`"
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(f"init: got the optimizer before the model; swap them: {right}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"init: model must be an nn.Module, got {_type_name(model)}; as in {right}")
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"init: optimizer must be a torch.optim.Optimizer, got the scheduler {type(optimizer).__name__}; give its "
            "optimizer, and the schedule to the step: dt.compose_step(loss_fn, [dt.transforms.scale_lr(...)])"
        )
    if isinstance(optimizer, list | tuple):
        raise ConfigError(
            f"init: optimizer must be one torch.optim.Optimizer, got a {type(optimizer).__name__} of {len(optimizer)}; give "
            "the parameters as groups of one optimizer (dt.optim.param_groups), or make a state for each with partial=True"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"init: optimizer must be a torch.optim.Optimizer, got {_type_name(optimizer)}; as in "
            "step.init(model, torch.optim.AdamW(model.parameters(), lr=3e-4))"
        )


def _type_name(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_params(params: Params, *, sharded: Sequence[str]) -> None:
    """Refuse a model without parameters, or with some that have no storage or no place in it.

    Args:
        params: the model's, by clean name.
        sharded: names of those that are sharded.

    Raises:
        ConfigError: no parameters, some on the meta device, or gathered copies where shards should be.
    """
    if not params:
        raise ConfigError("init: the model has no parameters")
    meta = [name for name, p in params.items() if p.is_meta]
    if meta:
        raise ConfigError(
            f"init: {len(meta)} of {len(params)} parameters are on the meta device (first: {meta[0]}); "
            "call dt.materialize first"
        )
    gathered = [name for name in sharded if not is_dtensor(params[name])]
    if gathered:
        raise ConfigError(
            f"init: {len(gathered)} of {len(params)} parameters are gathered copies, left by a forward outside of a step "
            f"(first: {gathered[0]}); run that forward under dt.eval_mode(model), and build the optimizer from what it leaves"
        )


def check_optimizer_params(params: Params, optimizer: torch.optim.Optimizer, *, partial: bool) -> None:
    """Refuse an optimizer that holds parameters of another model, or leaves out some that are trainable.

    Args:
        params: the model's, by clean name; tied ones once.
        optimizer: the one to check.
        partial: if True, trainable parameters may be left out.

    Raises:
        ConfigError: parameters that only one of the two has.
    """
    known = {id(p) for p in params.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stray = [p for p in held if id(p) not in known]
    if stray:
        raise ConfigError(
            f"init: {len(stray)} of {len(held)} optimizer parameters are not in the model (first: shape "
            f"{tuple(stray[0].shape)}); shard_model, materialize and edits of the model make new Parameter objects, so "
            "build the optimizer after them"
        )
    trainable = [name for name, p in params.items() if p.requires_grad]
    trained = {id(p) for p in held}
    left = [name for name in trainable if id(params[name]) not in trained]
    if left and not partial:
        names = f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
        raise ConfigError(
            f"init: {type(optimizer).__name__} holds {len(trainable) - len(left)} of {len(trainable)} trainable parameters, so "
            f"these would never train: {names}; add them, freeze them with requires_grad_(False), or pass partial=True"
        )


def check_fused_foreach(params: Params, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer, or a ``fused`` or ``foreach`` form of it, that would fail in the first step.

    Raises:
        ConfigError: an optimizer that torch cannot run on cut parameters; a form that torch does not have for the parameters
            of a group.
    """
    if type(optimizer) in _NOT_FOR_DTENSOR and any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"init: optimizer must be one that torch can run on cut parameters, got {type(optimizer).__name__}. Use "
            "torch.optim.AdamW, or leave the parameters whole with leave_out."
        )
    names = {id(p): name for name, p in params.items()}
    for index, group in enumerate(optimizer.param_groups):
        _check_group_form(index, group, optimizer, names)


def _check_group_form(index: int, group: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    form = next((form for form in ("fused", "foreach") if group.get(form)), None)
    trained = [p for p in group["params"] if p.requires_grad]
    whole = [names[id(p)] for p in trained if not is_dtensor(p)]
    if form is None or len(whole) == len(trained):
        return
    what = f"init: group {index} of {type(optimizer).__name__}({form}=True) holds"
    if whole:
        raise ConfigError(
            f"{what} {len(trained) - len(whole)} cut parameters and {len(whole)} whole ones (first: {whole[0]}), which that "
            "form does not take together; give the whole ones a group of their own"
        )
    if form == "fused" and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        raise ConfigError(f"{what} cut parameters, for which torch has a fused Adam and AdamW only; use foreach=True instead")
