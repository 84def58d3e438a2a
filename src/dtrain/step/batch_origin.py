"""Find the loader whose epochs count, for a batch that is not the next batch of one loader (``find_origin``).

A batch may come from no loader (new tensors), from several loaders (zipped), from another loader than the last batch (a second
stage, or loaders that alternate), or beside the loader of the run, whose epochs alone count.
"""

from __future__ import annotations

from dtrain.dist.batch_info import BatchInfo, LoaderHistory
from dtrain.state import TrainState

_NO_ORIGIN = "the last batch does not come from a loader of dt.build_loader, or it was made of new tensors (slices, copies)"
_SEVERAL_LOADERS = "the last batch has tensors of {} loaders"
_ALTERNATING_LOADERS = "batches of several loaders alternate"
_NO_BATCH_YET = "the loader that step.init received has returned no batch yet"


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
        return None, _with_loaders(history, infos), _SEVERAL_LOADERS.format(loaders)
    # Several batches of one loader were joined. The last one decides.
    origin = max(infos, key=lambda info: (info.end.epoch, info.end.batch or 0))
    if not history.loaders or origin.loader is not history.loaders[-1]:
        if run_loader is None and origin.loader in history.loaders:
            return origin, history.after_return_to(origin.loader), _ALTERNATING_LOADERS
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
