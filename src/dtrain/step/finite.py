"""Find gradients and losses that are not finite, as one decision of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import to_local
from dtrain.run_context import AsyncScalar
from dtrain.state import TrainState
from dtrain.transform import UpdateFn
from dtrain.typing import Metrics, Params, TransformState, make_metric

MAX_NONFINITE_STEPS = 10
"""Default number of steps in a row without a finite loss that stop a run.

An update with NaN damages the parameters permanently, so the run cannot recover. Ten skipped updates are more than a few bad
batches.
"""
_KEY = "nonfinite"


@dataclass(slots=True, eq=False)
class NonfiniteLossCounter:
    """Count the steps in a row in which this rank's loss was not finite, on the device, and read the count without a wait.

    A new count is sent to the host after the previous count has arrived, so no count is lost.

    Args:
        limit: number of steps that stops the run; None counts nothing.
        skipped_updates: number of updates in a row that were skipped, if the host knows them.
    """

    limit: int | None = MAX_NONFINITE_STEPS
    skipped_updates: int = 0
    _count: Tensor | None = None
    _previous: Tensor | None = None
    _step: int = -1
    _sent_step: int | None = None
    _host: list[AsyncScalar] = field(default_factory=list)

    def record(self, step: int, total: Tensor) -> None:
        """Count the loss ``total`` ``[]`` of ``step``; a second loss of one step replaces the first. Host sync: none."""
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
        """Return the first of too many nonfinite steps; None if there are fewer or the count is unknown. Host sync: none."""
        count = None if self._sent_step is None else self._host[0].try_read()
        if count is None or self._sent_step is None or self.limit is None:
            return None
        sent, self._sent_step = self._sent_step, None
        return sent - int(count) + 1 if count >= self.limit else None

    def reset(self) -> None:
        """Reset all counts."""
        self._count = self._previous = self._sent_step = None
        self._step, self.skipped_updates = -1, 0


def nonfinite_loss_counter(state: TrainState) -> NonfiniteLossCounter:
    """Return the run's ``NonfiniteLossCounter``, created on first use."""
    counter: NonfiniteLossCounter = state.run_context.transform_cache.setdefault(_KEY, NonfiniteLossCounter())
    return counter


def set_nonfinite_limit(state: TrainState, limit: int | None) -> None:
    """Stop the run after ``limit`` steps without a finite loss; None sets no limit. Mutates: ``state.run_context``."""
    state.run_context.transform_cache[_KEY] = NonfiniteLossCounter(limit=limit)


def all_finite(tensors: Iterable[Tensor], device: torch.device, *, caller: str = "all_finite") -> Tensor:
    """Return True (bool ``[]``, equal on every rank) if no element of any tensor is infinite or NaN on any rank.

    Args:
        tensors: plain tensors and DTensors, of any dtype.
        device: device of the result, which is the device of the training group.
        caller: function named in the error if ranks are missing.

    Collective: one all-reduce of float32 ``[]`` over all ranks. Host sync: none, except for tensors on another device.
    """
    shards_by_kind = defaultdict(list)
    for tensor in tensors:
        shard = to_local(tensor)
        # torch._foreach_norm fails on empty tensors.
        if shard.numel():
            shards_by_kind[shard.dtype, shard.device].append(shard)
    broken = torch.zeros((), device=device)
    for shards in shards_by_kind.values():
        largest = torch.stack(torch._foreach_norm(shards, math.inf))
        broken += (~torch.isfinite(largest)).sum().to(device)
    if get_dist_info().world_size > 1:
        with report_missing_ranks(caller):
            dist.all_reduce(broken)
    return broken == 0


def update_if_finite(
    update: UpdateFn, state: TrainState, metrics: Metrics, *, name: str, next_state: Callable[[bool], TransformState]
) -> tuple[TrainState, Metrics]:
    """Run ``update`` if all gradients are finite on all ranks, else skip the update. All transforms that skip updates use this.

    Args:
        update: function that applies the gradients.
        state: state with gradients.
        metrics: metrics of the step; ``skipped`` is added, 1 for a skipped update.
        name: name of the transform.
        next_state: function of ``skipped`` that returns the next state of the transform, or raises.

    Collective: as ``all_finite``. Host sync: one, because the host decides.
    """
    grads = [param.grad for param in state.params.values() if param.grad is not None]
    broken = not bool(all_finite(grads, state.device, caller=name))
    content = next_state(broken)
    if not broken:
        state, metrics = update(state, metrics)
    skipped = make_metric(float(broken), 1.0, state.device)
    return state.with_transform_state(name, content), {"skipped": skipped, **metrics}


def nonfinite_param_names(params: Params) -> str:
    """Return the names of parameters whose gradient is infinite or NaN on this rank: the first three, or ``none``.

    Host sync: one for each parameter.
    """
    grads = {name: to_local(param.grad) for name, param in params.items() if param.grad is not None}
    names = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    return f"{', '.join(names[:3]) or 'none'}{', ...' if len(names) > 3 else ''}"
