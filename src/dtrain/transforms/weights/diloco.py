"""DiLoCo: copies of the model that train apart, and an outer optimizer that follows the mean of their ways. See ``apart``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import to_local
from dtrain.durations import Duration
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.weights.local_sgd import check_optimizer_state, check_replicas, grad_per_replica
from dtrain.transforms.weights.local_training import average_replicas_, join_remaining_state, optimizer_params
from dtrain.typing import Metrics, Schedule, TransformState

_NAME = "diloco"


def outer_step_(
    outer: Sequence[Tensor], momenta: Sequence[Tensor], deltas: Sequence[Tensor], *, lr: float, momentum: float
) -> None:
    """One step of Nesterov's SGD on ``outer``, with ``deltas`` for gradients, on the local shards.

    Formula: ``m = momentum * m + delta``, then ``outer = outer - lr * (delta + momentum * m)``

    Args:
        outer: the parameters as of the last outer step.
        momenta: one for each, zeros at first.
        deltas: ``outer - mean(inner)``, the mean over copies of where the inner steps have come to.
        lr: outer rate.
        momentum: in ``[0, 1)``.

    Mutates: ``outer``, ``momenta``. Collective: none. Host sync: none.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the momentum as in ``torch.optim.SGD(nesterov=True)``.

    Example:
        >>> outer, m = torch.tensor([1.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        >>> outer_step_([outer], [m], [torch.tensor([0.1], dtype=torch.float64)], lr=0.7, momentum=0.9)
        >>> round(outer.item(), 9), m.item()  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        (0.867, 0.1)
    """
    if not outer:
        return
    with torch.no_grad():
        targets, kept, ways = ([to_local(tensor) for tensor in tensors] for tensors in (outer, momenta, deltas))
        torch._foreach_mul_(kept, momentum)
        torch._foreach_add_(kept, ways)
        torch._foreach_add_(targets, ways, alpha=-lr)
        torch._foreach_add_(targets, kept, alpha=-lr * momentum)


def diloco(
    interval: Duration | int | str,
    *,
    lr: float | Schedule = 0.7,
    momentum: float | Schedule = 0.9,
    optimizer_state: Literal["average", "keep"] = "average",
) -> Transform:
    """Train each copy of the model on its own samples; at the end of every interval make an outer step with their mean way.

    The run's optimizer is the inner one (AdamW in the paper). What all copies have gone, on average, since the last outer step
    is the gradient of the outer one, Nesterov's SGD, from whose result all copies go on. What a copy is, when a round ends,
    what is averaged besides, and when a checkpoint may be saved is as in ``local_sgd``; there, too, list it first. On one copy
    it looks ahead by itself. Where steps are made without it (before ``between`` begins), the first round starts from what they
    have left. The outer momentum goes on in parameters that ``freeze`` leaves alone from some step on, until it has died down.

    The slice is ``{"params": {name: outer}, "momentum": {name: m}, "next": int}``: parameters at the last outer step and the
    outer momentum, laid out like the parameters, in their dtype; and the step that continues the round. They take the memory of
    two copies of this rank's shards, and an outer step that of one more.

    Formula: at the end of an interval ``delta = outer - (param_1 + ... + param_K) / K``, ``m = momentum * m + delta``,
    ``outer = outer - lr * (delta + momentum * m)``, ``param_k = outer``

    Args:
        interval: ``500`` steps (the paper's), or a duration in any unit.
        lr: outer rate, >= 0, or a schedule of such. With ``lr=1, momentum=0`` this is ``local_sgd``.
        momentum: outer momentum, in ``[0, 1)``, or a schedule of such. Both are read at the last step of a round.
        optimizer_state: of the inner optimizer. ``"keep"`` leaves each copy its own, as in the paper, which found that sending
            it too (of AdamW, three times as much in all) gains nothing. The default, ``"average"``, departs from that, since
            only so the end of a round is one state of the run, which a checkpoint can hold and any number of copies resume.

    Mutates: parameters, optimizer state and slices, at the end of a round.
    Collective: as ``local_sgd``.
    Host sync: none.

    Raises:
        ConfigError: as ``local_sgd``; ``lr`` is negative or not finite, ``momentum`` outside of ``[0, 1)``; of schedules in the
            step that they are for, before anything changes.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [diloco(2)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05))
        >>> for _ in range(2):  # the gradient is 1: inner steps to 0.95, then 0.9
        ...     state, _ = step(state, torch.ones(4, 1, dtype=torch.float64))
        >>> round(model.weight.item(), 9)  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        0.867
    """
    each = Duration.parse(interval)
    rate_at = hyperparameter(lr, "diloco: lr", "[0, inf)")
    momentum_at = hyperparameter(momentum, "diloco: momentum", "[0, 1)")
    check_optimizer_state(_NAME, optimizer_state)

    def update(inner: UpdateFn) -> UpdateFn:
        def stepped(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            rate, decay = rate_at(state.clock), momentum_at(state.clock)
            state, metrics = inner(_start_round_if_needed(state), metrics)
            state = state.with_transform_state(_NAME, {**state.transform_states[_NAME], "next": state.step + 1})
            if ends_interval(state, each):
                _outer_step_(state, lr=rate, momentum=decay)
                if state.spec.replica_info is not None and optimizer_state == "average":
                    state = join_remaining_state(state, caller=_NAME, except_for=_NAME)
            return state, metrics

        return stepped

    return Transform(
        name=_NAME,
        init=_init_diloco,
        grad=grad_per_replica,
        update=update,
        uses_grad=False,
        hyperparameters=(rate_at, momentum_at),
    )


def _init_diloco(state: TrainState) -> TransformState:
    check_replicas(state, _NAME)
    momenta = {name: torch.zeros_like(param.detach()) for name, param in optimizer_params(state).items()}
    return {"params": _clone_params(state), "momentum": momenta, "next": state.step}


def _clone_params(state: TrainState) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in optimizer_params(state).items()}


def _start_round_if_needed(state: TrainState) -> TrainState:
    """The state with a round to continue: a new one from here, where steps were made without this transform."""
    content = state.transform_states[_NAME]
    return (
        state
        if content["next"] == state.step
        else state.with_transform_state(_NAME, {**content, "params": _clone_params(state)})
    )


def _outer_step_(state: TrainState, *, lr: float, momentum: float) -> None:
    """Mutates: parameters and the slice. Collective: as ``average_replicas_``."""
    outer, momenta = state.transform_states[_NAME]["params"], state.transform_states[_NAME]["momentum"]
    params = [to_local(state.params[name]) for name in outer]
    grad_sync_of(state.model).reshard()  # a forward may have left gathered copies of them
    with torch.no_grad():
        deltas = torch._foreach_sub([to_local(tensor) for tensor in outer.values()], params)
        with report_missing_ranks(_NAME):
            average_replicas_(deltas, state.spec.replica_info, device=state.device)
        outer_step_(list(outer.values()), list(momenta.values()), list(deltas), lr=lr, momentum=momentum)
        if params:
            torch._foreach_copy_(params, [to_local(tensor) for tensor in outer.values()])
