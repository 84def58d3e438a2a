"""Check that the model and the optimizer of a new state fit each other, and that no parameter is added to them later."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import ConfigError, StepError
from dtrain.fqn import parameters_by_fqn
from dtrain.named_optimizers import format_optimizer
from dtrain.typing import Params

# These optimizers write in place to tensors that DTensor would have to redistribute.
_NOT_FOR_DTENSOR = (torch.optim.Adafactor, torch.optim.Rprop)


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    """Refuse arguments that are not a model and an optimizer, and show the right call.

    Raises:
        ConfigError: another type, the two swapped, an optimizer whose ``step`` needs an argument, or an optimizer with state
            outside of its ``state``.
    """
    example = "`state = step.init(model, optimizer)`"
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(f"init: got the optimizer before the model. Swap them: {example}.")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"init: model must be an nn.Module, got {_type_name(model)}. Use {example}.")
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"init: optimizer must be a torch.optim.Optimizer, got the scheduler {type(optimizer).__name__}. Give its "
            "optimizer, and the schedule to the step: dt.compose_step(loss_fn, [dt.transforms.scale_lr(...)])."
        )
    if isinstance(optimizer, list | tuple):
        raise ConfigError(
            f"init: optimizer must be a torch.optim.Optimizer or a dict of optimizers, got a {type(optimizer).__name__} of "
            f"{len(optimizer)}. Name the optimizers: step.init(model, {{'matrices': muon, 'rest': adamw}})."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"init: optimizer must be a torch.optim.Optimizer, got {_type_name(optimizer)}. Use "
            "step.init(model, torch.optim.AdamW(model.parameters(), lr=3e-4))."
        )
    _check_needs_no_closure(optimizer)
    _check_holds_own_state(optimizer)


def _check_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` has a required argument, such as LBFGS and most implementations of SAM."""
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # Schedulers of torch replace ``step`` by a plain function.
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    required = [argument.name for argument in arguments if argument.default is empty and argument.kind in kinds]
    if required:
        raise ConfigError(
            f"init: optimizer must step without arguments, got {type(optimizer).__name__}, whose step needs {required[0]!r}. "
            "Use an optimizer that needs only the gradients; for sharpness-aware minimization use dt.transforms.sam."
        )


