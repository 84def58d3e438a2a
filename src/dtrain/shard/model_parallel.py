"""Split a model over the ranks of one batch: layers over the ``tp`` axis, sequences over the ``cp`` axis.

``tp_plan=`` shards layers with torch's parallel styles, before FSDP2 shards each rank's part. ``ring_attention`` runs torch's
context parallelism, extended to the CPU, and refused where it would be wrong. The ring uses private names of torch's prototype.
``tests/shard/test_context_parallel.py`` compares gradients with those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.dist.dtensor import chunks_per_dim, describe_placement, is_dtensor, replicate, to_local
from dtrain.dist.mesh import MODEL_AXES, axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn, unwrap_module
from dtrain.shard.params import param_places

# A step of a plain model imports this module, and an import of DTensors takes half as long as that of torch.
if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

TensorParallelPlan: TypeAlias = "Mapping[str, ParallelStyle] | Literal['auto']"
"""Module name patterns (as in ``blocks``; ``""`` is the model itself) -> parallel styles, applied in this order; or ``"auto"``,
the plan of a model of transformers."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Dim of positions in the tensors of ``scaled_dot_product_attention``.
_SEQ_DIM = 2
# Parts of a layer with LoRA of peft that a plan covers.
_LORA_PARTS = {"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
# Parts of torch's errors about attention without a ring.
_REFUSALS = ("Load balancing requires", "No available kernel", "No viable backend", "attn_bias is not supported")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedModule:
    """One module of a tensor-parallel plan."""

    name: str
    module: nn.Module
    style: ParallelStyle


def resolve_tp_plan(model: nn.Module, plan: TensorParallelPlan | None, mesh: DeviceMesh) -> list[PlannedModule]:
    """Return the modules that ``plan`` shards over the ``tp`` axis of ``mesh``, in order. A pure function.

    Raises:
        ConfigError: a plan without a ``tp`` axis or an axis without a plan, a mesh whose last axes are not ``cp`` and ``tp``, a
            name without a match, a style that is no ``ParallelStyle``, or a model without a plan that torch can express.
    """
    _check_axes(mesh)
    ranks = axis_size(mesh, "tp")
    if not plan:
        if ranks > 1:
            raise ConfigError(
                f"shard_model: a mesh with tp={ranks} needs a tp_plan. Pass tp_plan=, or build the mesh without tp."
            )
        return []
    if plan != "auto" and not isinstance(plan, Mapping):
        value = repr(plan) if isinstance(plan, str) else type(plan).__name__
        raise ConfigError(
            f"shard_model: tp_plan must be a mapping of module names to styles, or 'auto', got {value}. "
            "Pass {'mlp.up': ColwiseParallel()}, for example."
        )
    if ranks == 1:
        raise ConfigError(
            f"shard_model: tp_plan needs a mesh with a tp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}. Pass for example dt.build_mesh(tp=2)."
        )
    from torch.distributed.tensor.parallel import ParallelStyle

    is_optional = plan == "auto"
    plan = _transformers_plan(model, ranks) if plan == "auto" else plan
    planned_modules: list[PlannedModule] = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"shard_model: tp_plan[{pattern!r}] must be a ParallelStyle, got {style!r}. "
                "Pass for example ColwiseParallel() of torch.distributed.tensor.parallel."
            )
        is_match = compile_patterns([pattern], caller="shard_model: tp_plan")
        matches = {
            id(module): (name, module) for name, module in modules_by_fqn(model, include_duplicates=True) if is_match(name)
        }
        # A plan of transformers names the modules of all configs of an architecture.
        if not matches and not is_optional:
            raise ConfigError(
                f"shard_model: tp_plan names {pattern!r}, but the model has no such module. "
                "Print the names with model.named_modules()."
            )
        for name, module in matches.values():
            planned_modules += _plan_parts(name, module, style)
    return planned_modules


