"""``collate``: samples to a batch, as a TensorDict where samples are mappings of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from dtrain.data.loading.parcel import SMALL_BYTES
from dtrain.errors import DataError
from dtrain.types import Batch, is_tensordict


def collate(samples: Sequence[Any]) -> Batch:
    """Stack ``samples`` along a new first axis.

    Mappings whose values are tensors, arrays, numbers or such mappings become a ``TensorDict`` of batch size ``[n]``; with
    strings in it, a dict in which strings are lists. Everything else goes through torch's ``default_collate``.

    Raises:
        DataError: samples of several types or with several sets of keys, or tensors of several shapes; what differs is named.
    """
    first = samples[0]
    if len(set(map(type, samples))) > 1:
        odd = next(sample for sample in samples if type(sample) is not type(first))
        raise DataError(f"collate: one batch has a {type(first).__name__} and a {type(odd).__name__}; give samples of one type")
    try:
        if isinstance(first, Tensor):
            return _stacked(list(samples))
        if isinstance(first, Mapping):
            return _mapping(samples, "")
        return default_collate(list(samples))
    except DataError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"collate: cannot stack samples of type {type(first).__name__} ({reason}); give collate=") from error


def _mapping(samples: Sequence[Any], path: str) -> Batch:
    keys = samples[0].keys()
    try:
        columns = {key: [sample[key] for sample in samples] for key in keys}
    except KeyError:
        columns = {}
    if len(columns) < len(keys) or len({len(sample.keys()) for sample in samples}) > 1:  # one has less, or more
        odd = next(sample for sample in samples if sample.keys() != keys)
        differ = sorted(str(key) for key in odd.keys() ^ keys)
        raise DataError(f"collate: only some samples of a batch have {path}{differ[0]!r}; give all the same keys")
    stacked = {key: _column(values, f"{path}{key!r}") for key, values in columns.items()}
    if not all(isinstance(column, Tensor) or is_tensordict(column) for column in stacked.values()):
        return stacked
    from tensordict import TensorDict  # takes a second or two to import, and is needed only here

    return TensorDict(stacked, batch_size=[len(samples)])


def _column(values: list[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return _mapping(values, path + ".")
    if isinstance(first, Tensor | np.ndarray):
        try:
            return _stacked(values) if isinstance(first, Tensor) else torch.from_numpy(np.stack(values))
        except (RuntimeError, TypeError, ValueError):
            shapes = {tuple(one.shape) if isinstance(one, Tensor | np.ndarray) else type(one).__name__ for one in values}
            if len(shapes) == 1:
                raise
            shown = " and ".join(map(str, sorted(shapes, key=str)[:2]))
            raise DataError(f"collate: {path} is {shown} in one batch; pad or cut to one shape, or give collate=") from None
    return values if isinstance(first, str | bytes) or first is None else default_collate(values)


def _stacked(values: list[Tensor]) -> Tensor:
    """In a worker, what is large goes straight into memory that its rank can read, as torch does it: one copy less."""
    if get_worker_info() is None or len(values) * values[0].nbytes <= SMALL_BYTES:
        return torch.stack(values)
    shared: Tensor = default_collate(values)
    return shared
