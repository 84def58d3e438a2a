"""``MdsFormat``: read and write MDS, the shard format of mosaicml-streaming, byte for byte as mosaicml-streaming does.

A shard is: the number of samples (4 bytes), the start of each sample and the end of the last sample (4 bytes each), the columns
as JSON, and the samples. A sample is the sizes of its values without a fixed size (4 bytes each), and the values."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.data.stream.formats.shard_format import (
    ByteSource,
    Sample,
    Shard,
    ShardEntry,
    ShardFormat,
    ShardWriter,
    check_columns,
    check_sample,
    check_sample_bytes,
    decode_image,
    decode_raw_image,
    encode_image,
    encode_raw_image,
    image_bytes,
    import_pillow,
    infer_image_encoding,
    name_column,
    pickle_value,
    raw_image_bytes,
    select_columns,
    to_numpy,
    unpickle,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.stream.open_shards import ByteLRU


class MdsShard(Shard):
    """Samples of one shard, as mappings from column to value."""

    # Reading changes no state.
    thread_safe = True

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        super().__init__(source, max_sample_bytes)
        selected, columns = options.get("columns"), _parse_columns(entry)
        self._columns = [(name, encoding, selected is None or name in selected) for name, encoding in columns]
        self._sizes = struct.Struct(f"<{sum(encoding.size is None for _, encoding in columns)}I")
        self._bounds, _ = _read_offsets(source, entry.file.name)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, row: int, source: ByteSource) -> dict[str, Any]:
        """Read the values of the selected columns; see ``Shard.read``."""
        byte_count = self._bounds[row + 1] - self._bounds[row]
        check_sample_bytes(byte_count, self._max_sample_bytes)
        view = memoryview(source.read(self._bounds[row], self._bounds[row + 1]))
        sizes = iter(self._sizes.unpack_from(view))
        begin = self._sizes.size
        sample = {}
        for name, encoding, is_selected in self._columns:
            end = begin + (next(sizes) if encoding.size is None else encoding.size)
            if is_selected:
                if encoding.decoded_bytes is not None:
                    byte_count += encoding.decoded_bytes(view[begin:end])
                    check_sample_bytes(byte_count, self._max_sample_bytes)
                sample[name] = encoding.decode(view[begin:end])
            begin = end
        if begin != len(view):
            raise ValueError(f"it has {len(view)} bytes, but its values have {begin}")
        return sample


def _parse_columns(entry: ShardEntry) -> list[tuple[str, MdsEncoding]]:
    """Return the names and encodings of the columns.

    Raises:
        DataError: the details of the entry are invalid.
    """
    lists = [entry.details.get(f"column_{field}") for field in ("names", "sizes", "encodings")]
    names, sizes, encodings = (values if isinstance(values, list) else [] for values in lists)
    if not names or not len(names) == len(sizes) == len(encodings) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{entry.file.name}: the index must have column names, sizes and encodings, lists of one length.")
    columns: list[tuple[str, MdsEncoding]] = []
    for name, size, text in zip(names, sizes, encodings, strict=True):
        try:
            encoding = parse_encoding(str(text))
        except ConfigError as error:
            raise DataError(f"{entry.file.name}: column {name!r}: {error}") from None
        if (size or None) != encoding.size:
            raise DataError(f"{entry.file.name}: column {name!r} has {size!r} bytes, but {text} has {encoding.size}")
        columns.append((str(name), encoding))
    return columns


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
    has_typed_columns = True

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options and the columns; see ``ShardFormat.check``."""
        super().check(entry, options)
        columns = _parse_columns(entry)
        selected = select_columns(entry, options, [name for name, _ in columns])
        for name, encoding in columns:
            if encoding.unsafe and name in selected and options.get("allow_pickle") is not True:
                raise ConfigError(
                    f"{entry.file.name}: column {name!r} is pickled, and unpickling runs code from the file. "
                    "Leave it out with columns, or trust the data with allow_pickle=True."
                )
        # Only images grow when decoded.
        if any(encoding.decoded_bytes is not None for _, encoding in columns):
            import_pillow()

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

    def writer(self, first: Sample, columns: Mapping[str, str] | None, details: dict[str, Plain]) -> MdsWriter:
        """Make the writer; see ``ShardFormat.writer``."""
        return MdsWriter(first, columns, details)


