"""Whole parameters out of shards: for evaluation, for a look, for export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.dtensor import full_tensor
from dtrain.fqn import unwrap_module
from dtrain.shard.fsdp2_private import fsdp_param_groups, reshard_groups, units_of
from dtrain.state import TrainState, get_spec

_UNSHARDED_ATTRIBUTE = "_dtrain_whole"  # set on a model for as long as ``unshard_params`` lasts


def reshard(model: nn.Module) -> None:
    """Put the model back to its shards: after a forward without backward, units are left gathered.

    Mutates: the model's parameters (their sharded form is registered again).
    """
    reshard_groups(fsdp_param_groups(model))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every module's own mode is back and parameters are resharded.

    It computes with the parameters as they are on entering, also when an earlier forward has left gathered copies.
    """
    whole = is_unsharded(model)
    modes = [(module, module.training) for module in model.modules()]
    if not whole:
        reshard(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        if not whole:
            reshard(model)


@contextmanager
def unshard_params(model: nn.Module) -> Iterator[None]:
    """The whole model on every rank while the context lasts, for evaluation by hand or a look at its parameters.

    Parameters are plain tensors inside, in the dtype that ``precision`` computes in, and stay so through forwards, without
    gradients; a rank may run the model alone there. (With a plan, all ranks along ``tp`` must: what it has cut stays cut over
    them.) Changes made to parameters are lost. ``named_parameters()`` has them; ``state_dict()`` gives shards, and ends the
    effect, as loading does. A plain model is left as it is.

    Mutates: the model's parameters (their gathered form is registered). It takes the memory of the whole model.
    Collective: one all-gather per unit, on entering; every rank must enter.
    """
    with torch.no_grad():
        if is_unsharded(model):
            yield
            return
        try:
            reshard(model)  # what an earlier forward has left gathered may be older than the shards
            unwrap_module(model).__dict__[_UNSHARDED_ATTRIBUTE] = True
            for unit in units_of(model):
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            _restore_shards(model)


def is_unsharded(model: nn.Module) -> bool:
    """Whether ``unshard_params`` holds for ``model`` just now."""
    return _UNSHARDED_ATTRIBUTE in unwrap_module(model).__dict__


def _restore_shards(model: nn.Module) -> None:
    unwrap_module(model).__dict__.pop(_UNSHARDED_ATTRIBUTE, None)
    frees = get_spec(model).strategy in ("full_shard", "hybrid_shard")
    for index, unit in enumerate(units_of(model)):  # the first is the root, which is not freed after its forward
        unit.set_reshard_after_forward(frees and index > 0, recurse=False)
    reshard(model)


def full_params(source: TrainState | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every parameter, one at a time, on every rank: for export and debugging.

    Args:
        source: a state, or tensors by name that are laid out like parameters, such as ``state.slices["ema"]["params"]``.

    Yields:
        The clean name and a detached tensor of the global shape on the device; only the last one yielded is alive. Names of
        tied parameters come once, as in ``state.params``.

    Collective: one all-gather per sharded tensor; every rank must take all of them.
    """
    tensors = source.params if isinstance(source, TrainState) else source
    for name, tensor in tensors.items():
        yield name, full_tensor(tensor.detach())
