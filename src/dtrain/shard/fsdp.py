"""Shard a plain model over ranks: ``shard_model``, with FSDP2, or with plain parameters under ``replicate``.

Methods other than ``forward`` that compute with parameters (``forward_methods``) unshard and reshard their module, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Literal, NoReturn, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain import spans
from dtrain.arguments import check_choice, check_int, explain_arguments, explain_fields
from dtrain.dist.collectives import all_gather_json, raise_if_any_failed
from dtrain.dist.dtensor import is_dtensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import axis_size, data_rank, data_shape, get_mesh, tp_rank
from dtrain.dist.reconfigure import is_joining
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn
from dtrain.init_checks import check_kinds
from dtrain.shard.buffers import attach_buffer_sync, check_buffer_choices
from dtrain.shard.fsdp2_private import init_root, run_modules_separately, share_attributes, units_of
from dtrain.shard.grad_sync import attach_grad_sync
from dtrain.shard.materialize import record_write_counts
from dtrain.shard.model_parallel import TensorParallelPlan, apply_tp_plan, format_tp_plan, resolve_tp_plan
from dtrain.shard.params import ParamObjects, check_param_objects
from dtrain.shard.precision import (
    DtypePlan,
    Precision,
    cast_at_borders_,
    cast_buffers_,
    module_dtypes,
    plan_dtypes,
    separate_units,
)
from dtrain.shard.replicate import make_bucket_reducer
from dtrain.shard.spec import Accumulate, Buffers, ShardSpec, Strategy, attach_spec, get_spec
from dtrain.shard.unshard import generate_in_lockstep, register_forward_methods
from dtrain.shard.wrapping import Blocks, IgnoredParams, WrapPlan, plan_wrapping
from dtrain.typing import Plain

ReduceGroup = Literal["shared", "own"]


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """Prefetching and process groups of a sharded model's collectives. Results do not depend on the configuration.

    FSDP2 frees memory in the order of the computation, so at most the prefetched units are unsharded besides the current unit.

    Args:
        forward_prefetch: units gathered ahead in forward. 0 starts each gather when the unit is called, which on a GPU is well
            before the computation. Raise the number if the host does not run ahead.
        backward_prefetch: units gathered ahead in backward. 1 is FSDP2's default, in reverse order of forward. 0 needs the
            least memory and waits for each unit. Larger numbers follow the order of modules in the model.
        reduce_group: ``"own"`` creates a process group for gradient reductions, which then overlap with gathers (torch 2.13 and
            newer).
        reduce_buffers: gradient buffers in flight; more than 1 keeps backward from waiting for the last reduction (torch 2.13
            and newer).
        symmetric_memory: if True, gather through NCCL's symmetric memory (CUDA only).

    Example:
        comm_config = dt.shard.CommConfig(backward_prefetch=2, reduce_group="own")
        model = dt.shard_model(model, mesh, blocks=(Block,), comm_config=comm_config)

    Raises:
        ConfigError: a field has an invalid value.
    """

    forward_prefetch: int = 0
    backward_prefetch: int = 1
    reduce_group: ReduceGroup = "shared"
    reduce_buffers: int = 1
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("forward_prefetch", 0), ("backward_prefetch", 0), ("reduce_buffers", 1)):
            check_int("CommConfig", name, getattr(self, name), minimum=least)
        check_choice("CommConfig", "reduce_group", self.reduce_group, get_args(ReduceGroup))
        check_choice("CommConfig", "symmetric_memory", self.symmetric_memory, (True, False))
        if self.symmetric_memory and self.reduce_buffers > 1:
            raise ConfigError("CommConfig: symmetric_memory has one buffer per reduction. Leave reduce_buffers at 1.")


@explain_arguments
@spans.timed("shard")
def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate", "no_shard"] = "full_shard",
    blocks: Blocks = (),
    precision: Precision | None = None,
    accumulate: Accumulate = "local",
    buffers: Buffers | Mapping[str, Buffers] | None = None,
    sync: bool = True,
    forward_methods: Sequence[str] = (),
    ignored_params: IgnoredParams = (),
    tp_plan: TensorParallelPlan | None = None,
    offload: Literal["params"] | None = None,
    comm_config: CommConfig | None = None,
) -> nn.Module:
    """Shard ``model`` over the data-parallel ranks of ``mesh`` and return it.

    Args:
        model: plain module with real weights, of which rank 0's are used, or on the meta device (call ``materialize``
            afterwards).
        mesh: device mesh from ``build_mesh``.
        strategy: ``"full_shard"`` shards parameters, gradients and optimizer state over all ranks, and unshards each unit in
            its forward and backward. ``"shard_grad_op"`` keeps parameters unsharded from the first forward of a step to its
            last backward. ``"hybrid_shard"`` shards over ``dp_shard`` and replicates over ``dp_replicate``. ``"replicate"``
            (alias ``"no_shard"``) keeps full copies on every rank; see below. All strategies but ``hybrid_shard`` flatten the
            axes of the mesh except ``tp``. All strategies sum gradients over all ranks.
        blocks: modules that become units, usually the transformer block: module classes, names (``*`` matches text without a
            dot) or a function of (name, module). The remaining parameters form one unit with the model itself.
        precision: dtypes of compute, reduction and buffers; None computes in the stored dtypes. If ``precision`` casts
            parameters, BatchNorm and similar modules become separate units. Modules of ``overrides`` do, too.
        accumulate: ``"local"`` adds up full-size gradients on each rank, in at least float32, and reduces once a step;
            ``"sharded"`` reduces after every microbatch and stores shards only. ``hybrid_shard`` and ``replicate`` all-reduce
            after the last microbatch in both cases.
        buffers: synchronization of buffers that a forward changes, after each backward: ``"broadcast"`` from the first rank
            with samples; ``"mean"`` over these ranks (whole numbers: broadcast); ``"sum"`` for counters, the value at the start
            of the step plus what all ranks have added; ``"own"`` for none. A mapping chooses by name, by the first pattern that
            matches (``{"**.load": "sum", "**": "mean"}``). Without a choice, persistent buffers and counters are broadcast,
            and others are each rank's own. A warning in the first steps names a buffer that ranks change differently in place.
        sync: if True, broadcast rank 0's weights and buffers; pass False only if all ranks hold equal values.
        forward_methods: names of further methods that compute with parameters (``"encode"``, ``"decoder.generate"``), of the
            model or of a block. All ranks must call the methods in the same order.
        ignored_params: parameters that every rank keeps unsharded, by name or as a function of (name, parameter);
            ``microbatch_step`` sums their gradients once a step. ``precision`` does not cast ignored parameters. Scalars and
            empty parameters are always ignored.
        tp_plan: module names (as in ``blocks``) -> parallel styles such as ``ColwiseParallel()`` from
            ``torch.distributed.tensor.parallel``, applied in order over the ``tp`` axis. Other parameters are replicated along
            ``tp``, so their input activations must be equal on all ranks along ``tp``. ``"auto"`` takes the plan of a model of
            transformers, if torch has its styles.
        offload: ``"params"`` stores shards, gradients and optimizer state in host memory (pinned if there is an accelerator),
            and the optimizer runs on the CPU. Units are copied to the device to be gathered. Ignored parameters stay on the
            device.
        comm_config: prefetching and process groups of FSDP2's collectives; None uses FSDP2's defaults.

    Tied parameters stay tied. The modules that own a parameter tied across blocks form a separate unit. A parameter inside a
    unit may be unused on some ranks. Units must run in the same order on all ranks, except under ``"replicate"``.

    Under ``"replicate"``, modules and parameters stay plain: copies, ``torch.func`` and gradients of gradients work, and a copy
    is on no mesh. A step sums gradients in flat buckets during its last backward. A backward outside of a step is local. FSDP2
    replicates the model instead if ``precision`` sets ``param``, ``output`` or ``overrides``, or with ``tp_plan`` or
    ``offload``.

    Mutates: ``model``; FSDP2 replaces every Parameter object by a DTensor, so build the optimizer afterwards.
    Collective: makes process groups (once for each strategy), compares a hash of names, shapes, dtypes and options, and
    broadcasts real weights and buffers.

    Example:
        mesh = dt.build_mesh()
        model = dt.shard_model(model, mesh, blocks=(Block,), precision=dt.Precision.preset("DEFAULT"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    Raises:
        ConfigError: an invalid option, an entry of ``blocks``, ``forward_methods``, ``ignored_params`` or ``tp_plan`` without a
            match, a model that is sharded already or differs between ranks, a parameter or an embedding that would train
            otherwise than in one process, or a layer that ``tp_plan`` cannot shard. All ranks raise.
        PeerError: another rank raised.
    """
    error: Exception | None = None
    try:
        resolved = _check_shardable(model, mesh, precision, strategy, accumulate)
        check_buffer_choices(model, buffers)
        check_kinds(parameters_by_fqn(model)[0], "shard_model")
        precision = precision or Precision()
        dtypes = module_dtypes(model, precision)
        separate = separate_units(model, dtypes)
        wrap_plan = plan_wrapping(model, blocks, ignored_params, separate_units=separate, forward_methods=forward_methods)
        planned_modules = resolve_tp_plan(model, tp_plan, mesh)
        resolved_comm = check_comm_config(comm_config, mesh.device_type)
        check_choice("shard_model", "offload", offload, ("params", None))
        # Casts in forward, offloading and parallel styles need FSDP2's copies of parameters.
        casts = precision.param or precision.output or precision.overrides
        plain = resolved == "replicate" and not (casts or offload or planned_modules)
        check_param_objects(model, whole=plain, ignored_params=wrap_plan.ignored_params, ranks=mesh.size())
    # The predicates are user code. raise_if_any_failed reports any exception on all ranks.
    except Exception as problem:  # noqa: BLE001
        error = problem
    raise_if_any_failed(error, caller="shard_model")
    options = [resolved, accumulate, buffers, sync, list(forward_methods), repr(precision), list(mesh.shape), offload]
    check_same_model(model, wrap_plan, [*options, repr(resolved_comm), *format_tp_plan(planned_modules)])
    record_write_counts(model)
    objects = ParamObjects(model)
    assert precision is not None
    cast_buffers_(model, precision, dtypes)
    broadcast_params_and_buffers(model, get_dist_info().device, sync=sync)
    fsdp_mesh = apply_tp_plan(model, planned_modules, _fsdp_mesh(mesh, resolved), wrap_plan.ignored_params)
    if not plain:
        dtype_plan = plan_dtypes(model, precision, dtypes, wrap_plan)
        _apply_fully_shard(model, fsdp_mesh, wrap_plan, dtype_plan, resolved, offload)
        cast_at_borders_(dtype_plan)
        _apply_comm_config(model, wrap_plan, resolved_comm)
        register_forward_methods(wrap_plan.forward_methods)
        share_attributes(model)
        generate_in_lockstep(model, True)
    objects.carry_over_()
    index, count = data_rank(mesh)
    spec = ShardSpec(
        strategy=resolved,
        mesh=mesh,
        data_rank=index,
        data_ranks=count,
        ranks_per_batch=mesh.size() // count,
        counts_in_loss=tp_rank(mesh) == 0,
        accumulate=accumulate,
        buffers=buffers,
        ignored_params=() if plain else tuple(wrap_plan.ignored_params),
        plain_params=plain,
        compute_device=get_dist_info().device if offload else None,
    )
    reducer = make_bucket_reducer(model, fsdp_mesh.get_group("dp_all"), wrap_plan, precision) if plain else None
    attach_spec(model, spec)
    attach_grad_sync(model, spec, reducer)
    attach_buffer_sync(model, spec)
    init_root(model)
    return model


def _check_shardable(model: object, mesh: object, precision: object, strategy: str, accumulate: str) -> Strategy:
    """Return the strategy without an alias, if the arguments are valid for a model that is not sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard_model: model must be a torch.nn.Module, got {type(model).__name__}. Pass the whole model.")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"shard_model: model must not be wrapped in {type(model).__name__}, which also reduces gradients. "
            "Pass the inner model."
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"shard_model: mesh must be a DeviceMesh, got {type(mesh).__name__}. Use dt.build_mesh.")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"shard_model: precision must be a Precision or None, got {precision!r}. "
            "Pass for example dt.Precision(param='bf16')."
        )
    strategies = [*(name for name in get_args(Strategy) if name != "none"), "no_shard"]
    resolved = "replicate" if check_choice("shard_model", "strategy", strategy, strategies) == "no_shard" else strategy
    check_choice("shard_model", "accumulate", accumulate, get_args(Accumulate))
    if get_spec(model).mesh is not None:
        raise ConfigError(
            f"shard_model: the {type(model).__name__} is sharded already ({get_spec(model).strategy}). Call shard_model once."
        )
    inside = next((type(m).__name__ for m in model.modules() if get_spec(m).mesh is not None), None)
    if inside is not None:
        raise ConfigError(f"shard_model: a {inside} inside the model is sharded already. Shard the whole model once.")
    if any(is_dtensor(param) for param in model.parameters()):
        raise ConfigError(
            f"shard_model: the parameters of the {type(model).__name__} are DTensors already. Shard the whole model once."
        )
    if resolved == "hybrid_shard" and (len(data_shape(mesh)) != 2 or mesh.size(0) == 1):
        raise ConfigError(
            f"shard_model: hybrid_shard needs a mesh of two axes with dp_replicate > 1, got shape {list(mesh.shape)}. "
            "Pass for example dt.build_mesh(dp_replicate=2, dp_shard=-1)."
        )
    if mesh.device_type == "cpu" and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ConfigError("shard_model: SyncBatchNorm runs on GPUs only. On the CPU use BatchNorm with buffers='mean'.")
    return cast(Strategy, resolved)


