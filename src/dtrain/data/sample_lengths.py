"""``SampleLengths``: tokens of each sample, from a column, an array, a function, or the dataset, without reading samples.

A sample may have several parts, as the documents of a packed block. Attention stays inside a part, so a cost that grows faster
than the length is the sum of the costs of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.dataset import ColumnDataset, is_hugging_face
from dtrain.data.sample_order import IntArray
from dtrain.errors import ConfigError
from dtrain.typing import is_tensordict

LengthSource: TypeAlias = "str | Sequence[int] | Tensor | NDArray[Any] | Callable[[int], int] | None"
"""Source of lengths: a column, ``[samples]`` integers, or a function of a sample's number; None asks the dataset."""

_CALLER = "build_loader"
_ADVICE = "Pass lengths=[len(sample) for sample in dataset], a column with the lengths, or a function of a sample's number."
# Rows of a Hugging Face dataset whose lengths are computed at a time.
_ROWS = 1 << 16


class SampleLengths(Protocol):
    """Tokens of the parts of each sample."""

    def parts_of(self, indices: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the tokens of the parts of the samples at ``indices``, and the parts of each sample; None means one part."""
        ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LengthTable:
    """Lengths in memory: 8 bytes per part.

    Args:
        parts: ``[parts]`` int64, tokens of each part, in the order of the samples.
        ends: ``[samples]`` int64, end of each sample among the parts, exclusively; None if each sample is one part.
    """

    parts: IntArray
    ends: IntArray | None = None

    def __len__(self) -> int:
        return len(self.parts if self.ends is None else self.ends)

    def parts_of(self, indices: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the tokens of the parts of the samples at ``indices``, and the parts of each sample; None means one part."""
        if self.ends is None:
            return self.parts[indices], None
        ends, begins = self.ends[indices], np.where(indices > 0, self.ends[indices - 1], 0)
        counts = ends - begins
        # Numbers of the parts: each sample's own range, one after the other.
        numbers = np.arange(int(counts.sum())) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        return self.parts[numbers], counts

    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        if self.ends is None:
            return int(self.parts.max())
        totals = np.concatenate([[0], np.cumsum(self.parts)])[self.ends]
        return int(np.diff(totals, prepend=0).max())

    @classmethod
    def join(cls, tables: Sequence[LengthTable]) -> LengthTable:
        """Return the lengths of concatenated datasets."""
        parts = np.concatenate([table.parts for table in tables])
        if all(table.ends is None for table in tables):
            return cls(parts)
        ends, first = [], 0
        for table in tables:
            ends.append(first + (np.arange(1, len(table) + 1) if table.ends is None else table.ends))
            first += len(table.parts)
        return cls(parts, np.concatenate(ends))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LengthFunction:
    """Lengths by a function, called for the samples of each global batch.

    Args:
        fn: function of a sample's number; of a sample, if the dataset is iterable.
    """

    fn: Callable[[Any], int]

    def parts_of(self, indices: IntArray) -> tuple[IntArray, None]:
        """Return the tokens of the samples at ``indices``; each sample is one part.

        Raises:
            ConfigError: the function returns a value that is not a length.
        """
        return np.array([check_length(_CALLER, self.fn(index), index) for index in indices.tolist()], dtype=np.int64), None

    def of_samples(self, samples: Sequence[Any]) -> IntArray:
        """Return the tokens of ``samples``. An error counts the samples from 0."""
        lengths = [check_length(_CALLER, self.fn(sample), number) for number, sample in enumerate(samples)]
        return np.array(lengths, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LengthInKey:
    """Length of a sample under a key: an integer, or the length of the value. A class, because a worker may pickle it."""

    key: str

    def __call__(self, sample: Any) -> Any:
        value = sample[self.key]
        return value if getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__") else len(value)


def find_sample_lengths(lengths: LengthSource) -> LengthFunction:
    """Return the lengths of the samples of an iterable dataset, as a function of a sample.

    Raises:
        ConfigError: ``lengths`` is None, or an array.
    """
    if isinstance(lengths, str):
        return LengthFunction(LengthInKey(lengths))
    if not callable(lengths):
        got = "None" if lengths is None else f"a {type(lengths).__name__}"
        raise ConfigError(
            f"{_CALLER}: lengths must be a function of a sample, or a key of it, for balance and max_tokens over an iterable "
            f"dataset, got {got}. Pass lengths=lambda sample: len(sample['input_ids']), for example."
        )
    return LengthFunction(lengths)


def check_length(caller: str, value: object, number: int) -> int:
    """Return ``value`` as the length of sample ``number``.

    Raises:
        ConfigError: ``value`` is not an integer of at least 0.
    """
    length = value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise ConfigError(
            f"{caller}: lengths must return an integer of at least 0, got {value!r} for sample {number}. "
            "Return the number of tokens of the sample."
        )
    return length


def find_lengths(dataset: Any, lengths: LengthSource) -> SampleLengths:
    """Return the lengths of the samples of an indexed ``dataset``.

    Raises:
        ConfigError: the dataset knows no lengths, has no such column, or ``lengths`` has a wrong number of samples, a negative
            length or a value that is not an integer.
    """
    if lengths is not None and not isinstance(lengths, str):
        return LengthFunction(lengths) if callable(lengths) else LengthTable(_check_array(lengths, len(dataset), "lengths"))
    return known_lengths(dataset, lengths)


def known_lengths(dataset: Any, column: str | None) -> LengthTable:
    """Return the lengths that ``dataset`` knows, in ``column`` if it is not None.

    A dataset knows lengths by a method ``sample_lengths(column)``. Tensors by name, a TensorDict and a Hugging Face ``Dataset``
    have columns: integers are lengths, and lists have lengths.

    Raises:
        ConfigError: ``dataset`` knows no lengths, or has no such column.
    """
    if hasattr(dataset, "sample_lengths"):
        result = dataset.sample_lengths(column)
        return result if isinstance(result, LengthTable) else LengthTable(_check_array(result, len(dataset), "sample_lengths"))
    kind = type(dataset).__name__
    if column is None:
        raise ConfigError(f"{_CALLER}: balance and max_tokens need lengths, which a {kind} does not know. {_ADVICE}")
    names = _column_names(dataset)
    if column not in names:
        known = f", only {', '.join(sorted(map(str, names))[:8])}" if names else ""
        raise ConfigError(
            f"{_CALLER}: lengths must name a column of the dataset, but a {kind} has no {column!r}{known}. {_ADVICE}"
        )
    if is_hugging_face(dataset):
        return LengthTable(_check_array(_arrow_lengths(dataset, column), len(dataset), f"the column {column!r}"))
    values = dataset.named_columns()[column] if isinstance(dataset, ColumnDataset) else dataset[column]
    return LengthTable(_check_array(values, len(dataset), f"the column {column!r}"))


def _column_names(dataset: Any) -> list[Any]:
    if isinstance(dataset, ColumnDataset):
        return list(dataset.named_columns())
    if is_hugging_face(dataset):
        return list(dataset.column_names)
    return list(dataset.keys()) if is_tensordict(dataset) else []


def _arrow_lengths(dataset: Any, column: str) -> NDArray[Any]:
    """Return the integers of a column of a Hugging Face ``Dataset``, or the lengths of its lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = []
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        values = table.column(column)
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        lengths.append((pc.list_value_length(values) if is_list else values).to_numpy())
    return np.concatenate(lengths)


def _check_array(lengths: Any, samples: int, name: str) -> IntArray:
    values = np.asarray(lengths.detach().cpu() if isinstance(lengths, Tensor) else lengths)
    if values.shape != (samples,):
        raise ConfigError(f"{_CALLER}: {name} must have one length per sample ({samples}), got shape {values.shape}. {_ADVICE}")
    if values.dtype.kind not in "iu":
        raise ConfigError(f"{_CALLER}: {name} must be integers, got {values.dtype}. Pass the number of tokens as int64.")
    if values.min() < 0:
        raise ConfigError(
            f"{_CALLER}: {name} must be at least 0, got {values.min()} for sample {int(values.argmin())}. "
            "Pass the number of tokens of each sample."
        )
    return values.astype(np.int64, copy=False)