MDS = MdsFormat()


class MdsWriter(ShardWriter):
    """Writer of MDS; see ``ShardWriter``."""

    suffix = ".mds"
    sample_bytes = 4

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        if columns is None:
            check_sample(first, 0)
            columns = {}
            for name, value in first.items():
                with name_column(name, 0):
                    columns[name] = infer_encoding(to_numpy(value))
        self._encodings: dict[str, MdsEncoding] = {}
        for name in sorted(columns):
            with name_column(name):
                self._encodings[name] = parse_encoding(columns[name])
        super().__init__(
            {
                **settings,
                "column_names": [*self._encodings],
                "column_encodings": [columns[name] for name in self._encodings],
                "column_sizes": [encoding.size for encoding in self._encodings.values()],
            }
        )
        self._config = json.dumps({**self.details, "version": 2, "format": "mds"}, sort_keys=True).encode()
        self.shard_bytes = 8 + len(self._config)

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """Encode the sizes of values without a fixed size, and the values."""
        check_columns(sample, number, [*self._encodings])
        sizes, values = [], []
        for name, encoding in self._encodings.items():
            with name_column(name, number):
                values.append(encoding.encode(to_numpy(sample[name])))
            if encoding.size is None:
                sizes.append(len(values[-1]))
        return np.array(sizes, "<u4").tobytes() + b"".join(values)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """Encode a shard."""
        begin = 4 * (len(encoded) + 2) + len(self._config)
        bounds = np.cumsum([begin, *map(len, encoded)])
        if bounds[-1] >= 2**32:
            raise ConfigError(
                f"a shard of {bounds[-1]} bytes is too large for MDS, which has 4-byte offsets. Use smaller samples."
            )
        return b"".join([np.uint32(len(encoded)).tobytes(), bounds.astype("<u4").tobytes(), self._config, *encoded])


_SCALAR_NAMES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPE_OF = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_NUMBER_OF = {np.dtype(dtype).name: number for number, dtype in _DTYPE_OF.items()}
_STRUCT = dict(zip(("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"), "BHIQbhiqefd", strict=True))
_MAX_AXES = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsEncoding:
    """Encoding of values as bytes.

    Args:
        size: bytes of every value; None if the size varies.
        encode: function from a value to bytes; raises ``TypeError`` or ``ValueError`` for a value that it cannot encode.
        decode: function from bytes to a value, which does not refer to the bytes.
        unsafe: if True, decoding runs code from the bytes.
        decoded_bytes: function from bytes to the size of the decoded value, for values that may grow when decoded.
    """

    size: int | None = None
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], Any]
    unsafe: bool = False
    decoded_bytes: Callable[[memoryview], int] | None = None


def parse_encoding(text: str) -> MdsEncoding:
    """Return the encoding of a name; ``ndarray`` may be followed by ``:dtype`` and ``:size,size``.

    Raises:
        ConfigError: the name, dtype or shape is unknown.
    """
    if text in ENCODINGS:
        return ENCODINGS[text]
    name, _, config = text.partition(":")
    if name != "ndarray":
        raise ConfigError(f"encoding {text!r} is unknown. Use one of {', '.join(ENCODINGS)}.")
    dtype, colon, shape = config.partition(":")
    if dtype and dtype not in _NUMBER_OF:
        raise ConfigError(f"encoding {text!r}: dtype {dtype!r} is unknown. Use one of {', '.join(_NUMBER_OF)}.")
    sizes = shape.split(",") if colon else []
    if (colon and not dtype) or not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise ConfigError(
            f"encoding {text!r}: must be 'ndarray', 'ndarray:dtype' or 'ndarray:dtype:size,size,...'. "
            "Write 'ndarray:float32:3,32', for example."
        )
    return _array_encoding(dtype or None, tuple(map(int, sizes)) or None)


