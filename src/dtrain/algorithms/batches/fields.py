"""The tensors that a batch method reads, and a batch with others in their place: the given one is never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.types import Batch, is_tensordict

Key: TypeAlias = str | int
"""Where a batch has a tensor: a key of a mapping or a TensorDict, a place in a tuple or list; not used of a bare tensor."""


def read(batch: Batch, key: Key, where: str) -> Tensor:
    """The tensor at ``key``; ``batch`` itself when it is one.

    Raises:
        ConfigError: there is none, or something else.
    """
    if isinstance(batch, Tensor):
        return batch
    try:
        value = batch[key]
    except (KeyError, IndexError, TypeError):
        has = sorted(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise ConfigError(f"{where}: the batch has no {key!r}; it has {has}; give the right inputs= or targets=") from None
    if not isinstance(value, Tensor):
        raise ConfigError(f"{where}: needs a tensor at {key!r}, got a {type(value).__name__}; collate it in the loader")
    return value


def read_targets(batch: Batch, key: Key, where: str) -> Tensor:
    """The tensor at ``key``, of a batch that has more than one.

    Raises:
        ConfigError: there is none, something else, or the batch is a tensor, which would be its own target.
    """
    if isinstance(batch, Tensor):
        raise ConfigError(
            f"{where}: needs inputs and targets, got a batch that is one tensor; give a mapping or a tuple of both"
        )
    return read(batch, key, where)


def replaced(batch: Batch, values: Mapping[Any, Tensor]) -> Batch:
    """A batch of the same kind with ``values`` at their keys, and all else as it was."""
    if isinstance(batch, Tensor):
        return next(iter(values.values()))
    if is_tensordict(batch):
        return batch.copy().update(dict(values))
    if isinstance(batch, Mapping):
        return {**batch, **values}
    items = list(batch)
    for at, value in values.items():
        items[at] = value
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def on_images(batch: Batch, key: Key, where: str, fn: Callable[[Tensor], Tensor]) -> Batch:
    """``batch`` with ``fn`` of its images, ``[batch, channels, height, width]``; one image ``[channels, height, width]`` is a
    batch of one, so what is made for batches serves samples in a loader too.

    Raises:
        ConfigError: something else than images.
    """
    images = read(batch, key, where)
    if images.ndim not in (3, 4) or 0 in images.shape[-3:]:
        raise ConfigError(
            f"{where}: needs images [batch, channels, height, width] or one [channels, height, width], "
            f"got shape {tuple(images.shape)} at {key!r}"
        )
    made = fn(images) if images.ndim == 4 else fn(images.unsqueeze(0)).squeeze(0)
    return replaced(batch, {key: made})


def check_batched(images: Tensor, where: str, *, key: Key) -> None:
    """Refuse what is no batch of images.

    Raises:
        ConfigError: another shape than ``[batch, channels, height, width]``.
    """
    if images.ndim != 4 or 0 in images.shape[-2:]:
        raise ConfigError(f"{where}: needs images [batch, channels, height, width], got shape {tuple(images.shape)} at {key!r}")
