"""``ShardFormat``: the base of shard formats; protocols of their readers and writers; ``get_format``: a format by its name.

Helpers of the formats check samples, wrap errors, and present a source of bytes as a file object."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from dtrain.arguments import single_line
from dtrain.errors import ConfigError, DataError, DtrainError, ShardError, escape_unprintable
from dtrain.packages import missing_extra_error
from dtrain.storage import exists, read_file, resolve_path
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.stream.open_shards import ByteLRU


MAX_SAMPLE_BYTES = 2**29
"""Default limit of a decoded sample."""


class ByteSource(Protocol):
    """Raw (decompressed) bytes of a file: a memory-mapped local file, or ranges of a remote file."""

    @property
    def size(self) -> int:
        """Total number of bytes."""

    def read(self, begin: int, end: int) -> bytes | memoryview:
        """Return the bytes from ``begin`` to ``end``; fewer at the end of the file."""


class Shard:
    """Open shard, whose samples a subclass counts and reads.

    Args:
        source: raw bytes of the file.
        max_sample_bytes: maximum of a decoded sample.
    """

    thread_safe = False
    """True if reading changes no state, so that several threads may read the shard at a time."""

    def __init__(self, source: ByteSource, max_sample_bytes: int = MAX_SAMPLE_BYTES) -> None:
        self._source: ByteSource | None = source
        self._max_sample_bytes = max_sample_bytes

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, row: int, /) -> Any:
        """Return the decoded sample. An exception of any class means that the sample cannot be decoded."""
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        return self.read(row, self._source)

    def read(self, row: int, source: ByteSource) -> Any:
        """Read and decode the sample ``row``, which exists."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the source. No sample is read afterwards."""
        self._source = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """Stored file of a dataset.

    Args:
        name: path relative to the dataset's root, with ``/``.
        size: stored bytes.
        raw_size: bytes after decompression; None if unknown. Equal to ``size`` without compression.
        raw_name: name that other readers give to a decompressed copy beside the file; None if there is no such name.
        compression: one of ``compression.COMPRESSIONS``; None for a raw file.
        digests: algorithm -> hex digest of the stored bytes; may be empty.
        raw_digests: algorithm -> hex digest of the raw bytes; may be empty.
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
    """Entry of a shard in an index.

    Args:
        file: file of the shard.
        samples: number of samples.
        format: one of ``FORMAT_NAMES``.
        details: plain data that the format needs to open the shard; MDS: names and encodings of the columns.
    """

    file: ShardFile
    samples: int
    format: str
    details: Mapping[str, Plain] = field(default_factory=dict)


class ShardFormat:
    """File format of shards. One object per format, without state.

    A subclass implements ``open_unchecked``, ``count`` and ``writer``.
    """

    name: str
    """Name of the format, also in an index."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of file names without the suffix of a compression; empty if only an index identifies the format."""

    supports_ranges = False
    """True if a sample can be found without the whole file, so that range requests to a server are worthwhile."""

    options: tuple[str, ...] = ()
    """Names of the ``options`` of ``open``."""

    has_typed_columns = False
    """True if a writer encodes each column by its type."""

    noun = "samples"
    """Word for samples in errors."""

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options and the entry as far as possible without a byte of the shard.

        Raises:
            ConfigError: an option or its value is unknown, a package is not installed, or reading the data would run code.
            DataError: the details are invalid.
        """
        if unknown := sorted(set(options) - set(self.options)):
            advice = f"Use one of {', '.join(self.options)}" if self.options else "Remove all options"
            raise ConfigError(f"format {self.name} has no option {unknown[0]!r}. {advice}.")

    def open(
        self,
        source: ByteSource,
        entry: ShardEntry,
        options: Mapping[str, Any],
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        decoded: ByteLRU | None = None,
    ) -> Shard:
        """Open the shard with the raw bytes ``source``.

        Args:
            source: raw bytes of the file, which the shard keeps.
            entry: entry of the index.
            options: options of the format.
            max_sample_bytes: maximum of a decoded sample; a larger sample is not decoded.
            decoded: cache of the reader, for a format that decodes many samples at once; None makes a cache for this shard.

        Raises:
            DataError: the bytes are not of this format, or the number of samples differs from the entry.
            ConfigError: an option is unknown, or a package is not installed.
        """
        self.check(entry, options)
        shard = self.open_unchecked(source, entry, options, max_sample_bytes, decoded)
        if len(shard) != entry.samples:
            actual = f"{len(shard)} {self.noun}"
            raise DataError(f"{entry.file.name}: has {actual}, but the index has {entry.samples}. It is truncated or changed.")
        return shard

    def open_unchecked(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int, decoded: ByteLRU | None
    ) -> Shard:
        """Open the shard without a check of the options or of the number of samples."""
        raise NotImplementedError

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Return the number of samples and the details of a file without an index. Read as little as the format allows.

        Raises:
            DataError: the bytes are not of this format.
        """
        raise NotImplementedError

    def writer(self, first: Sample, columns: Mapping[str, str] | None, details: dict[str, Plain]) -> ShardWriter:
        """Make the writer of a dataset.

        Args:
            first: the first sample.
            columns: types by column; None infers them from the first sample, and is the only value without typed columns.
            details: details of the entries in the index.

        Raises:
            ConfigError: the format cannot store such columns, or a package is not installed.
        """
        raise NotImplementedError


