"""Count the samples of a batch, split the batch into microbatches, and move the batch to a device.

A batch is a tensor, or a nested mapping, sequence or TensorDict of tensors. By default the batch axis is the first axis of
every tensor. A ``BatchSpec`` describes other batches, and is needed to count tokens.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.arguments import check_int, explain_arguments
from dtrain.device import is_accelerator
from dtrain.dist.batch_info import BatchInfo
from dtrain.errors import ConfigError
from dtrain.typing import Batch, CountFn, SplitFn, WeightFn, is_tensordict

# Attribute of a batch's tensors that holds the BatchInfo.
_BATCH_INFO = "_dtrain_batch_info"
# A sequence without tensors holds one entry per sample (ids, file names).
_SEQUENCE_TYPES = (list, tuple)


class MicrobatchList(list[Batch]):
    """Batch that the loader has split into microbatches: a list of batches, each collated from its own samples.

    ``build_loader(max_tokens=)`` makes it. A step, an evaluation and ``split_batch`` take it like any batch, and run its
    microbatches in order. A ``microbatch_size`` or a smaller ``max_tokens`` splits them further.

    Args:
        microbatches: microbatches, in order.
        part_tokens: of each microbatch, the tokens of a part of 1, 2, ... samples, its longest samples; empty if unknown.
        max_tokens: limit of the tokens of a part; None, or a limit without ``part_tokens``, leaves the microbatches whole.

    Example:
        >>> import dtrain as dt
        >>> batch = dt.data.MicrobatchList([torch.ones(1, 8), torch.ones(3, 2)])
        >>> [list(microbatch.shape) for microbatch in dt.data.split_batch(batch, 2)]
        [[1, 8], [2, 2], [1, 2]]
    """

    def __init__(
        self,
        microbatches: Iterable[Batch] = (),
        *,
        part_tokens: Sequence[Sequence[int]] = (),
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(microbatches)
        self.part_tokens = part_tokens
        self.max_tokens = max_tokens

    def with_microbatches(self, microbatches: Iterable[Batch]) -> MicrobatchList:
        """Return a list of other microbatches, made of these one by one, with the same tokens and limit."""
        return MicrobatchList(microbatches, part_tokens=self.part_tokens, max_tokens=self.max_tokens)

    def with_max_tokens(self, max_tokens: int | None) -> MicrobatchList:
        """Return the same microbatches with another limit. A part of one sample may be larger."""
        return MicrobatchList(self, part_tokens=self.part_tokens, max_tokens=max_tokens)

    def part_sizes(self, microbatch_size: int | None = None) -> list[int | None]:
        """Return the most samples of a part by microbatch, at most ``microbatch_size``; None for a whole microbatch."""
        sizes = [microbatch_size] * len(self)
        if self.max_tokens is not None:
            for number, tokens in enumerate(self.part_tokens):
                samples = _count_fitting(tokens, self.max_tokens)
                if samples < len(tokens):
                    sizes[number] = min(samples, microbatch_size or samples)
        return sizes

    def largest_first(self) -> MicrobatchList:
        """Return the same microbatches with the most tokens of a part first. Only the memory of its steps is the same."""
        limit = self.max_tokens

        def count_tokens(number: int) -> int:
            tokens = self.part_tokens[number]
            return tokens[(len(tokens) if limit is None else _count_fitting(tokens, limit)) - 1] if tokens else 0

        order = sorted(range(len(self)), key=count_tokens, reverse=True)
        return MicrobatchList(
            [self[number] for number in order], part_tokens=[self.part_tokens[number] for number in order], max_tokens=limit
        )


def _count_fitting(tokens: Sequence[int], limit: int) -> int:
    """Return the samples of the largest part within ``limit``, at least one."""
    return max(bisect_right(tokens, limit), 1)


def counts_tokens(batch: Batch) -> TypeGuard[MicrobatchList]:
    """Return True if the loader has split ``batch`` by tokens, so that a limit of tokens can split it further."""
    return isinstance(batch, MicrobatchList) and bool(batch.part_tokens)


def list_microbatches(batch: Batch) -> Sequence[Batch]:
    """Return the microbatches of the loader, or ``batch`` alone if the loader has not split it."""
    return batch if type(batch) is MicrobatchList else (batch,)


def map_microbatches(batch: Batch, fn: Callable[[Batch], Batch]) -> Batch:
    """Return ``fn`` of ``batch``, or of each microbatch of the loader."""
    return batch.with_microbatches(map(fn, batch)) if isinstance(batch, MicrobatchList) else fn(batch)


def count_samples(batch: Batch, tensors: Sequence[Tensor] | None = None) -> int:
    """Return the number of samples: the common size of the first axis of all tensors.

    Args:
        batch: batch to count.
        tensors: result of ``list_tensors(batch)``, if the caller has it.

    Raises:
        ConfigError: no tensor, or tensors of different sizes. The message shows the shapes.
    """
    if type(batch) is MicrobatchList:
        return sum(map(count_samples, batch))
    sizes = {leaf.shape[0] for leaf in (list_tensors(batch) if tensors is None else tensors) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    if not sizes:
        raise ConfigError(
            f"batch: found no tensor to split in a {type(batch).__name__}. Give tensors, mappings or sequences of tensors, or "
            "describe the batch with dt.batch_spec(count=..., split=...)."
        )
    shapes = ", ".join(f"{path}{list(leaf.shape)}" for path, leaf in iter_named_tensors(batch, "batch") if leaf.ndim > 0)
    raise ConfigError(
        f"batch: the first axis must be the batch axis in every tensor, got {shapes}. Describe the batch with "
        "dt.batch_spec: its axes, or count= and split=."
    )


def count_samples_and_tokens(
    batch: Batch, batch_spec: BatchSpec | None = None, tensors: Sequence[Tensor] | None = None
) -> tuple[int, int]:
    """Return the number of samples and tokens of a batch. Without axes and ``batch_spec.count``, tokens are 0.

    Raises:
        ConfigError: ``batch`` cannot be counted, or ``batch_spec.count`` returns no whole numbers.
    """
    if type(batch) is MicrobatchList:
        counts = [count_samples_and_tokens(microbatch, batch_spec) for microbatch in batch]
        return sum(samples for samples, _ in counts), sum(tokens for _, tokens in counts)
    if batch_spec is None or (batch_spec.count is None and not batch_spec.axes):
        return count_samples(batch, tensors), 0
    return batch_spec.count_by_axes(batch) if batch_spec.count is None else call_count(batch_spec.count, batch)


def check_rows(batch: Batch, batch_spec: BatchSpec | None, samples: int | None = None) -> None:
    """Refuse a batch whose samples are not the rows of its tensors. ``samples`` is their number, if it was counted already.

    Raises:
        ConfigError: ``batch_spec.count`` counts another number of samples than the batch axis has, or the loader has split the
            batch into microbatches.
    """
    if isinstance(batch, MicrobatchList):
        raise ConfigError(
            f"batch: a method that selects samples needs tensors with a row per sample, got {len(batch)} microbatches. "
            "Leave max_tokens out of build_loader."
        )
    if batch_spec is None or batch_spec.count is None:
        return
    samples = count_samples_and_tokens(batch, batch_spec)[0] if samples is None else samples
    rows = batch_spec.count_by_axes(batch)[0] if batch_spec.axes else count_samples(batch)
    if rows != samples:
        raise ConfigError(
            f"batch_spec: count returns {samples} samples for a batch of {rows} rows. Pass split= as well; a method that "
            "selects samples needs tensors with a row per sample."
        )


def narrow_batch(batch: Batch, start: int, length: int, batch_spec: BatchSpec | None = None) -> Batch:
    """Return ``length`` samples of ``batch`` from ``start`` on; tensors are views."""
    if length:
        check_rows(batch, batch_spec)
    return _narrow(batch, start, length, batch_spec)


def _narrow(batch: Batch, start: int, length: int, batch_spec: BatchSpec | None) -> Batch:
    def rows(values: Any) -> Any:
        return values[start : start + length]

    return _map_samples(batch, batch_spec, lambda leaf, axis: leaf.narrow(axis, start, length), rows, rows)


def select_samples(batch: Batch, indices: Tensor, batch_spec: BatchSpec | None = None) -> Batch:
    """Return the samples of ``batch`` at ``indices`` ``[k]`` (int64, on the batch's device), in that order; tensors are copies.

    >>> select_samples(
    ...     {"x": torch.tensor([1, 2, 3]), "id": ["a", "b", "c"]}, torch.tensor([2, 0])
    ... )
    {'x': tensor([3, 1]), 'id': ['c', 'a']}

    Host sync: none; one for each sequence with an entry per sample.
    """
    check_rows(batch, batch_spec)
    return _map_samples(
        batch,
        batch_spec,
        lambda leaf, axis: leaf.index_select(axis, indices),
        lambda values: type(values)(values[index] for index in indices.tolist()),
        lambda tensordict: tensordict[indices],
    )


def _map_samples(
    batch: Batch,
    batch_spec: BatchSpec | None,
    cut: Callable[[Tensor, int], Tensor],
    cut_sequence: Callable[[Any], Any],
    cut_tensordict: Callable[[Any], Any],
) -> Batch:
    """Apply ``cut`` to tensors and their batch axis, ``cut_sequence`` to sequences with an entry per sample."""
    if batch_spec is not None and batch_spec.axes:
        return batch_spec.map_batch_axis(batch, cut, cut_tensordict)
    samples = count_samples(batch)

    def cut_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return cut(leaf, 0) if leaf.ndim > 0 else leaf
        if isinstance(leaf, _SEQUENCE_TYPES) and len(leaf) == samples:
            return cut_sequence(leaf)
        if _holds_rows(leaf, samples):
            raise _uncut_error(batch, leaf, samples)
        return leaf

    return _map_leaves(batch, cut_leaf, cut_tensordict)


def split_batch(batch: Batch, microbatch_size: int, *, batch_spec: BatchSpec | None = None) -> list[Batch]:
    """Split a batch into microbatches of at most ``microbatch_size`` samples, in order, as views.

    Tensors are split along the batch axis, and lists and tuples without tensors by sample. Numbers, strings and other values
    without rows are in each microbatch. An empty batch gives an empty list.

    Args:
        batch: batch to split.
        microbatch_size: samples per microbatch; the last microbatch may be smaller.
        batch_spec: axes of the tensors, or functions that count and split; None takes the first axis as the batch axis.

    Example:
        >>> import dtrain as dt
        >>> microbatches = dt.data.split_batch({"x": torch.arange(5)}, 2)
        >>> [microbatch["x"].tolist() for microbatch in microbatches]
        [[0, 1], [2, 3], [4]]

    Raises:
        ConfigError: ``microbatch_size`` below 1, a batch whose samples cannot be counted, or an array or object in the batch
            that may have a row per sample. The message names its key and type.
    """
    _, _, microbatches = count_and_split(batch, microbatch_size, batch_spec)
    infos = get_batch_infos(batch)
    return [attach_batch_info(microbatch, infos[0]) for microbatch in microbatches] if len(infos) == 1 else microbatches


def count_and_split(
    batch: Batch, microbatch_size: int | None, batch_spec: BatchSpec | None, tensors: Sequence[Tensor] | None = None
) -> tuple[int, int, list[Batch]]:
    """Return the samples, the tokens and the microbatches of a batch; without a size the batch is one microbatch.

    ``tensors`` is the result of ``list_tensors(batch)``, if the caller has it.

    Raises:
        ConfigError: ``batch`` cannot be counted or split, or ``batch_spec.split`` returns no microbatch.
    """
    if microbatch_size is not None:
        check_microbatch_size(microbatch_size)
    if type(batch) is MicrobatchList:
        limits = batch.part_sizes(microbatch_size)
        split = [count_and_split(microbatch, limit, batch_spec) for microbatch, limit in zip(batch, limits, strict=True)]
        return sum(row[0] for row in split), sum(row[1] for row in split), [part for row in split for part in row[2]]
    is_described = batch_spec is not None and (batch_spec.axes or batch_spec.count or batch_spec.split)
    if microbatch_size is not None and not is_described:
        flat = _count_and_split_flat(batch, microbatch_size)
        if flat is not None:
            return flat[0], 0, flat[1]
    samples, tokens = count_samples_and_tokens(batch, batch_spec, tensors)
    if samples == 0:
        return 0, tokens, []
    if microbatch_size is None:
        return samples, tokens, [batch]
    if batch_spec is not None and batch_spec.split is not None:
        return samples, tokens, call_split(batch_spec.split, batch, microbatch_size, samples)
    check_rows(batch, batch_spec, samples)
    starts = range(0, samples, microbatch_size)
    if batch_spec is not None and batch_spec.axes:
        sizes = [min(microbatch_size, samples - start) for start in starts]
        return samples, tokens, [_narrow(batch, *rows, batch_spec) for rows in zip(starts, sizes, strict=True)]
    return samples, tokens, list(_split_leaves(batch, starts, _part_sizes(samples, microbatch_size), batch))


def _part_sizes(samples: int, microbatch_size: int) -> list[int]:
    full, rest = divmod(samples, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


def _split_leaves(value: Any, starts: range, sizes: Sequence[int], batch: Batch) -> Sequence[Any]:
    """Return the part of ``value``, a value of ``batch``, in each microbatch. Visits each value once, for all microbatches.

    ``starts`` are the first samples of the microbatches, up to the number of samples, and ``sizes`` their samples.
    """
    if isinstance(value, Tensor):
        # Faster than ``split``, a function of Python.
        return value.split_with_sizes(sizes) if value.ndim else [value] * len(sizes)
    kind, is_sequence = type(value), isinstance(value, _SEQUENCE_TYPES)
    # The common types are compared first, because checks of abstract classes are slow.
    if kind is dict or (not is_sequence and isinstance(value, Mapping) and not is_tensordict(value)):
        columns = [_split_leaves(item, starts, sizes, batch) for item in value.values()]
        rows: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else [()] * len(sizes)
        return [dict(zip(value, row, strict=True)) for row in rows]
    is_named = hasattr(value, "_fields")
    if is_sequence and value and (is_named or isinstance(value[0], Tensor) or list_tensors(value)):
        rows = zip(*[_split_leaves(item, starts, sizes, batch) for item in value], strict=True)
        return [kind(*row) for row in rows] if is_named else [kind(row) for row in rows]
    if is_tensordict(value) or (is_sequence and len(value) == starts.stop):
        return [value[start : start + starts.step] for start in starts]
    if len(sizes) > 1 and _holds_rows(value, starts.stop):
        raise _uncut_error(batch, value, starts.stop)
    return [value] * len(sizes)


_OBJECT_DEPTH, _CHECKED_ENTRIES = 3, 64


def _holds_rows(value: Any, samples: int, depth: int = 0) -> bool:
    """Return True if ``value``, which no function here can cut, may have a row for each of ``samples``."""
    if depth > _OBJECT_DEPTH or isinstance(value, str | bytes | int | float | type | nn.Module):
        return False
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    if isinstance(value, _SEQUENCE_TYPES):
        held = [*value[:_CHECKED_ENTRIES]]
    elif isinstance(value, Sized) and not isinstance(value, Mapping) and len(value) == samples:
        return True
    else:
        slots = (getattr(value, name, None) for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
        held = [*getattr(value, "__dict__", {}).values(), *slots]
    return any(_holds_rows(entry, samples, depth + 1) for entry in held)


def _uncut_error(batch: Batch, value: Any, samples: int) -> ConfigError:
    place, kind = next((path for path, leaf in _iter_values(batch, "batch") if leaf is value), "batch"), type(value).__name__
    return ConfigError(
        f"batch: {place} must be a tensor to be split with the {samples} samples, got {kind}. Let collate return tensors, "
        "or lists or dicts of them, or split the batch yourself: dt.batch_spec(count=..., split=...)."
    )


def _count_and_split_flat(batch: Batch, microbatch_size: int) -> tuple[int, list[Batch]] | None:
    """Count and split a tensor, or a flat dict, tuple or list of tensors of one length, with one call for each tensor.

    Returns:
        Number of samples, and the microbatches; None for a batch of another structure, or without samples.
    """
    kind = type(batch)
    if kind is tuple or kind is list:
        leaves = batch
    elif kind is dict:
        leaves = batch.values()
    elif isinstance(batch, Tensor):
        leaves = (batch,)
    else:
        return None
    samples = 0
    for leaf in leaves:
        rows = leaf.size(0) if isinstance(leaf, Tensor) and leaf.ndim else 0
        if not rows or samples not in (0, rows):
            return None
        samples = rows
    if not samples:
        return None
    sizes = _part_sizes(samples, microbatch_size)
    # Faster than ``split``, a function of Python.
    columns = [leaf.split_with_sizes(sizes) for leaf in leaves]
    if kind is dict:
        return samples, [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if kind is tuple or kind is list:
        return samples, [kind(row) for row in zip(*columns, strict=True)]
    return samples, list(columns[0])


def check_microbatch_size(microbatch_size: int) -> None:
    """Raise ``ConfigError`` unless ``microbatch_size`` is an integer of at least 1."""
    check_int("split_batch", "microbatch_size", microbatch_size)


@dataclass(frozen=True, slots=True, eq=False)
class FailedBatch:
    """Placeholder for a batch that failed on this rank. ``microbatch_step`` raises ``error`` once all ranks know.

    A loop that reads the batch before the step gets the error at once.
    """

    error: Exception
    info: BatchInfo | None = None

    def __getitem__(self, key: Any) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[Any]:
        raise self.error

    def __getattr__(self, name: str) -> Any:
        # Code that asks whether a batch has an attribute needs an AttributeError, and copies ask for special methods.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"this batch has no {name!r}, because it failed: {self.error}") from self.error


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of ``batch`` to ``device``. Tensors on ``device`` are returned unchanged, in new containers."""

    def move(leaf: Any) -> Any:
        # ``to`` takes three times as long as the comparison.
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device != device else leaf

    if type(batch) is dict:
        moved = {}
        for key, leaf in batch.items():
            if type(leaf) is not Tensor:
                break
            moved[key] = leaf if leaf.device == device else move(leaf)
        else:
            return moved
    return _map_leaves(batch, move, lambda tensors: tensors.to(device, non_blocking=True))


def pin_memory(batch: Batch) -> Batch:
    """Copy every CPU tensor of ``batch`` to page-locked memory, so that copies to a GPU are asynchronous."""

    def pin(leaf: Any) -> Any:
        return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf

    return _map_leaves(batch, pin, lambda tensors: tensors.pin_memory())


def attach_batch_info(batch: Batch, info: BatchInfo) -> Batch:
    """Attach ``info`` to ``batch``, and return ``batch``.

    The info is an attribute of the tensor objects. So all containers of the same tensors share the info.
    A slice or a copy of a tensor has no info. A batch without tensors gets the attribute itself, if possible.

    Mutates: one attribute of each tensor.
    """
    leaves = list_tensors(batch)
    for leaf in leaves:
        setattr(leaf, _BATCH_INFO, info)
    if not leaves and hasattr(batch, "__dict__"):
        object.__setattr__(batch, _BATCH_INFO, info)
    return batch


def get_batch_infos(batch: Batch) -> list[BatchInfo]:
    """Return the infos of the tensors of ``batch``: none, one, or several if the batch combines several loaders."""
    if isinstance(batch, FailedBatch):
        return [] if batch.info is None else [batch.info]
    infos: list[BatchInfo] = []
    for leaf in list_tensors(batch) or [batch]:
        info = getattr(leaf, _BATCH_INFO, None)
        if info is not None and info not in infos:
            infos.append(info)
    return infos


def copy_batch_info(source: Batch, target: Batch) -> Batch:
    """Copy the info of ``source`` to ``target``, a batch made from ``source``. Mutates: the tensors of ``target``."""
    infos = get_batch_infos(source)
    return attach_batch_info(target, infos[0]) if len(infos) == 1 else target


def _map_leaves(value: Any, fn: Callable[[Any], Any], of_tensordict: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to tensors and to values without tensors, and ``of_tensordict`` to whole TensorDicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if is_tensordict(value):
        return of_tensordict(value)
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, fn, of_tensordict) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_leaves(item, fn, of_tensordict) for item in value))
    if isinstance(value, _SEQUENCE_TYPES) and list_tensors(value):
        items = (_map_leaves(item, fn, of_tensordict) for item in value)
        return value.with_microbatches(items) if isinstance(value, MicrobatchList) else type(value)(items)
    return fn(value)


