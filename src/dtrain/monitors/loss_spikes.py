"""A guard that looks at the loss, two steps late, so that nothing waits for the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError, NonFiniteError, StepError
from dtrain.run_context import AsyncScalar
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metric, Metrics, TransformState

_NAME = "watch_loss"
_DELAY_STEPS = 2  # steps: by then a GPU has the loss, as the host is a step ahead of it or less
_MIN_HISTORY = 10  # losses, before their median says what is usual


def is_spike(loss: float, history: Sequence[float], factor: float) -> bool:
    """Whether ``loss`` is far above the median of the losses before it; never while there are fewer than ten.

    Formula: ``loss > median + (factor - 1) * abs(median)``, which for a positive median is ``loss > factor * median``

    Example:
        >>> is_spike(5.0, [2.0] * 9 + [100.0], 2.0), is_spike(3.9, [2.0] * 9 + [100.0], 2.0), is_spike(5.0, [2.0] * 9, 2.0)
        (True, False, False)
    """
    if len(history) < _MIN_HISTORY:
        return False
    usual = median(history)
    return loss > usual + (factor - 1.0) * abs(usual)


def watch_loss(
    action: Literal["raise", "warn"] = "raise", *, factor: float | None = None, window: int = 50, metric: str = "loss"
) -> Transform:
    """Raise, or warn, when the loss of a step is infinite or NaN, or far above what it has been; on all ranks alike.

    It learns of a loss two steps later, when a GPU has it anyway, so no step waits; by then the parameters may be spoiled, and
    the run is to go on from its last checkpoint. What keeps a gradient that is not finite from the parameters is ``nonfinite``
    (or ``loss_scale``), at the price of a wait in each step; list ``watch_loss`` before those, or it sees no step that they
    leave out. The losses of the last two steps of a run are not looked at.

    What it finds is in the ledger of the run, too: an event ``loss`` with the step and the value.

    The slice is ``{"waiting": int, "newest": [], "older": [], "usual": {"0": float, ...}}``: the losses that have not been
    looked at yet, and with ``factor`` the last finite ones, oldest first.

    Formula: ``loss > median + (factor - 1) * abs(median)`` with the median of the last ``window`` finite losses, once there are
    ten; the loss is the mean over all ranks

    Args:
        action: ``"raise"``, or ``"warn"`` on rank 0 and go on.
        factor: how far above the median is too far, > 1; None looks only at whether it is finite.
        window: of how many steps the median is, >= 10.
        metric: which of the step's metrics is the loss.

    Collective: one all-reduce of two float64 a step, on several ranks.
    Host sync: none; it waits for an event of two steps ago.

    Raises:
        ConfigError: another ``action``, a ``factor`` or ``window`` out of range; in a step, no such metric.
        NonFiniteError: in a step, on all ranks: the loss of two steps ago was not finite (``"raise"``).
        StepError: in a step, on all ranks: that loss was a spike (``"raise"``).

    Source: the running median as a robust mean, Huber 1981, Robust Statistics, chapter 1.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [watch_loss()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for value in (1.0, float("nan"), 1.0):
        ...     state, _ = step(state, torch.tensor([[value]]))
        >>> step(state, torch.tensor([[1.0]]))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        dtrain.errors.NonFiniteError: watch_loss: the loss of step 1 was nan; ...
    """
    if action not in ("raise", "warn"):
        raise ConfigError(f"watch_loss: action must be 'raise' or 'warn', got {action!r}")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf):
        raise ConfigError(f"watch_loss: needs a finite factor > 1, or None, got {factor=}")
    if type(window) is not int or window < _MIN_HISTORY:
        raise ConfigError(f"watch_loss: needs a whole window >= {_MIN_HISTORY}, got {window=}")

    def init(state: TrainState) -> TransformState:
        nothing = torch.zeros((), dtype=torch.float64, device=state.device)
        _pending_losses(state)
        return {"waiting": 0, "newest": nothing, "older": nothing.clone(), "usual": {}}

    def update(inner: UpdateFn) -> UpdateFn:
        def watched(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step, now = state.step, state.transform_states[_NAME]
            way = _pending_losses(state)
            if now["waiting"] == _DELAY_STEPS:
                value = way.read(step - _DELAY_STEPS, now["older"])
                usual = list(now["usual"].values())
                problem = _describe_problem(value, usual, factor)
                if problem is not None:
                    _report_problem(step - _DELAY_STEPS, value, problem, action)
                if factor is not None and math.isfinite(value):
                    kept = [*usual, value][-window:]
                    now = {**now, "usual": {str(at): each for at, each in enumerate(kept)}}
            state, metrics = inner(state, metrics)
            if metric not in metrics:
                raise ConfigError(f"watch_loss: the step has no metric {metric!r}; it has {', '.join(sorted(metrics))}")
            loss = _global_mean(metrics[metric])
            way.send(step, loss)
            after = {**now, "waiting": min(now["waiting"] + 1, _DELAY_STEPS), "newest": loss, "older": now["newest"]}
            return state.with_transform_state(_NAME, after), metrics

        return watched

    return Transform(name=_NAME, init=init, update=update, uses_grad=False)


@dataclass(slots=True, eq=False)
class _PendingLosses:
    """Losses on their way to the host, by the step that they are of: one more than are waiting, for a step tried again."""

    slots: list[tuple[int, AsyncScalar]]

    def send(self, step: int, loss: Tensor) -> None:
        at = step % len(self.slots)
        self.slots[at] = (step, self.slots[at][1])
        self.slots[at][1].copy_from(loss)

    def read(self, step: int, loss: Tensor) -> float:
        """The loss of ``step``; after a resume, where nothing was sent, from the slice (which waits)."""
        for sent, scalar in self.slots:
            if sent == step and (value := scalar.wait()) is not None:
                return value
        return float(loss)


def _pending_losses(state: TrainState) -> _PendingLosses:
    kept = state.run_context.transform_cache
    if _NAME not in kept:
        kept[_NAME] = _PendingLosses(slots=[(-1, AsyncScalar(state.device)) for _ in range(_DELAY_STEPS + 1)])
    found: _PendingLosses = kept[_NAME]
    return found


def _global_mean(metric: Metric) -> Tensor:
    """Over all ranks, float64 ``[]``."""
    if get_dist_info().world_size == 1:
        return metric.total.double() / metric.weight
    both = torch.stack([metric.total, metric.weight]).double()
    with report_missing_ranks(_NAME):
        dist.all_reduce(both)
    return both[0] / both[1]


def _describe_problem(loss: float, usual: Sequence[float], factor: float | None) -> str | None:
    if not math.isfinite(loss):
        return "look at its batch and at the learning rate, and go on from the last checkpoint"
    if factor is not None and is_spike(loss, usual, factor):
        return f"the median of the {len(usual)} before is {median(usual):.6g}, and {factor=}"
    return None


def _report_problem(step: int, loss: float, problem: str, action: str) -> None:
    message = f"watch_loss: the loss of step {step} was {loss:.6g}; {problem}"
    spans.record_event("loss", step=step, value=loss if math.isfinite(loss) else str(loss), problem=problem)
    if action == "raise":
        raise (StepError if math.isfinite(loss) else NonFiniteError)(message)
    if get_dist_info().rank == 0:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
