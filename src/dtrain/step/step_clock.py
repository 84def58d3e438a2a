"""Begin a step at the position of its batch in the loader's data, and advance the clock when the step ends.

Most batches are the next batch of one loader. ``find_origin`` finds the loader whose epochs count for any other batch: a batch
of no loader (new tensors), of several loaders (zipped), of another loader than the last batch (a second stage, or loaders that
alternate), or beside the loader of the run, whose epochs alone count.

The begin of a step also finds modules and parameters that the model got after ``step.init``.
"""

from __future__ import annotations

from dtrain.data.batch import FailedBatch, get_batch_infos
from dtrain.dist.batch_info import BatchInfo, BatchStatus, LoaderHistory, StepBatch
from dtrain.dist.context import current_context
from dtrain.dist.init import check_init_dist_called
from dtrain.errors import StepError
from dtrain.init_checks import check_no_new_in_model, check_no_new_in_optimizer
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.schedules.durations import Duration
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState, check_block_open
from dtrain.typing import Batch

_NO_ORIGIN = "the last batch does not come from a loader of dt.build_loader, or it was made of new tensors (slices, copies)"
_NO_BATCH_YET = "the loader that step.init received has returned no batch yet"
# Number of steps between two comparisons of all parameters of a model whose modules stay the same.
_EVERY = 100


def begin_step(state: TrainState, batch: Batch, *, divides_late: bool = False) -> TrainState:
    """Return ``state`` at the start of a step over ``batch``, with the origin of the batch and the clock at its position.

    Transforms see this clock. Its epoch is the epoch of the batch, also in a second step on the last batch of an epoch.

    Args:
        state: state between two steps.
        batch: this rank's batch.
        divides_late: as in ``Step``.

    Collective: none. Mutates: the statuses of the batch.

    Raises:
        StepError: the model got a trainable parameter after ``step.init``, or ``init_dist``'s block has ended.
        ConfigError: a rank of a launcher without ``init_dist``.
    """
    if current_context().info is None:
        check_block_open(state.spec, "step")
        check_init_dist_called("step")
    find_new_params(state, "step")
    infos, history, before, reason = get_batch_infos(batch), state._loader_history, state.clock, ""
    origin = infos[0] if len(infos) == 1 else None
    # Most steps are on the next batch of one loader.
    if origin is None or not history.loaders or origin.loader is not history.loaders[-1]:
        origin, history, reason = find_origin(state, infos)
    divisor = 1.0 if divides_late else None
    statuses: tuple[BatchStatus, ...] = ()
    if infos or origin is not None:
        statuses = tuple(dict.fromkeys([info.status for info in (infos if origin is None else [*infos, origin])]))
    for status in statuses:
        status.started = True
    if origin is None or reason:
        step_batch = StepBatch(info=origin, repeated=False, clock_before=before, statuses=statuses)
        clock = before if origin is None and isinstance(batch, FailedBatch) else before._without_epochs(reason)
        return state._replace(_step_batch=step_batch, clock=clock, _loader_history=history, _grad_divisor=divisor)
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
    clock = before._begin_step(start)
    return state._replace(_step_batch=step_batch, clock=clock, _loader_history=history, _grad_divisor=divisor)


def find_new_params(state: TrainState, caller: str) -> None:
    """Refuse trainable parameters that the model got after ``step.init``.

    Each step compares the modules, which takes some 10 ns a module. All parameters are compared if the modules have changed, in
    the first step, and in every 100th step.

    Mutates: ``state._run_context.children``.

    Raises:
        StepError: the first such parameter, by name.
    """
    context = state._run_context
    # A dict compares the identity of its values first.
    unchanged = context.children is not None and context.children[0] == context.children[1]
    if unchanged and state.clock.step % _EVERY:
        return
    check_all_params(state, caller, frozen_ok=True)
    if not unchanged:
        children = [module._modules for module in state.model.modules()]
        context.children = children, [dict(by_name) for by_name in children]


def check_all_params(state: TrainState, caller: str, *, frozen_ok: bool = False) -> None:
    """Refuse parameters that the model or the optimizer got after ``step.init``; see ``check_no_new_in_model``."""
    check_no_new_in_optimizer(state.params, state.model, state.optimizer, caller=caller)
    gathered = grad_sync_of(state.model).unsharded_params()
    check_no_new_in_model(state.params, state.model, caller=caller, gathered=gathered, frozen_ok=frozen_ok)


def find_origin(state: TrainState, infos: list[BatchInfo]) -> tuple[BatchInfo | None, LoaderHistory, str]:
    """Return the info of the batch whose epochs count, the history of loaders, and the reason why no epochs count, or "".

    Args:
        state: state before the step.
        infos: infos of the batch.
    """
    history, run_loader, others = state._loader_history, state._tracked_loader, list[BatchInfo]()
    if run_loader is not None:
        others = [info for info in infos if info.loader is not run_loader._identity]
        infos = [info for info in infos if info.loader is run_loader._identity]
        # A step on new tensors belongs to the last batch of the run's loader.
        if not infos and run_loader._last_batch_info is not None:
            infos = [run_loader._last_batch_info]
    if not infos:
        return None, _with_loaders(history, others), _NO_ORIGIN if run_loader is None else _NO_BATCH_YET
    loaders = len({id(info.loader) for info in infos})
    if loaders > 1:
        return None, _with_loaders(history, infos), f"the last batch has tensors of {loaders} loaders"
    # Several batches of one loader were joined. The last one decides.
    origin = max(infos, key=lambda info: (info.end.epoch, info.end.batch or 0))
    if not history.loaders or origin.loader is not history.loaders[-1]:
        if run_loader is None and origin.loader in history.loaders:
            return origin, history.after_return_to(origin.loader), "batches of several loaders alternate"
        # The epochs of a new loader continue those of the clock, except if the loader was resumed.
        offset = state.clock.epoch - origin.begin.epoch
        offset = offset if history.loaders else max(0, offset)
        history = LoaderHistory(loaders=(*history.loaders, origin.loader), epoch_offset=offset, in_use=(origin.loader,))
    return origin, _with_loaders(history, others), ""


def _with_loaders(history: LoaderHistory, infos: list[BatchInfo]) -> LoaderHistory:
    """Return the history with loaders whose epochs do not count: a save needs their positions."""
    for info in infos:
        history = history.after_return_to(info.loader)
    return history


def with_agreed_position(state: TrainState) -> TrainState:
    """Return ``state`` after the ranks agreed. If some rank does not know its position, no rank counts epochs."""
    counts, step_batch = state._step_counts, state._step_batch
    if counts is None or step_batch is None or step_batch.info is None or counts.position is not None:
        return state
    reason = "on some ranks the last batch was made of new tensors (slices, copies)"
    return state._replace(clock=step_batch.clock_before._without_epochs(reason))


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
