"""Find the batch's place in its loader's data when a step starts, and move the clock there when it ends."""

from __future__ import annotations

from dataclasses import replace

from dtrain.batch import FailedBatch, origins_of
from dtrain.clock import Clock, Place
from dtrain.dist.origin import Agreement, Begun, Followed, Origin
from dtrain.durations import Duration
from dtrain.errors import StepError
from dtrain.state import TrainState
from dtrain.types import Batch

_FOREIGN = (
    "the last batch is not one that a loader of dt.build_loader handed out, or it was made of new tensors (slices, copies)"
)
_SEVERAL = "the last batch has tensors of {} loaders"
_IN_TURNS = "batches of several loaders came in turns"
_ON_SOME_RANKS = "on some ranks the last batch was made of new tensors (slices, copies)"
_NOT_YET = "the loader that step.init was given has handed out no batch yet"


def begin_step(state: TrainState, batch: Batch) -> TrainState:
    """``state`` at the start of a step over ``batch``: with the origin of the batch, and the clock at its place.

    Methods that the step calls see this clock: its epoch is the one that the batch belongs to, also in the second step on the
    last batch of an epoch. Collective: none. Mutates: the agreements of the batch.
    """
    found = origins_of(batch)
    origin, reason = _origin_of(state, found)
    agreements = _begun(found if origin is None else [*found, origin])
    if origin is None:
        clock = state.clock if isinstance(batch, FailedBatch) else state.clock.without_epochs(reason)
        return state.but(begun=Begun(origin=None, again=False, clock=state.clock, agreements=agreements), clock=clock)
    followed = state.followed
    again = origin.agreement is followed.batch
    if not followed.loaders or origin.loader is not followed.loaders[-1]:
        if origin.loader in followed.loaders and state.shared.loader is None:
            clock = state.clock.without_epochs(_IN_TURNS)
            begun = Begun(origin=origin, again=False, clock=state.clock, agreements=agreements)
            return state.but(begun=begun, clock=clock)
        followed = _following(followed, origin, state.clock)
    if not again:
        followed = Followed(loaders=followed.loaders, base=followed.base, batch=origin.agreement)
    clock = state.clock.starting(_beginning(origin, state.clock, followed.base, again=again), again=again)
    begun = Begun(origin=origin, again=again, clock=state.clock, agreements=agreements)
    return state.but(begun=begun, followed=followed, clock=clock)


def with_agreed_place(state: TrainState) -> TrainState:
    """``state`` in a step once the ranks have agreed. If some rank does not know its place, no rank goes by its own."""
    tally, begun = state.tally, state.begun
    if tally is None or begun is None or begun.origin is None or tally.place is not None:
        return state
    return state.but(clock=begun.clock.without_epochs(_ON_SOME_RANKS))


def _begun(origins: list[Origin]) -> tuple[Agreement, ...]:
    """The agreements of ``origins``, for the end of the step. Mutates: them; a step on their batches has begun."""
    agreements = tuple(dict.fromkeys(origin.agreement for origin in origins))
    for agreement in agreements:
        agreement.begun = True
    return agreements


def _origin_of(state: TrainState, found: list[Origin]) -> tuple[Origin | None, str]:
    """The one of ``found`` whose epochs count, or the reason why there is none."""
    loader = state.shared.loader
    if loader is not None:
        found = [origin for origin in found if origin.loader is loader.identity]
        if not found:
            last = loader.handed_out
            return (None, _NOT_YET) if last is None else (_without_spare(last), "")
    if len(found) == 1:
        return found[0], ""
    loaders = len({id(origin.loader) for origin in found})
    if loaders == 1:  # batches of one loader, made one
        return _without_spare(max(found, key=lambda origin: (origin.end.epoch, origin.end.batch or 0))), ""
    return None, _SEVERAL.format(loaders) if found else _FOREIGN


def _without_spare(origin: Origin) -> Origin:
    """``origin`` of a batch that was made of the loader's: the spare sample may not look like it."""
    return origin if origin.spare is None else replace(origin, spare=None)


def _following(followed: Followed, origin: Origin, clock: Clock) -> Followed:
    """A loader's first batch in this state. Epochs go on from the clock; a resumed loader is where the clock is already."""
    base = clock.epoch - origin.begin.epoch
    return Followed(loaders=(*followed.loaders, origin.loader), base=base if followed.loaders else max(0, base))


def _beginning(origin: Origin, clock: Clock, base: int, *, again: bool) -> Place:
    """The place before the batch. Ranks that end epochs separately take the place that they agreed on last."""
    if origin.alone:
        return clock.before.place if again and clock.before is not None else clock.place
    return Place(origin.begin.epoch + base, origin.begin.batch)


def next_clock(state: TrainState) -> Clock:
    """The clock after the step in progress: what a transform goes by that has something to do at the end of an interval.

    Raises:
        StepError: no step is in progress.
    """
    tally, begun = state.tally, state.begun
    if tally is None:
        raise StepError("tick: no step is in progress; the state must come from microbatch_step, which counts the batch")
    place = tally.place
    if place is not None:
        place = Place(place.epoch + state.followed.base, place.batch)
    if begun is not None and state.clock.no_epochs is not None:
        place = None
    return state.clock.tick(samples=tally.samples, tokens=tally.tokens, seconds=tally.seconds, place=place)


def ends_interval(state: TrainState, interval: Duration) -> bool:
    """Return True if the step in progress ends an ``interval``: what ``state.crossed`` will say after it.

    If a batch takes several steps, an epoch ends once: in the first step on its last batch.

    Raises:
        StepError: no step is in progress, and the interval is not one of steps.
    """
    if interval.unit == "ba":  # most are, and the clock of the next step takes longer to make
        return state.clock.step // int(interval.value) < (state.clock.step + 1) // int(interval.value)
    if state.begun is not None and state.begun.again and state.clock.counts_by_loader(interval):
        return False
    return next_clock(state).crossed(interval)
