"""Batches that say what a loader's would: their place in its data, and a spare sample."""

from collections.abc import Callable

from dtrain.batch import mark_batch, tensors_of
from dtrain.clock import Place
from dtrain.dist.origin import Origin

_LOADER = object()


def fresh(batch):
    """``batch`` in other tensor objects over the same memory: what was attached to the old ones is gone."""
    return {key: value.detach() for key, value in batch.items()} if isinstance(batch, dict) else batch.detach()


def placed(batch, begin: Place, end: Place, *, spare=None, loader: object = _LOADER):
    """``batch`` as a loader hands it out between two places of its data."""
    made = fresh(batch)
    assert tensors_of(made)
    return mark_batch(made, Origin(loader=loader, begin=begin, end=end, spare=spare))


def with_spare(batch, spare):
    """``batch`` as a loader hands it out with a sample for ranks that have none."""
    return placed(batch, Place(0, 0), Place(0, 1), spare=spare)


def places(ends: Callable[[int], bool], steps: int) -> list[tuple[Place, Place]]:
    """Begin and end of each batch of a run in which those for which ``ends`` is true end an epoch."""
    at, found = Place(0, 0), []
    for step in range(steps):
        after = Place(at.epoch + 1, 0) if ends(step) else Place(at.epoch, at.batch + 1)
        found.append((at, after))
        at = after
    return found


def of_epochs(batch, step: int, length: int):
    """``batch`` as number ``step`` of a loader whose epochs have ``length`` batches."""
    return placed(batch, Place(*divmod(step, length)), Place(*divmod(step + 1, length)))
