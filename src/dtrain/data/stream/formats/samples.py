"""Samples on their way into a shard: what they must look like, and where one is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from dtrain.errors import ConfigError
from dtrain.types import Plain

Sample = Mapping[str, Any]


class Writer(Protocol):
    """Makes the shards of one dataset. What it cannot keep it refuses; tuples become lists, and tensors arrays."""

    @property
    def suffix(self) -> str:
        """Of the names of its files."""

    @property
    def shard_bytes(self) -> int:
        """What a shard takes before its first sample."""

    @property
    def sample_bytes(self) -> int:
        """What a sample takes besides its own bytes."""

    @property
    def details(self) -> dict[str, Plain]:
        """Of the entries in the index."""

    def encode(self, sample: Sample, number: int, /) -> Any:
        """The sample, checked, and encoded if the format can do that one by one.

        Raises:
            ConfigError: the sample does not fit the columns, or the format cannot keep it.
        """

    def size(self, encoded: Any, /) -> int:
        """Its bytes, or about that."""

    def pack(self, encoded: Sequence[Any], /) -> bytes:
        """The shard.

        Raises:
            ConfigError: the samples do not make one.
        """


_WRONG_VALUE = (ConfigError, TypeError, ValueError, OverflowError, AttributeError, NotImplementedError)


class Naming:
    """A context that puts the column, and the sample, into what is found wrong with a value.

    Args:
        column: changed by whoever goes through several.
        number: of the sample, if it is of one.
    """

    __slots__ = ("column", "number")

    def __init__(self, column: str = "", number: int | None = None) -> None:
        self.column, self.number = column, number

    def __enter__(self) -> Naming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, _WRONG_VALUE):
            where = "" if self.number is None else f"sample {self.number}, "
            raise ConfigError(f"{where}column {self.column!r}: {' '.join(str(error).split())}") from error


def check_mapping(sample: Any, number: int) -> None:
    """
    Raises:
        ConfigError: no mapping of names to values, or an empty one.
    """
    if not isinstance(sample, Mapping) or not sample or not all(isinstance(name, str) for name in sample):
        found = f"{type(sample).__name__}: {str(sample)[:60]!r}"
        raise ConfigError(f"sample {number}: a mapping of names to values is wanted, got {found}")


def check_columns(sample: Any, number: int, names: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: a column too many, or too few.
    """
    check_mapping(sample, number)
    if sample.keys() != set(names):
        raise ConfigError(f"sample {number}: has columns {', '.join(sorted(sample))}; the dataset has {', '.join(names)}")


def plain(value: Any) -> Any:
    """Tensors as arrays."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
