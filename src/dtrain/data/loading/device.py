"""``prefetch_to_device``: batches copied to a device while it computes on earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from dtrain.batch import pinned, tensors_of, to_device, with_origins_of
from dtrain.errors import ConfigError
from dtrain.types import Batch

Item = TypeVar("Item")


def prefetch_to_device(batches: Iterable[Batch], device: torch.device | str, *, ahead: int = 2) -> Iterator[Batch]:
    """``batches`` on ``device``; the copy of the next ``ahead`` ones runs while the loop is busy with this one.

    On a CUDA device tensors go through page-locked memory and over a stream of their own, which the current stream waits for:
    the host does not. On another device each batch is moved when it is asked for, and nothing is read ahead.

    For batches of a dtrain loader, ``build_loader(device=...)`` does this with the position still that of the batch handed out;
    around ``loader.until(...)`` the position would run ahead of the loop.

    Raises:
        ConfigError: ``ahead`` below 1.
    """
    if ahead < 1:
        raise ConfigError(f"prefetch_to_device: ahead must be at least 1, got {ahead}")
    yield from moved_ahead(batches, torch.device(device), ahead=ahead, batch_of=_same, with_batch=with_origins_of)


def moved_ahead(
    items: Iterable[Item],
    device: torch.device,
    *,
    ahead: int,
    batch_of: Callable[[Item], Batch],
    with_batch: Callable[[Item, Batch], Item],
    stops: Callable[[Item], bool] = lambda _: False,
) -> Iterator[Item]:
    """``prefetch_to_device`` of items that hold a batch; nothing is read ahead behind one that ``stops``."""
    if device.type != "cuda":
        for item in items:
            yield with_batch(item, to_device(batch_of(item), device))
        return
    stream = torch.cuda.Stream(device)
    copies: deque[tuple[Item, Any]] = deque()
    for item in items:
        with torch.cuda.stream(stream):
            moved = with_batch(item, to_device(pinned(batch_of(item)), device))
            copies.append((moved, stream.record_event()))
        while len(copies) > (0 if stops(item) else ahead):
            yield _arrived(*copies.popleft(), device, batch_of)
    while copies:
        yield _arrived(*copies.popleft(), device, batch_of)


def _arrived(item: Item, copied: Any, device: torch.device, batch_of: Callable[[Item], Batch]) -> Item:
    """``item``, which the current stream may use from here on; its memory is not given away before that stream is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in tensors_of(batch_of(item)):
        tensor.record_stream(current)
    return item


def _same(batch: Batch) -> Batch:
    return batch