_FORMAT_MODULES = MappingProxyType(
    {"mds": "mds", "parquet": "parquet", "jsonl": "json_lines", "text": "json_lines", "tar": "tar"}
)

FORMAT_NAMES = tuple(_FORMAT_MODULES)
"""Names of all readable shard formats."""


def get_format(name: str) -> ShardFormat:
    """Return the shard format of a name. The module and the package of a format are imported on first use.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in _FORMAT_MODULES:
        raise ConfigError(f"format {name!r} is unknown. Use one of {', '.join(FORMAT_NAMES)}.")
    module = importlib.import_module(f"dtrain.data.stream.formats.{_FORMAT_MODULES[name]}")
    return cast(ShardFormat, getattr(module, name.upper()))


def select_columns(entry: ShardEntry, options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the columns of a shard, of these ``names``, that the option ``columns`` selects, in the order of the shard.

    Raises:
        ConfigError: the option has a name that is not in ``names``.
    """
    selected = options.get("columns")
    if selected is None:
        return list(names)
    if missing := [name for name in selected if name not in names]:
        raise ConfigError(
            f"{entry.file.name}: no column {missing[0]!r}; the columns are {', '.join(names)}. "
            "Pass columns= with names of this list."
        )
    return [name for name in names if name in selected]


def check_sample_bytes(actual: int, limit: int) -> None:
    """Check the number of bytes that a sample takes in memory.

    Raises:
        ValueError: the number is above the limit.
    """
    if actual > limit:
        raise ValueError(f"it has {actual} bytes, more than max_sample_bytes={limit}. Raise it to trust the data")


@contextmanager
def wrap_shard_errors(file_name: str) -> Iterator[None]:
    """Convert an exception from foreign bytes to a ``ShardError`` of one line. Exceptions of dtrain propagate unchanged.

    Args:
        file_name: name of the file.
    """
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:
        raise ShardError(
            f"{one_line(file_name)}: is damaged or missing: {type(error).__name__}: {one_line(error).rstrip('.')}. "
            "Restore the file, or write the dataset again."
        ) from error


# Limit of a message in characters.
_MAX_MESSAGE = 500


def one_line(message: object) -> str:
    """Format a message that quotes foreign data as one line of printable characters."""
    text = single_line(message) or "no message"
    text = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return escape_unprintable(text)


class ByteSourceFile(io.RawIOBase):
    """File object that reads the bytes of a ``ByteSource``, with a position, without a buffer."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most ``size`` bytes; all remaining bytes if ``size`` is None or negative."""
        remaining = max(0, self._source.size - self._position)
        count = remaining if size is None or size < 0 else min(size, remaining)
        data = bytes(self._source.read(self._position, self._position + count)) if count else b""
        self._position += len(data)
        return data


Sample = Mapping[str, Any]


class ShardWriter:
    """Writer of a dataset's shards. It refuses values that it cannot store. Tuples become lists, and tensors become arrays.

    Args:
        details: details of the entries in the index.
    """

    suffix: str
    """Suffix of file names."""

    shard_bytes = 0
    """Bytes of a shard without samples."""

    sample_bytes = 0
    """Overhead of a sample in bytes."""

    def __init__(self, details: dict[str, Plain]) -> None:
        self.details = details

    def encode(self, sample: Sample, number: int, /) -> Any:
        """Check a sample, and encode it if the format encodes samples one by one.

        Raises:
            ConfigError: the sample does not have the columns of the dataset, or the format cannot store it.
        """
        raise NotImplementedError

    def size(self, encoded: Any, /) -> int:
        """Return the bytes of an encoded sample, possibly an estimate."""
        return len(encoded)

    def pack(self, encoded: Sequence[Any], /) -> bytes:
        """Encode a shard.

        Raises:
            ConfigError: the samples do not fit in one shard.
        """
        return b"".join(encoded)


