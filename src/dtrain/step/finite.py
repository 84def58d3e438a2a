"""Whether gradients are finite, as one decision of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import current
from dtrain.dist.timeouts import naming_missing
from dtrain.tensors import local
from dtrain.types import Params


def all_finite(tensors: Iterable[Tensor], device: torch.device, *, where: str = "all_finite") -> Tensor:
    """Whether no element of any tensor is infinite or NaN on any rank: bool ``[]``, the same on every rank.

    Args:
        tensors: plain ones and DTensors, of any dtype.
        device: where the answer is to be: that of the training group.
        where: who asks, for the error if ranks do not come.

    Collective: one all-reduce of float32 ``[]`` over all ranks. Host sync: none, except for tensors on another device.
    """
    kinds = defaultdict(list)
    for tensor in tensors:
        shard = local(tensor)
        if shard.numel():  # nothing has no largest element
            kinds[shard.dtype, shard.device].append(shard)
    broken = torch.zeros((), device=device)
    for shards in kinds.values():
        largest = torch.stack(torch._foreach_norm(shards, math.inf))
        broken += (~torch.isfinite(largest)).sum().to(device)
    if current().world_size > 1:
        with naming_missing(where):
            dist.all_reduce(broken)
    return broken == 0


def broken_here(params: Params) -> str:
    """The names of parameters whose gradient is infinite or NaN on this rank, for a message: the first three, or ``none``.

    Host sync: one for each parameter.
    """
    grads = {name: local(param.grad) for name, param in params.items() if param.grad is not None}
    names = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    return f"{', '.join(names[:3]) or 'none'}{', ...' if len(names) > 3 else ''}"
