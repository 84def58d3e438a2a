"""``MdsFormat``: read and write MDS, the shard format of mosaicml-streaming, byte for byte as mosaicml-streaming does.

A shard is: the number of samples (4 bytes), the start of each sample and the end of the last sample (4 bytes each), the columns
as JSON, and the samples. A sample is the sizes of its values without a fixed size (4 bytes each), and the values."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.data.stream.formats import images
from dtrain.data.stream.formats.mds_encodings import MdsEncoding, infer_encoding, parse_encoding
from dtrain.data.stream.formats.shard_format import (
    ByteSource,
    ColumnErrors,
    Sample,
    ShardEntry,
    ShardFormat,
    check_columns,
    check_sample,
    check_sample_bytes,
    to_numpy,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.stream.open_shards import ByteLRU

_IMAGE_ENCODINGS = ("pil", "jpeg", "png")


class MdsShard:
    """Samples of one shard, as mappings from column to value."""

    # Reading changes no state.
    thread_safe = True

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        self._source: ByteSource | None = source
        self._max_sample_bytes = max_sample_bytes
        self._columns = _select_columns(_parse_columns(entry), options)
        self._sizes = struct.Struct(f"<{sum(size is None for _, size, _, _ in self._columns)}I")
        self._bounds, _ = _read_offsets(source, entry.file.name)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        byte_count = self._bounds[row + 1] - self._bounds[row]
        check_sample_bytes(byte_count, self._max_sample_bytes)
        view = memoryview(self._source.read(self._bounds[row], self._bounds[row + 1]))
        sizes = iter(self._sizes.unpack_from(view))
        at = self._sizes.size
        sample = {}
        for name, size, decode, decoded_bytes in self._columns:
            end = at + (next(sizes) if size is None else size)
            if decode is not None:
                if decoded_bytes is not None:
                    byte_count += decoded_bytes(view[at:end])
                    check_sample_bytes(byte_count, self._max_sample_bytes)
                sample[name] = decode(view[at:end])
            at = end
        if at != len(view):
            raise ValueError(f"it has {len(view)} bytes, but its values have {at}")
        return sample

    def close(self) -> None:
        """Release the source."""
        self._source = None


MdsColumn = tuple[str, int | None, Callable[[memoryview], Any] | None, Callable[[memoryview], int] | None]
"""Name, fixed size or None, decoder or None for an unused column, and the decoded size of values that grow when decoded."""


def _parse_columns(entry: ShardEntry) -> list[tuple[str, int | None, MdsEncoding]]:
    lists = [entry.details.get(f"column_{field}") for field in ("names", "sizes", "encodings")]
    names, sizes, encodings = (values if isinstance(values, list) else [] for values in lists)
    if not names or not len(names) == len(sizes) == len(encodings) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{entry.file.name}: the index must have column names, sizes and encodings, lists of one length.")
    columns: list[tuple[str, int | None, MdsEncoding]] = []
    for name, size, text in zip(names, sizes, encodings, strict=True):
        try:
            encoding = parse_encoding(str(text))
        except ConfigError as error:
            raise DataError(f"{entry.file.name}: column {name!r}: {error}") from None
        if (size or None) != encoding.size:
            raise DataError(f"{entry.file.name}: column {name!r} has {size!r} bytes, but {text} has {encoding.size}")
        columns.append((str(name), encoding.size, encoding))
    return columns


def _select_columns(columns: list[tuple[str, int | None, MdsEncoding]], options: Mapping[str, Any]) -> list[MdsColumn]:
    selected = options.get("columns")
    return [
        (name, size, coder.decode if selected is None or name in selected else None, coder.decoded_bytes)
        for name, size, coder in columns
    ]


def _read_offsets(source: ByteSource, name: str) -> tuple[memoryview, int]:
    """Read the starts of samples and the end of the last sample; also return the end of the table.

    Raises:
        DataError: the numbers do not fit the file.
    """
    samples = int.from_bytes(source.read(0, 4), "little")
    end = 4 * (samples + 2)
    table = source.read(4, end) if 8 <= end <= source.size else b""
    if len(table) != end - 4:
        raise DataError(f"{name}: is not an MDS shard, or truncated: {source.size} bytes, {samples} samples.")
    bounds = np.frombuffer(table, "<u4").astype(np.uint32)
    if bounds[0] < end or bounds[-1] != source.size or (bounds[1:] < bounds[:-1]).any():
        raise DataError(f"{name}: is damaged: samples end at byte {bounds[-1]} of {source.size}, or are out of order.")
    return bounds.data, end


class MdsFormat(ShardFormat):
    """MDS; see the module.

    Options: ``columns`` (names of the columns to read), and ``allow_pickle`` (if True, columns encoded as ``pkl`` may be read).
    """

    name = "mds"
    suffixes = (".mds",)
    supports_ranges = True
    options = ("columns", "allow_pickle")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options and the columns; see ``ShardFormat.check``."""
        super().check(entry, options)
        selected = options.get("columns")
        columns = _parse_columns(entry)
        if selected is not None and (missing := [name for name in selected if name not in {name for name, _, _ in columns}]):
            names = ", ".join(name for name, _, _ in columns)
            raise ConfigError(
                f"{entry.file.name}: no column {missing[0]!r}; the columns are {names}. Pass columns= with names of this list."
            )
        for name, _, encoding in columns:
            if selected is not None and name not in selected:
                continue
            if encoding.unsafe and options.get("allow_pickle") is not True:
                raise ConfigError(
                    f"{entry.file.name}: column {name!r} is pickled, and unpickling runs code from the file. "
                    "Leave it out with columns, or trust the data with allow_pickle=True."
                )
        texts = [str(text) for text in entry.details["column_encodings"]]  # type: ignore[union-attr]
        if any(kind in text for text in texts for kind in _IMAGE_ENCODINGS):
            images.check_pillow()

    def open_unchecked(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int, decoded: ByteLRU | None
    ) -> MdsShard:
        """Open a shard; see ``ShardFormat.open``."""
        return MdsShard(source, entry, options, max_sample_bytes)

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Count the samples, and read the columns from the shard; see ``ShardFormat.count``."""
        bounds, end = _read_offsets(source, "file")
        try:
            config = json.loads(bytes(source.read(end, bounds[0])))
        except ValueError as error:
            raise DataError(f"there are no columns between byte {end} and the samples: {error}") from None
        selected = ("column_names", "column_encodings", "column_sizes")
        if not isinstance(config, dict):
            raise DataError(f"columns must be an object, got {type(config).__name__}")
        return len(bounds) - 1, {key: config[key] for key in selected if key in config}


MDS = MdsFormat()


class MdsWriter:
    """Writer of MDS; see ``ShardWriter``."""

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
        """Encode the sizes of values without a fixed size, and the values."""
        check_columns(sample, number, self._names)
        sizes, values = [], []
        with ColumnErrors(number=number) as at:
            for at.column, encoding in zip(self._names, self._encodings, strict=True):
                values.append(encoding.encode(to_numpy(sample[at.column])))
                if encoding.size is None:
                    sizes.append(len(values[-1]))
        return np.array(sizes, "<u4").tobytes() + b"".join(values)

    def size(self, encoded: bytes, /) -> int:
        """Return the bytes of an encoded sample."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """Encode a shard."""
        begin = 4 * (len(encoded) + 2) + len(self._config)
        bounds = np.cumsum([begin, *map(len, encoded)])
        if bounds[-1] >= 2**32:
            raise ConfigError(
                f"a shard of {bounds[-1]} bytes is too large for MDS, which has 4-byte offsets. Use smaller samples."
            )
        return b"".join([np.uint32(len(encoded)).tobytes(), bounds.astype("<u4").tobytes(), self._config, *encoded])


def _infer_columns(first: Sample) -> dict[str, str]:
    check_sample(first, 0)
    columns = {}
    with ColumnErrors(number=0) as at:
        for at.column in first:
            columns[at.column] = infer_encoding(to_numpy(first[at.column]))
    return columns
