"""Begin a step at the position of its batch in the loader's data, and advance the clock when the step ends."""

from __future__ import annotations

from dtrain.data.batch import FailedBatch, get_batch_infos
from dtrain.dist.batch_info import StepBatch
from dtrain.errors import StepError
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.step.batch_origin import find_origin
from dtrain.typing import Batch

_UNKNOWN_ON_SOME_RANKS = "on some ranks the last batch was made of new tensors (slices, copies)"


def begin_step(state: TrainState, batch: Batch) -> TrainState:
    """Return ``state`` at the start of a step over ``batch``, with the origin of the batch and the clock at its position.

    Transforms see this clock. Its epoch is the epoch of the batch, also in a second step on the last batch of an epoch.
    Collective: none. Mutates: the statuses of the batch.
    """
    infos, history, before, reason = get_batch_infos(batch), state._loader_history, state.clock, ""
    origin = infos[0] if len(infos) == 1 else None
    # Most steps are on the next batch of one loader.
    if origin is None or not history.loaders or origin.loader is not history.loaders[-1]:
        origin, history, reason = find_origin(state, infos)
    statuses = tuple(dict.fromkeys(info.status for info in (infos if origin is None else [*infos, origin])))
    for status in statuses:
        status.started = True
    if origin is None or reason:
        step_batch = StepBatch(info=origin, repeated=False, clock_before=before, statuses=statuses)
        clock = before if origin is None and isinstance(batch, FailedBatch) else before._without_epochs(reason)
        return state._replace(_step_batch=step_batch, clock=clock, _loader_history=history)
    repeated = origin.status is history.last_batch
    if not repeated:
        history = history.after_batch(origin.status)
    step_batch = StepBatch(info=origin, repeated=repeated, clock_before=before, statuses=statuses)
    start = before._start_of_batch(repeated=repeated)
    # Ranks that end epochs separately begin at the last position that they agreed on.
    if not origin.independent_epochs:
        epoch, index = origin.begin.epoch + history.epoch_offset, origin.begin.batch
        counted = start.batch if epoch == start.epoch else 0
        start = EpochPosition(epoch, counted if index is None else index)
    return state._replace(_step_batch=step_batch, _loader_history=history, clock=before._begin_step(start))


def with_agreed_position(state: TrainState) -> TrainState:
    """Return ``state`` after the ranks agreed. If some rank does not know its position, no rank counts epochs."""
    counts, step_batch = state._step_counts, state._step_batch
    if counts is None or step_batch is None or step_batch.info is None or counts.position is not None:
        return state
    return state._replace(clock=step_batch.clock_before._without_epochs(_UNKNOWN_ON_SOME_RANKS))


def next_clock(state: TrainState) -> Clock:
    """Return the clock after the step in progress, for a transform that acts at the end of an interval.

    Raises:
        StepError: no step is in progress.
    """
    counts, step_batch = state._step_counts, state._step_batch
    if counts is None:
        raise StepError("tick: no step is in progress. Pass a state of microbatch_step, which counts the batch.")
    position, counts_epochs = counts.position, step_batch is None or state.clock._no_epochs_reason is None
    if position is not None:
        position = EpochPosition(position.epoch + state._loader_history.epoch_offset, position.batch) if counts_epochs else None
    clock = state.clock.tick(samples=counts.samples, tokens=counts.tokens, seconds=counts.seconds, position=position)
    if step_batch is None or step_batch.info is None or not counts_epochs:
        return clock
    # A batch that had a step before, or batches without a step, count from the end of the last batch with a step.
    return clock._crossing_from(step_batch.clock_before._start_of_batch(repeated=step_batch.repeated))


def ends_interval(state: TrainState, interval: Duration) -> bool:
    """Return True if the step in progress ends an ``interval``; ``state.crossed`` returns the same after the step.

    If a batch takes several steps, an epoch ends once: in the first step on its last batch.

    Raises:
        StepError: no step is in progress, and the unit of the interval is not steps.
    """
    # Most intervals count steps, and this comparison is faster than the clock of the next step.
    if interval.unit == "ba":
        return state.clock.step // int(interval.value) < (state.clock.step + 1) // int(interval.value)
    if state._step_batch is not None and state._step_batch.repeated and state.clock._uses_epochs(interval):
        return False
    return next_clock(state).crossed(interval)
