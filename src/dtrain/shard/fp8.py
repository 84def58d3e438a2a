"""``convert_to_fp8``: linear layers that multiply in 8-bit floating point, through torchao; before sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.extras import missing
from dtrain.names import clean_modules, matcher
from dtrain.state import spec_of

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_CAPABILITY = (8, 9)  # the first GPUs with 8-bit floating-point products
_MULTIPLE = 16  # of both sizes of a layer, which those products need


def convert_to_fp8(
    model: nn.Module, *, recipe: Recipe = "tensorwise", skip: str | Sequence[str] = (), emulate: bool = False
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
    if recipe not in get_args(Recipe):
        raise ConfigError(f"convert_to_fp8: unknown {recipe=}; use one of {', '.join(get_args(Recipe))}")
    if spec_of(model).mesh is not None:
        raise ConfigError("convert_to_fp8: this model is sharded already; convert it before shard_model")
    chosen = _chosen(model, [skip] if isinstance(skip, str) else list(skip))
    if not emulate:
        _check_device()
    convert, config = _torchao(recipe, emulate)
    converted: nn.Module = convert(model, config=config, module_filter_fn=lambda module, name: id(module) in chosen)
    return converted


def _chosen(model: nn.Module, skip: Sequence[str]) -> set[int]:
    """The layers to convert, by identity."""
    linear = {name: module for name, module in clean_modules(model) if type(module) is nn.Linear}
    for pattern in skip:
        if not any(map(matcher([pattern], where="convert_to_fp8: skip"), linear)):
            raise ConfigError(f"convert_to_fp8: skip names {pattern!r}, but no linear layer has such a name")
    skipped = matcher(skip, where="convert_to_fp8: skip")
    fits = {
        id(module)
        for name, module in linear.items()
        if not skipped(name) and module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
    }
    if not fits:
        raise ConfigError(
            f"convert_to_fp8: none of {len(linear)} linear layers can be converted; they need sizes that {_MULTIPLE} divides"
        )
    return fits


def _check_device() -> None:
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < _CAPABILITY:
        what = "no CUDA device is here" if found is None else f"this one has {found[0]}.{found[1]}"
        raise ConfigError(
            f"convert_to_fp8: needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher, {what}; leave it "
            "out, or pass emulate=True to try it slowly"
        )


def _torchao(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """torchao's conversion and its configuration for ``recipe``. Imported here: it takes a second, and few have it."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise missing(f"convert_to_fp8: needs torchao, which cannot be imported ({error})", "fp8") from error
    return convert_to_float8_training, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
