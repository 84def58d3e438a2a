"""Find gradients and losses that are not finite, as one decision of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import current
from dtrain.dist.timeouts import naming_missing
from dtrain.host_scalar import HostScalar
from dtrain.state import TrainState
from dtrain.tensors import local
from dtrain.types import Params

IN_A_ROW = 10
"""Steps without a finite loss, one after another, that stop a run by default. An update with NaN spoils the parameters for
good, so a run never recovers from it, and ten steps cost little. Ten skipped updates are far more than a bad batch or two.
"""
_KEY = "nonfinite"


@dataclass(slots=True, eq=False)
class LossWatch:
    """Count the steps in a row in which this rank's loss was not finite, on the device, and read the count without a wait.

    A count is sent to the host only when the one before has arrived, so none is lost however far the device is behind.

    Args:
        limit: the count that is too many; None counts nothing.
        skipped: updates that were left out one after another, where the host knows.
    """

    limit: int | None = IN_A_ROW
    skipped: int = 0
    _count: Tensor | None = None
    _before: Tensor | None = None
    _step: int = -1
    _sent: int | None = None
    _host: list[HostScalar] = field(default_factory=list)

    def note(self, step: int, total: Tensor) -> None:
        """Count the loss ``total`` ``[]`` of ``step``; a further one of the same step takes its place. Host sync: none."""
        if self.limit is None:
            return
        if step != self._step:
            self._before = self._count if step == self._step + 1 else None
            self._step = step
        broken = torch.nan_to_num(total - total, nan=1.0)  # 0 if finite, 1 if infinite or NaN
        self._count = broken if self._before is None else torch.addcmul(broken, broken, self._before)
        if self._sent is None:
            self._host = self._host or [HostScalar(total.device)]
            self._host[0].post(self._count)
            self._sent = step

    def first_of_too_many(self) -> int | None:
        """Return the step with which too many began; None if they are fewer, or nothing is known yet. Host sync: none."""
        count = None if self._sent is None else self._host[0].peek()
        if count is None or self._sent is None or self.limit is None:
            return None
        sent, self._sent = self._sent, None
        return sent - int(count) + 1 if count >= self.limit else None

    def reset(self) -> None:
        """Forget what was counted."""
        self._count = self._before = self._sent = None
        self._step, self.skipped = -1, 0


def loss_watch(state: TrainState) -> LossWatch:
    """The run's ``LossWatch``, made on first use."""
    found: LossWatch = state.shared.kept.setdefault(_KEY, LossWatch())
    return found


def set_loss_watch(state: TrainState, limit: int | None) -> None:
    """Let ``limit`` steps without a finite loss stop the run; None lets it go on. Mutates: ``state.shared``."""
    state.shared.kept[_KEY] = LossWatch(limit=limit)


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
