"""Check that a checkpoint holds the position of each loader that a run trains on, because a resume would repeat its batches.

The state knows the loaders by their batches. A position may be anywhere in ``extra`` or in the state of a transform: the check
looks for the loader itself, and then for its state.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

from dtrain.checkpoint.extra import NotSaved, state_of, unwrap
from dtrain.errors import ConfigError
from dtrain.state import TrainState


def check_loaders(
    states: Mapping[str, TrainState], extra: Mapping[str, Any], *, caller: str, lost_is_error: bool = True
) -> None:
    """Raise if a loader whose batches the states have counted has no position in ``extra``.

    Args:
        states: states by name.
        extra: entries of the caller, with marks.
        caller: prefix of messages.
        lost_is_error: if False, a loader that no longer exists is no error, because a load cannot lose its position.

    Raises:
        ConfigError: a loader is missing.
    """
    missing = _missing_loaders(states, extra, lost_is_error=lost_is_error)
    if missing:
        # A loader in a reference cycle is not in use any more.
        gc.collect()
        missing = _missing_loaders(states, extra, lost_is_error=lost_is_error)
    if not missing:
        return
    loader = missing[0]
    position = "the position of the loader" if loader is None else f"the position of {loader!r}"
    advice = "Keep the loader in a variable, and pass it" if loader is None else "Pass it"
    raise ConfigError(
        f"{caller}: extra must hold {position}, or a resume repeats its batches, got {sorted(extra)}. {advice}: "
        'extra={"loader": loader}. To leave it out on purpose: extra={"loader": dt.checkpoint.not_saved(loader)}.'
    )


def _missing_loaders(states: Mapping[str, TrainState], extra: Mapping[str, Any], *, lost_is_error: bool) -> list[Any]:
    """Return the loaders of the states that are not in ``extra``. None stands for a loader that no longer exists."""
    missing: list[Any] = []
    entries = {id(value.loader if isinstance(value, NotSaved) else unwrap(value)) for value in extra.values()}
    for state in states.values():
        history = state.loader_history
        # A loader of copied batches is a guess, so it counts only while it exists.
        last = history.loaders[-1:]
        identities = [*history.loaders, *history.untracked, *([] if state.loader is None else [state.loader.identity])]
        for identity in identities:
            # Other objects than dtrain's loaders have no position that could be saved.
            if not isinstance(identity, weakref.ref):
                continue
            loader = identity()
            if loader is None:
                # An earlier loader that no longer exists is used up.
                missing += [None] if lost_is_error and any(identity is each for each in last) else []
            elif id(loader) not in entries and not _is_part_of(loader.state_dict(), _plain_states(states, extra)):
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
