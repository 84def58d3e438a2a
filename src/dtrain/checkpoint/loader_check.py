"""Check that a checkpoint holds the position of each loader that a run trains on, and the stops of its loop.

A resume would repeat the batches of a missing loader, and forget what a missing stop has judged.

The state holds the loaders that ``Step.init`` was given, and knows the other loaders by their batches.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from dtrain.checkpoint.extra import objects_of, short_key
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.run_objects import LOADER, NotSaved, is_tracked_loader, unwrap
from dtrain.state import TrainState

_ADVICE = (
    "Pass it: step.init(model, optimizer, loader=loader), or stateful={'second': loader} for a further loader. To leave it out "
    "on purpose: loader=dt.checkpoint.not_saved(loader)."
)


def check_loaders(states: Mapping[str, TrainState], *, caller: str) -> None:
    """Raise if the states do not hold the loader of the last batches; also loaders that take turns with it.

    Warns once on rank 0 if the last batches may be copies of a loader's batches. Such a batch does not name its loader.

    Raises:
        ConfigError: a loader is missing.
    """
    histories = [state._loader_history for state in states.values()]
    identities = [identity for history in histories for identity in history.in_use]
    if _missing_loaders(identities, states):
        # A loader in a reference cycle is not in use any more.
        gc.collect()
    missing = _missing_loaders(identities, states)
    if missing:
        raise ConfigError(
            f"{caller}: the state must hold the position of {missing[0]!r}, or a resume repeats its batches. {_ADVICE}"
        )
    is_lost = None in _resolve(history.in_use[-1] for history in histories if history.in_use)
    marked = {key: value for key, value in objects_of(states).items() if isinstance(value, NotSaved)}
    if is_lost and not any(short_key(key) == LOADER or _is_loader(unwrap(value)) for key, value in marked.items()):
        raise ConfigError(
            f"{caller}: the state must hold the position of the last loader, which no longer exists, or a resume repeats its "
            f"batches. {_ADVICE}"
        )
    _warn_of_guessed_loaders(states, caller)


def check_stops(states: Mapping[str, TrainState], extra: Mapping[str, Any], *, caller: str) -> None:
    """Raise if a stop of the last ``until`` has judged a value, and the checkpoint does not hold the stop.

    Raises:
        ConfigError: a stop is missing, so that a resume would forget its values.
    """
    objects = [*extra.values(), *objects_of(states).values()]
    held = {id(unwrap(value)) for value in objects}
    used = _resolve(identity for state in states.values() for identity in state._loader_history.in_use)
    for loader in (unwrap(value) for value in (*objects, *used)):
        for stop in getattr(loader, "_stops", ()) if is_tracked_loader(loader) else ():
            if getattr(stop, "_has_judged", False) and id(stop) not in held:
                raise ConfigError(
                    f"{caller}: the state must hold {stop!r} of loader.until(stop=...), or a resume forgets its values. "
                    "Pass it: step.init(model, optimizer, loader=loader, stateful={'stop': stop})."
                )


def _is_loader(value: Any) -> bool:
    """Return True for a loader, and for None, which stands for the loader of the last batches."""
    return value is None or is_tracked_loader(value) or isinstance(value, DataLoader)


def _warn_of_guessed_loaders(states: Mapping[str, TrainState], caller: str) -> None:
    """Warn once if the state was stepped on new tensors after a loader without a position has issued a batch.

    Mutates: ``warned_of_loader`` of the runs.
    """
    runs = [state._run_context for state in states.values()]
    if get_dist_info().rank != 0 or any(run.warned_of_loader for run in runs):
        return
    missing = _missing_loaders([state._loader_history.guessed for state in states.values()], states)
    if missing:
        for run in runs:
            run.warned_of_loader = True
        warnings.warn(
            f"{caller}: the state should hold the position of {missing[0]!r} if it trains on copies of its batches, or a "
            f"resume repeats them. {_ADVICE}",
            # Also past the check of the arguments, to the caller's line.
            stacklevel=6,
        )


def _missing_loaders(identities: Iterable[object], states: Mapping[str, TrainState]) -> list[Any]:
    """Return the loaders that exist and that no state holds."""
    held = {id(unwrap(value)) for value in objects_of(states).values()}
    return [loader for loader in _resolve(identities) if loader is not None and id(loader) not in held]


def _resolve(identities: Iterable[object]) -> list[Any]:
    """Return the loaders of ``build_loader``, and None for a loader that no longer exists.

    Objects of other libraries have no position that could be saved.
    """
    return [identity() for identity in identities if isinstance(identity, weakref.ref)]
