"""What a shard is to whoever reads it: bytes, an entry of the index, and samples by row. The formats fill this in.

A source as a file object, for libraries that want one.

Samples on their way into a shard: what they must look like, and where one is wrong."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, cast

from dtrain.errors import ConfigError, DtrainError, ShardError, escape_unprintable
from dtrain.typing import Plain

MAX_SAMPLE_BYTES = 2**29
"""Bytes of a decoded sample, unless the user allows more."""


class ByteSource(Protocol):
    """The raw (not compressed) bytes of one file: a memory-mapped file of this machine, or ranges of one on a server."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read(self, begin: int, end: int) -> bytes | memoryview:
        """The bytes from ``begin`` up to ``end``; fewer only where the file ends."""


class Shard(Protocol):
    """An opened shard. Used by one thread at a time; what it holds of the source is let go of by ``close``."""

    def __len__(self) -> int:
        """Samples in it."""

    def __getitem__(self, row: int, /) -> Any:
        """The decoded sample. Whatever this raises, of which class it may be, means that it cannot be decoded."""

    def close(self) -> None:
        """Let go of everything; no sample is read after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file of a dataset, as it is stored.

    Args:
        name: relative to the dataset's root, with ``/``.
        size: bytes as stored.
        raw_size: bytes after decompression; None if that is not known. Equal to ``size`` for what is not compressed.
        raw_name: the name that other readers give to the decompressed file beside the stored one; None if there is none.
        compression: one of ``compression.COMPRESSIONS``; None for what is stored raw.
        digests: algorithm -> hex digest of the stored bytes; may be empty.
        raw_digests: likewise of the raw bytes.
    """

    name: str
    size: int
    raw_size: int | None = None
    raw_name: str | None = None
    compression: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    raw_digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of an index.

    Args:
        file: where its bytes are.
        samples: how many it has.
        format: a key of ``FORMATS``.
        details: what the format needs to open it, plain data; MDS: names and encodings of the columns.
    """

    file: ShardFile
    samples: int
    format: str
    details: Mapping[str, Plain] = field(default_factory=dict)


class ShardFormat(Protocol):
    """How the samples lie in a file. One object per format, without state."""

    @property
    def name(self) -> str:
        """Its key in ``FORMATS``, and in an index."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How names end in a folder without an index, before the suffix of a compression; empty: only an index tells."""

    @property
    def supports_ranges(self) -> bool:
        """Whether a sample can be found without reading the whole file, so that ranges of it are worth asking a server for."""

    @property
    def options(self) -> tuple[str, ...]:
        """The names that ``open`` knows in its ``options``."""

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Find what ``open`` would refuse, as far as the entry tells without a byte of the shard.

        Raises:
            ConfigError: an option or a value that the format does not know, a package that is not installed, or data that
                would run code when they are read.
            DataError: details that make no sense.
        """

    def open(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> Shard:
        """The shard whose raw bytes are ``source``. A sample that would have more than ``max_sample_bytes`` is not decoded.

        Raises:
            DataError: the bytes are not of this format, or hold another number of samples than the entry says.
            ConfigError: an option that the format does not know, or a package that is not installed.
        """

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Samples and details of a file that no index describes. Reads as little as the format allows.

        Raises:
            DataError: the bytes are not of this format.
        """


_FORMAT_MODULES = {"mds": "mds", "parquet": "parquet", "jsonl": "json_lines", "text": "json_lines", "tar": "tar"}


class _FormatRegistry(Mapping[str, ShardFormat]):
    """Mapping from a format's name to the format. The module of a format, and its package, are imported on first use."""

    def __getitem__(self, name: str) -> ShardFormat:
        if name not in _FORMAT_MODULES:
            raise KeyError(name)
        module = importlib.import_module(f"dtrain.data.stream.formats.{_FORMAT_MODULES[name]}")
        return cast(ShardFormat, getattr(module, name.upper()))

    def __iter__(self) -> Iterator[str]:
        return iter(_FORMAT_MODULES)

    def __len__(self) -> int:
        return len(_FORMAT_MODULES)


FORMATS: Mapping[str, ShardFormat] = _FormatRegistry()
"""Every readable shard format, by name."""


def get_format(name: str) -> ShardFormat:
    """Return the shard format of a name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is not known; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def check_options(form: ShardFormat, options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: an option that ``form`` does not know.
    """
    if unknown := sorted(set(options) - set(form.options)):
        known = f"it knows {', '.join(form.options)}" if form.options else "it has none"
        raise ConfigError(f"format {form.name} has no option {unknown[0]!r}; {known}")


def check_sample_bytes(found: int, limit: int) -> None:
    """
    Raises:
        ValueError: the sample would have more bytes in memory than it may.
    """
    if found > limit:
        raise ValueError(f"it has {found} bytes, more than max_sample_bytes={limit}; allow more if you trust the data")


@contextmanager
def wrap_shard_errors(file_name: str) -> Iterator[None]:
    """Turn an exception that foreign bytes cause, and that is none of dtrain's, into a ``ShardError`` of one line.

    Args:
        file_name: name of the file.
    """
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:
        raise ShardError(
            f"{one_line(file_name)}: is damaged, or no such file: {type(error).__name__}: {one_line(error)}"
        ) from error


_MAX_MESSAGE = 500  # characters of a message


def one_line(message: object) -> str:
    """Return a message that quotes foreign data as one line that every terminal and log file can hold."""
    text = " ".join(str(message).split()) or "no message"
    text = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return escape_unprintable(text)


class ByteSourceFile(io.RawIOBase):
    """Reads the bytes of a ``Source``; it has a position, and no buffer."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go there."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """At most so many bytes; all that are left if none or a negative number is given."""
        left = max(0, self._source.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = bytes(self._source.read(self._at, self._at + count)) if count else b""
        self._at += len(data)
        return data

    def readinto(self, out: Any, /) -> int:
        """Fill ``out``, as far as there are bytes."""
        view = memoryview(out).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


Sample = Mapping[str, Any]


class ShardWriter(Protocol):
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


_VALUE_ERRORS = (ConfigError, TypeError, ValueError, OverflowError, AttributeError, NotImplementedError)


class ColumnErrors:
    """A context that puts the column, and the sample, into what is found wrong with a value.

    Args:
        column: changed by whoever goes through several.
        number: of the sample, if it is of one.
    """

    __slots__ = ("column", "number")

    def __init__(self, column: str = "", number: int | None = None) -> None:
        self.column, self.number = column, number

    def __enter__(self) -> ColumnErrors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, _VALUE_ERRORS):
            where = "" if self.number is None else f"sample {self.number}, "
            raise ConfigError(f"{where}column {self.column!r}: {' '.join(str(error).split())}") from error


def check_sample(sample: Any, number: int) -> None:
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
    check_sample(sample, number)
    if sample.keys() != set(names):
        raise ConfigError(f"sample {number}: has columns {', '.join(sorted(sample))}; the dataset has {', '.join(names)}")


def to_numpy(value: Any) -> Any:
    """Tensors as arrays."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
