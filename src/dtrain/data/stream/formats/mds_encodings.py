"""``MdsEncoding``: encode and decode the values of MDS columns, bit for bit as mosaicml-streaming does."""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from dtrain.data.stream.formats import images, unsafe_pickle
from dtrain.errors import ConfigError

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
        name = next(
            (name for kind, name in _ENCODING_OF_TYPE.items() if type(value) is kind), ""
        ) or images.infer_image_encoding(value)
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


def _encode_int64(value: Any) -> bytes:
    return operator.index(value).to_bytes(8, "little", signed=True)


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


def _encode_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


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
        decode=lambda view: [item_encoding.decode(part) for part in _split_parts(view[4:])],
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
_PIL = MdsEncoding(encode=images.encode_raw, decode=images.decode_raw, decoded_bytes=images.decoded_raw_bytes)
_JPEG = MdsEncoding(encode=partial(images.encode_image, "JPEG"), decode=images.decode_image, decoded_bytes=images.decoded_bytes)
_PNG = MdsEncoding(encode=partial(images.encode_image, "PNG"), decode=images.decode_image, decoded_bytes=images.decoded_bytes)
_JPEGS = MdsEncoding(
    encode=_encode_jpegs,
    decode=lambda view: [images.decode_image(part) for part in _split_parts(view)],
    decoded_bytes=_decoded_bytes_of_parts(_JPEG, 0),
)

ENCODINGS: Mapping[str, MdsEncoding] = {
    "bytes": _BYTES,
    "str": MdsEncoding(encode=lambda value: bytes(_require_type(value, str).encode()), decode=lambda view: str(view, "utf-8")),
    "int": MdsEncoding(size=8, encode=_encode_int64, decode=lambda view: int.from_bytes(view, "little", signed=True)),
    **{name: _scalar_encoding(name) for name in _SCALAR_NAMES},
    "ndarray": _array_encoding(None, None),
    "str_int": _digits_encoding(int, int),
    "str_float": _digits_encoding(float, float),
    "str_decimal": _digits_encoding(Decimal, Decimal),
    "json": MdsEncoding(encode=_encode_json, decode=lambda view: json.loads(str(view, "utf-8"))),
    "pil": _PIL,
    "jpeg": _JPEG,
    "png": _PNG,
    "list[pil]": _list_encoding(_PIL),
    "list[jpeg]": _list_encoding(_JPEG),
    "list[png]": _list_encoding(_PNG),
    "jpeg_array": _JPEGS,
    "jpegarray": _JPEGS,
    "pkl": MdsEncoding(encode=unsafe_pickle.dumps, decode=unsafe_pickle.loads, unsafe=True),
}
"""All encodings without a parameter."""

_ENCODING_OF_TYPE = {
    str: "str",
    bytes: "bytes",
    int: "int",
    float: "float64",
    Decimal: "str_decimal",
    bool: "json",
    list: "json",
    dict: "json",
    type(None): "json",
}
