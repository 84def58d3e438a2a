"""``prefetch_to_device``: batches copied to a device while it computes on earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from dtrain.batch import copy_batch_info, list_tensors, pin_memory, to_device
from dtrain.errors import ConfigError
from dtrain.typing import Batch

Item = TypeVar("Item")


def prefetch_to_device(batches: Iterable[Batch], device: torch.device | str, *, prefetch_factor: int = 2) -> Iterator[Batch]:
    """``batches`` on ``device``; the copy of the next ``prefetch_factor`` ones runs while the loop is busy with this one.

    On a CUDA device tensors go through page-locked memory and over a stream of their own, which the current stream waits for:
    the host does not. On another device each batch is moved when it is asked for, and nothing is read ahead.

    For batches of a dtrain loader, ``build_loader(device=...)`` does this with the position still that of the batch handed out;
    around ``loader.until(...)`` the position would run ahead of the loop.

    Raises:
        ConfigError: ``prefetch_factor`` below 1.
    """
    if prefetch_factor < 1:
        raise ConfigError(f"prefetch_to_device: ahead must be at least 1, got {prefetch_factor}")
    yield from prefetch_items(
        batches, torch.device(device), prefetch_factor=prefetch_factor, get_batch=_identity, set_batch=copy_batch_info
    )


def prefetch_items(
    items: Iterable[Item],
    device: torch.device,
    *,
    prefetch_factor: int,
    get_batch: Callable[[Item], Batch],
    set_batch: Callable[[Item, Batch], Item],
    is_last: Callable[[Item], bool] = lambda _: False,
) -> Iterator[Item]:
    """``prefetch_to_device`` of items that hold a batch; nothing is read ahead behind one that ``is_last``."""
    if device.type != "cuda":
        for item in items:
            yield set_batch(item, to_device(get_batch(item), device))
        return
    stream = torch.cuda.Stream(device)
    copies: deque[tuple[Item, Any]] = deque()
    for item in items:
        with torch.cuda.stream(stream):
            moved = set_batch(item, to_device(pin_memory(get_batch(item)), device))
            copies.append((moved, stream.record_event()))
        while len(copies) > (0 if is_last(item) else prefetch_factor):
            yield _wait_for_copy(*copies.popleft(), device, get_batch)
    while copies:
        yield _wait_for_copy(*copies.popleft(), device, get_batch)


def _wait_for_copy(item: Item, copied: Any, device: torch.device, get_batch: Callable[[Item], Batch]) -> Item:
    """``item``, which the current stream may use from here on; its memory is not given away before that stream is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in list_tensors(get_batch(item)):
        tensor.record_stream(current)
    return item


def _identity(batch: Batch) -> Batch:
    return batch