def _plan_parts(name: str, module: nn.Module, style: ParallelStyle) -> list[PlannedModule]:
    """Return the module, or the parts of a wrapper of peft that ``style`` shards: the base layer, and a matrix of each adapter.

    ``ColwiseParallel`` gives each rank its outputs of the base layer and of ``lora_B``. ``RowwiseParallel`` gives each rank its
    inputs of the base layer and of ``lora_A``. The other matrix stays whole, as its input is equal on all ranks.

    Raises:
        ConfigError: adapters other than plain LoRA, or a style whose other side is not whole.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    parts = module._modules
    if "original_module" in parts and "modules_to_save" in parts:
        # A copy of the module that trains as a whole.
        copies = {"original_module": parts["original_module"], **dict(module.get_submodule("modules_to_save").named_children())}
        found = [_plan_parts(f"{name}.{key}", copy, style) for key, copy in copies.items() if copy is not None]
        return [planned for planned_parts in found for planned in planned_parts]
    base = parts.get("base_layer")
    if base is None or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return [PlannedModule(name=name, module=module, style=style)]
    side = "inputs" if isinstance(style, ColwiseParallel) else "outputs"
    layouts = style.input_layouts if isinstance(style, ColwiseParallel) else style.output_layouts
    matrices = dict(module.get_submodule("lora_B" if side == "inputs" else "lora_A").named_children())
    trained = {key for key, child in parts.items() if child is not None and next(child.parameters(), None) is not None}
    if "lora_embedding_A" in trained:
        # The matrices of an embedding are no modules, and stay whole.
        side, layouts = "outputs", style.output_layouts
    if other := sorted(trained - _LORA_PARTS):
        raise ConfigError(
            f"shard_model: tp_plan: adapters must be plain LoRA under a plan, got {', '.join(other)} in {name!r}. "
            "Change the LoraConfig, or leave the module out of tp_plan."
        )
    if not all(layout.is_replicate() for layout in layouts):
        raise ConfigError(
            f"shard_model: tp_plan: {type(style).__name__} must have whole {side} on {name!r}, which has adapters, got "
            f"{layouts[0]}. Leave the layouts at their defaults."
        )
    planned = {"base_layer": base} | matrices
    return [PlannedModule(name=f"{name}.{key}", module=part, style=style) for key, part in planned.items()]


def _transformers_plan(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """Translate the tensor-parallel plan of a model of transformers into torch's styles. ``model`` may contain this model.

    Raises:
        ConfigError: no plan, a plan with a style that torch lacks, or heads that ``ranks`` does not divide.
    """
    plans = ((name, module, module.__dict__.get("_tp_plan")) for name, module in modules_by_fqn(model))
    found = next(((name, module, plan) for name, module, plan in plans if plan), None)
    if found is None:
        raise ConfigError(
            f"shard_model: tp_plan='auto' needs a model of transformers with a plan, "
            f"got {type(unwrap_module(model)).__name__}. Pass a mapping of module names to styles."
        )
    prefix, owner, names = found
    config: Any = getattr(owner, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(
                f"shard_model: tp must divide {key}={heads} for tp_plan='auto', got tp={ranks}. Use a smaller tp."
            )
    styles = _styles_of_transformers()
    unknown = {pattern: style for pattern, style in names.items() if style not in styles}
    if unknown:
        listed = ", ".join(f"{pattern!r}: {style!r}" for pattern, style in unknown.items())
        raise ConfigError(
            f"shard_model: tp_plan='auto' needs styles that torch has, but the plan of {type(owner).__name__} contains "
            f"{listed}. Pass a mapping of module names to styles without these modules."
        )
    translated = {f"{prefix}.{pattern}".lstrip("."): styles[style] for pattern, style in names.items()}
    return {pattern: style for pattern, style in translated.items() if style is not None}


def _styles_of_transformers() -> dict[str, ParallelStyle | None]:
    """Return torch's styles by the names of transformers; None leaves a module whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    gathered, split = ColwiseParallel(output_layouts=replicate()), RowwiseParallel(input_layouts=replicate())
    return {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": gathered,
        "colwise_rep": gathered,
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": split,
        "rowwise_rep": split,
        "embedding_rowwise": split,
        "embedding_colwise": gathered,
        "sequence_parallel": SequenceParallel(use_local_output=True),
        # A norm of each head. The heads, in the dim before the last, are those of this rank, so its gradient is partial.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=-2, use_local_output=True),
        "replicate": None,
    }