def _fsdp_mesh(mesh: DeviceMesh, strategy: Strategy) -> DeviceMesh:
    """Return the mesh for FSDP2: all data ranks in one axis, after a replicated axis if there is one, and ``tp``.

    ``replicate`` shards over an axis of size one, so that all strategies use one code path. Ranks along ``cp`` hold parts of
    one sequence, and their gradients are summed like gradients of other samples.
    """
    tensor = axis_size(mesh, "tp")
    if strategy == "hybrid_shard" and len(mesh.shape) == 2:
        return mesh
    degrees = {"dp_all": mesh.size() // tensor}
    if strategy == "hybrid_shard":
        degrees = {"dp_replicate": mesh.size(0), "dp_shard": mesh.size() // mesh.size(0) // tensor}
    elif strategy == "replicate":
        degrees["dp_one"] = 1
    return get_mesh({**degrees, "tp": tensor} if tensor > 1 else degrees)


def _apply_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    wrap_plan: WrapPlan,
    dtype_plan: DtypePlan,
    strategy: Strategy,
    offload: str | None,
) -> None:
    """Call ``fully_shard`` for each unit, innermost first."""
    device = get_dist_info().device
    keep_unsharded = strategy in ("shard_grad_op", "replicate")
    offload_policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
    ignored = set(cast("list[nn.Parameter]", list(wrap_plan.ignored_params.values())))
    shard = partial(fully_shard, mesh=mesh, ignored_params=ignored or None, offload_policy=offload_policy)
    assigned = {id(param) for param in ignored}
    for weight in model.parameters():
        # FSDP2 takes no transposed weights and no memory format of images. The values stay.
        if id(weight) not in assigned and not is_dtensor(weight) and not weight.is_contiguous():
            weight.data = weight.data.contiguous()
    for modules, precision in zip(wrap_plan.units, dtype_plan.units, strict=True):
        own = [param for module in modules for param in module.parameters() if id(param) not in assigned]
        # The dtype of the trainable parameters, if there are any.
        stored = next((param.dtype for param in (*(p for p in own if p.requires_grad), *own)), torch.float32)
        policy = precision._policy(stored)
        reshard: bool | None = not keep_unsharded
        if modules[0] is model:
            # Backward needs the root's parameters right after forward. FSDP2's default (None) keeps the root unsharded.
            reshard = False if keep_unsharded else None
        else:
            # Blocks return tensors of their compute dtype.
            policy = replace(policy, output_dtype=None)
        shard(list(modules), mp_policy=policy, reshard_after_forward=reshard)
        run_modules_separately(modules[0])
        assigned.update(id(param) for module in modules for param in module.parameters())
    for unit in units_of(model):
        # The step divides the summed gradients once by the global weight. gloo has no premultiplied sum, so force plain sums.
        if mesh.size() > 1:
            # With a factor, a single rank divides all gradients into new tensors, even by 1.
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # This method replaces a method of FSDP2 with a less helpful error.
        setattr(type(unit), "__deepcopy__", _raise_on_deepcopy)  # noqa: B010
    with torch.no_grad():
        for whole in wrap_plan.ignored_params.values():
            if not whole.is_meta and whole.device != device:
                whole.data = whole.data.to(device)


def _raise_on_deepcopy(module: nn.Module, memo: object) -> NoReturn:
    raise ConfigError(
        f"deepcopy: the {type(module).__name__.removeprefix('FSDP')} is sharded, and sharded units cannot be copied. Build and "
        "shard a second model, and call second.load_state_dict(first.state_dict()), or copy before shard_model."
    )


def check_comm_config(comm_config: object, device_type: str) -> CommConfig:
    """Return ``comm_config``, or the default for None.

    Raises:
        ConfigError: a value of another type, or an option that this torch or device does not support.
    """
    if comm_config is None:
        return CommConfig()
    if not isinstance(comm_config, CommConfig):
        raise ConfigError(
            f"shard_model: comm_config must be a CommConfig or None, got {comm_config!r}. "
            "Pass for example dt.shard.CommConfig(backward_prefetch=2)."
        )
    if comm_config.symmetric_memory and device_type != "cuda":
        raise ConfigError(f"shard_model: symmetric_memory needs CUDA, got a {device_type} mesh. Leave symmetric_memory out.")
    for used, method, name, version in (
        (comm_config.reduce_group == "own", "set_separate_reduce_scatter_group", "reduce_group='own'", "2.13"),
        (comm_config.reduce_buffers > 1, "set_reduce_scatter_max_input_buffers", "reduce_buffers", "2.13"),
        (comm_config.symmetric_memory, "set_symm_mem_for_comm", "symmetric_memory", "2.12"),
    ):
        if used and not hasattr(FSDPModule, method):
            raise ConfigError(f"shard_model: {name} needs torch {version}, got {torch.__version__}. Leave {name} out.")
    return comm_config


def _apply_comm_config(model: nn.Module, wrap_plan: WrapPlan, comm_config: CommConfig) -> None:
    """Apply ``comm_config`` to the units of a sharded model.

    Mutates: FSDP2's units. Collective: with ``reduce_group="own"``, makes a process group.
    """
    assert isinstance(model, FSDPModule)
    # The first module of each unit in the order of the model, which is the order of most forwards.
    unit_of = {id(module): index for index, modules in enumerate(wrap_plan.units) for module in modules}
    first: dict[int, FSDPModule] = {}
    for module in model.modules():
        if id(module) in unit_of and isinstance(module, FSDPModule):
            first.setdefault(unit_of[id(module)], module)
    units = list(first.values())
    forward, backward = comm_config.forward_prefetch, comm_config.backward_prefetch
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward == 0:
            # The unit itself is unsharded already. An empty list would select FSDP2's default.
            unit.set_modules_to_backward_prefetch([unit])
        elif backward > 1:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1] or [unit])
        if comm_config.symmetric_memory:
            unit.set_symm_mem_for_comm()
    if comm_config.reduce_group == "own":
        model.set_separate_reduce_scatter_group()
    if comm_config.reduce_buffers > 1:
        model.set_reduce_scatter_max_input_buffers(comm_config.reduce_buffers)


