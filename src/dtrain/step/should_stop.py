"""Ask if the run was told to save and stop, with the same answer on every rank."""

from __future__ import annotations

from dtrain.dist.context import current_context
from dtrain.state import TrainState


def should_stop(state: TrainState) -> bool:
    """Return True if a rank was told to stop before the step that led to ``state``; the result is equal on every rank.

    A run is told to stop by SIGTERM, or by the signal of ``dtrain launch --stop-signal``. Call the function in every iteration.
    If it returns True, save and leave ``init_dist``'s block. If a save was committed since, the block exits with code 75 on
    every rank.

    Args:
        state: the newest state of the run.

    Collective: none; the ranks agree in the record that they exchange before each step.

    Example:
        stop = dt.should_stop(state)
        if stop or state.crossed("1ep"):
            dt.save_sharded("ckpt", state, extra={"loader": loader})
        if stop:
            break

    Raises:
        StaleStateError: ``state`` was stepped already.
    """
    state._check_not_stale("should_stop")
    return current_context().preemption.poll()
