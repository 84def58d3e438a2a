"""Copies of a model's shards in memory: an old policy, a target network, a reference that follows slowly, the best weights.

A copy is a dict of tensors by name, placed as the parameters and buffers are, so nothing is gathered. Checkpoints hold none.
A copy that a resumed run needs is the state of a transform: ``transforms.ema(0.0, every="100ba")`` copies at intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import from_local_like, is_placed_like, to_local
from dtrain.errors import ConfigError, StaleStateError
from dtrain.fqn import buffers_by_fqn, parameters_by_fqn
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.skipped_units import ModelUnits
from dtrain.shard.unshard import is_unsharded, reshard
from dtrain.state import live_runs


def snapshot(model: nn.Module, *, offload: bool = False, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copy this rank's shards of all parameters and buffers of a model.

    Args:
        model: plain, replicated or sharded model; not inside of ``unshard_params``.
        offload: if True, the copy is in the memory of the CPU, pinned if the model is on an accelerator. If False, it is on
            the device of the model.
        into: earlier copy of the model to overwrite, so that no memory is allocated; None makes a new copy.

    Returns:
        Tensors by clean name, placed as in the model (a parameter under FSDP2 is a DTensor), of the same dtypes, without
        gradients: parameters first, a tied parameter once, then buffers, persistent or not.

    Mutates: ``into``. Sharded parameters that an earlier forward left gathered are sharded again.
    Collective: none. Host sync: none; with ``offload`` on an accelerator one for each tensor.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1)
        >>> old = dt.shard.snapshot(model)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> torch.equal(old["weight"], model.weight)
        False
        >>> dt.shard.restore_(model, old)
        >>> torch.equal(old["weight"], model.weight)
        True

    Raises:
        ConfigError: not a model, an unsharded model, a model on the meta device, or an ``into`` of another model.
        StaleStateError: an average or another copy is in the place of the parameters.
    """
    tensors = _tensors_of(model, "snapshot")
    if into is None:
        return {name: _copy(tensor, offload=offload) for name, tensor in tensors.items()}
    if not isinstance(into, dict):
        raise ConfigError(f"snapshot: into must be a dict of snapshot, got {type(into).__name__}. Leave it out for a new copy.")
    _check_fits(into, tensors, "snapshot: into")
    _copy_all_(list(into.values()), [tensors[name] for name in into])
    return into


def restore_(model: nn.Module, copy: Mapping[str, Tensor]) -> None:
    """Set the parameters and buffers of a model to those of a copy. The optimizer does not change.

    Call it between steps. The state of a run stays its newest state.

    Args:
        model: the model of the copy, or another one that is built and sharded in the same way.
        copy: result of ``snapshot``, on any device; it stays as it is.

    Mutates: parameters and buffers. Collective: none. Host sync: none.

    Example:
        best = dt.shard.snapshot(model, offload=True)
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if is_better(state):
                dt.shard.snapshot(model, into=best)
        dt.shard.restore_(model, best)

    Raises:
        ConfigError: as ``snapshot``; a copy with other names, shapes, dtypes or shards than the model's.
        StaleStateError: as ``snapshot``.
    """
    tensors = _tensors_of(model, "restore_")
    _check_fits(copy, tensors, "restore_: copy")
    _copy_all_(list(tensors.values()), [copy[name] for name in tensors])


@contextmanager
def use_snapshot(model: nn.Module, copy: Mapping[str, Tensor]) -> Iterator[None]:
    """Use a copy as the model's parameters and buffers inside the context; restore every bit on exit.

    The parameters and the copy exchange their contents, one shard at a time, so the context needs the memory of one more shard,
    and not of a second model. Buffers that change inside the context are restored, in the model and in the copy.

    Inside the context, a step, a save or a load of a run of the model raises. Run forwards there under ``eval_mode``.

    A loss function may enter the context if all ranks have equal numbers of microbatches. A rank without a further microbatch
    would gather its shards of the trained parameters, so a sharded model's step raises there. Compute the outputs of the copy
    before the step instead, as a column of the batch, or use a second sharded model.

    Args:
        model: as in ``restore_``.
        copy: as in ``restore_``.

    Mutates: parameters, buffers and ``copy``, inside the context. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> reference = dt.shard.snapshot(model)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> with dt.shard.use_snapshot(model, reference), dt.eval_mode(model):
        ...     model(torch.ones(1)).item()
        2.0
        >>> model.weight.item()
        3.0

    Raises:
        ConfigError: as ``restore_``.
        StaleStateError: as ``snapshot``.
        StepError: from the forward, in the step of a sharded model: ranks have different numbers of microbatches, or a rank
            skips a unit.
    """
    tensors = _tensors_of(model, "use_snapshot")
    _check_fits(copy, tensors, "use_snapshot: copy")
    params = parameters_by_fqn(model)[0]
    buffers = [name for name in tensors if name not in params]
    undo = list[Callable[[], None]]()
    with restore_buffers(model), _mark_replaced(model), ModelUnits.mark_replaced(model):
        try:
            for name, param in params.items():
                undo.append(exchange_(param, copy[name]))
            _copy_all_([tensors[name] for name in buffers], [copy[name] for name in buffers])
            yield
        finally:
            reshard(model)
            for exchange_again in undo:
                exchange_again()