def infer_encoding(value: Any) -> str:
    """Infer the encoding for values like ``value``.

    Raises:
        ConfigError: the type has no encoding.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        name = f"ndarray:{value.dtype.name}"
    elif isinstance(value, np.ndarray | np.generic):
        name = value.dtype.name
    else:
        name = _ENCODING_OF_TYPE.get(type(value)) or infer_image_encoding(value)
    if name.partition(":")[2] not in ("", *_NUMBER_OF) or (name not in ENCODINGS and not name.startswith("ndarray")):
        raise ConfigError(f"a value of type {type(value).__name__} has no default encoding. Pass columns={{name: encoding}}.")
    return name


def _require_type(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"must be {' or '.join(kind.__name__ for kind in kinds)}, got {type(value).__name__}")
    return value


def _digits_encoding(kind: Callable[[str], Any], *kinds: type) -> MdsEncoding:
    """Encode a number as digits, exact and of any size."""
    return MdsEncoding(
        encode=lambda value: str(_require_type(value, *kinds)).encode(), decode=lambda view: kind(str(view, "utf-8"))
    )


def _scalar_encoding(name: str) -> MdsEncoding:
    dtype = np.dtype(name).newbyteorder("<")

    def encode(value: Any) -> bytes:
        converted = dtype.type(value)
        if dtype.kind != "f" and converted != value:
            raise ValueError(f"must be of type {name}, got {value!r}")
        return bytes(np.array(converted, dtype).tobytes())

    # struct takes half the time of an array with one element.
    unpack = struct.Struct("<" + _STRUCT[f"{dtype.kind}{dtype.itemsize}"]).unpack
    return MdsEncoding(size=dtype.itemsize, encode=encode, decode=lambda view: dtype.type(*unpack(view)))


def _array_encoding(dtype: str | None, shape: tuple[int, ...] | None) -> MdsEncoding:
    """Encode an array: the dtype unless it is fixed, the shape unless it is fixed, and the values."""
    item = None if dtype is None else np.dtype(dtype).newbyteorder("<")
    size = None if item is None or shape is None else item.itemsize * math.prod(shape)
    return MdsEncoding(size=size, encode=partial(_encode_array, dtype, shape), decode=partial(_decode_array, item, shape))


def _encode_array(dtype: str | None, shape: tuple[int, ...] | None, value: Any) -> bytes:
    _require_type(value, np.ndarray)
    if value.dtype.name not in _NUMBER_OF or dtype not in (None, value.dtype.name):
        raise TypeError(f"dtype must be {dtype or ', '.join(_NUMBER_OF)}, got {value.dtype.name}")
    if shape not in (None, value.shape):
        raise ValueError(f"shape must be {shape}, got {value.shape}")
    if not value.size or not 1 <= value.ndim <= _MAX_AXES:
        raise ValueError(f"an array must have 1 to {_MAX_AXES} axes and at least one element, got shape {value.shape}")
    head = b"" if dtype else bytes([_NUMBER_OF[value.dtype.name]])
    if shape is None:
        width = next(width for width in range(4) if max(value.shape) < 1 << (8 << width))
        head += bytes([value.ndim << 2 | width]) + b"".join(size.to_bytes(1 << width, "little") for size in value.shape)
    return head + bytes(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())


def _decode_array(item: np.dtype[Any] | None, shape: tuple[int, ...] | None, view: memoryview) -> Any:
    """Decode a copy of the array, which is writable and does not keep a memory-mapped file open."""
    begin = 0
    if item is None:
        item, begin = np.dtype(_DTYPE_OF[view[0]]), 1
    if shape is None:
        axes, width = view[begin] >> 2, 1 << (view[begin] & 3)
        shape = tuple(np.frombuffer(view, f"<u{width}", axes, begin + 1).tolist())
        begin += 1 + axes * width
    return np.frombuffer(view, item, offset=begin).reshape(shape).copy()


def _join_parts(parts: list[bytes]) -> bytes:
    """Encode the number of parts, the size of each part, and the parts."""
    return np.array([len(parts), *map(len, parts)], "<u4").tobytes() + b"".join(parts)


def _split_parts(view: memoryview) -> list[memoryview]:
    count = int.from_bytes(view[:4], "little")
    ends = 4 + 4 * count + np.cumsum(np.frombuffer(view, "<u4", count, 4), dtype=np.int64)
    bounds = [4 + 4 * count, *ends.tolist()]
    if bounds[-1] != len(view):
        raise ValueError(f"{count} parts must have {len(view)} bytes, got {bounds[-1]}")
    return [view[begin:end] for begin, end in pairwise(bounds)]


def _list_encoding(item_encoding: MdsEncoding) -> MdsEncoding:
    """Encode a list: four unused bytes, and the parts."""
    return MdsEncoding(
        encode=lambda value: bytes(4) + _join_parts([item_encoding.encode(item) for item in _require_type(value, list)]),
        decode=lambda view: [item_encoding.decode(item) for item in _split_parts(view[4:])],
        decoded_bytes=_decoded_bytes_of_parts(item_encoding, 4),
    )


def _decoded_bytes_of_parts(item_encoding: MdsEncoding, begin: int) -> Callable[[memoryview], int] | None:
    decoded_bytes = item_encoding.decoded_bytes
    return None if decoded_bytes is None else lambda view: sum(map(decoded_bytes, _split_parts(view[begin:])))


def _encode_jpegs(value: Any) -> bytes:
    """Encode compressed images. An empty list is refused, because mosaicml-streaming cannot read it."""
    if not _require_type(value, list, tuple):
        raise ValueError("jpeg_array must have an image")
    return _join_parts([bytes(_require_type(item, bytes, bytearray)) for item in value])


_BYTES = MdsEncoding(encode=lambda value: bytes(_require_type(value, bytes, bytearray)), decode=bytes)
_PIL = MdsEncoding(encode=encode_raw_image, decode=decode_raw_image, decoded_bytes=raw_image_bytes)
_JPEG = MdsEncoding(encode=partial(encode_image, "JPEG"), decode=decode_image, decoded_bytes=image_bytes)
_PNG = MdsEncoding(encode=partial(encode_image, "PNG"), decode=decode_image, decoded_bytes=image_bytes)
_JPEGS = MdsEncoding(
    encode=_encode_jpegs,
    decode=lambda view: [decode_image(item) for item in _split_parts(view)],
    decoded_bytes=_decoded_bytes_of_parts(_JPEG, 0),
)

ENCODINGS: Mapping[str, MdsEncoding] = {
    "bytes": _BYTES,
    "str": MdsEncoding(encode=lambda value: bytes(_require_type(value, str).encode()), decode=lambda view: str(view, "utf-8")),
    "int": MdsEncoding(
        size=8,
        encode=lambda value: operator.index(value).to_bytes(8, "little", signed=True),
        decode=lambda view: int.from_bytes(view, "little", signed=True),
    ),
    **{name: _scalar_encoding(name) for name in _SCALAR_NAMES},
    "ndarray": _array_encoding(None, None),
    "str_int": _digits_encoding(int, int),
    "str_float": _digits_encoding(float, float),
    "str_decimal": _digits_encoding(Decimal, Decimal),
    "json": MdsEncoding(
        encode=lambda value: json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode(),
        decode=lambda view: json.loads(str(view, "utf-8")),
    ),
    "pil": _PIL,
    "jpeg": _JPEG,
    "png": _PNG,
    "list[pil]": _list_encoding(_PIL),
    "list[jpeg]": _list_encoding(_JPEG),
    "list[png]": _list_encoding(_PNG),
    "jpeg_array": _JPEGS,
    "jpegarray": _JPEGS,
    "pkl": MdsEncoding(encode=pickle_value, decode=unpickle, unsafe=True),
}
"""All encodings without a parameter."""

_ENCODING_OF_TYPE: Mapping[type, str] = {
    **dict.fromkeys((bool, list, dict, type(None)), "json"),
    str: "str",
    bytes: "bytes",
    int: "int",
    float: "float64",
    Decimal: "str_decimal",
}
