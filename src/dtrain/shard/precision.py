"""Set the dtypes of parameters, gradient reductions, buffers and outputs of a sharded model (``Precision``).

``convert_to_fp8`` converts linear layers to 8-bit floating point through torchao, before sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dtrain.arguments import check_choice, explain_fields
from dtrain.device import use_on_current_stream
from dtrain.dist.dtensor import from_local_like, to_local
from dtrain.errors import ConfigError
from dtrain.fqn import buffer_slots, compile_patterns, modules_by_fqn
from dtrain.packages import missing_extra_error
from dtrain.shard.spec import get_spec

# A step without sharding takes functions of this module, and an import of FSDP2 takes more than half of that of torch. So the
# policies of FSDP2 are imported where they are made.
if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from dtrain.shard.wrapping import WrapPlan

DType = Literal["fp32", "bf16", "fp16"]
Preset = Literal["DEFAULT", "PURE", "FULL"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NORMS_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

# Fields of each preset: True for the low precision, False for float32. Other fields keep the stored dtype.
_PRESETS: dict[str, dict[str, bool]] = {
    "DEFAULT": {"param": True, "reduce": False},
    "PURE": {"param": True, "reduce": True},
    "FULL": {},
}


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a sharded model's computation: ``"fp32"``, ``"bf16"``, ``"fp16"``; None keeps the stored dtype.

    Args:
        param: dtype of parameters and floating-point inputs in forward and backward; the optimizer uses the stored dtype.
        reduce: dtype of gradient reductions over ranks; None means float32, or a wider compute dtype. Gradients of microbatches
            are always accumulated in at least float32.
        buffer: stored dtype of all floating-point buffers from ``shard_model`` on, including rotary frequencies and other
            tables. Integer and complex buffers keep their dtypes. No preset sets this field.
        output: dtype of the floating-point tensors that the root module returns.
        overrides: patterns of module names (``*`` matches text without a dot, ``**`` any text) -> dtype in which these modules
            compute, with all modules inside; the first pattern that matches counts. Their gradients are reduced in at least
            float32, and their buffers keep the stored dtype. Each module with parameters becomes a separate unit.

    A module in ``overrides`` gets its floating-point inputs in its dtype. A result with the shape of such an input, as of a
    norm, returns to the dtype around the module. Any other result, as of a head or a router, keeps the module's dtype. Modules
    with tied parameters share the dtype. Integers and booleans (token ids, positions, masks) are never cast.

    ``param`` and ``buffer`` do not affect normalizations with running statistics (BatchNorm). Their parameters and statistics
    keep the stored dtype, because a moving average with 8 or 11 bits of precision stops changing.

    Example:
        >>> import dtrain as dt
        >>> dt.Precision.preset("DEFAULT", "bf16")
        Precision(param='bf16', reduce='fp32', buffer=None, output=None, overrides=None)
        >>> precision = dt.Precision(
        ...     param="bf16", overrides={"**.norm": "fp32", "lm_head": "fp32"}
        ... )

    Raises:
        ConfigError: an unknown dtype, or ``overrides`` that is not a mapping.
    """

    param: DType | None = None
    reduce: DType | None = None
    buffer: DType | None = None
    output: DType | None = None
    overrides: Mapping[str, DType] | None = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "buffer", "output"):
            check_choice("Precision", name, getattr(self, name), (*_DTYPES, None))
        if not isinstance(self.overrides, Mapping | None):
            raise ConfigError(
                f"Precision: overrides must be a mapping of names to dtypes, got {self.overrides!r}. "
                "Pass for example overrides={'**.norm': 'fp32'}."
            )
        for pattern, dtype in (self.overrides or {}).items():
            check_choice("Precision", f"overrides[{pattern!r}]", dtype, tuple(_DTYPES))

    @classmethod
    def preset(cls, name: Preset, low: Literal["bf16", "fp16"] = "bf16") -> Precision:
        """Return a common combination by name.

        Args:
            name: ``"DEFAULT"`` computes in the low precision and reduces gradients in float32; ``"PURE"`` also reduces in the
                low precision; ``"FULL"`` sets no field.
            low: the low precision.

        Buffers keep their dtype, because rounding changes tables. ``Precision(buffer=...)`` casts buffers.

        Example:
            precision = dt.Precision.preset("DEFAULT", "bf16")
            model = dt.shard_model(model, mesh, blocks=(Block,), precision=precision)

        Raises:
            ConfigError: an unknown name or dtype.
        """
        check_choice("Precision.preset", "name", name, _PRESETS)
        check_choice("Precision.preset", "low", low, ("bf16", "fp16"))
        fields: dict[str, Any] = {field: low if is_low else "fp32" for field, is_low in _PRESETS[name].items()}
        return replace(cls(), **fields)

    def _policy(self, stored: torch.dtype) -> MixedPrecisionPolicy:
        """Return the FSDP2 policy of a unit with trainable parameters of dtype ``stored``. The policy ignores buffers."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        param, output = (_DTYPES[v] if v else None for v in (self.param, self.output))
        # For None, torch 2.15 uses the stored dtype and older versions use the compute dtype, so set the dtype explicitly.
        reduce = _DTYPES[self.reduce] if self.reduce else accumulation_dtype(param or stored)
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)


LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes whose sums are computed in float32."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum many numbers of ``dtype``: float32 for bfloat16 and float16, else ``dtype``."""
    return torch.float32 if dtype in LOW_PRECISION_DTYPES else dtype


