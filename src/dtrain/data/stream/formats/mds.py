"""MDS, the format of mosaicml-streaming: samples of named columns one after the other, and a table of where each begins.

A shard is: samples (4 bytes), where each begins and the last one ends (4 bytes each), the columns as JSON, and the samples. A
sample is the sizes of its values that have no fixed one (4 bytes each), and then its values.

Writes MDS: byte for byte what mosaicml-streaming writes of the same samples with the same options."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.data.stream.formats import images
from dtrain.data.stream.formats.mds_encodings import MdsEncoding, infer_encoding, parse_encoding
from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    ByteSource,
    ColumnErrors,
    Sample,
    ShardEntry,
    check_columns,
    check_options,
    check_sample,
    check_sample_bytes,
    to_numpy,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

_IMAGE_ENCODINGS = ("pil", "jpeg", "png")


class MdsShard:
    """The samples of one shard, as mappings of column to value."""

    thread_safe = True  # nothing changes while a sample is read

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        self._source: ByteSource | None = source
        self._max_sample_bytes = max_sample_bytes
        self._columns = _select_columns(_parse_columns(entry), options)
        self._sizes = struct.Struct(f"<{sum(size is None for _, size, _, _ in self._columns)}I")
        self._bounds, _ = _read_offsets(source, entry.file.name)
        if len(self) != entry.samples:
            raise DataError(f"{entry.file.name}: has {len(self)} samples, its index says {entry.samples}")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        taken = self._bounds[row + 1] - self._bounds[row]
        check_sample_bytes(taken, self._max_sample_bytes)
        view = memoryview(self._source.read(self._bounds[row], self._bounds[row + 1]))
        sizes = iter(self._sizes.unpack_from(view))
        at = self._sizes.size
        sample = {}
        for name, size, decode, expands in self._columns:
            end = at + (next(sizes) if size is None else size)
            if decode is not None:
                if expands is not None:
                    taken += expands(view[at:end])
                    check_sample_bytes(taken, self._max_sample_bytes)
                sample[name] = decode(view[at:end])
            at = end
        if at != len(view):
            raise ValueError(f"it has {len(view)} bytes, its values have {at}")
        return sample

    def close(self) -> None:
        """Let go of the source."""
        self._source = None


MdsColumn = tuple[str, int | None, Callable[[memoryview], Any] | None, Callable[[memoryview], int] | None]
"""Name, bytes if fixed, how to decode it (None where it is not wanted), and the bytes of a value that grows by that."""


def _parse_columns(entry: ShardEntry) -> list[tuple[str, int | None, MdsEncoding]]:
    lists = [entry.details.get(f"column_{what}") for what in ("names", "sizes", "encodings")]
    names, sizes, encodings = (found if isinstance(found, list) else [] for found in lists)
    if not names or not len(names) == len(sizes) == len(encodings) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{entry.file.name}: its index has no list of column names, sizes and encodings, of one length each")
    columns: list[tuple[str, int | None, MdsEncoding]] = []
    for name, size, text in zip(names, sizes, encodings, strict=True):
        try:
            encoding = parse_encoding(str(text))
        except ConfigError as error:
            raise DataError(f"{entry.file.name}: column {name!r}: {error}") from None
        if (size or None) != encoding.size:
            raise DataError(f"{entry.file.name}: column {name!r} has {size!r} bytes, {text} has {encoding.size}")
        columns.append((str(name), encoding.size, encoding))
    return columns


def _select_columns(columns: list[tuple[str, int | None, MdsEncoding]], options: Mapping[str, Any]) -> list[MdsColumn]:
    wanted = options.get("columns")
    return [
        (name, size, coder.decode if wanted is None or name in wanted else None, coder.decoded_bytes)
        for name, size, coder in columns
    ]


def _read_offsets(source: ByteSource, name: str) -> tuple[memoryview, int]:
    """Where samples begin, and the last one ends; and where the table itself ends.

    Raises:
        DataError: the numbers do not fit the file.
    """
    samples = int.from_bytes(source.read(0, 4), "little")
    end = 4 * (samples + 2)
    table = source.read(4, end) if 8 <= end <= source.size else b""
    if len(table) != end - 4:
        raise DataError(f"{name}: is no MDS shard, or truncated: {source.size} bytes, {samples} samples")
    bounds = np.frombuffer(table, "<u4").astype(np.uint32)
    if bounds[0] < end or bounds[-1] != source.size or (bounds[1:] < bounds[:-1]).any():
        raise DataError(f"{name}: is damaged: samples end at byte {bounds[-1]} of {source.size}, or in a strange order")
    return bounds.data, end


class MdsFormat:
    """The format; see the module.

    Options: ``columns`` (names; others are left out), and ``allow_pickle`` (whether columns encoded as ``pkl`` may be read).
    """

    name = "mds"
    suffixes = (".mds",)
    supports_ranges = True
    options = ("columns", "allow_pickle")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        wanted = options.get("columns")
        columns = _parse_columns(entry)
        if wanted is not None and (missing := [name for name in wanted if name not in {name for name, _, _ in columns}]):
            names = ", ".join(name for name, _, _ in columns)
            raise ConfigError(f"{entry.file.name}: no column {missing[0]!r}; there are {names}")
        for name, _, encoding in columns:
            if wanted is not None and name not in wanted:
                continue
            if encoding.unsafe and options.get("allow_pickle") is not True:
                raise ConfigError(
                    f"{entry.file.name}: column {name!r} is pickled, and reading it runs what the file says; "
                    "leave it out with columns, or trust the data with allow_pickle=True"
                )
        texts = [str(text) for text in entry.details["column_encodings"]]  # type: ignore[union-attr]
        if any(kind in text for text in texts for kind in _IMAGE_ENCODINGS):
            images.check_pillow()

    def open(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> MdsShard:
        """See ``Format.open``."""
        self.check(entry, options)
        return MdsShard(source, entry, options, max_sample_bytes)

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. The columns are in the shard, too."""
        bounds, end = _read_offsets(source, "file")
        try:
            config = json.loads(bytes(source.read(end, bounds[0])))
        except ValueError as error:
            raise DataError(f"no columns between byte {end} and the samples: {error}") from None
        wanted = ("column_names", "column_encodings", "column_sizes")
        if not isinstance(config, dict):
            raise DataError(f"columns are {type(config).__name__}, not an object")
        return len(bounds) - 1, {key: config[key] for key in wanted if key in config}


