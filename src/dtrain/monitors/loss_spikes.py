"""Detect non-finite losses and loss spikes without waiting for the device, two steps after the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.arguments import check_choice, check_int, check_number, warn
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, NonFiniteError, StepError
from dtrain.run_context import AsyncScalar
from dtrain.state import TrainState
from dtrain.step.transform import Transform, UpdateFn
from dtrain.typing import Metric, Metrics, TransformState

_NAME = "watch_loss"
# After two steps a GPU has finished the loss: the host is at most one step ahead.
_DELAY_STEPS = 2
# smallest number of losses for a median
_MIN_HISTORY = 10


def is_spike(loss: float, history: Sequence[float], factor: float) -> bool:
    """Return True if ``loss`` is far above the median of the earlier losses. With fewer than ten losses, return False.

    Formula: ``loss > median + (factor - 1) * abs(median)``, which for a positive median is ``loss > factor * median``

    Example:
        >>> (
        ...     is_spike(5.0, [2.0] * 9 + [100.0], 2.0),
        ...     is_spike(3.9, [2.0] * 9 + [100.0], 2.0),
        ...     is_spike(5.0, [2.0] * 9, 2.0),
        ... )
        (True, False, False)
    """
    if len(history) < _MIN_HISTORY:
        return False
    center = median(history)
    return loss > center + (factor - 1.0) * abs(center)


def watch_loss(
    action: Literal["raise", "warn"] = "raise", *, factor: float | None = None, window: int = 50, metric: str = "loss"
) -> Transform:
    """Raise or warn on all ranks if the loss of a step is infinite, NaN or far above the earlier losses.

    The check runs two steps later, when a GPU has the loss anyway, so no step waits. By then a bad update may have spoiled the
    parameters: resume from the last checkpoint. To keep a non-finite gradient from the parameters, use ``nonfinite`` or
    ``loss_scale``, at the price of one wait per step. List ``watch_loss`` before these transforms; skipped steps are invisible
    to ``watch_loss`` otherwise. The losses of the last two steps of a run are not checked.

    The ledger of the run gets an event ``loss`` with the step and the value.

    The transform state is ``{"waiting": int, "newest": [], "older": [], "usual": {"0": float, ...}}``: the unchecked losses,
    and with ``factor`` the last finite losses, oldest first.

    Formula: ``loss > median + (factor - 1) * abs(median)`` with the median of the last ``window`` finite losses, at least ten;
    the loss is the mean over all ranks

    Args:
        action: ``"raise"``, or ``"warn"`` on rank 0 and continue.
        factor: largest ratio of loss and median, > 1; None checks only for finite losses.
        window: number of losses in the median, >= 10.
        metric: name of the loss among the metrics of the step.

    Collective: one all-reduce of two float64 a step, on several ranks.
    Host sync: none; the host waits for an event of two steps ago.

    Source: the running median as a robust mean, Huber 1981, Robust Statistics, chapter 1.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1)
        >>> loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss, [dt.monitors.watch_loss()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for value in (1.0, float("nan"), 1.0):
        ...     state, _ = step(state, torch.tensor([[value]]))
        >>> step(state, torch.tensor([[1.0]]))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        dtrain.errors.NonFiniteError: watch_loss: the loss of step 1 was nan. ...

    Raises:
        ConfigError: invalid ``action``, ``factor`` or ``window``; in a step, the metric is missing.
        NonFiniteError: in a step, on all ranks: the loss of two steps ago was not finite (``"raise"``).
        StepError: in a step, on all ranks: the loss of two steps ago was a spike (``"raise"``).
    """
    check_choice("watch_loss", "action", action, ("raise", "warn"))
    if factor is not None:
        check_number("watch_loss", "factor", factor, above=1, advice="Pass None to check only for finite losses.")
    check_int("watch_loss", "window", window, minimum=_MIN_HISTORY)

    def init(state: TrainState) -> TransformState:
        zero = torch.zeros((), dtype=torch.float64, device=state.device)
        _pending_losses(state)
        return {"waiting": 0, "newest": zero, "older": zero.clone(), "usual": {}}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step, now = state.step, state.transform_states[_NAME]
            pending = _pending_losses(state)
            if now["waiting"] == _DELAY_STEPS:
                value = pending.read(step - _DELAY_STEPS, now["older"])
                history = list(now["usual"].values())
                _report_problem(step - _DELAY_STEPS, value, history, factor, action)
                if factor is not None and math.isfinite(value):
                    history = [*history, value][-window:]
                    now = {**now, "usual": {str(index): each for index, each in enumerate(history)}}
            state, metrics = inner(state, metrics)
            if metric not in metrics:
                raise ConfigError(
                    f"watch_loss: metric must be one of {', '.join(sorted(metrics))}, got {metric!r}. "
                    "Choose one of the metrics of the step."
                )
            loss = _global_mean(metrics[metric])
            pending.send(step, loss)
            after = {**now, "waiting": min(now["waiting"] + 1, _DELAY_STEPS), "newest": loss, "older": now["newest"]}
            return state.with_transform_state(_NAME, after), metrics

        return update_fn

    return Transform(name=_NAME, init=init, update=update, uses_grad=False)


@dataclass(slots=True, eq=False)
class _PendingLosses:
    """Losses in transfer to the host, by step. One extra slot allows a repeated step."""

    slots: list[tuple[int, AsyncScalar]]

    def send(self, step: int, loss: Tensor) -> None:
        slot = step % len(self.slots)
        self.slots[slot] = (step, self.slots[slot][1])
        self.slots[slot][1].copy_from(loss)

    def read(self, step: int, loss: Tensor) -> float:
        """Return the loss of ``step``. After a resume, read the loss from the transform state, which waits."""
        for sent, scalar in self.slots:
            if sent == step and (value := scalar.wait()) is not None:
                return value
        return float(loss)


def _pending_losses(state: TrainState) -> _PendingLosses:
    # ``named`` changes the seed: each watch of a run keeps its own losses.
    cache, key = state._run_context.transform_cache, f"{_NAME}.{state.seed}"
    if key not in cache:
        cache[key] = _PendingLosses(slots=[(-1, AsyncScalar(state.device)) for _ in range(_DELAY_STEPS + 1)])
    pending: _PendingLosses = cache[key]
    return pending


def _global_mean(metric: Metric) -> Tensor:
    """Compute the mean over all ranks, float64 ``[]``."""
    if get_dist_info().world_size == 1:
        return metric.total.double() / metric.weight
    both = torch.stack([metric.total, metric.weight]).double()
    with report_missing_ranks(_NAME):
        dist.all_reduce(both)
    return both[0] / both[1]


def _report_problem(step: int, loss: float, history: Sequence[float], factor: float | None, action: str) -> None:
    """Raise or warn if a loss is not finite or a spike."""
    if not math.isfinite(loss):
        problem = "Check the batch and the learning rate, and resume from the last checkpoint."
    elif factor is not None and is_spike(loss, history, factor):
        problem = f"The median of the {len(history)} losses before is {median(history):.6g}, and {factor=}."
    else:
        return
    message = f"watch_loss: the loss of step {step} was {loss:.6g}. {problem}"
    spans.record_event("loss", step=step, value=loss if math.isfinite(loss) else str(loss), problem=problem)
    if action == "raise":
        raise (StepError if math.isfinite(loss) else NonFiniteError)(message)
    if get_dist_info().rank == 0:
        warn(message, RuntimeWarning)
