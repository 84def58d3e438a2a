"""``shard_model``, and the few calls through which a step steers FSDP2's gradient reduction."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import current
from dtrain.dist.mesh import data_rank
from dtrain.errors import ConfigError
from dtrain.shard.precision import Precision
from dtrain.state import ShardSpec, Strategy, attach_spec, spec_of

_OTHER_NAMES = {"no_shard": "replicate"}


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: str = "full_shard",
    blocks: Sequence[type[nn.Module]] = (),
    precision: Precision | None = None,
) -> nn.Module:
    """Lay ``model`` out over the data-parallel ranks of ``mesh`` and return it.

    Args:
        model: a plain module, on the meta device (then call ``materialize``), or with real weights, of which rank 0's
            are taken.
        mesh: from ``build_mesh``; all its axes are flattened into one data-parallel axis.
        strategy: ``"full_shard"`` cuts parameters, gradients and optimizer state over the ranks; ``"replicate"`` (also
            called ``"no_shard"``) keeps all of them on every rank. Both reduce gradients over all ranks.
        blocks: module classes that are gathered and freed as one unit each, usually the transformer block.
        precision: dtypes of compute and reduction; None computes in the dtype of the parameters.

    Mutates: ``model``; every Parameter object is replaced by a DTensor, so an optimizer built before is useless.
    Collective: makes process groups, compares a hash of names, shapes and dtypes, and broadcasts real weights and buffers.

    Raises:
        ConfigError: an unknown strategy, a class in ``blocks`` that the model does not contain, a model that was sharded
            before, or that differs between ranks; on all ranks alike.
    """
    chosen = _checked(model, strategy, blocks)
    _check_equal(model)
    index, count = data_rank(mesh)
    spec = ShardSpec(strategy=chosen, mesh=mesh, data_rank=index, data_ranks=count)
    _broadcast_real_tensors(model, current().device)
    policy = (precision or Precision()).policy()
    inner = dataclasses.replace(policy, output_dtype=None)  # blocks hand each other what they compute in
    # One path for both strategies: replication is sharding over an axis of one rank, with an all-reduce over the other axis.
    whole = _parallel_mesh(mesh, chosen)
    keep_gathered = chosen == "replicate"
    for block in _blocks_inside_out(model, tuple(blocks)):
        fully_shard(block, mesh=whole, mp_policy=inner, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=whole, mp_policy=policy, reshard_after_forward=False if keep_gathered else None)
    for unit in fsdp_modules(model):
        # Sums, not means: the step divides once by the global weight. gloo has no pre-multiplied sum, hence the second call.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    attach_spec(model, spec)
    return model


def _checked(model: nn.Module, strategy: str, blocks: Sequence[type[nn.Module]]) -> Strategy:
    chosen = _OTHER_NAMES.get(strategy, strategy)
    known = [name for name in get_args(Strategy) if name != "none"]
    if chosen not in known:
        raise ConfigError(f"shard_model: unknown {strategy=}; use one of {', '.join([*known, *_OTHER_NAMES])}")
    if spec_of(model).mesh is not None:
        raise ConfigError(
            f"shard_model: this {type(model).__name__} is sharded already ({spec_of(model).strategy}); call it once"
        )
    for kind in blocks:
        if not any(isinstance(module, kind) for module in model.modules()):
            raise ConfigError(f"shard_model: blocks names {kind.__name__}, but the model has no module of that class")
    return cast(Strategy, chosen)


def _check_equal(model: nn.Module) -> None:
    """Refuse models that differ between ranks before a collective pairs wrong tensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    rows = [f"{name} {tuple(t.shape)} {t.dtype} {t.is_meta} {t.requires_grad}" for name, t in named]
    everyone = all_gather_json(hashlib.sha256("\n".join(rows).encode()).hexdigest())
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ConfigError(
                f"shard_model: rank {rank} has another model than rank 0 (names, shapes, dtypes, devices or requires_grad of "
                "its tensors differ); build it from the same config on all ranks"
            )


def _broadcast_real_tensors(model: nn.Module, device: torch.device) -> None:
    """Move what is not on meta to the device and give every rank rank 0's values."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                if tensor is not None and not tensor.is_meta:
                    # As bytes, since gloo does not know every dtype; of a dense copy, since it ignores strides.
                    dense = tensor.data.to(device).contiguous()
                    dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
                    tensor.data = torch.empty_like(tensor.data, device=device).copy_(dense)


def _parallel_mesh(mesh: DeviceMesh, strategy: Strategy) -> DeviceMesh:
    """The mesh FSDP2 shards over: 1-D with all ranks for ``full_shard``; for ``replicate`` 2-D, the sharded axis of size 1."""
    kind, ranks = current().device.type, mesh.size()
    if strategy == "replicate":
        return init_device_mesh(kind, (ranks, 1), mesh_dim_names=("dp_all", "dp_one"))
    return init_device_mesh(kind, (ranks,), mesh_dim_names=("dp_all",))


def _blocks_inside_out(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Modules of the given classes, nested ones before those that contain them, the root left to the caller."""
    found = [module for module in model.modules() if blocks and isinstance(module, blocks) and module is not model]
    yield from reversed(found)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of ``model`` that FSDP2 treats as units; none for a plain model."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reduce_in_backward(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward reduces gradients over ranks (``now``) or keeps adding to this rank's own.

    Mutates: flags of FSDP2's units. Nothing for a plain model.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_is_last_backward(now)


def discard_backward(model: nn.Module) -> None:
    """Forget a forward or backward that an exception has ended: gathered parameters and half-accumulated gradients.

    FSDP2 keeps the gradients of microbatches that were not reduced yet beside the parameters, where ``zero_grad`` does not
    see them: they would be counted twice by the next step. No public call of torch clears them, hence the private names;
    ``tests/step/test_microbatch.py`` holds them in place.

    Mutates: FSDP2's units. Nothing for a plain model. Collective: none.
    """
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return  # a plain model, or one whose first forward has not begun
    if hasattr(model, "reset_iter_state"):  # torch 2.13 and newer; before, only gradients can be cleared
        model.reset_iter_state()
    for unit in fsdp_modules(model):
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])
        for held in (param for group in groups for param in group.fsdp_params):
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None


def reshard(model: nn.Module) -> None:
    """Put the model back to its shards: after a forward without backward, units are left gathered.

    Mutates: the model's parameters (their sharded form is registered again).
    """
    for unit in fsdp_modules(model):
        unit.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every module's own mode is back and parameters are resharded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)
