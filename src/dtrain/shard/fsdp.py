"""``shard_model``: a plain model laid out over ranks, by one path through FSDP2 for every strategy.

Methods other than ``forward`` that compute with parameters: declared by name, they gather and free them as it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, NoReturn, cast, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain import spans
from dtrain.dist.collectives import raise_if_any_failed
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import axis_size, data_rank, data_shape, get_mesh, tp_rank
from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.buffers import attach_buffer_sync, broadcast_params_and_buffers, check_same_model
from dtrain.shard.comm_config import CommConfig, apply_comm_config, check_comm_config
from dtrain.shard.fsdp2_private import init_root, is_in_forward, units_of
from dtrain.shard.grad_sync import attach_grad_sync
from dtrain.shard.meta_writes import record_write_counts
from dtrain.shard.precision import Precision, cast_buffers_, keeps_dtype, separate_units
from dtrain.shard.tensor_parallel import TensorParallelPlan, apply_tp_plan, format_tp_plan, resolve_tp_plan
from dtrain.shard.wrapping import Blocks, IgnoredParams, WrapPlan, plan_wrapping
from dtrain.state import Accumulate, Buffers, ShardSpec, Strategy, attach_spec, get_spec

_STRATEGY_ALIASES = {"no_shard": "replicate"}


@spans.timed("setup")
def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate", "no_shard"] = "full_shard",
    blocks: Blocks = (),
    precision: Precision | None = None,
    accumulate: Accumulate = "local",
    buffers: Buffers = "broadcast",
    sync: bool = True,
    forward_methods: Sequence[str] = (),
    ignored_params: IgnoredParams = (),
    tp_plan: TensorParallelPlan | None = None,
    offload: Literal["params"] | None = None,
    comm_config: CommConfig | None = None,
) -> nn.Module:
    """Lay ``model`` out over the data-parallel ranks of ``mesh`` and return it.

    Args:
        model: a plain module, on the meta device (then call ``materialize``), or with real weights, of which rank 0's
            are taken.
        mesh: from ``build_mesh``.
        strategy: ``"full_shard"`` cuts parameters, gradients and optimizer state over all ranks and gathers each unit for its
            forward and again for its backward; ``"shard_grad_op"`` cuts the same, but keeps gathered parameters from a
            step's first forward to its last backward; ``"hybrid_shard"`` cuts over the mesh's ``dp_shard`` and replicates
            over its ``dp_replicate``; ``"replicate"`` (also called ``"no_shard"``) keeps everything whole on every rank.
            All but ``hybrid_shard`` take all axes of the mesh but ``tp`` as one. Every strategy sums gradients over all ranks.
        blocks: what is gathered and freed as one unit each, usually the transformer block: module classes, names (``*`` for
            text without a dot), or a function of (name, module). What lies in no block is one unit with the model itself.
        precision: dtypes of compute, reduction and buffers; None computes in the dtypes that are stored. BatchNorm and the like
            become units of their own where it casts parameters.
        accumulate: ``"local"`` adds up a step's gradients on each rank, at full size and in at least float32, and reduces
            them once; ``"sharded"`` reduces after every microbatch and keeps shards only. The all-reduce of ``hybrid_shard``
            and ``replicate`` waits for the last microbatch in both.
        buffers: persistent buffers that a forward changes (BatchNorm's statistics) are, after each step's backward, those of
            rank 0 (``"broadcast"``), their mean over ranks (``"mean"``; integers: rank 0's), or each rank's own (``"local"``).
        sync: give all ranks rank 0's real weights and buffers. False is for ranks that are known to hold equal ones.
        forward_methods: methods that compute with parameters besides ``forward``, by name (``"encode"``, ``"decoder.generate"``), of
            the model or of a block. All ranks must call them alike, as they do ``forward``.
        ignored_params: parameters that stay whole on every rank, by name or as a function of (name, parameter); their gradients
            are summed by ``microbatch_step``, once a step. Scalars and parameters without elements always do. ``precision``
            does not cast them.
        tp_plan: how layers are cut over the mesh's ``tp`` axis: names of modules (as in ``blocks``) -> ``ColwiseParallel()`` and
            the other styles of ``torch.distributed.tensor.parallel``, applied in this order. Parameters that it does not name
            are whole along ``tp``, and so are their gradients: the activations that they see must be equal there.
        offload: ``"params"`` keeps shards, their gradients and so the optimizer's state in host memory, where the optimizer
            then computes; units come to the device to be gathered. Pinned where there is an accelerator. Parameters that are
            left out stay on the device. A model made on the meta device never lies on it whole.
        comm_config: how far ahead units are gathered, and through what; None is FSDP2's own way.

    Parameters that are tied stay tied; across blocks, the modules that own them become a unit of their own. A parameter inside
    a unit may be unused on some ranks. Units must run in the same order on all ranks; under ``"replicate"`` a rank may skip
    units.

    Mutates: ``model``; every Parameter object is replaced by a DTensor, so an optimizer built before is useless.
    Collective: makes process groups (once for each strategy), compares a hash of names, shapes, dtypes and options, and
    broadcasts real weights and buffers.

    Raises:
        ConfigError: an unknown option, an entry of ``blocks``, ``forward_methods``, ``ignored_params`` or ``tp_plan`` that fits nothing, a
            model that was sharded before, or that differs between ranks, a layer that cannot be cut as planned; on all alike.
        PeerError: so on another rank.
    """
    error: Exception | None = None
    try:
        _check_types(model, mesh, precision)
        chosen = _check_options(model, mesh, strategy, accumulate, buffers)
        layout = plan_wrapping(model, blocks, ignored_params, separate_units=separate_units(model, precision))
        check_forward_methods(model, forward_methods, layout)
        planned = resolve_tp_plan(model, tp_plan, mesh)
        sending = check_comm_config(comm_config, mesh.device_type)
        if offload not in (None, "params"):
            raise ConfigError(f"shard_model: unknown {offload=}; use 'params' or None")
    except Exception as problem:  # noqa: BLE001  # predicates are the user's; whatever they raise, all ranks hear of it here
        error = problem
    raise_if_any_failed(error, caller="shard_model")
    options = [
        chosen,
        accumulate,
        buffers,
        sync,
        list(forward_methods),
        repr(precision),
        list(mesh.shape),
        offload,
        repr(sending),
    ]
    check_same_model(model, layout, [*options, *format_tp_plan(planned)])
    record_write_counts(model)
    cast_buffers_(model, precision)
    broadcast_params_and_buffers(model, get_dist_info().device, sync=sync)
    parallel = apply_tp_plan(model, planned, _fsdp_mesh(mesh, chosen), layout.ignored_params)
    keep = chosen in ("shard_grad_op", "replicate")
    _apply_fully_shard(
        model, parallel, layout, (precision or Precision()), keep_unsharded=keep, offload=_offload_policy(offload)
    )
    apply_comm_config(model, layout, sending)
    index, count = data_rank(mesh)
    spec = ShardSpec(
        strategy=chosen,
        mesh=mesh,
        data_rank=index,
        data_ranks=count,
        ranks_per_batch=mesh.size() // count,
        counts_in_loss=tp_rank(mesh) == 0,
        accumulate=accumulate,
        buffers=buffers,
        ignored_params=tuple(layout.ignored_params),
        compute_device=get_dist_info().device if offload else None,
    )
    attach_spec(model, spec)
    attach_grad_sync(model, spec)
    attach_buffer_sync(model, spec)
    register_forward_methods(model, forward_methods)
    init_root(model)
    _forbid_deepcopy(model)
    return model


def _check_types(model: object, mesh: object, precision: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard_model: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"shard_model: this model is wrapped in {type(model).__name__}, which reduces gradients too; pass the model inside "
            "it"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"shard_model: mesh must be a DeviceMesh, got {type(mesh).__name__}; make one with dt.build_mesh")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"shard_model: precision must be a Precision or None, got {precision!r}; as in dt.Precision(param='bf16')"
        )


def _check_options(model: nn.Module, mesh: DeviceMesh, strategy: str, accumulate: str, buffers: str) -> Strategy:
    chosen = _STRATEGY_ALIASES.get(strategy, strategy) if isinstance(strategy, str) else strategy
    known = [name for name in get_args(Strategy) if name != "none"]
    if chosen not in known:
        raise ConfigError(f"shard_model: unknown {strategy=}; use one of {', '.join([*known, *_STRATEGY_ALIASES])}")
    for name, value, allowed in (("accumulate", accumulate, get_args(Accumulate)), ("buffers", buffers, get_args(Buffers))):
        if value not in allowed:
            raise ConfigError(f"shard_model: unknown {name}={value!r}; use one of {', '.join(allowed)}")
    if get_spec(model).mesh is not None:
        raise ConfigError(
            f"shard_model: this {type(model).__name__} is sharded already ({get_spec(model).strategy}); call it once"
        )
    inside = next((type(m).__name__ for m in model.modules() if get_spec(m).mesh is not None), None)
    if inside is not None:
        raise ConfigError(f"shard_model: a {inside} inside this model is sharded already; shard the whole model once")
    if any(is_dtensor(param) for param in model.parameters()):
        raise ConfigError(
            f"shard_model: the parameters of this {type(model).__name__} lie on a mesh already; shard the whole model once"
        )
    if chosen == "hybrid_shard" and (len(data_shape(mesh)) != 2 or mesh.size(0) == 1):
        raise ConfigError(
            f"shard_model: hybrid_shard needs a mesh of two axes with dp_replicate > 1, got shape {list(mesh.shape)}; "
            "e.g. dt.build_mesh(dp_replicate=2, dp_shard=-1)"
        )
    if mesh.device_type == "cpu" and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ConfigError("shard_model: SyncBatchNorm runs on GPUs only; on the CPU use BatchNorm with buffers='mean'")
    return cast(Strategy, chosen)


def _fsdp_mesh(mesh: DeviceMesh, strategy: Strategy) -> DeviceMesh:
    """The mesh FSDP2 shards over: all ranks in one axis; with a replicated axis before it, 2-D; and ``tp`` as it is.

    ``replicate`` is sharding over an axis of one rank, so it takes the same path as the others. Ranks along ``cp`` hold other
    parts of one sequence, and gradients are summed over them as over other samples.
    """
    tensor = axis_size(mesh, "tp")
    if strategy == "hybrid_shard" and len(mesh.shape) == 2:
        return mesh
    if strategy == "hybrid_shard":
        degrees = {"dp_replicate": mesh.size(0), "dp_shard": mesh.size() // mesh.size(0) // tensor}
    elif strategy == "replicate":
        degrees = {"dp_all": mesh.size() // tensor, "dp_one": 1}
    else:
        degrees = {"dp_all": mesh.size() // tensor}
    return get_mesh({**degrees, "tp": tensor} if tensor > 1 else degrees)


def _offload_policy(offload: str | None) -> OffloadPolicy:
    return OffloadPolicy() if offload is None else CPUOffloadPolicy(pin_memory=get_dist_info().device.type != "cpu")


def _stored_dtype(modules: Sequence[nn.Module], taken: set[int]) -> torch.dtype:
    """Return the dtype of a unit's parameters, of the trainable ones if there are any; ``taken`` belong to other units."""
    own = [param for module in modules for param in module.parameters() if id(param) not in taken]
    trainable = [param for param in own if param.requires_grad]
    return next((param.dtype for param in (*trainable, *own)), torch.float32)


def _apply_fully_shard(
    model: nn.Module, mesh: DeviceMesh, layout: WrapPlan, precision: Precision, *, keep_unsharded: bool, offload: OffloadPolicy
) -> None:
    """Make FSDP2 units of the layout, inside out. ``keep_unsharded``: gathered parameters stay after a forward."""
    whole = set(cast("list[nn.Parameter]", list(layout.ignored_params.values())))
    cut = partial(fully_shard, mesh=mesh, ignored_params=whole or None, offload_policy=offload)
    taken = {id(param) for param in whole}
    for modules in layout.units:
        stored = _stored_dtype(modules, taken)
        policy = precision.policy(stored)
        reshard: bool | None = not keep_unsharded
        if modules[0] is model:
            reshard = (
                False if keep_unsharded else None
            )  # needed again right after its forward: FSDP2's default (None) keeps them
        elif keeps_dtype(modules[0]):
            policy = precision.stored_dtype_policy(stored)
        else:
            policy = dataclasses.replace(policy, output_dtype=None)  # blocks hand each other the dtype that they compute in
        cut(list(modules), mp_policy=policy, reshard_after_forward=reshard)
        taken.update(id(param) for module in modules for param in module.parameters())
    for unit in units_of(model):
        # Sums, not means: the step divides once by the global weight. gloo has no pre-multiplied sum, hence the second call.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    device = get_dist_info().device
    with torch.no_grad():
        for param in layout.ignored_params.values():
            if not param.is_meta and param.device != device:
                param.data = param.data.to(device)


def _forbid_deepcopy(model: nn.Module) -> None:
    """Have ``copy.deepcopy`` of a unit of ``model`` say what to do instead. Mutates: the classes that FSDP2 has made."""
    for unit in units_of(model):
        setattr(type(unit), "__deepcopy__", _raise_on_deepcopy)  # noqa: B010  # FSDP2 has put one there that says less


def _raise_on_deepcopy(module: nn.Module, memo: object) -> NoReturn:
    raise ConfigError(
        f"deepcopy: this {type(module).__name__.removeprefix('FSDP')} is sharded, and its units cannot be copied. Build a "
        "second model, shard it in the same way and call second.load_state_dict(first.state_dict()), or copy before shard_model"
    )


def check_forward_methods(model: nn.Module, forward_methods: Sequence[str], layout: WrapPlan) -> None:
    """Refuse methods that are not there, or whose module is no unit.

    Raises:
        ConfigError: so.
    """
    if (
        isinstance(forward_methods, str)
        or not isinstance(forward_methods, Sequence)
        or not all(isinstance(path, str) for path in forward_methods)
    ):
        example = forward_methods if isinstance(forward_methods, str) else "encode"
        raise ConfigError(f"shard_model: methods is a sequence of names, got {forward_methods!r}; e.g. methods=({example!r},)")
    units = {id(module) for modules in layout.units for module in modules}
    for path in forward_methods:
        owner, name = _resolve_method(model, path)
        if not callable(getattr(owner, name, None)):
            raise ConfigError(f"shard_model: methods names {path!r}, but {type(owner).__name__} has no method {name!r}")
        if id(owner) not in units:
            block = path.rpartition(".")[0]
            raise ConfigError(
                f"shard_model: methods names {path!r}, but {block!r} is no unit of its own; add {block!r} to blocks"
            )


def register_forward_methods(model: nn.Module, forward_methods: Sequence[str]) -> None:
    """Gather parameters around these methods. Mutates: the modules that own them (one attribute each)."""
    for path in forward_methods:
        owner, name = _resolve_method(model, path)
        assert isinstance(owner, FSDPModule)
        plain = getattr(owner, name)
        register_fsdp_forward_method(owner, name)
        setattr(owner, name, MethodType(_use_plain_inside_forward(plain, getattr(owner, name)), owner))


def _use_plain_inside_forward(plain: Any, gathering: Any) -> Any:
    """``gathering``, but ``plain`` within a forward of the module, which would otherwise lose its parameters in the middle."""

    def method(owner: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return (plain if is_in_forward(owner) else gathering)(*args, **kwargs)

    return method


def _resolve_method(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, name = path.rpartition(".")
    if not prefix:
        return model, name
    found = dict(modules_by_fqn(model, include_duplicates=True)).get(prefix)
    if found is None:
        raise ConfigError(f"shard_model: methods names {path!r}, but the model has no module {prefix!r}")
    return found, name