def keeps_dtype(module: nn.Module) -> bool:
    """Return True if ``module`` always computes in its stored dtype, because the module has running statistics."""
    return isinstance(module, _NORMS_WITH_STATISTICS) and module.running_mean is not None


def module_dtypes(model: nn.Module, precision: Precision) -> dict[int, DType | None]:
    """Return the compute dtype of each module by ``id``; None for the stored dtype.

    Raises:
        ConfigError: a pattern of ``overrides`` that matches no module, or a container without ``forward``.
    """
    modules = dict(modules_by_fqn(model))
    choices = {
        pattern: (compile_patterns([pattern], caller="shard_model: overrides"), dtype)
        for pattern, dtype in (precision.overrides or {}).items()
    }
    for pattern, (matches, _) in choices.items():
        if not any(name and matches(name) for name in modules):
            ends = list({name.rpartition(".")[2]: None for name in modules if name})
            nearest = get_close_matches(pattern.rpartition(".")[2], ends, cutoff=0.3) or ends[:3]
            raise ConfigError(
                f"shard_model: overrides names {pattern!r}, but no module matches. "
                f"The nearest names end in {', '.join(map(repr, nearest))}."
            )
    dtypes: dict[int, DType | None] = {}
    for name, module in modules.items():
        around = dtypes[id(modules[name.rpartition(".")[0]])] if name else precision.param
        named = next((dtype for matches, dtype in choices.values() if name and matches(name)), around)
        dtypes[id(module)] = None if keeps_dtype(module) else named
        if named != around and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"shard_model: overrides names {name!r}, a {type(module).__name__} without forward. Name '{name}.*' instead."
            )
    return dtypes


def separate_units(model: nn.Module, dtypes: Mapping[int, DType | None]) -> Iterator[nn.Module]:
    """Yield the modules that must be separate units, because their compute dtype differs from the parent's."""
    return (module for module, _ in _border_modules(model, dtypes) if any(True for _ in module.parameters()))