@contextmanager
def name_column(column: str, number: int | None = None) -> Iterator[None]:
    """Add the column, and the number of the sample if there is one, to the error of a value."""
    try:
        yield
    except (ConfigError, TypeError, ValueError, OverflowError, AttributeError, NotImplementedError) as error:
        where = "" if number is None else f"sample {number}, "
        raise ConfigError(f"{where}column {column!r}: {single_line(error)}") from error


def check_sample(sample: Any, number: int) -> None:
    """Check the type of a sample.

    Raises:
        ConfigError: the sample is not a mapping of names to values, or is empty.
    """
    if not isinstance(sample, Mapping) or not sample or not all(isinstance(name, str) for name in sample):
        actual = f"{type(sample).__name__}: {str(sample)[:60]!r}"
        raise ConfigError(
            f"sample {number}: must be a mapping of names to values, got {actual}. "
            f"Write each sample as {{'text': ...}}, for example."
        )


def check_columns(sample: Any, number: int, names: Sequence[str]) -> None:
    """Check the columns of a sample.

    Raises:
        ConfigError: a column is missing, or is not in the dataset.
    """
    check_sample(sample, number)
    if sample.keys() != set(names):
        raise ConfigError(
            f"sample {number}: columns must be {', '.join(names)}, got {', '.join(sorted(sample))}. "
            "Give every sample the columns of the first sample."
        )


def to_numpy(value: Any) -> Any:
    """Convert a tensor to an array; return any other value unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


# Unpickling runs code, so formats refuse pickled values unless allow_pickle=True.
unpickle, pickle_value = pickle.loads, pickle.dumps


# Limit of an image file. Offsets in a shard have 4 bytes.
_MAX_FILE_BYTES = 2**32 - 1


def import_pillow() -> Any:
    """Import the images of pillow.

    Raises:
        ConfigError: pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra_error("images need the package pillow", "images") from None
    return Image


def decode_image(view: memoryview) -> Any:
    """Decode an image file completely, so that damage raises here and not on first use."""
    image = import_pillow().open(BytesIO(view))
    image.load()
    return image


def image_bytes(view: memoryview) -> int:
    """Return the bytes that an image takes in memory, from the header of its file."""
    image = import_pillow().open(BytesIO(view))
    return _pixel_bytes(image.width, image.height, image.mode)


def raw_image_bytes(view: memoryview) -> int:
    """Return the bytes that an image in the form of ``encode_raw_image`` takes in memory."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _pixel_bytes(width, height, str(view[12 : 12 + length], "ascii"))


def _pixel_bytes(width: int, height: int, mode: str) -> int:
    # Pillow uses 1 or 4 bytes per pixel.
    return width * height * (1 if mode in ("1", "L", "P") else 4)


def decode_raw_image(view: memoryview) -> Any:
    """Decode an image in the form of ``encode_raw_image``."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return import_pillow().frombytes(str(view[12 : 12 + length], "ascii"), (width, height), bytes(view[12 + length :]))


def encode_raw_image(image: Any) -> bytes:
    """Encode an image as width, height and length of the mode (4 bytes each), the mode, and the pixels."""
    mode = _require_image(image).mode.encode()
    head: bytes = np.array([*image.size, len(mode)], "<u4").tobytes() + mode
    return head + bytes(image.tobytes())


def encode_image(kind: str, image: Any) -> bytes:
    """Encode an image as a file of this kind. Bytes are returned unchanged, and a JPEG from a file is copied."""
    if isinstance(image, bytes):
        return image
    name = getattr(_require_image(image), "filename", "")
    if kind == "JPEG" and image.format == "JPEG" and name and exists(path := resolve_path(Path(name))):
        return read_file(path, limit=_MAX_FILE_BYTES)
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def infer_image_encoding(value: Any) -> str:
    """Return the MDS encoding that stores an image without loss; empty if the value is not an image."""
    if "PIL.Image" not in sys.modules or not isinstance(value, import_pillow().Image):
        return ""
    return "jpeg" if value.format == "JPEG" else "png" if value.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else "pil"


def _require_image(value: Any) -> Any:
    if not isinstance(value, import_pillow().Image):
        raise TypeError(f"must be an image or the bytes of an image, got {type(value).__name__}")
    return value