def _check_axes(mesh: DeviceMesh) -> None:
    """Raise ``ConfigError`` unless ranks of one batch are adjacent. The step counts each batch once by rank order."""
    names = mesh.mesh_dim_names or ()
    model_axes = [name for name in names if name in MODEL_AXES]
    if model_axes and (
        list(names[-len(model_axes) :]) != sorted(model_axes) or mesh.mesh.flatten().tolist() != list(range(mesh.size()))
    ):
        raise ConfigError(
            f"shard_model: cp and tp must be the last axes of a mesh of all ranks in order, got {list(names)}. "
            "Use dt.build_mesh."
        )


def format_tp_plan(planned_modules: Sequence[PlannedModule]) -> list[str]:
    """Return a description of each planned module, equal on all ranks if the plans are equal."""
    return [
        f"{p.name}: {type(p.style).__name__ if type(p.style).__repr__ is object.__repr__ else p.style!r}"
        for p in planned_modules
    ]


def apply_tp_plan(
    model: nn.Module, planned_modules: Sequence[PlannedModule], mesh: DeviceMesh, ignored_params: Collection[str]
) -> DeviceMesh:
    """Shard the planned modules over the ``tp`` axis of ``mesh``, and return the mesh without ``tp``.

    torch's styles replace parameters one by one, so this function restores ties and ``requires_grad``.

    Mutates: ``model``; the parameters of planned modules are replaced. Collective: none; all ranks hold equal values.

    Raises:
        ConfigError: a style does not fit its module, the axis does not divide a dimension, tied parameters get different
            placements, or the plan shards an ignored parameter or a buffer. All ranks raise, and the model is unusable.
    """
    if not planned_modules:
        return mesh
    from torch.distributed.tensor.parallel import parallelize_module

    locations, axis = param_places(model), mesh["tp"]
    for entry in planned_modules:
        try:
            parallelize_module(entry.module, axis, entry.style, src_data_rank=None)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError) as problem:
            kind, style = type(entry.module).__name__, type(entry.style).__name__
            raise ConfigError(
                f"shard_model: tp_plan: {style} does not fit {entry.name!r}, a {kind}: {str(problem).rstrip('.')}. "
                "Choose a style for this kind of module."
            ) from problem
        entry.module.register_forward_hook(_wait_for_output)
        for key, buffer in entry.module.named_buffers():
            if is_dtensor(buffer):
                raise ConfigError(
                    f"shard_model: tp_plan: {type(entry.style).__name__} on {entry.name!r} shards the buffer {key!r}, but "
                    "every rank must hold full buffers. Move the buffer out of the module, or plan an inner module."
                )
    for param, places in locations:
        current = [module._parameters[key] for _, module, key in places]
        if all(tensor is param for tensor in current):
            continue
        _check_placements(places, current, axis.size(), ignored_params)
        first = current[0]
        assert first is not None, "a style replaces parameters by parameters"
        first.requires_grad_(param.requires_grad)
        for _, module, key in places:
            module.register_parameter(key, first)
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]