def _border_modules(model: nn.Module, dtypes: Mapping[int, DType | None]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules whose dtype differs from that of the parent, with the parent."""
    modules = dict(modules_by_fqn(model))
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]]
        if dtypes[id(module)] != dtypes[id(parent)]:
            yield module, parent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DtypePlan:
    """Dtypes of a model's units, and the modules at whose borders tensors are cast.

    Args:
        units: precision of each unit.
        casts: modules with the dtype of their floating-point inputs, and the dtype of results with the shape of such an input;
            None leaves results unchanged.
    """

    units: tuple[Precision, ...]
    casts: tuple[tuple[nn.Module, torch.dtype, torch.dtype | None], ...]


def plan_dtypes(model: nn.Module, precision: Precision, dtypes: Mapping[int, DType | None], wrap_plan: WrapPlan) -> DtypePlan:
    """Plan the dtypes of the units of ``model``.

    Args:
        model: plain model.
        precision: precision of the model.
        dtypes: dtype of each module by ``id``, of ``module_dtypes``.
        wrap_plan: units of the model.
    """
    low, of_units, of_modules, layers = precision.param, list[Precision](), dict(dtypes), list[nn.Module]()
    computed: dict[int, torch.dtype] = {}
    ignored = set(map(id, wrap_plan.ignored_params.values()))
    for modules in wrap_plan.units:
        inside = [module for unit in modules for module in unit.modules()]
        members = [module for module in inside if id(module) in dtypes and id(module) not in computed]
        params = [
            (module, p) for module in members for p in module._parameters.values() if p is not None and id(p) not in ignored
        ]
        # The owners' dtypes differ only in a unit of tied parameters.
        dtype = next((dtypes[id(owner)] for owner, _ in params if dtypes[id(owner)] != low), low)
        of_units.append(precision if dtype == low else Precision(param=dtype, reduce=None if dtype else precision.reduce))
        stored = next((param.dtype for _, param in params), torch.float32)
        for module in members:
            named = of_modules[id(module)] = dtype if dtypes[id(module)] == low else dtypes[id(module)]
            computed[id(module)] = _DTYPES[named] if named else stored
        if precision.overrides and low and dtype == low:
            layers += {id(owner): owner for owner, _ in params if not owner._modules}.values()
    borders = [(module, parent) for module, parent in _border_modules(model, of_modules) if not keeps_dtype(module)]
    casts = [(module, computed[id(module)], computed[id(parent)]) for module, parent in borders]
    # A layer beside a named module may get a result of the module's dtype.
    return DtypePlan(units=tuple(of_units), casts=(*casts, *((layer, computed[id(layer)], None) for layer in layers)))


def cast_at_borders_(dtype_plan: DtypePlan) -> None:
    """Cast floating-point tensors that enter and leave modules. Mutates: hooks of the modules."""
    for module, dtype, dtype_around in dtype_plan.casts:
        module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        if dtype_around is not None:
            module.register_forward_hook(partial(_cast_results, dtype_around), with_kwargs=True)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs))


def _cast_results(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any, results: Any) -> Any:
    inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    shapes = {tensor.shape for tensor in inputs if tensor.is_floating_point()}

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.shape in shapes else tensor

    return tree_map_only(Tensor, cast, results)


def cast_buffers_(model: nn.Module, precision: Precision, dtypes: Mapping[int, DType | None]) -> None:
    """Cast floating-point buffers outside of ``overrides`` to the dtype of ``precision``. Mutates: ``model``, also on meta."""
    if precision.buffer is None:
        return
    dtype = _DTYPES[precision.buffer]
    for _, module, key in list(buffer_slots(model)):
        buffer = module._buffers[key]
        keeps = keeps_dtype(module) or dtypes[id(module)] != precision.param
        if buffer is not None and buffer.is_floating_point() and not keeps:
            module._buffers[key] = buffer.to(dtype)


Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
# Older GPUs have no 8-bit floating-point matrix products.
_MIN_FP8_CAPABILITY = (8, 9)
# The products need both sizes of a layer to be multiples of 16.
_FP8_SIZE_MULTIPLE = 16


def convert_to_fp8(
    model: nn.Module, *, recipe: Fp8Recipe = "tensorwise", ignore: str | Sequence[str] = (), emulate: bool = False
) -> nn.Module:
    """Convert the linear layers of ``model`` to 8-bit floating-point products, forward and backward; return the model.

    Parameters keep their names, dtypes and values, so sharding, optimizers and checkpoints do not change. Activations, weights
    and gradients are scaled and rounded for each product, and accumulated in a wider dtype. The conversion is worthwhile for
    large layers in compiled blocks, together with ``Precision(param="bf16")``.

    Args:
        model: plain module before ``shard_model``; on meta, too.
        recipe: scaling recipe of torchao: one scale per tensor is fastest, one per row is more accurate;
            ``"rowwise_with_gw_hp"`` computes the weight gradient in the wider dtype.
        ignore: names of layers to leave unchanged (``*`` matches text without a dot), usually the head. Layers with a size that
            16 does not divide, and subclasses of ``nn.Linear``, are always left unchanged.
        emulate: if True, round to 8 bits but multiply in the wider dtype; slow, for tests without such a GPU.

    Needs the extra ``dtrain[fp8]``, and a GPU of compute capability 8.9 or higher.

    Mutates: ``model``; linear layers are replaced, their Parameter objects stay.

    Example:
        model = dt.shard.convert_to_fp8(model, ignore="head")
        model = dt.shard_model(model, mesh, blocks=(Block,), precision=dt.Precision(param="bf16"))
        model = dt.compile_blocks(model, blocks=(Block,))

    Raises:
        ConfigError: a sharded model, an unknown recipe, a name that matches no linear layer, no layer to convert, an
            unsupported GPU, or torchao is missing.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao's ``torchao.float8``.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"convert_to_fp8: model must be a torch.nn.Module, got {type(model).__name__}. Pass the model, not its parameters."
        )
    check_choice("convert_to_fp8", "recipe", recipe, get_args(Fp8Recipe))
    if get_spec(model).mesh is not None:
        raise ConfigError("convert_to_fp8: the model is sharded already. Convert the model before shard_model.")
    selected = _select_linear_layers(model, [ignore] if isinstance(ignore, str) else list(ignore))
    capability = torch.cuda.get_device_capability() if not emulate and torch.cuda.is_available() else None
    if not emulate and (capability is None or capability < _MIN_FP8_CAPABILITY):
        actual = "no CUDA device" if capability is None else f"{capability[0]}.{capability[1]}"
        raise ConfigError(
            f"convert_to_fp8: compute capability must be {_MIN_FP8_CAPABILITY[0]}.{_MIN_FP8_CAPABILITY[1]} or higher, "
            f"got {actual}. Leave convert_to_fp8 out, or pass emulate=True for a slow test."
        )
    # The import takes a second.
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise missing_extra_error(f"convert_to_fp8: needs torchao, which cannot be imported ({error})", "fp8") from error
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: id(module) in selected
    )
    return converted


