"""``should_stop``: whether this run is to save and stop now."""

from __future__ import annotations

from dtrain.dist import preemption
from dtrain.state import TrainState


def should_stop(state: TrainState) -> bool:
    """Whether a rank was asked to stop before the step that led to ``state``: the same answer on every rank.

    SIGTERM asks, and the signal that ``dtrain launch --stop-signal`` names. Ask in every iteration; where it is true, save and
    leave ``init_dist``'s block. When a save was committed since, the block exits with code 75 on every rank::

        stop = dt.should_stop(state)
        if stop or state.crossed("1ep"):
            dt.save_sharded("ckpt", state, extra={"loader": loader})
        if stop:
            break

    Args:
        state: the newest state of the run.

    Collective: none; the ranks agree in the record that they exchange before each step.

    Raises:
        StaleStateError: ``state`` was stepped already.
    """
    state._check_not_stale("should_stop")
    return preemption.poll()
