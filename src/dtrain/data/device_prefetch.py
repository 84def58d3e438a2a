"""``prefetch_to_device``: copy the next batches to a device while the device computes on the current batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dtrain.arguments import check_int
from dtrain.data.batch import copy_batch_info, list_tensors, pin_memory, to_device
from dtrain.data.batch_source import BatchSource, LoaderItem
from dtrain.data.iterable_batch_source import IterableBatchSource
from dtrain.device import is_accelerator
from dtrain.typing import Batch

Item = TypeVar("Item")


def prefetch_to_device(batches: Iterable[Batch], device: torch.device | str, *, prefetch_factor: int = 2) -> Iterator[Batch]:
    """Yield ``batches`` on ``device``, and copy the next ``prefetch_factor`` batches while the loop uses the current batch.

    On an accelerator, tensors are copied from page-locked memory on a separate stream. The current stream waits for the copy,
    but the host does not wait. On another device, each batch is moved when the loop requests the batch, without prefetch.

    For a dtrain loader use ``build_loader(device=...)`` instead, which keeps the position at the batch that was issued. Around
    ``loader.until(...)``, prefetching would move the position ahead of the loop.

    Example:
        >>> import dtrain as dt
        >>> batches = [torch.arange(2), torch.arange(3)]
        >>> [batch.tolist() for batch in dt.data.prefetch_to_device(batches, "cpu")]
        [[0, 1], [0, 1, 2]]

    Raises:
        ConfigError: ``prefetch_factor`` is below 1.
    """
    check_int("prefetch_to_device", "prefetch_factor", prefetch_factor)
    yield from prefetch_items(
        batches,
        torch.device(device),
        prefetch_factor=prefetch_factor,
        get_batch=lambda batch: batch,
        set_batch=copy_batch_info,
    )


def items_on_device(
    items: Iterator[LoaderItem], source: BatchSource, device: torch.device | None, prefetch_factor: int
) -> Iterator[LoaderItem]:
    """Return the ``items`` of ``source`` with their batches on ``device``, prefetched; None leaves the batches on the host.

    The next epoch of an iterable dataset is not read ahead.
    """
    if device is None:
        return items
    is_iterable = isinstance(source, IterableBatchSource)
    return prefetch_items(
        items,
        device,
        prefetch_factor=prefetch_factor,
        get_batch=lambda item: item.batch,
        set_batch=lambda item, batch: replace(item, batch=batch),
        # The loop may change an iterable dataset at the end of an epoch, and samples in preparation cannot be read again.
        # If ranks end their epochs independently, the next batch also depends on the step on this batch.
        is_last=lambda item: is_iterable and item.ends_epoch,
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
    """Prefetch items that hold a batch, as ``prefetch_to_device`` does. ``is_last`` stops read-ahead."""
    if not is_accelerator(device):
        for item in items:
            yield set_batch(item, to_device(get_batch(item), device))
        return
    stream = torch.Stream(device)
    copies: deque[tuple[Item, Any]] = deque()
    for item in items:
        with stream:
            moved = set_batch(item, to_device(pin_memory(get_batch(item)), device))
            copies.append((moved, stream.record_event()))
        while len(copies) > (0 if is_last(item) else prefetch_factor):
            yield _wait_for_copy(*copies.popleft(), device, get_batch)
    while copies:
        yield _wait_for_copy(*copies.popleft(), device, get_batch)


def _wait_for_copy(item: Item, copied: Any, device: torch.device, get_batch: Callable[[Item], Batch]) -> Item:
    """Make the current stream wait for the copy, and keep the tensors' memory allocated until the stream has used them."""
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)
    for tensor in list_tensors(get_batch(item)):
        tensor.record_stream(current)
    return item