def list_tensors(value: Any) -> list[Tensor]:
    """List every tensor of a batch."""
    kind = type(value)
    # The common types are compared first, because checks of abstract classes are slow.
    if kind is tuple or kind is list:
        items = list(value)
    elif kind is dict:
        items = list(value.values())
    elif isinstance(value, Tensor):
        return [value]
    elif isinstance(value, Mapping) or is_tensordict(value):
        items = list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = list(value)
    else:
        return []
    for item in items:
        if type(item) is not Tensor and not isinstance(item, Tensor):
            break
    else:
        return items
    # A batch may hold thousands of ids of one type, so each type is checked once.
    kinds = {kind for kind in set(map(type, items)) if _may_hold_tensors(kind)}
    leaves: list[Tensor] = []
    for item in items if kinds else ():
        if type(item) in kinds:
            leaves += [item] if isinstance(item, Tensor) else list_tensors(item)
    return leaves


@lru_cache(maxsize=128)
def _may_hold_tensors(kind: type) -> bool:
    is_container = issubclass(kind, Mapping | Sequence) and not issubclass(kind, str | bytes)
    return is_container or issubclass(kind, Tensor) or kind.__module__.startswith("tensordict")


def iter_named_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a batch with their places, such as ``"batch['labels']"`` for the path ``"batch"``."""
    return ((place, leaf) for place, leaf in _iter_values(value, path) if isinstance(leaf, Tensor))


def _iter_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, value
    is_mapping = isinstance(value, Mapping) or (is_tensordict(value) and not isinstance(value, Tensor))
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    for key, item in value.items() if is_mapping else enumerate(value if is_sequence else ()):
        yield from _iter_values(item, f"{path}[{key!r}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Description of a batch, which every function with a ``batch_spec`` accepts. ``batch_spec`` makes one.

    Args:
        axes: names of the axes of a batch's tensors by key, like einops patterns. The axis ``batch`` counts samples, the axis
            ``seq`` counts the tokens of a sample. Without axes, the first axis of every tensor counts samples.
        count: function that counts a batch; it takes precedence over the axes.
        split: function that splits a batch into microbatches; it takes precedence over the axes.
        weight: function that returns this rank's weight of a whole batch.
    """

    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    count: CountFn | None = None
    split: SplitFn | None = None
    weight: WeightFn | None = None

    def count_by_axes(self, batch: Batch) -> tuple[int, int]:
        """Return the number of samples and tokens of ``batch`` by its axes. Tokens are 0 without an axis ``seq``.

        Raises:
            ConfigError: a missing key, a wrong number of axes, or two sizes of one axis. The message names key and axis.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for key, axes in self.axes.items():
            if not (isinstance(batch, Mapping) or is_tensordict(batch)):
                kind = type(batch).__name__
                raise ConfigError(f"batch_spec: needs a mapping of tensors, got a {kind}. Let collate return a dict.")
            # A TensorDict has no ``in`` of its own.
            if key not in (keys := list(batch.keys())):
                raise ConfigError(f"batch_spec: the batch has no {key!r}, only {sorted(map(str, keys))}. Describe these keys.")
            shape = tuple(batch[key].shape)
            if len(shape) != len(axes):
                raise ConfigError(f"batch_spec: {key!r} must be [{', '.join(axes)}], got shape {shape}. Correct its axes.")
            for axis, size in zip(axes, shape, strict=True):
                first, first_key = sizes.setdefault(axis, (size, key))
                if first != size:
                    raise ConfigError(
                        f"batch_spec: axis {axis!r} is {first} in {first_key!r} but {size} in {key!r} (shape {shape}). Pad it."
                    )
        samples, (seq, _) = sizes["batch"][0], sizes.get("seq", (0, ""))
        return samples, samples * seq

    def map_batch_axis(self, batch: Batch, cut: Callable[[Tensor, int], Tensor], cut_first: Callable[[Any], Any]) -> Batch:
        """Apply ``cut`` to each named tensor and its batch axis, or ``cut_first`` to a TensorDict as a whole.

        Keys that are not in the spec are kept whole.
        """
        axis_of = {key: axes.index("batch") for key, axes in self.axes.items() if "batch" in axes}
        if is_tensordict(batch) and batch.batch_dims and not any(axis_of.values()):
            return cut_first(batch)
        tensors = {key: cut(batch[key], axis) for key, axis in axis_of.items()}
        if not is_tensordict(batch):
            return {key: tensors.get(key, value) for key, value in batch.items()}
        result = batch.copy()
        # The batch axis is not the first axis of every tensor.
        result.batch_size = []
        return result.update(tensors)


@explain_arguments
def batch_spec(
    axes: Mapping[str, str] | None = None,
    *,
    count: CountFn | None = None,
    split: SplitFn | None = None,
    weight: WeightFn | None = None,
) -> BatchSpec:
    """Describe a batch, once for every function with a ``batch_spec``: the step, evaluation, loaders, transforms, monitors.

    Args:
        axes: names of the axes of each tensor, separated by spaces, by key. ``batch`` counts samples, ``seq`` tokens. None
            takes the first axis of every tensor as the batch axis.
        count: ``batch -> samples``, or ``(samples, tokens)``, for a batch that only you can count.
        split: ``(batch, microbatch_size) -> microbatches`` of at most that many samples, in order, for a batch that only you
            can split.
        weight: this rank's weight of a whole batch, a number or ``[]``, or by term (``{"loss": ..., "router": ...}``). Losses
            with ``terms`` and ``optimizer_in_backward`` need a ``weight`` that counts the same things as the loss.

    Example:
        >>> import dtrain as dt
        >>> spec = dt.batch_spec(
        ...     {"input_ids": "batch seq", "label": "batch"},
        ...     weight=lambda batch: len(batch["label"]),
        ... )
        >>> batch = {"input_ids": torch.ones(3, 8), "label": torch.ones(3)}
        >>> microbatches = dt.data.split_batch(batch, 2, batch_spec=spec)
        >>> [len(microbatch["label"]) for microbatch in microbatches]
        [2, 1]

    Raises:
        ConfigError: no axis ``batch``, an axis twice in one tensor, or a value that is not a function.
    """
    for name, function in (("count", count), ("split", split), ("weight", weight)):
        if function is not None and not callable(function):
            raise ConfigError(f"batch_spec: {name} must be a function of a batch, got {function!r}. Pass a function.")
    if axes is None:
        return BatchSpec(count=count, split=split, weight=weight)
    parsed = {key: tuple(pattern.split()) for key, pattern in axes.items()}
    for key, names in parsed.items():
        if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
            problem = f"axes must be different names separated by spaces, got {axes[key]!r}"
            raise ConfigError(f"batch_spec: {key!r}: {problem}. Write 'batch seq', for example.")
    if not any("batch" in names for names in parsed.values()):
        raise ConfigError(f"batch_spec: no tensor has an axis called 'batch', got {dict(axes)}. Write {{'x': 'batch seq'}}.")
    return BatchSpec(axes=parsed, count=count, split=split, weight=weight)


def call_count(count: CountFn, batch: Batch) -> tuple[int, int]:
    """Return the samples and tokens that ``count`` returns for ``batch``.

    Raises:
        ConfigError: ``count`` returns no whole numbers.
    """
    counted = count(batch)
    numbers = counted if isinstance(counted, tuple | list) else (counted, 0)
    try:
        samples, tokens = (-1 if isinstance(number, bool) else operator.index(number) for number in numbers)
    # There are not two numbers, or one is no integer of any library, or a tensor that holds no single integer.
    except (TypeError, ValueError):
        samples = tokens = -1
    if min(samples, tokens) < 0:
        raise ConfigError(
            f"batch_spec: count must return samples, or (samples, tokens), as whole numbers, got {counted!r}. "
            "Return len(batch['x']), for example."
        )
    return samples, tokens


def call_split(split: SplitFn, batch: Batch, microbatch_size: int, samples: int) -> list[Batch]:
    """Return the microbatches that ``split`` returns for a ``batch`` of ``samples`` samples.

    Raises:
        ConfigError: ``split`` returns no list, or an empty list.
    """
    result = split(batch, microbatch_size)
    if not isinstance(result, Iterable) or isinstance(result, str | Mapping | Tensor):
        raise ConfigError(
            f"batch_spec: split must return a list of microbatches, got {type(result).__name__}. Return a list from split."
        )
    microbatches = list(result)
    if not microbatches:
        raise ConfigError(
            f"batch_spec: split must return at least one microbatch for {samples} samples, got none. "
            "Return the batch itself in a list if it cannot be split."
        )
    return microbatches


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
