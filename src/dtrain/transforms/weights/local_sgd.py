"""Local SGD: replicas that train separately and are averaged at intervals. ``local_training`` describes the mechanism."""

from __future__ import annotations

from typing import Literal

from dtrain.arguments import check_choice
from dtrain.durations import Duration
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.weights.local_training import average_params_, check_replicas, grad_per_replica, join_remaining_state
from dtrain.typing import Metrics, TransformState

_NAME = "local_sgd"


def local_sgd(interval: Duration | int | str, *, optimizer_state: Literal["average", "keep"] = "average") -> Transform:
    """Train each replica on its own samples, and replace all replicas by their mean at the end of every interval.

    The replicas are those of the mesh's ``dp_replicate`` with ``strategy="hybrid_shard"``, or all data-parallel ranks with
    ``"replicate"``. With one replica this is the plain step. Replicas exchange no gradients. Interval 1, plain SGD and batches
    of equal weight are data-parallel training. The mean weights all replicas equally, whatever number of samples they have
    seen.

    A round ends after the step in which the clock crosses a boundary of ``interval``; ``state.crossed(interval)`` is True then.
    Between boundaries the replicas differ, and ``save_sharded`` raises. Save at a boundary, or after
    ``state = dt.transforms.join_replicas(state)``, which averages at any step. Also call ``join_replicas`` at the end of a run,
    and after ``between`` has ended. List ``local_sgd`` first, before all transforms that may skip an update. Do not wrap it in
    ``every``, which would skip the last steps of rounds.

    Formula: ``param_k = update_k(param_k, grad_k)`` in each step and replica ``k``; at the end of an interval
    ``param_k = (param_1 + ... + param_K) / K``

    Args:
        interval: length of a round: ``8`` steps, or a duration in any unit (``"1ep"``, ``"1e8tok"``).
        optimizer_state: ``"average"`` also averages the optimizer's state and the averages in other transforms' states at the
            end of a round, so a checkpoint there is exact. ``"keep"`` keeps the optimizer's state of each replica and sends the
            parameters only; a checkpoint then needs ``join_replicas`` at every step.

    Mutates: parameters, optimizer state and transform states, at the end of a round.
    Collective: in a step, those of a plain step without the all-reduce of gradients between replicas. At the end of a round one
    all-reduce between replicas per dtype and 64 MiB of this rank's shards.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.local_sgd(8)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.25))
        >>> state, _ = step(state, torch.tensor([[3.0], [1.0]]))  # the gradient is 2
        >>> model.weight.item()
        1.5

    Raises:
        ConfigError: ``interval`` is not a duration, or ``optimizer_state`` is unknown. From ``Step.init`` on: only part of the
            parameters is selected (``masked``), or the strategy shards over the mesh's ``dp_replicate``.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1; averaging momentum, Yu et al. 2019, arXiv:1905.03817, algorithm 1.
    """
    each = Duration.parse(interval)
    check_choice(_NAME, "optimizer_state", optimizer_state, ("average", "keep"))

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            if state.spec.replica_info is not None and ends_interval(state, each):
                average_params_(state, _NAME)
                state = join_remaining_state(state, caller=_NAME) if optimizer_state == "average" else state
            return state, metrics

        return update_fn

    return Transform(name=_NAME, init=_init_local_sgd, grad=grad_per_replica, update=update, uses_grad=False)


def _init_local_sgd(state: TrainState) -> TransformState:
    check_replicas(state, _NAME)
    return {}
