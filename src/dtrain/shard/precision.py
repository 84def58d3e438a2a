"""``Precision``: which dtype parameters, gradient reductions, buffers and outputs have while a sharded model computes.

``convert_to_fp8``: linear layers that multiply in 8-bit floating point, through torchao; before sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtrain.errors import ConfigError
from dtrain.fqn import buffer_slots, compile_patterns, modules_by_fqn
from dtrain.optional_dependencies import missing_extra_error
from dtrain.state import get_spec

DType = Literal["fp32", "bf16", "fp16"]
Preset = Literal["DEFAULT", "PURE", "FULL"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIELDS = ("param", "reduce", "buffer", "output")
_LOW_PRECISION = ("bf16", "fp16")
_NORMS_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

# By preset, the fields that are in the low precision (True) or in float32 (False). The others keep the dtype that is stored.
_PRESETS: dict[str, dict[str, bool]] = {
    "DEFAULT": {"param": True, "reduce": False},
    "PURE": {"param": True, "reduce": True},
    "FULL": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a sharded model's compute: ``"fp32"``, ``"bf16"``, ``"fp16"``; None keeps the stored one.

    >>> Precision.preset("DEFAULT", "bf16")
    Precision(param='bf16', reduce='fp32', buffer=None, output=None)

    Args:
        param: of parameters, and of floating inputs, in forward and backward (the optimizer keeps the stored ones).
        reduce: of gradients while ranks are summed; None means float32, or a wider dtype of compute. The gradients of a step's
            microbatches are always added up in at least float32.
        buffer: that all floating-point buffers are stored in from ``shard_model`` on, rotary frequencies and other tables
            included. Integers and complex numbers keep theirs. No preset sets this field.
        output: of the floating tensors that the root module returns.

    Normalisations with running statistics (BatchNorm) are left alone by ``param`` and ``buffer``: their parameters and
    statistics are computed with as they are stored, since in 8 or 11 bits a moving average stops moving.

    Raises:
        ConfigError: another dtype.
    """

    param: DType | None = None
    reduce: DType | None = None
    buffer: DType | None = None
    output: DType | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or value not in _DTYPES):
                raise ConfigError(f"Precision: {name} must be one of {', '.join(_DTYPES)} or None, got {value!r}")

    @classmethod
    def preset(cls, name: Preset, low: Literal["bf16", "fp16"] = "bf16") -> Precision:
        """A usual combination by name.

        Args:
            name: ``"DEFAULT"`` computes with parameters in the low precision and sums gradients in float32. ``"PURE"`` also
                sums the gradients of ranks in the low precision. ``"FULL"`` sets no field.
            low: the low precision.

        Buffers keep their dtype: a table in the low precision is another table. ``Precision(buffer=...)`` casts them.

        Raises:
            ConfigError: another name or dtype.
        """
        if not isinstance(name, str) or name not in _PRESETS:
            raise ConfigError(f"Precision.preset: name must be one of {', '.join(_PRESETS)}, got {name!r}")
        if not isinstance(low, str) or low not in _LOW_PRECISION:
            raise ConfigError(f"Precision.preset: low must be one of {', '.join(_LOW_PRECISION)}, got {low!r}")
        return replace(cls(), **{field: low if is_low else "fp32" for field, is_low in _PRESETS[name].items()})

    def policy(self, stored: torch.dtype) -> MixedPrecisionPolicy:
        """Return the policy of FSDP2 for a unit whose trainable parameters are ``stored`` in that dtype. It has no buffers."""
        param, output = (_DTYPES[v] if v else None for v in (self.param, self.output))
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=self._reduce_dtype(param or stored), output_dtype=output)

    def stored_dtype_policy(self, stored: torch.dtype) -> MixedPrecisionPolicy:
        """Return the policy of a unit that computes with parameters as they are stored and inputs as they come."""
        return MixedPrecisionPolicy(reduce_dtype=self._reduce_dtype(stored), cast_forward_inputs=False)

    def _reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        # Said in any case: torch 2.15 takes the stored dtype for None, and older versions take the computed one.
        return _DTYPES[self.reduce] if self.reduce else accumulation_dtype(computed)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up many numbers of ``dtype``: float32 for bfloat16 and float16, else ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def keeps_dtype(module: nn.Module) -> bool:
    """Return True if ``module`` computes as it is stored, whatever the precision: it keeps running statistics of its own."""
    return isinstance(module, _NORMS_WITH_STATISTICS) and module.running_mean is not None


def separate_units(model: nn.Module, precision: Precision | None) -> Iterator[nn.Module]:
    """The modules that must be units of their own, since they compute in other dtypes than what is around them."""
    if precision is not None and precision.param is not None:
        for name, module in modules_by_fqn(model):
            if name and keeps_dtype(module) and any(True for _ in module.parameters()):
                yield module