def check_same_model(model: nn.Module, wrap_plan: WrapPlan, options: Sequence[object]) -> None:
    """Check that model and options are equal on all ranks, before a collective pairs wrong tensors.

    Collective: an exchange of one hash, and of the hashed rows if hashes differ.

    Raises:
        ConfigError: ranks differ; on all ranks, with the first row that differs.
    """
    names = {id(module): name or "model" for name, module in modules_by_fqn(model)}
    rows = [f"option {option}" for option in options]
    rows += [f"unit {[names.get(id(module), 'model') for module in modules]}" for modules in wrap_plan.units]
    rows.append(f"ignored {sorted(wrap_plan.ignored_params)}")
    tensors = {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}
    for name, tensor in tensors.items():
        kind = "meta " if tensor.is_meta else ""
        kind += "frozen " if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        rows.append(f"{name} {list(tensor.shape)} {kind}{str(tensor.dtype).removeprefix('torch.')}")
    hashes = all_gather_json(hashlib.sha256("\n".join(rows).encode()).hexdigest())
    if len(set(cast("list[str]", hashes))) == 1:
        return
    rows_of_ranks = cast("list[list[str]]", all_gather_json(cast(Plain, rows)))
    for rank, other_rows in enumerate(rows_of_ranks):
        for expected, actual in zip_longest(rows_of_ranks[0], other_rows, fillvalue="nothing"):
            if expected != actual:
                raise ConfigError(
                    f"shard_model: the model of rank {rank} must equal the model of rank 0 ({expected!r}), got {actual!r}. "
                    "Build the model from the same config, with the same options, on all ranks."
                )


def broadcast_params_and_buffers(model: nn.Module, device: torch.device, *, sync: bool) -> None:
    """Move real tensors to ``device`` and, with ``sync``, broadcast rank 0's values.

    Mutates: parameters and buffers. Collective: with ``sync``, one broadcast per tensor.
    """
    # A rank that takes the place of a dead one loads the values of the others.
    sync = sync and not is_joining()
    for tensor in [*parameters_by_fqn(model)[0].values(), *buffers_by_fqn(model).values()]:
        if tensor.is_meta:
            continue
        if not sync:
            tensor.data = tensor.data.to(device)
            continue
        # gloo does not support every dtype and ignores strides, so broadcast the bytes of a dense copy.
        dense = tensor.data.to(device).contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        tensor.data = torch.empty_like(tensor.data, device=device).copy_(dense)
