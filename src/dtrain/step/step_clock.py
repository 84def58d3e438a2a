"""Find the batch's position in its loader's data when a step starts, and advance the clock when the step ends."""

from __future__ import annotations

from dtrain.data.batch import FailedBatch, get_batch_infos
from dtrain.dist.batch_info import BatchInfo, BatchStatus, LoaderHistory, StepBatch
from dtrain.dist.context import current_context
from dtrain.errors import StepError
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.typing import Batch

_NO_ORIGIN = "the last batch does not come from a loader of dt.build_loader, or it was made of new tensors (slices, copies)"
_SEVERAL_LOADERS = "the last batch has tensors of {} loaders"
_ALTERNATING_LOADERS = "batches of several loaders alternate"
_UNKNOWN_ON_SOME_RANKS = "on some ranks the last batch was made of new tensors (slices, copies)"
_NO_BATCH_YET = "the loader that step.init received has returned no batch yet"


def begin_step(state: TrainState, batch: Batch) -> TrainState:
    """Return ``state`` at the start of a step over ``batch``, with the origin of the batch and the clock at its position.

    Transforms see this clock. Its epoch is the epoch of the batch, also in a second step on the last batch of an epoch.
    Collective: none. Mutates: the statuses of the batch.
    """
    if (recorder := current_context().recorder) is not None:
        recorder.step_begins(state, batch)
    infos = get_batch_infos(batch)
    origin, reason = _find_origin(state, infos)
    statuses = _mark_begun(infos if origin is None else [*infos, origin])
    if origin is None:
        clock = state.clock if isinstance(batch, FailedBatch) else state.clock._without_epochs(reason)
        step_batch = StepBatch(info=None, repeated=False, clock_before=state.clock, statuses=statuses)
        history = _with_other_loaders(state._loader_history, state, infos)
        return state._replace(_step_batch=step_batch, clock=clock, _loader_history=history)
    history = state._loader_history
    repeated = origin.status is history.last_batch
    if not history.loaders or origin.loader is not history.loaders[-1]:
        if origin.loader in history.loaders and state._tracked_loader is None:
            clock = state.clock._without_epochs(_ALTERNATING_LOADERS)
            step_batch = StepBatch(info=origin, repeated=False, clock_before=state.clock, statuses=statuses)
            return state._replace(_step_batch=step_batch, clock=clock, _loader_history=history.after_return_to(origin.loader))
        history = _follow_loader(history, origin, state.clock)
    if state._tracked_loader is not None:
        history = _with_other_loaders(history, state, infos)
    if not repeated:
        history = LoaderHistory(
            loaders=history.loaders,
            epoch_offset=history.epoch_offset,
            last_batch=origin.status,
            in_use=history.in_use,
            guessed=history.guessed,
        )
    position = _position_before(origin, state.clock, history.epoch_offset, repeated=repeated)
    step_batch = StepBatch(info=origin, repeated=repeated, clock_before=state.clock, statuses=statuses)
    return state._replace(
        _step_batch=step_batch, _loader_history=history, clock=state.clock._begin_batch(position, repeated=repeated)
    )


def with_agreed_position(state: TrainState) -> TrainState:
    """Return ``state`` after the ranks agreed. If some rank does not know its position, no rank counts epochs."""
    counts, step_batch = state._step_counts, state._step_batch
    if counts is None or step_batch is None or step_batch.info is None or counts.position is not None:
        return state
    return state._replace(clock=step_batch.clock_before._without_epochs(_UNKNOWN_ON_SOME_RANKS))


def _mark_begun(origins: list[BatchInfo]) -> tuple[BatchStatus, ...]:
    """Return the statuses of ``origins``, for the end of the step. Mutates: the statuses, which are marked as started."""
    if not origins:
        return ()
    statuses = tuple(dict.fromkeys(origin.status for origin in origins))
    for status in statuses:
        status.started = True
    return statuses


def _find_origin(state: TrainState, infos: list[BatchInfo]) -> tuple[BatchInfo | None, str]:
    """Return the element of ``infos`` whose epochs count, or the reason why there is none."""
    loader = state._tracked_loader
    if loader is None and not infos:
        return None, _NO_ORIGIN
    if loader is not None:
        infos = [info for info in infos if info.loader is loader._identity]
        if not infos:
            last = loader._last_batch_info
            return (None, _NO_BATCH_YET) if last is None else (last, "")
    if len(infos) == 1:
        return infos[0], ""
    loaders = len({id(info.loader) for info in infos})
    # Several batches of one loader were joined; the last one decides.
    if loaders == 1:
        return max(infos, key=lambda info: (info.end.epoch, info.end.batch or 0)), ""
    return None, _SEVERAL_LOADERS.format(loaders)


def _with_other_loaders(history: LoaderHistory, state: TrainState, infos: list[BatchInfo]) -> LoaderHistory:
    """Return the history with the loaders of the batch whose epochs the clock does not count: a save needs their positions."""
    own = None if state._tracked_loader is None else state._tracked_loader._identity
    for info in infos:
        if info.loader is not own:
            history = history.after_return_to(info.loader)
    return history


def _follow_loader(history: LoaderHistory, origin: BatchInfo, clock: Clock) -> LoaderHistory:
    """Return the history with a new loader. Its epochs continue those of the clock, except if the loader was resumed."""
    offset = clock.epoch - origin.begin.epoch
    offset = offset if history.loaders else max(0, offset)
    return LoaderHistory(loaders=(*history.loaders, origin.loader), epoch_offset=offset, in_use=(origin.loader,))


def _position_before(origin: BatchInfo, clock: Clock, epoch_offset: int, *, repeated: bool) -> EpochPosition:
    """Return the position before the batch. Ranks that end epochs separately use the last position that they agreed on."""
    if origin.independent_epochs:
        return clock._previous._position if repeated and clock._previous is not None else clock._position
    return EpochPosition(origin.begin.epoch + epoch_offset, origin.begin.batch)


def next_clock(state: TrainState) -> Clock:
    """Return the clock after the step in progress, for a transform that acts at the end of an interval.

    Raises:
        StepError: no step is in progress.
    """
    counts, step_batch = state._step_counts, state._step_batch
    if counts is None:
        raise StepError("tick: no step is in progress. Pass a state of microbatch_step, which counts the batch.")
    position = counts.position
    if position is not None:
        position = EpochPosition(position.epoch + state._loader_history.epoch_offset, position.batch)
    if step_batch is not None and state.clock._no_epochs_reason is not None:
        position = None
    return state.clock.tick(samples=counts.samples, tokens=counts.tokens, seconds=counts.seconds, position=position)


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
