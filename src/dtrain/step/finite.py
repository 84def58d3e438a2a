"""Find gradients and losses that are not finite, as one decision of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import to_local
from dtrain.run_context import AsyncScalar
from dtrain.state import TrainState
from dtrain.typing import Params

MAX_NONFINITE_STEPS = 10
"""Steps without a finite loss, one after another, that stop a run by default. An update with NaN spoils the parameters for
good, so a run never recovers from it, and ten steps cost little. Ten skipped updates are far more than a bad batch or two.
"""
_KEY = "nonfinite"


@dataclass(slots=True, eq=False)
class NonfiniteLossCounter:
    """Count the steps in a row in which this rank's loss was not finite, on the device, and read the count without a wait.

    A count is sent to the host only when the one before has arrived, so none is lost however far the device is behind.

    Args:
        limit: the count that is too many; None counts nothing.
        skipped_updates: updates that were left out one after another, where the host knows.
    """

    limit: int | None = MAX_NONFINITE_STEPS
    skipped_updates: int = 0
    _count: Tensor | None = None
    _previous: Tensor | None = None
    _step: int = -1
    _sent_step: int | None = None
    _host: list[AsyncScalar] = field(default_factory=list)

    def record(self, step: int, total: Tensor) -> None:
        """Count the loss ``total`` ``[]`` of ``step``; a further one of the same step takes its place. Host sync: none."""
        if self.limit is None:
            return
        if step != self._step:
            self._previous = self._count if step == self._step + 1 else None
            self._step = step
        broken = torch.nan_to_num(total - total, nan=1.0)  # 0 if finite, 1 if infinite or NaN
        self._count = broken if self._previous is None else torch.addcmul(broken, broken, self._previous)
        if self._sent_step is None:
            self._host = self._host or [AsyncScalar(total.device)]
            self._host[0].copy_from(self._count)
            self._sent_step = step

    def first_failed_step(self) -> int | None:
        """Return the step with which too many began; None if they are fewer, or nothing is known yet. Host sync: none."""
        count = None if self._sent_step is None else self._host[0].try_read()
        if count is None or self._sent_step is None or self.limit is None:
            return None
        sent, self._sent_step = self._sent_step, None
        return sent - int(count) + 1 if count >= self.limit else None

    def reset(self) -> None:
        """Forget what was counted."""
        self._count = self._previous = self._sent_step = None
        self._step, self.skipped_updates = -1, 0


def nonfinite_loss_counter(state: TrainState) -> NonfiniteLossCounter:
    """The run's ``NonfiniteLossCounter``, made on first use."""
    found: NonfiniteLossCounter = state.run_context.transform_cache.setdefault(_KEY, NonfiniteLossCounter())
    return found


def set_nonfinite_limit(state: TrainState, limit: int | None) -> None:
    """Let ``limit`` steps without a finite loss stop the run; None lets it go on. Mutates: ``state.shared``."""
    state.run_context.transform_cache[_KEY] = NonfiniteLossCounter(limit=limit)


def all_finite(tensors: Iterable[Tensor], device: torch.device, *, caller: str = "all_finite") -> Tensor:
    """Whether no element of any tensor is infinite or NaN on any rank: bool ``[]``, the same on every rank.

    Args:
        tensors: plain ones and DTensors, of any dtype.
        device: where the answer is to be: that of the training group.
        caller: who asks, for the error if ranks do not come.

    Collective: one all-reduce of float32 ``[]`` over all ranks. Host sync: none, except for tensors on another device.
    """
    kinds = defaultdict(list)
    for tensor in tensors:
        shard = to_local(tensor)
        if shard.numel():  # nothing has no largest element
            kinds[shard.dtype, shard.device].append(shard)
    broken = torch.zeros((), device=device)
    for shards in kinds.values():
        largest = torch.stack(torch._foreach_norm(shards, math.inf))
        broken += (~torch.isfinite(largest)).sum().to(device)
    if get_dist_info().world_size > 1:
        with report_missing_ranks(caller):
            dist.all_reduce(broken)
    return broken == 0


def nonfinite_param_names(params: Params) -> str:
    """The names of parameters whose gradient is infinite or NaN on this rank, for a message: the first three, or ``none``.

    Host sync: one for each parameter.
    """
    grads = {name: to_local(param.grad) for name, param in params.items() if param.grad is not None}
    names = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    return f"{', '.join(names[:3]) or 'none'}{', ...' if len(names) > 3 else ''}"
