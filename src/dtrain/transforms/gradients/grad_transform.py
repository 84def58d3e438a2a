"""Build transforms that change the gradient before the update, and compute sums over the units of a gradient.

A unit is the weights of one output of a layer: a row of a weight, or the whole of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dtrain.dist.dtensor import all_reduce_partial_, to_local
from dtrain.schedules.hyperparameters import Hyperparameter
from dtrain.state import TrainState
from dtrain.step.transform import Transform, UpdateFn
from dtrain.typing import Metrics


def grad_transform(fn: Callable[..., None], *, name: str, at_clock: Mapping[str, Hyperparameter] | None = None) -> Transform:
    """Return a transform that calls ``fn`` with the parameters before the update.

    Args:
        fn: function ``(params, ...)`` that changes ``.grad`` in place.
        name: name of the transform.
        at_clock: further keyword arguments of ``fn``, as functions of the clock before the step.
    """
    values = at_clock or {}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            fn(state.params, **{option: at(state.clock) for option, at in values.items()})
            return inner(state, metrics)

        return update_fn

    return Transform(name=name, update=update, hyperparameters=tuple(values.values()))


def unit_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of one unit: all dims but the first (the outputs), or all dims of a vector or scalar."""
    return tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else tuple(range(tensor.ndim))


def unit_sums(tensors: Sequence[Tensor], of_shard: Callable[[Tensor, tuple[int, ...]], Tensor]) -> list[Tensor]:
    """Return each tensor's sums over units, broadcastable to this rank's shard: the dims of a unit have size 1.

    Args:
        tensors: plain tensors or DTensors.
        of_shard: function ``(shard, dims) -> sums`` that keeps the dims.

    Collective: one all-reduce per mesh axis that shards units; whole rows need none.
    """
    dims = [unit_dims(tensor) for tensor in tensors]
    sums = [of_shard(to_local(tensor), over) for tensor, over in zip(tensors, dims, strict=True)]
    all_reduce_partial_(sums, tensors, dims)
    return sums


def sum_dtype(shard: Tensor) -> torch.dtype:
    """Return the dtype for sums over ``shard``: at least float32."""
    return torch.promote_types(shard.dtype, torch.float32)
