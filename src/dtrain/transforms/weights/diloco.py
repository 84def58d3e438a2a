"""DiLoCo: replicas that train separately, and an outer optimizer on the averaged parameter deltas (pseudo-gradients)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dtrain.arguments import check_choice
from dtrain.dist.dtensor import to_local
from dtrain.dist.incident import report_missing_ranks
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.step.transform import Transform, UpdateFn
from dtrain.transforms.weights.local_sgd import (
    average_replicas_,
    check_replicas,
    grad_per_replica,
    join_remaining_state,
    optimizer_params,
)
from dtrain.typing import Metrics, Schedule, TransformState

_NAME = "diloco"


def outer_step_(
    outer: Sequence[Tensor], momenta: Sequence[Tensor], deltas: Sequence[Tensor], *, lr: float, momentum: float
) -> None:
    """Make one step of Nesterov SGD on ``outer`` with ``deltas`` as gradients, on the local shards.

    Formula: ``m = momentum * m + delta``, then ``outer = outer - lr * (delta + momentum * m)``

    Args:
        outer: parameters after the previous outer step.
        momenta: momentum of each parameter; zeros at first.
        deltas: ``outer - mean(inner)``, with the mean of the inner parameters over replicas.
        lr: outer learning rate.
        momentum: number in ``[0, 1)``.

    Mutates: ``outer``, ``momenta``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> outer, m = (
        ...     torch.tensor([1.0], dtype=torch.float64),
        ...     torch.zeros(1, dtype=torch.float64),
        ... )
        >>> delta = torch.tensor([0.1], dtype=torch.float64)
        >>> dt.transforms.outer_step_([outer], [m], [delta], lr=0.7, momentum=0.9)
        >>> round(outer.item(), 9), m.item()  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        (0.867, 0.1)

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the momentum as in ``torch.optim.SGD(nesterov=True)``.
    """
    if not outer:
        return
    with torch.no_grad():
        targets, velocities, grads = ([to_local(tensor) for tensor in tensors] for tensors in (outer, momenta, deltas))
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads)
        torch._foreach_add_(targets, grads, alpha=-lr)
        torch._foreach_add_(targets, velocities, alpha=-lr * momentum)


def diloco(
    every: Duration | int | str,
    *,
    lr: float | Schedule = 0.7,
    momentum: float | Schedule = 0.9,
    optimizer_state: Literal["average", "keep"] = "average",
) -> Transform:
    """Train each replica on its own samples, and make an outer step with the mean parameter delta at the end of every interval.

    The run's optimizer is the inner optimizer (AdamW in the paper). The outer optimizer is Nesterov SGD. Its gradient is the
    change of the parameters since the last outer step, averaged over replicas. All replicas continue from its result. Replicas,
    the end of a round, the averaged state and the steps with a checkpoint are as in ``local_sgd``. List ``diloco`` first, too.
    With one replica it is a lookahead optimizer. If steps are made without the transform (before ``between`` starts), the first
    round starts from their result. The outer momentum still moves parameters that ``freeze`` freezes later, until the momentum
    has decayed.

    The transform state is ``{"params": {name: outer}, "momentum": {name: m}, "next": int}``: parameters at the last outer step
    and the outer momentum, laid out like the parameters, in their dtype; and the step that continues the round. The state takes
    the memory of two copies of this rank's shards, and an outer step the memory of one more copy.

    Formula: at the end of an interval ``delta = outer - (param_1 + ... + param_K) / K``, ``m = momentum * m + delta``,
    ``outer = outer - lr * (delta + momentum * m)``, ``param_k = outer``

    Args:
        every: length of a round: a number of steps (500 in the paper) or a duration in any unit.
        lr: outer learning rate, >= 0, or a schedule. ``lr=1, momentum=0`` is ``local_sgd``.
        momentum: outer momentum in ``[0, 1)``, or a schedule. Both schedules are evaluated at the last step of a round.
        optimizer_state: ``"average"`` averages the state of the inner optimizer at the end of a round, so a checkpoint can
            store the round's end and any number of replicas can resume. ``"keep"`` keeps the state of each replica, as in the
            paper. The paper found no gain from averaging AdamW's state, which sends three times as much in all.

    Mutates: parameters, optimizer state and transform states, at the end of a round.
    Collective: as ``local_sgd``.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.diloco(2)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05))
        >>> for _ in range(2):  # the gradient is 1: inner steps to 0.95, then 0.9
        ...     state, _ = step(state, torch.ones(4, 1, dtype=torch.float64))
        >>> round(model.weight.item(), 9)  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        0.867

    Raises:
        ConfigError: as ``local_sgd``; ``lr`` is negative or not finite, or ``momentum`` is outside of ``[0, 1)``. Schedules are
            checked in each step, before the step changes anything.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.

    Suggested values:
        C4, decoder of 150M, 8 replicas: ``every=500``, ``lr=0.7``, ``momentum=0.9`` (Douillard et al. 2023, section 3)
        C4, decoder of 1.1B, 4 replicas: ``every=125``, ``lr=0.7``, ``momentum=0.9`` (Jaghouar et al. 2024, arXiv:2407.07852)
    When not to use: the network between all ranks is fast: a gradient reduction in every step then costs little, and its result
        does not depend on the number of replicas.
    """
    each = Duration.parse(every)
    lr_at = hyperparameter(lr, "diloco: lr", "[0, inf)")
    momentum_at = hyperparameter(momentum, "diloco: momentum", "[0, 1)")
    check_choice(_NAME, "optimizer_state", optimizer_state, ("average", "keep"))

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            outer_lr, outer_momentum = lr_at(state.clock), momentum_at(state.clock)
            state, metrics = inner(_start_round_if_needed(state), metrics)
            state = state.with_transform_state(_NAME, {**state.transform_states[_NAME], "next": state.step + 1})
            if ends_interval(state, each):
                _outer_step_(state, lr=outer_lr, momentum=outer_momentum)
                if state.spec.replica_info is not None and optimizer_state == "average":
                    state = join_remaining_state(state, caller=_NAME, except_for=_NAME)
            return state, metrics

        return update_fn

    return Transform(
        name=_NAME,
        init=_init_diloco,
        grad=grad_per_replica,
        update=update,
        uses_grad=False,
        hyperparameters=(lr_at, momentum_at),
    )


def _init_diloco(state: TrainState) -> TransformState:
    check_replicas(state, _NAME)
    momenta = {name: torch.zeros_like(param.detach()) for name, param in optimizer_params(state).items()}
    return {"params": _clone_params(state), "momentum": momenta, "next": state.step}


def _clone_params(state: TrainState) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in optimizer_params(state).items()}


def _start_round_if_needed(state: TrainState) -> TrainState:
    """Return the state with a current round. A new round starts here if steps were made without this transform."""
    content = state.transform_states[_NAME]
    return (
        state
        if content["next"] == state.step
        else state.with_transform_state(_NAME, {**content, "params": _clone_params(state)})
    )


def _outer_step_(state: TrainState, *, lr: float, momentum: float) -> None:
    """Make the outer step. Mutates: parameters and the transform state. Collective: as ``average_replicas_``."""
    outer, momenta = state.transform_states[_NAME]["params"], state.transform_states[_NAME]["momentum"]
    params = [to_local(state.params[name]) for name in outer]
    # A forward may have left unsharded copies of the parameters.
    grad_sync_of(state.model).reshard()
    with torch.no_grad():
        deltas = torch._foreach_sub([to_local(tensor) for tensor in outer.values()], params)
        with report_missing_ranks(_NAME):
            average_replicas_(deltas, state.spec.replica_info, device=state.device)
        outer_step_(list(outer.values()), list(momenta.values()), list(deltas), lr=lr, momentum=momentum)
        if params:
            torch._foreach_copy_(params, [to_local(tensor) for tensor in outer.values()])