@contextmanager
def _mark_replaced(model: nn.Module) -> Iterator[None]:
    """Refuse steps, saves and loads of the runs of ``model`` in a context. Mutates: the runs."""
    runs = live_runs(model)
    try:
        for run in runs:
            run.replaced_by = (
                "a copy is in the place of the parameters. Leave `with dt.shard.use_snapshot(model, copy):` first."
            )
        yield
    finally:
        for run in runs:
            run.replaced_by = None


def exchange_(param: Tensor, other: Tensor) -> Callable[[], None]:
    """Exchange the contents of the shards of two tensors. If their dtypes differ, only ``param`` changes.

    Mutates: both. Returns a function that undoes the exchange.
    """
    with torch.no_grad():
        own, replacement = to_local(param), to_local(other)
        original = own.clone()
        own.copy_(replacement)
        if own.dtype == replacement.dtype:
            replacement.copy_(original)

            def exchange_again() -> None:
                exchange_(param, other)

            return exchange_again

    def restore_copy() -> None:
        with torch.no_grad():
            to_local(param).copy_(original)

    return restore_copy


def _tensors_of(model: nn.Module, caller: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}. Pass state.model.")
    if is_unsharded(model):
        raise ConfigError(f"{caller}: the model must be sharded, got an unsharded model. Leave unshard_params first.")
    for run in live_runs(model):
        if run.replaced_by is not None:
            raise StaleStateError(f"{caller}: {run.replaced_by}")
    # An earlier forward may have left gathered copies in the place of the shards, which the next forward would use.
    reshard(model)
    tensors = {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ConfigError(f"{caller}: the model must have values, got {on_meta[0]} on the meta device. Call dt.materialize.")
    return tensors


def _copy(tensor: Tensor, *, offload: bool) -> Tensor:
    shard = to_local(tensor.detach())
    if not offload or shard.device.type == "cpu":
        return from_local_like(tensor, shard.clone())
    host = torch.empty_like(shard, device="cpu", pin_memory=True)
    return from_local_like(tensor, host.copy_(shard))


def _copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([to_local(target) for target in targets], [to_local(source) for source in sources])


def _check_fits(copy: Mapping[str, Tensor], tensors: Mapping[str, Tensor], caller: str) -> None:
    """Refuse a copy of another model.

    Raises:
        ConfigError: the first name that only one of them has, or whose tensors differ in shape, dtype or shards.
    """
    if not isinstance(copy, Mapping):
        raise ConfigError(f"{caller} must be a dict of snapshot, got {type(copy).__name__}. Call dt.shard.snapshot(model).")
    other = next((name for name in [*tensors, *copy] if name not in copy or name not in tensors), None)
    if other is not None:
        owner = "the model" if other in tensors else "the copy"
        raise ConfigError(f"{caller} must have the names of the model, but only {owner} has {other!r}. Copy this model.")
    for name, tensor in tensors.items():
        kept = copy[name]
        if kept.dtype != tensor.dtype or not is_placed_like(kept, tensor) or to_local(kept).shape != to_local(tensor).shape:
            raise ConfigError(
                f"{caller} must be placed as the model, got {kept.dtype} {list(to_local(kept).shape)} for {name!r} instead of "
                f"{tensor.dtype} {list(to_local(tensor).shape)} on this rank. Make the copy after shard_model."
            )