def _select_linear_layers(model: nn.Module, skip: Sequence[str]) -> set[int]:
    """Return the ids of the layers to convert."""
    linear = {name: module for name, module in modules_by_fqn(model) if type(module) is nn.Linear}
    for pattern in skip:
        if not any(map(compile_patterns([pattern], caller="convert_to_fp8: skip"), linear)):
            raise ConfigError(
                f"convert_to_fp8: ignore names {pattern!r}, but no linear layer matches. "
                "Print the names with model.named_modules()."
            )
    skipped = compile_patterns(skip, caller="convert_to_fp8: skip")
    selected = {
        id(module)
        for name, module in linear.items()
        if not skipped(name) and module.in_features % _FP8_SIZE_MULTIPLE == 0 and module.out_features % _FP8_SIZE_MULTIPLE == 0
    }
    if not selected:
        raise ConfigError(
            f"convert_to_fp8: none of {len(linear)} linear layers can be converted. "
            f"Use sizes that are multiples of {_FP8_SIZE_MULTIPLE}."
        )
    return selected


def has_low_precision_grads(params: Iterable[Tensor]) -> bool:
    """Return True if a gradient has fewer bits than sums of gradients need."""
    return any(param.grad is not None and accumulation_dtype(param.grad.dtype) != param.grad.dtype for param in params)


def stash_low_precision_grads_(params: Iterable[Tensor], stash: dict[int, Tensor]) -> None:
    """Move gradients that accumulation in ``.grad`` would round into ``stash``, where they are summed in float32.

    Mutates: ``.grad`` of ``params``; ``stash``, by the ``id`` of the parameter.
    """
    for param in params:
        if param.grad is None or accumulation_dtype(param.grad.dtype) == param.grad.dtype:
            continue
        grad, stashed = to_local(param.grad), stash.get(id(param))
        stash[id(param)] = grad.to(accumulation_dtype(grad.dtype)) if stashed is None else stashed.add_(grad)
        # FSDP2 allocated the gradient in another stream, which must not reuse its memory too early.
        use_on_current_stream(grad)
        param.grad = None


def add_stashed_grads_(params: Iterable[Tensor], stash: dict[int, Tensor]) -> None:
    """Add the stashed gradients to the gradients of the last microbatch. Mutates: ``.grad`` of ``params``; ``stash``."""
    if not stash:
        return
    for param in params:
        stashed = stash.pop(id(param), None)
        if stashed is not None:
            last = param.grad
            total = stashed if last is None else stashed.add_(to_local(last))
            param.grad = from_local_like(param, total.to(param.dtype)) if last is None else last
            if last is not None:
                to_local(last).copy_(total)
