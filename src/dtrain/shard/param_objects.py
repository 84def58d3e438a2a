"""Keep what a user has stored on the Parameter objects of a model, and refuse parameters that cannot be sharded.

FSDP2, tensor parallelism and ``materialize`` make new Parameter objects. Attributes (``weight._no_weight_decay = True``) and
gradient hooks move to the new objects. FSDP2 computes with a further object, the unsharded parameter, which shares the
attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn
from dtrain.shard.fsdp2_private import has_own_attributes_only

# torch stores these attributes itself: the identity of a parameter in FSDP2, and the mark of a DTensor that is a parameter.
_ATTRIBUTES_OF_TORCH = frozenset({"_fsdp_orig_uid", "_is_param"})


class ParamObjects:
    """Attributes and gradient hooks of a model's parameters and buffers, by name, before a function replaces the tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # torch may also keep an object and exchange all that it holds.
        self._kept = {
            name: (
                {key: value for key, value in tensor.__dict__.items() if key not in _ATTRIBUTES_OF_TORCH}
                if has_own_attributes_only(tensor)
                else {},
                tensor._backward_hooks,
                getattr(tensor, "_post_accumulate_grad_hooks", None),
            )
            for name, tensor in _tensors_by_name(model).items()
        }

    def carry_over_(self) -> None:
        """Give the tensors of the same names the kept attributes and hooks.

        A handle of a hook still removes the hook, because the new tensor has the dictionary of the old one.

        Mutates: the model's parameters and buffers.
        """
        for name, tensor in _tensors_by_name(self._model).items():
            attributes, hooks, accumulate_hooks = self._kept.get(name, ({}, None, None))
            tensor.__dict__.update(attributes)
            if hooks and tensor._backward_hooks is not hooks:
                tensor._backward_hooks = hooks
            if accumulate_hooks and tensor._post_accumulate_grad_hooks is not accumulate_hooks:
                tensor._post_accumulate_grad_hooks = accumulate_hooks


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}


def check_param_objects(model: nn.Module, *, whole: bool, ignored_params: Mapping[str, Tensor], ranks: int) -> None:
    """Refuse parameters that would train otherwise than in one process.

    Args:
        model: plain model.
        whole: if True, the parameters stay the user's own objects.
        ignored_params: parameters that stay whole, by name.
        ranks: number of ranks that share the parameters.

    Raises:
        ConfigError: a parameter of a class of its own, or that shares memory with another tensor of the
            model; an embedding that writes its own weight or has sparse gradients.
    """
    params, _ = parameters_by_fqn(model)
    for name, param in params.items():
        # isinstance is True for every tensor that is a parameter, so ask for the class itself.
        own_class = type(param) is not nn.Parameter and issubclass(type(param), nn.Parameter)
        if own_class and not whole and name not in ignored_params:
            raise ConfigError(
                f"shard_model: the parameter {name!r} must be a plain nn.Parameter, got {type(param).__name__}, and FSDP2 "
                "replaces the class. Set an attribute, name it in ignored_params, or use strategy='replicate'."
            )
    _check_memory(model)
    if not whole or ranks > 1:
        _check_embeddings(model)


def _check_memory(model: nn.Module) -> None:
    """Refuse a parameter that overlaps with another tensor, because each tensor gets memory of its own."""
    params, _ = parameters_by_fqn(model)
    extents = sorted(
        (*extent(tensor), name, tensor)
        for name, tensor in _tensors_by_name(model).items()
        if tensor.layout == torch.strided and not hasattr(tensor, "device_mesh") and tensor.numel()
    )
    for (storage, _, end, name, tensor), (next_storage, start, _, other_name, other) in pairwise(extents):
        # Rows or columns of one tensor lie between each other without an overlap.
        dense = tensor.is_contiguous() or other.is_contiguous() or tensor.storage_offset() == other.storage_offset()
        if storage == next_storage and start < end and dense and (name in params or other_name in params):
            raise ConfigError(
                f"shard_model: {name!r} and {other_name!r} must be one Parameter or have memory of their own, got two tensors "
                "in the same memory, which sharding would separate. Tie them by assignment: b.weight = a.weight."
            )


def extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage, first byte and last byte + 1 of a tensor. A tensor on meta has a storage, too."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, width = int(tensor.storage_offset()) * tensor.itemsize, tensor.itemsize
    return tensor.untyped_storage()._cdata, start, start + (last + 1) * width


def _check_embeddings(model: nn.Module) -> None:
    for name, module in _embeddings(model):
        label = f"shard_model: the {type(module).__name__} {name!r}" if name else f"shard_model: the {type(module).__name__}"
        if module.max_norm is not None:
            raise ConfigError(
                f"{label} must not have max_norm={module.max_norm}, because each forward writes the rows of its own samples "
                "into the weight. Leave max_norm out, and normalize the looked-up rows in forward, or the weight after a step."
            )
        if module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{label} must not have sparse=True, because ranks sum dense gradients. Pass sparse=False and a dense "
                "optimizer such as torch.optim.AdamW."
            )


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in modules_by_fqn(model) if isinstance(module, nn.Embedding | nn.EmbeddingBag))