def cast_buffers_(model: nn.Module, precision: Precision | None) -> None:
    """Store the floating-point buffers in the dtype of ``precision``. Mutates: ``model``; on meta, what is made later."""
    if precision is None or precision.buffer is None:
        return
    dtype = _DTYPES[precision.buffer]
    for _, module, key in list(buffer_slots(model)):
        buffer = module._buffers[key]
        if buffer is not None and buffer.is_floating_point() and not keeps_dtype(module):
            module._buffers[key] = buffer.to(dtype)


Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_MIN_FP8_CAPABILITY = (8, 9)  # the first GPUs with 8-bit floating-point products
_FP8_SIZE_MULTIPLE = 16  # of both sizes of a layer, which those products need


def convert_to_fp8(
    model: nn.Module, *, recipe: Fp8Recipe = "tensorwise", skip: str | Sequence[str] = (), emulate: bool = False
) -> nn.Module:
    """Have the linear layers of ``model`` multiply in 8-bit floating point, forward and backward; return the model.

    Parameters keep their names, dtypes and values, so sharding, optimizers and checkpoints are what they were: activations,
    weights and gradients are scaled and rounded for each product, and summed in a wider dtype. It pays off for large layers
    in blocks that are compiled, together with ``Precision(param="bf16")``.

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        recipe: how values are scaled, as torchao names it: one scale per tensor is fastest, one per row more exact;
            ``"rowwise_with_gw_hp"`` leaves the weights' gradient in the wider dtype.
        skip: names of layers that stay as they are (``*`` for text without a dot), usually the head. Layers with a size that
            16 does not divide, and subclasses of ``nn.Linear``, always do.
        emulate: round to 8 bits, but multiply in the wider dtype: slow, for tests without such a GPU.

    Needs the extra ``dtrain[fp8]``, and a GPU of compute capability 8.9 or higher.

    Mutates: ``model``; linear layers are replaced, their Parameter objects stay.

    Raises:
        ConfigError: a model that is sharded already, an unknown recipe, a name that fits no linear layer, no layer to convert,
            no such GPU, no torchao.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao's ``torchao.float8``.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"convert_to_fp8: model must be a torch.nn.Module, got {type(model).__name__}")
    if recipe not in get_args(Fp8Recipe):
        raise ConfigError(f"convert_to_fp8: unknown {recipe=}; use one of {', '.join(get_args(Fp8Recipe))}")
    if get_spec(model).mesh is not None:
        raise ConfigError("convert_to_fp8: this model is sharded already; convert it before shard_model")
    chosen = _select_linear_layers(model, [skip] if isinstance(skip, str) else list(skip))
    if not emulate:
        _check_fp8_device()
    convert, config = _torchao_converter(recipe, emulate)
    converted: nn.Module = convert(model, config=config, module_filter_fn=lambda module, name: id(module) in chosen)
    return converted


def _select_linear_layers(model: nn.Module, skip: Sequence[str]) -> set[int]:
    """The layers to convert, by identity."""
    linear = {name: module for name, module in modules_by_fqn(model) if type(module) is nn.Linear}
    for pattern in skip:
        if not any(map(compile_patterns([pattern], caller="convert_to_fp8: skip"), linear)):
            raise ConfigError(f"convert_to_fp8: skip names {pattern!r}, but no linear layer has such a name")
    skipped = compile_patterns(skip, caller="convert_to_fp8: skip")
    fits = {
        id(module)
        for name, module in linear.items()
        if not skipped(name) and module.in_features % _FP8_SIZE_MULTIPLE == 0 and module.out_features % _FP8_SIZE_MULTIPLE == 0
    }
    if not fits:
        raise ConfigError(
            f"convert_to_fp8: none of {len(linear)} linear layers can be converted; they need sizes that {_FP8_SIZE_MULTIPLE} divides"
        )
    return fits


def _check_fp8_device() -> None:
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < _MIN_FP8_CAPABILITY:
        what = "no CUDA device is here" if found is None else f"this one has {found[0]}.{found[1]}"
        raise ConfigError(
            f"convert_to_fp8: needs a GPU of compute capability {_MIN_FP8_CAPABILITY[0]}.{_MIN_FP8_CAPABILITY[1]} or higher, {what}; leave it "
            "out, or pass emulate=True to try it slowly"
        )


def _torchao_converter(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """torchao's conversion and its configuration for ``recipe``. Imported here: it takes a second, and few have it."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise missing_extra_error(f"convert_to_fp8: needs torchao, which cannot be imported ({error})", "fp8") from error
    return convert_to_float8_training, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
