"""Find the batch's place in its loader's data when a step starts, and move the clock there when it ends."""

from __future__ import annotations

from dataclasses import replace

from dtrain.batch import FailedBatch, get_batch_infos
from dtrain.clock import Clock, EpochPosition
from dtrain.dist.batch_info import BatchInfo, BatchStatus, LoaderHistory, StepBatch
from dtrain.durations import Duration
from dtrain.errors import StepError
from dtrain.state import TrainState
from dtrain.typing import Batch

_NO_ORIGIN = (
    "the last batch is not one that a loader of dt.build_loader handed out, or it was made of new tensors (slices, copies)"
)
_SEVERAL_LOADERS = "the last batch has tensors of {} loaders"
_ALTERNATING_LOADERS = "batches of several loaders came in turns"
_UNKNOWN_ON_SOME_RANKS = "on some ranks the last batch was made of new tensors (slices, copies)"
_NO_BATCH_YET = "the loader that step.init was given has handed out no batch yet"


def begin_step(state: TrainState, batch: Batch) -> TrainState:
    """``state`` at the start of a step over ``batch``: with the origin of the batch, and the clock at its place.

    Methods that the step calls see this clock: its epoch is the one that the batch belongs to, also in the second step on the
    last batch of an epoch. Collective: none. Mutates: the agreements of the batch.
    """
    found = get_batch_infos(batch)
    origin, reason = _find_origin(state, found)
    agreements = _mark_begun(found if origin is None else [*found, origin])
    if origin is None:
        clock = state.clock if isinstance(batch, FailedBatch) else state.clock.without_epochs(reason)
        return state._replace(
            step_batch=StepBatch(info=None, repeated=False, clock_before=state.clock, statuses=agreements), clock=clock
        )
    followed = state.loader_history
    again = origin.status is followed.last_batch
    if not followed.loaders or origin.loader is not followed.loaders[-1]:
        if origin.loader in followed.loaders and state.run_context.loader is None:
            clock = state.clock.without_epochs(_ALTERNATING_LOADERS)
            begun = StepBatch(info=origin, repeated=False, clock_before=state.clock, statuses=agreements)
            return state._replace(step_batch=begun, clock=clock)
        followed = _follow_loader(followed, origin, state.clock)
    if not again:
        followed = LoaderHistory(loaders=followed.loaders, epoch_offset=followed.epoch_offset, last_batch=origin.status)
    clock = state.clock.begin_batch(_position_before(origin, state.clock, followed.epoch_offset, again=again), repeated=again)
    begun = StepBatch(info=origin, repeated=again, clock_before=state.clock, statuses=agreements)
    return state._replace(step_batch=begun, loader_history=followed, clock=clock)


def with_agreed_position(state: TrainState) -> TrainState:
    """``state`` in a step once the ranks have agreed. If some rank does not know its place, no rank goes by its own."""
    tally, begun = state.step_counts, state.step_batch
    if tally is None or begun is None or begun.info is None or tally.position is not None:
        return state
    return state._replace(clock=begun.clock_before.without_epochs(_UNKNOWN_ON_SOME_RANKS))


def _mark_begun(origins: list[BatchInfo]) -> tuple[BatchStatus, ...]:
    """The agreements of ``origins``, for the end of the step. Mutates: them; a step on their batches has begun."""
    agreements = tuple(dict.fromkeys(origin.status for origin in origins))
    for agreement in agreements:
        agreement.started = True
    return agreements


def _find_origin(state: TrainState, found: list[BatchInfo]) -> tuple[BatchInfo | None, str]:
    """The one of ``found`` whose epochs count, or the reason why there is none."""
    loader = state.run_context.loader
    if loader is not None:
        found = [origin for origin in found if origin.loader is loader.identity]
        if not found:
            last = loader.last_batch_info
            return (None, _NO_BATCH_YET) if last is None else (_without_padding_sample(last), "")
    if len(found) == 1:
        return found[0], ""
    loaders = len({id(origin.loader) for origin in found})
    if loaders == 1:  # batches of one loader, made one
        return _without_padding_sample(max(found, key=lambda origin: (origin.end.epoch, origin.end.batch or 0))), ""
    return None, _SEVERAL_LOADERS.format(loaders) if found else _NO_ORIGIN


def _without_padding_sample(origin: BatchInfo) -> BatchInfo:
    """``origin`` of a batch that was made of the loader's: the spare sample may not look like it."""
    return origin if origin.padding_sample is None else replace(origin, padding_sample=None)


def _follow_loader(followed: LoaderHistory, origin: BatchInfo, clock: Clock) -> LoaderHistory:
    """A loader's first batch in this state. Epochs go on from the clock; a resumed loader is where the clock is already."""
    base = clock.epoch - origin.begin.epoch
    return LoaderHistory(loaders=(*followed.loaders, origin.loader), epoch_offset=base if followed.loaders else max(0, base))


def _position_before(origin: BatchInfo, clock: Clock, base: int, *, again: bool) -> EpochPosition:
    """The place before the batch. Ranks that end epochs separately take the place that they agreed on last."""
    if origin.independent_epochs:
        return clock.previous.position if again and clock.previous is not None else clock.position
    return EpochPosition(origin.begin.epoch + base, origin.begin.batch)


def next_clock(state: TrainState) -> Clock:
    """The clock after the step in progress: what a transform goes by that has something to do at the end of an interval.

    Raises:
        StepError: no step is in progress.
    """
    tally, begun = state.step_counts, state.step_batch
    if tally is None:
        raise StepError("tick: no step is in progress; the state must come from microbatch_step, which counts the batch")
    place = tally.position
    if place is not None:
        place = EpochPosition(place.epoch + state.loader_history.epoch_offset, place.batch)
    if begun is not None and state.clock.no_epochs_reason is not None:
        place = None
    return state.clock.tick(samples=tally.samples, tokens=tally.tokens, seconds=tally.seconds, position=place)


def ends_interval(state: TrainState, interval: Duration) -> bool:
    """Return True if the step in progress ends an ``interval``: what ``state.crossed`` will say after it.

    If a batch takes several steps, an epoch ends once: in the first step on its last batch.

    Raises:
        StepError: no step is in progress, and the interval is not one of steps.
    """
    if interval.unit == "ba":  # most are, and the clock of the next step takes longer to make
        return state.clock.step // int(interval.value) < (state.clock.step + 1) // int(interval.value)
    if state.step_batch is not None and state.step_batch.repeated and state.clock.uses_epochs(interval):
        return False
    return next_clock(state).crossed(interval)