def _check_holds_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state is in another optimizer or differs between ranks, because checkpoints would lack it."""
    name = type(optimizer).__name__
    if any(kind.__module__.startswith("torch.distributed.optim") for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"init: optimizer must keep its whole state on every rank, got {name}, whose state differs between ranks. Use the "
            "plain optimizer: dt.shard_model(strategy='shard_grad_op') shards its state, dt.transforms.local_sgd averages."
        )
    inner = next((inner for inner in _inner_optimizers(optimizer) if inner.state is not optimizer.state), None)
    if inner is not None:
        raise ConfigError(
            f"init: optimizer must keep its state in its own .state, got {name}, which wraps {type(inner).__name__} with a "
            "state of its own. Checkpoints would lack this state. Set inner.state = outer.state, or pass the inner optimizer."
        )


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    for value in vars(optimizer).values():
        members = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        yield from (member for member in members if isinstance(member, torch.optim.Optimizer))


def _type_name(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_params(params: Params, *, sharded: Sequence[str]) -> None:
    """Refuse a model without parameters, or with meta, complex or whole parameters.

    Args:
        params: the model's parameters by clean name.
        sharded: names of the parameters that must be sharded.

    Raises:
        ConfigError: no parameters, parameters on the meta device, complex parameters, or whole tensors instead of shards.
    """
    if not params:
        raise ConfigError("init: the model has no parameters. Build its layers before step.init.")
    check_kinds(params, "init")
    meta = [name for name, p in params.items() if p.is_meta]
    if meta:
        raise ConfigError(
            f"init: {len(meta)} of {len(params)} parameters are on the meta device (first: {meta[0]}). "
            "Call dt.materialize first."
        )
    whole = [name for name in sharded if not is_dtensor(params[name])]
    if whole:
        raise ConfigError(
            f"init: {len(whole)} of {len(params)} parameters are whole tensors in a sharded model (first: {whole[0]}): "
            "its module was added after shard_model, or dt.unshard_params is open. Build the whole model before shard_model, "
            "and call step.init outside of dt.unshard_params."
        )


def check_kinds(params: Params, caller: str) -> None:
    """Refuse parameters without a shape, and complex parameters, of which torch has no norms in a wider real dtype.

    Raises:
        ConfigError: a parameter of a lazy module that has not run, or a complex parameter, by name.
    """
    for name, param in params.items():
        if isinstance(param, UninitializedParameter):
            raise ConfigError(
                f"{caller}: the parameter {name!r} must have a shape, got a lazy module that has not run. Run the model "
                "once on a small batch before."
            )
        if param.is_complex():
            raise ConfigError(
                f"{caller}: the parameter {name!r} must be real, got {str(param.dtype).removeprefix('torch.')}. Store "
                "nn.Parameter(torch.view_as_real(weight)), and compute with torch.view_as_complex(self.weight)."
            )


def check_optimizer_params(params: Params, optimizer: torch.optim.Optimizer, *, missing_ok: bool) -> None:
    """Refuse an optimizer with parameters of another model, or without some trainable parameters.

    Args:
        params: the model's parameters by clean name; tied parameters once.
        optimizer: optimizer to check.
        missing_ok: if True, trainable parameters may be missing.

    Raises:
        ConfigError: parameters that are only in the model or only in the optimizer.
    """
    model_ids = {id(p) for p in params.values()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = [p for p in optimized if id(p) not in model_ids]
    if unknown:
        raise ConfigError(
            f"init: {len(unknown)} of {len(optimized)} optimizer parameters are not in the model (first: shape "
            f"{tuple(unknown[0].shape)}). shard_model, materialize and edits of the model make new Parameter objects. Build "
            "the optimizer after them. Register a parameter of the loss in the model: model.scale = nn.Parameter(...)."
        )
    trainable = [name for name, p in params.items() if p.requires_grad]
    optimized_ids = {id(p) for p in optimized}
    missing = [name for name in trainable if id(params[name]) not in optimized_ids]
    if missing and not missing_ok:
        names = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        raise ConfigError(
            f"init: {format_optimizer(optimizer)} holds {len(trainable) - len(missing)} of {len(trainable)} trainable "
            f"parameters, so these would never train: {names}. Add them, freeze them with requires_grad_(False), or pass "
            "missing_ok=True."
        )


def check_no_new_in_optimizer(params: Params, model: nn.Module, optimizer: torch.optim.Optimizer, *, caller: str) -> None:
    """Refuse parameters that the optimizer got after ``step.init``, as by ``add_param_group``.

    Args:
        params: parameters of the state by clean name.
        model: model of the state.
        optimizer: optimizer of the state.
        caller: function named in the error.

    Raises:
        StepError: the first such parameter, by name.
    """
    known = {id(param) for param in params.values()}
    new = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in known]
    if new:
        names = {id(param): repr(name) for name, param in parameters_by_fqn(model)[0].items()}
        _raise_new(names.get(id(new[0]), f"of shape {tuple(new[0].shape)}"), "was added to the optimizer", len(new), caller)


def check_no_new_in_model(
    params: Params, model: nn.Module, *, caller: str, gathered: Collection[Tensor] = (), frozen_ok: bool = False
) -> None:
    """Refuse parameters that the model got after ``step.init``, in new modules or in the place of others.

    Args:
        params: parameters of the state by clean name.
        model: model of the state.
        caller: function named in the error.
        gathered: unsharded copies, which stand in the place of their parameters while they are gathered.
        frozen_ok: if True, frozen parameters may be new.

    Raises:
        StepError: the first such parameter, by name.
    """
    known = {id(param) for param in params.values()} | {id(copy) for copy in gathered}
    registered = parameters_by_fqn(model)[0]
    new = [name for name, p in registered.items() if id(p) not in known and (p.requires_grad or not frozen_ok)]
    if new:
        _raise_new(repr(new[0]), "was replaced" if new[0] in params else "was added to the model", len(new), caller)


def _raise_new(name: str, change: str, count: int, caller: str) -> NoReturn:
    raise StepError(
        f"{caller}: the parameter {name} {change} after step.init ({count} in all), so it is not in the state: its gradient "
        "would be neither reduced nor divided, and a checkpoint would lack it. Build the whole model before shard_model, or "
        "make a new optimizer and a new state for the changed model: `state = step.init(model, optimizer)`."
    )


def check_fused_foreach(params: Params, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer, or its ``fused`` or ``foreach`` form, that would fail in the first step.

    Raises:
        ConfigError: an optimizer that torch cannot run on sharded parameters; a form that does not exist for the parameters of
            a group.
    """
    if type(optimizer) in _NOT_FOR_DTENSOR and any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"init: optimizer must be one that torch can run on sharded parameters, got {type(optimizer).__name__}. Use "
            "torch.optim.AdamW, or keep the parameters whole with ignored_params."
        )
    names = {id(p): name for name, p in params.items()}
    for index, group in enumerate(optimizer.param_groups):
        _check_group_form(index, group, optimizer, names)


def _check_group_form(index: int, group: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    form = next((form for form in ("fused", "foreach") if group.get(form)), None)
    trainable = [p for p in group["params"] if p.requires_grad]
    whole = [names[id(p)] for p in trainable if not is_dtensor(p)]
    if form is None or len(whole) == len(trainable):
        return
    prefix = f"init: group {index} of {type(optimizer).__name__}({form}=True) holds"
    if whole:
        raise ConfigError(
            f"{prefix} {len(trainable) - len(whole)} sharded parameters and {len(whole)} whole ones (first: {whole[0]}), which "
            "this form does not take together. Give the whole parameters their own group."
        )
    if form == "fused" and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        raise ConfigError(f"{prefix} sharded parameters, but torch has only fused Adam and AdamW for them. Use foreach=True.")