def _wait_for_output(module: nn.Module, args: object, output: Any) -> Any:
    """Return the output of a planned module without torch's wrapper of a running collective.

    A compiled block that gets such a wrapper computes a wrong gradient of its input (torch 2.13). An operation outside of
    compiled code would wait, too.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    wait: Any = _Wait.apply
    return wait(output) if isinstance(output, AsyncCollectiveTensor) else output


class _Wait(torch.autograd.Function):
    """The tensor of a collective, once it has arrived. No copy."""

    @staticmethod
    def forward(ctx: Any, output: Any) -> Tensor:
        return cast(Tensor, output.trigger_wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _check_placements(
    places: Sequence[tuple[str, nn.Module, str]], current: Sequence[Tensor | None], ranks: int, ignored_params: Collection[str]
) -> None:
    name = places[0][0]
    if len({describe_placement(tensor) for tensor in current if tensor is not None}) > 1:
        raise ConfigError(
            f"shard_model: tp_plan: {', '.join(name for name, _, _ in places)} are one parameter, but get "
            "different placements. Use styles that agree (RowwiseParallel on an embedding, ColwiseParallel on a head)."
        )
    if name in ignored_params:
        raise ConfigError(
            f"shard_model: tp_plan shards {name!r}, which is an ignored parameter (ignored_params, a scalar, or empty). "
            "Remove the parameter from tp_plan or from ignored_params."
        )
    assert current[0] is not None, "current has one tensor per place"
    for dim, count in chunks_per_dim(current[0]).items():
        if current[0].shape[dim] % count:
            raise ConfigError(
                f"shard_model: tp_plan shards {name!r} {list(current[0].shape)} along dim {dim} into {count} uneven pieces. "
                f"Use a size that tp={ranks} divides, or leave the module out of tp_plan."
            )


@contextmanager
def ring_attention(
    axis: DeviceMesh, sequences: Sequence[tuple[Tensor, int]], buffers: Sequence[tuple[Tensor, int]]
) -> Iterator[None]:
    """Shard tensors over ``axis``, and let ``scaled_dot_product_attention`` use the keys of all ranks, inside the context.

    Arguments of attention that the ring cannot compute raise a ``ConfigError``. Attention without a fused kernel raises torch's
    error, with a note on what to change.

    Args:
        axis: mesh of the ranks that share sequences.
        sequences: tensors and their sequence dims, which are sharded in place and stay so.
        buffers: the same for tensors that are restored.

    Mutates: the tensors; torch's ``scaled_dot_product_attention``, inside the context.
    """
    from torch.distributed.tensor.experimental import context_parallel

    both = [*sequences, *buffers]
    tensors, dims = [tensor for tensor, _ in both], [dim for _, dim in both]
    cuda = torch.backends.cuda
    # torch has no ring for the unfused backend.
    fused = (
        (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled()),
        (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled()),
        (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled()),
    )
    sharded = context_parallel(
        axis, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers={tensor for tensor, _ in sequences}
    )
    try:
        with (
            _cpu_kernels() if axis.device_type == "cpu" else nullcontext(),
            _always_restored(sharded),
            _checked_arguments(),
            sdpa_kernel([backend for backend, is_enabled in fused if is_enabled]),
        ):
            yield
    except RuntimeError as error:
        if any(text in str(error) for text in _REFUSALS):
            error.add_note(
                "context_parallel: attention must have a fused kernel. Give query, key and value the same batch size and head "
                "size, and the same number of heads or enable_gqa=True."
            )
        raise


@contextmanager
def replace_attention(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Let models call ``attend`` instead of torch's ``scaled_dot_product_attention``, inside the context.

    Mutates: torch's function, inside the context.
    """
    before, replacement = functional.scaled_dot_product_attention, cast(Any, attend)
    functional.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


@contextmanager
def count_attention_calls() -> Iterator[list[None]]:
    """Yield a list that gets an entry for each call of ring attention. Use it inside of ``ring_attention``.

    Mutates: torch's ``scaled_dot_product_attention``, inside the context.
    """
    attend, calls = functional.scaled_dot_product_attention, list[None]()

    @wraps(attend)
    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(None)
        return attend(*args, **options)

    with replace_attention(counted):
        yield calls


