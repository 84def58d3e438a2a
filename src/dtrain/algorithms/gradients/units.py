"""Sums over units: what belongs to one output of a layer, also where a unit is cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.tensors import local, sum_cut_


def unit_dims(tensor: Tensor) -> tuple[int, ...]:
    """The dims of one unit: all but the first, which is that of the outputs; of a vector or a number all, it is one unit."""
    return tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else tuple(range(tensor.ndim))


def unit_sums(tensors: Sequence[Tensor], of_shard: Callable[[Tensor, tuple[int, ...]], Tensor]) -> list[Tensor]:
    """For each tensor its sum over each unit, to be used with this rank's shard: as many dims, those of a unit of size 1.

    Args:
        tensors: plain or DTensor.
        of_shard: ``(shard, dims) -> sums``, with the dims kept.

    Collective: one all-reduce per mesh axis along which units are cut; rows that are whole need none.
    """
    dims = [unit_dims(tensor) for tensor in tensors]
    sums = [of_shard(local(tensor), over) for tensor, over in zip(tensors, dims, strict=True)]
    sum_cut_(sums, tensors, dims)
    return sums


def at_least_float32(shard: Tensor) -> torch.dtype:
    """The dtype that sums of ``shard`` are taken in."""
    return torch.promote_types(shard.dtype, torch.float32)
