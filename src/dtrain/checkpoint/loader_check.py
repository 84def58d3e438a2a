"""Check that a checkpoint holds the position of each loader that a run trains on, because a resume would repeat its batches.

The state knows the loaders by their batches. A position may be anywhere in ``extra`` or in the state of a transform: the check
looks for the loader itself, and then for its state.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.checkpoint.extra import NotSaved, state_of, unwrap
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.state import TrainState


def check_loaders(states: Mapping[str, TrainState], extra: Mapping[str, Any], *, caller: str) -> None:
    """Raise if the loader of the last batches has no position in ``extra``; also loaders that take turns with it.

    Warns once on rank 0 if the last batches may be copies of a loader's batches. Such a batch does not name its loader.

    Args:
        states: states by name.
        extra: entries of the caller, with marks.
        caller: prefix of messages.

    Raises:
        ConfigError: a loader is missing.
    """
    check_init_loaders(states, extra, caller=caller)
    identities = [identity for state in states.values() for identity in state.loader_history.in_use]
    if _missing_loaders(identities, states, extra):
        # A loader in a reference cycle is not in use any more.
        gc.collect()
    _raise_if_missing(_missing_loaders(identities, states, extra), extra, caller)
    newest = [state.loader_history.loaders[-1] for state in states.values() if state.loader_history.loaders]
    is_lost = any(isinstance(identity, weakref.ref) and identity() is None for identity in newest)
    if is_lost and not any(isinstance(value, NotSaved) for value in extra.values()):
        raise ConfigError(
            f"{caller}: extra must hold the position of the last loader, which no longer exists, or a resume repeats its "
            f'batches, got {sorted(extra)}. Keep the loader in a variable, and pass it: extra={{"loader": loader}}. To leave '
            'it out on purpose: extra={"loader": dt.checkpoint.not_saved(None)}.'
        )
    _warn_of_guessed_loaders(states, extra, caller)


def check_init_loaders(states: Mapping[str, TrainState], extra: Mapping[str, Any], *, caller: str) -> None:
    """Raise if a loader that ``Step.init`` received has no position in ``extra``. Its epochs are those of the clock.

    Raises:
        ConfigError: a loader is missing.
    """
    identities = [state.loader.identity for state in states.values() if state.loader is not None]
    # The clock would count no epochs of another loader.
    advice = " The clock counts the epochs of this loader: to train on another one, pass that one to step.init."
    _raise_if_missing(_missing_loaders(identities, states, extra), extra, caller, advice)


def _raise_if_missing(missing: list[Any], extra: Mapping[str, Any], caller: str, advice: str = "") -> None:
    if missing:
        raise ConfigError(
            f"{caller}: extra must hold the position of {missing[0]!r}, or a resume repeats its batches, got {sorted(extra)}. "
            'Pass it: extra={"loader": loader}. To leave it out on purpose: '
            'extra={"loader": dt.checkpoint.not_saved(loader)}.' + advice
        )


def _warn_of_guessed_loaders(states: Mapping[str, TrainState], extra: Mapping[str, Any], caller: str) -> None:
    """Warn once if the state was stepped on new tensors after a loader without a position has issued a batch.

    Mutates: ``warned_of_loader`` of the runs.
    """
    runs = [state.run_context for state in states.values()]
    if get_dist_info().rank != 0 or any(run.warned_of_loader for run in runs):
        return
    missing = _missing_loaders([state.loader_history.guessed for state in states.values()], states, extra)
    if missing:
        for run in runs:
            run.warned_of_loader = True
        warnings.warn(
            f"{caller}: extra should hold the position of {missing[0]!r} if the state trains on copies of its batches, or a "
            f'resume repeats them, got {sorted(extra)}. Pass it: extra={{"loader": loader}}. If the batches do not come from '
            'it: extra={"loader": dt.checkpoint.not_saved(loader)}.',
            stacklevel=5,
        )


def _missing_loaders(identities: Iterable[object], states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> list[Any]:
    """Return the loaders that exist and are not in ``extra``."""
    missing: list[Any] = []
    entries = {id(value.loader if isinstance(value, NotSaved) else unwrap(value)) for value in extra.values()}
    for identity in identities:
        # Other objects than dtrain's loaders have no position that could be saved.
        loader = identity() if isinstance(identity, weakref.ref) else None
        if loader is None or id(loader) in entries:
            continue
        if not _is_part_of(loader.state_dict(), _plain_states(states, extra)):
            missing.append(loader)
    return missing


def _plain_states(states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> list[Any]:
    """Return the states of all entries and transforms, one of which may hold the state of a loader."""
    # Two loaders of equal data have equal states at the same position, so another loader proves nothing.
    holders = [unwrap(value) for value in extra.values() if not hasattr(unwrap(value), "last_batch_info")]
    entries = [state_of(value) for value in holders if not isinstance(value, NotSaved)]
    return [*entries, *(state.transform_states for state in states.values())]


def _is_part_of(loader_state: Mapping[str, Any], tree: Any) -> bool:
    """Return True if a dict in ``tree`` is ``loader_state``."""
    if isinstance(tree, Mapping):
        if tree.keys() == loader_state.keys() and all(_is_equal(tree[key], loader_state[key]) for key in tree):
            return True
        return any(_is_part_of(loader_state, item) for item in tree.values())
    return isinstance(tree, list | tuple) and any(_is_part_of(loader_state, item) for item in tree)


def _is_equal(a: Any, b: Any) -> bool:
    # The state of a dataset may hold tensors, whose comparison is no bool.
    return type(a) is type(b) and (type(a) not in (int, str, float, bool) or a == b)
