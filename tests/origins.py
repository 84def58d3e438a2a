"""Batches with the marks that a loader sets: their place in its data."""

from collections.abc import Callable

from dtrain.data.batch import attach_batch_info, list_tensors
from dtrain.dist.batch_info import BatchInfo
from dtrain.schedules.clock import EpochPosition

_LOADER = object()


def fresh(batch):
    """Return ``batch`` in other tensor objects over the same memory, without the attributes of the old objects."""
    return {key: value.detach() for key, value in batch.items()} if isinstance(batch, dict) else batch.detach()


def placed(batch, begin: EpochPosition, end: EpochPosition, *, loader: object = _LOADER):
    """``batch`` as a loader hands it out between two places of its data."""
    made = fresh(batch)
    assert list_tensors(made)
    return attach_batch_info(made, BatchInfo(loader=loader, begin=begin, end=end))


def places(ends: Callable[[int], bool], steps: int) -> list[tuple[EpochPosition, EpochPosition]]:
    """Begin and end of each batch of a run in which those for which ``ends`` is true end an epoch."""
    position, pairs = EpochPosition(0, 0), []
    for step in range(steps):
        after = EpochPosition(position.epoch + 1, 0) if ends(step) else EpochPosition(position.epoch, position.batch + 1)
        pairs.append((position, after))
        position = after
    return pairs


def of_epochs(batch, step: int, length: int):
    """``batch`` as number ``step`` of a loader whose epochs have ``length`` batches."""
    return placed(batch, EpochPosition(*divmod(step, length)), EpochPosition(*divmod(step + 1, length)))
