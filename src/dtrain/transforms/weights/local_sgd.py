"""Local SGD: copies of the model that train apart, and are averaged every so many steps. See ``apart`` for how."""

from __future__ import annotations

from typing import Literal

from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import GradFn, Transform, UpdateFn
from dtrain.transforms.weights.local_training import average_params_, check_not_masked, join_remaining_state, split_replicas
from dtrain.typing import Batch, Metrics, TransformState

_NAME = "local_sgd"


def local_sgd(interval: Duration | int | str, *, optimizer_state: Literal["average", "keep"] = "average") -> Transform:
    """Train each copy of the model on its own samples, and replace all copies by their mean at the end of every interval.

    Copies are what the mesh's ``dp_replicate`` holds with ``strategy="hybrid_shard"``, or each data-parallel rank with
    ``"replicate"``; on one copy this is the plain step. No gradient travels between copies. Interval 1, plain SGD and batches
    of one weight are data-parallel training. A mean of copies counts each once, whatever it has been trained on.

    A round ends after the step in which the clock crosses a boundary of ``interval``, as ``state.crossed(interval)`` then says.
    In between copies differ, and ``save_sharded`` refuses: save at such a boundary, or after ``state =
    dt.transforms.join_replicas(state)``, which averages at any step; so also at the end of a run, and after ``between`` has ended. List it
    first: what may leave an update out must be inside of it. In ``every`` it would miss the steps in which rounds end.

    Formula: ``param_k = update_k(param_k, grad_k)`` in each step and copy ``k``; at the end of an interval
    ``param_k = (param_1 + ... + param_K) / K``

    Args:
        interval: ``8`` steps, or a duration in any unit (``"1ep"``, ``"1e8tok"``).
        optimizer_state: ``"average"`` makes the optimizer's state one at the end of a round, too, and averages in the slices of
            other transforms; then all is equal there, and a checkpoint is exact. ``"keep"`` leaves each copy its own, and sends
            the parameters only; a checkpoint needs ``join_replicas`` before it at every step.

    Mutates: parameters, optimizer state and slices, at the end of a round.
    Collective: in a step, those of a plain one without the all-reduce of gradients between copies; at the end of a round one
    all-reduce between copies per dtype and 64 MiB of this rank's shards.
    Host sync: none.

    Raises:
        ConfigError: no duration, another ``optimizer_state``; from ``Step.init`` on, a part of the parameters (``masked``), or
            a strategy that leaves no copies of a mesh that has them.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1; averaging momentum, Yu et al. 2019, arXiv:1905.03817, algorithm 1.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> step = compose_step(mean_loss(lambda model, x: model(x).mean(), weight=len), [local_sgd(8)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.25))
        >>> state, _ = step(state, torch.tensor([[3.0], [1.0]]))  # the gradient is 2
        >>> model.weight.item()
        1.5
    """
    each = Duration.parse(interval)
    check_optimizer_state(_NAME, optimizer_state)

    def update(inner: UpdateFn) -> UpdateFn:
        def averaged(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            if state.spec.replica_info is not None and ends_interval(state, each):
                average_params_(state, _NAME)
                state = join_remaining_state(state, caller=_NAME) if optimizer_state == "average" else state
            return state, metrics

        return averaged

    return Transform(name=_NAME, init=_init_local_sgd, grad=grad_per_replica, update=update, uses_grad=False)


def _init_local_sgd(state: TrainState) -> TransformState:
    check_replicas(state, _NAME)
    return {}


def grad_per_replica(inner: GradFn) -> GradFn:
    """``inner`` with the copies of the model apart: the gradient of each copy is that of its own samples."""

    def apart(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        return inner(split_replicas(state), batch, microbatch_size=microbatch_size)

    return apart


def check_replicas(state: TrainState, caller: str) -> None:
    """Refuse, at the start of a run, what copies cannot train apart in.

    Raises:
        ConfigError: a part of the parameters, or a mesh whose copies the strategy has done away with.
    """
    check_not_masked(state, caller)
    split_replicas(state)


def check_optimizer_state(caller: str, value: str) -> None:
    """Refuse what says neither to average nor to keep."""
    if value not in ("average", "keep"):
        raise ConfigError(f"{caller}: optimizer_state must be 'average' or 'keep', got {value!r}")