@contextmanager
def _checked_arguments() -> Iterator[None]:
    """Refuse arguments of attention that the ring cannot compute, before torch computes another result or raises its own error.

    Mutates: torch's ``scaled_dot_product_attention``, inside the context.
    """
    ring: Callable[..., Tensor] = functional.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        problem = None
        if attn_mask is not None:
            problem = f"attn_mask must be None, got a mask of shape {list(attn_mask.shape)}"
        elif not is_causal:
            problem = "is_causal must be True, got False"
        # The ring computes several blocks, and torch's backward repeats the random numbers of the last block only.
        elif dropout_p:
            problem = f"dropout_p must be 0, got {dropout_p}"
        elif query.ndim != 4:
            problem = f"query must be [batch, heads, seq, dim], got {query.ndim} dims"
        elif query.shape[2] != key.shape[2]:
            problem = f"query and key must have the same length, got {query.shape[2]} and {key.shape[2]}"
        if problem is not None:
            raise ConfigError(
                f"context_parallel: scaled_dot_product_attention: {problem}. Use causal self-attention without "
                "a mask and without dropout; for transformers see docs/parallelism.md."
            )
        return ring(query, key, value, None, 0.0, True, scale=scale, enable_gqa=enable_gqa)

    checked: Any = attend
    # Attention of transformers asks, because the ring takes no mask.
    checked.is_ring = True
    # torch restores its own function only.
    with replace_attention(checked):
        yield


@contextmanager
def _always_restored(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter torch's context, which restores nothing after an exception, and leave it as if there were none."""
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


@contextmanager
def _cpu_kernels() -> Iterator[None]:
    """Let torch's ring call the CPU's attention kernel, inside the context. Mutates: torch's table of kernels."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    kernels: dict[Any, Any] = _attention.custom_ops
    kernels.update({_FORWARD: _attend, _BACKWARD: _attend_backward})
    try:
        yield
    finally:
        del kernels[_FORWARD], kernels[_BACKWARD]


def _attend(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    query, key, value, *rest = map(_local, args)
    options = {**dict(zip(("dropout_p", "is_causal"), rest, strict=False)), **options}
    options = {name: _local(value) for name, value in options.items()}
    if options.pop("attn_mask", None) is not None:
        raise RuntimeError("attn_bias is not supported")
    with _sums_in_dtype_of(query):
        parts = _attention._templated_ring_attention(
            args[0].device_mesh.get_group(), _SEQ_DIM, kernel, query, key, value, **options
        )
    return _as_shards(parts, args[0])


def _attend_backward(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    grad, query, key, value, out, logsumexp, dropout_p, is_causal = (_local(value) for value in args)
    ring = _attention._templated_ring_attention_backward
    tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    with _sums_in_dtype_of(query):
        parts = ring(
            args[0].device_mesh.get_group(),
            _SEQ_DIM,
            kernel,
            grad_out=grad,
            grad_out_name="grad_out",
            is_causal=is_causal,
            dropout_p=dropout_p,
            **tensors,
            **{name: _local(value) for name, value in options.items()},
        )
    return _as_shards(parts, args[0])


def _local(value: Any) -> Any:
    return to_local(value) if isinstance(value, Tensor) else value


def _as_shards(parts: Sequence[Tensor], like: Any) -> tuple[Any, ...]:
    """Return DTensors with these shards, sharded over the same ranks and the same dim as ``like``."""
    return tuple(type(like).from_local(shard, like.device_mesh, like.placements, run_check=False) for shard in parts)


@contextmanager
def _sums_in_dtype_of(tensor: Tensor) -> Iterator[None]:
    """Let the ring sum the ranks' parts in float32, as on a GPU, or in float64 for tensors of float64, inside the context."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before = options.convert_to_f32
    options.convert_to_f32 = before and tensor.dtype != torch.float64
    try:
        yield
    finally:
        options.convert_to_f32 = before
