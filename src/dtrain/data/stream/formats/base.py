"""What a shard is to whoever reads it: bytes, an entry of the index, and samples by row. The formats fill this in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dtrain.errors import ConfigError, DtrainError, ShardError, printable
from dtrain.types import Plain

MAX_SAMPLE_BYTES = 2**29
"""Bytes of a decoded sample, unless the user allows more."""


class Source(Protocol):
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


class Format(Protocol):
    """How the samples lie in a file. One object per format, without state."""

    @property
    def name(self) -> str:
        """Its key in ``FORMATS``, and in an index."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How names end in a folder without an index, before the suffix of a compression; empty: only an index tells."""

    @property
    def ranged(self) -> bool:
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
        self, source: Source, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> Shard:
        """The shard whose raw bytes are ``source``. A sample that would have more than ``max_sample_bytes`` is not decoded.

        Raises:
            DataError: the bytes are not of this format, or hold another number of samples than the entry says.
            ConfigError: an option that the format does not know, or a package that is not installed.
        """

    def count(self, source: Source) -> tuple[int, dict[str, Plain]]:
        """Samples and details of a file that no index describes. Reads as little as the format allows.

        Raises:
            DataError: the bytes are not of this format.
        """


def check_options(form: Format, options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: an option that ``form`` does not know.
    """
    if unknown := sorted(set(options) - set(form.options)):
        known = f"it knows {', '.join(form.options)}" if form.options else "it has none"
        raise ConfigError(f"format {form.name} has no option {unknown[0]!r}; {known}")


def check_sample_bytes(found: int, most: int) -> None:
    """
    Raises:
        ValueError: the sample would have more bytes in memory than it may.
    """
    if found > most:
        raise ValueError(f"it has {found} bytes, more than max_sample_bytes={most}; allow more if you trust the data")


@contextmanager
def only_shard_errors(where: str) -> Iterator[None]:
    """Turn an exception that foreign bytes cause, and that is none of dtrain's, into a ``ShardError`` of one line.

    Args:
        where: name of the file.
    """
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:
        raise ShardError(
            f"{one_line(where)}: is damaged, or no such file: {type(error).__name__}: {one_line(error)}"
        ) from error


_LONGEST = 500  # characters of a message


def one_line(message: object) -> str:
    """Return a message that quotes foreign data as one line that every terminal and log file can hold."""
    text = " ".join(str(message).split()) or "no message"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return printable(text)
