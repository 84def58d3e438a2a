"""Describe a batch: the axes of its tensors, and functions that count, split and weigh batches that only the user can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex

from torch import Tensor

from dtrain.arguments import explain_arguments
from dtrain.errors import ConfigError
from dtrain.typing import Batch, CountFn, SplitFn, WeightFn, is_tensordict


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

    def axis_sizes(self, batch: Batch) -> dict[str, int]:
        """Return the size of every named axis.

        Raises:
            ConfigError: a missing key, a wrong number of axes, or two sizes of one axis. The message names key and axis.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for key, axes in self.axes.items():
            if not _has_key(batch, key):
                keys = sorted(map(str, _batch_keys(batch)))
                raise ConfigError(f"batch_spec: the batch has no {key!r}, only {keys}. Describe these keys.")
            shape = tuple(batch[key].shape)
            if len(shape) != len(axes):
                raise ConfigError(f"batch_spec: {key!r} must be [{', '.join(axes)}], got shape {shape}. Correct its axes.")
            for axis, size in zip(axes, shape, strict=True):
                known, first_key = sizes.setdefault(axis, (size, key))
                if known != size:
                    raise ConfigError(
                        f"batch_spec: axis {axis!r} is {known} in {first_key!r} but {size} in {key!r} (shape {shape}). Pad it."
                    )
        return {axis: size for axis, (size, _) in sizes.items()}

    def count_by_axes(self, batch: Batch) -> tuple[int, int]:
        """Return the number of samples and tokens of ``batch`` by its axes. Tokens are 0 without an axis ``seq``."""
        sizes = self.axis_sizes(batch)
        return sizes["batch"], sizes["batch"] * sizes.get("seq", 0)

    def narrow(self, batch: Batch, start: int, length: int) -> Batch:
        """Return ``length`` samples of ``batch`` from ``start`` on, as views. Keys that are not in the spec are kept whole."""
        return self._map_batch_axis(
            batch, lambda leaf, axis: leaf.narrow(axis, start, length), lambda whole: whole[start : start + length]
        )

    def select(self, batch: Batch, indices: Tensor) -> Batch:
        """Return copies of the samples at ``indices`` ``[k]``, in that order. Keys that are not in the spec are kept whole."""
        return self._map_batch_axis(batch, lambda leaf, axis: leaf.index_select(axis, indices), lambda whole: whole[indices])

    def _map_batch_axis(self, batch: Batch, cut: Callable[[Tensor, int], Tensor], cut_first: Callable[[Any], Any]) -> Batch:
        """Apply ``cut`` to each named tensor and its batch axis, or ``cut_first`` to a TensorDict as a whole."""
        axis = {key: axes.index("batch") for key, axes in self.axes.items() if "batch" in axes}
        if is_tensordict(batch) and batch.batch_dims and not any(axis.values()):
            return cut_first(batch)
        parts = {key: cut(batch[key], at) for key, at in axis.items()}
        if not is_tensordict(batch):
            return {key: parts.get(key, value) for key, value in batch.items()}
        part = batch.copy()
        # The batch axis is not the first axis of every tensor.
        part.batch_size = []
        return part.update(parts)


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
        >>> [len(part["label"]) for part in dt.data.split_batch(batch, 2, batch_spec=spec)]
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
    numbers = [_to_int(number) for number in (counted if isinstance(counted, tuple | list) else (counted, 0))]
    if len(numbers) != 2 or min(numbers) < 0:
        raise ConfigError(
            f"batch_spec: count must return samples, or (samples, tokens), as whole numbers, got {counted!r}. "
            "Return len(batch['x']), for example."
        )
    return numbers[0], numbers[1]


def _to_int(value: object) -> int:
    """Return an integer of any library as a Python integer; -1 for any other value."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return -1
    try:
        return index(value)
    # A tensor that holds no single integer raises in index().
    except TypeError:
        return -1


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


def _has_key(batch: Batch, key: str) -> bool:
    return key in _batch_keys(batch)


def _batch_keys(batch: Batch) -> list[Any]:
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"batch_spec: needs a mapping of tensors, got a {type(batch).__name__}. Let collate return a dict.")
    return list(batch.keys())