MDS = MdsFormat()


class MdsWriter:
    """See ``Writer``."""

    suffix = ".mds"
    sample_bytes = 4

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        columns = _infer_columns(first) if columns is None else columns
        self._names = sorted(columns)
        self._encodings = []
        with ColumnErrors() as at:
            for at.column in self._names:
                self._encodings.append(parse_encoding(columns[at.column]))
        self.details: dict[str, Plain] = {
            **settings,
            "column_names": [*self._names],
            "column_encodings": [columns[name] for name in self._names],
            "column_sizes": [encoding.size for encoding in self._encodings],
        }
        self._config = json.dumps({**self.details, "version": 2, "format": "mds"}, sort_keys=True).encode()
        self.shard_bytes = 8 + len(self._config)

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """The sizes of the values that have no fixed one, and the values."""
        check_columns(sample, number, self._names)
        sizes, values = [], []
        with ColumnErrors(number=number) as at:
            for at.column, encoding in zip(self._names, self._encodings, strict=True):
                values.append(encoding.encode(to_numpy(sample[at.column])))
                if encoding.size is None:
                    sizes.append(len(values[-1]))
        return np.array(sizes, "<u4").tobytes() + b"".join(values)

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The shard."""
        begin = 4 * (len(encoded) + 2) + len(self._config)
        bounds = np.cumsum([begin, *map(len, encoded)])
        if bounds[-1] >= 2**32:
            raise ConfigError(f"a shard of {bounds[-1]} bytes cannot be MDS, which counts them in four; make samples smaller")
        return b"".join([np.uint32(len(encoded)).tobytes(), bounds.astype("<u4").tobytes(), self._config, *encoded])


def _infer_columns(first: Sample) -> dict[str, str]:
    check_sample(first, 0)
    columns = {}
    with ColumnErrors(number=0) as at:
        for at.column in first:
            columns[at.column] = infer_encoding(to_numpy(first[at.column]))
    return columns
