"""Encodings of MDS: how one value of a column lies in a sample. Those of mosaicml-streaming, bit for bit."""

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
    """One way to make bytes of a value.

    Args:
        size: bytes of every value; None where they differ.
        encode: a value's bytes. Raises ``TypeError`` or ``ValueError`` for one that it cannot keep.
        decode: the value of bytes, which are not kept.
        unsafe: whether decoding runs what the bytes say.
        decoded_bytes: the bytes of a decoded value, by its header, where they may be many more than those that it comes from.
    """

    size: int | None = None
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], Any]
    unsafe: bool = False
    decoded_bytes: Callable[[memoryview], int] | None = None


def parse_encoding(text: str) -> MdsEncoding:
    """The encoding with this name; ``ndarray`` may be followed by ``:dtype`` and ``:size,size``.

    Raises:
        ConfigError: a name, dtype or shape that is not known.
    """
    if text in ENCODINGS:
        return ENCODINGS[text]
    name, _, config = text.partition(":")
    if name != "ndarray":
        raise ConfigError(f"encoding {text!r} is not known; known: {', '.join(ENCODINGS)}")
    dtype, colon, shape = config.partition(":")
    if dtype and dtype not in _NUMBER_OF:
        raise ConfigError(f"encoding {text!r}: dtype {dtype!r} is not known; known: {', '.join(_NUMBER_OF)}")
    sizes = shape.split(",") if colon else []
    if (colon and not dtype) or not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise ConfigError(f"encoding {text!r}: an array is 'ndarray', 'ndarray:dtype' or 'ndarray:dtype:size,size,...'")
    return _array_encoding(dtype or None, tuple(map(int, sizes)) or None)


def infer_encoding(value: Any) -> str:
    """The encoding that keeps values like this one.

    Raises:
        ConfigError: there is none.
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
        raise ConfigError(f"a value of type {type(value).__name__} has no encoding of its own; give columns={{name: encoding}}")
    return name


def _require_type(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{' or '.join(kind.__name__ for kind in kinds)} wanted, got {type(value).__name__}")
    return value


def _digits_encoding(kind: Callable[[str], Any], *kinds: type) -> MdsEncoding:
    """A number as its digits: of any size, and exact."""
    return MdsEncoding(
        encode=lambda value: str(_require_type(value, *kinds)).encode(), decode=lambda view: kind(str(view, "utf-8"))
    )


def _scalar_encoding(name: str) -> MdsEncoding:
    dtype = np.dtype(name).newbyteorder("<")

    def encode(value: Any) -> bytes:
        kept = dtype.type(value)
        if dtype.kind != "f" and kept != value:
            raise ValueError(f"{value!r} is not of type {name}")
        return bytes(np.array(kept, dtype).tobytes())

    unpack = struct.Struct("<" + _STRUCT[f"{dtype.kind}{dtype.itemsize}"]).unpack  # half the time of an array of one
    return MdsEncoding(size=dtype.itemsize, encode=encode, decode=lambda view: dtype.type(*unpack(view)))


def _encode_int64(value: Any) -> bytes:
    return operator.index(value).to_bytes(8, "little", signed=True)


def _array_encoding(dtype: str | None, shape: tuple[int, ...] | None) -> MdsEncoding:
    """Values, before them the sizes unless all arrays have the same, before those the dtype unless it is the same."""
    item = None if dtype is None else np.dtype(dtype).newbyteorder("<")
    size = None if item is None or shape is None else item.itemsize * math.prod(shape)
    return MdsEncoding(size=size, encode=partial(_encode_array, dtype, shape), decode=partial(_decode_array, item, shape))


def _encode_array(dtype: str | None, shape: tuple[int, ...] | None, value: Any) -> bytes:
    _require_type(value, np.ndarray)
    if value.dtype.name not in _NUMBER_OF or dtype not in (None, value.dtype.name):
        raise TypeError(f"array of dtype {dtype or ', '.join(_NUMBER_OF)} wanted, got {value.dtype.name}")
    if shape not in (None, value.shape):
        raise ValueError(f"array of shape {shape} wanted, got {value.shape}")
    if not value.size or not 1 <= value.ndim <= _MAX_AXES:
        raise ValueError(f"array of 1 to {_MAX_AXES} axes and at least one element wanted, got shape {value.shape}")
    head = b"" if dtype else bytes([_NUMBER_OF[value.dtype.name]])
    if shape is None:
        width = next(width for width in range(4) if max(value.shape) < 1 << (8 << width))
        head += bytes([value.ndim << 2 | width]) + b"".join(size.to_bytes(1 << width, "little") for size in value.shape)
    return head + bytes(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())


def _decode_array(item: np.dtype[Any] | None, shape: tuple[int, ...] | None, view: memoryview) -> Any:
    """A copy: what is mapped from a file neither stays alive for it nor is written to."""
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
    """How many, how large each, and they."""
    return np.array([len(parts), *map(len, parts)], "<u4").tobytes() + b"".join(parts)


def _split_parts(view: memoryview) -> list[memoryview]:
    count = int.from_bytes(view[:4], "little")
    ends = 4 + 4 * count + np.cumsum(np.frombuffer(view, "<u4", count, 4), dtype=np.int64)
    bounds = [4 + 4 * count, *ends.tolist()]
    if bounds[-1] != len(view):
        raise ValueError(f"{count} parts of {bounds[-1]} bytes in {len(view)} bytes")
    return [view[begin:end] for begin, end in pairwise(bounds)]


def _list_encoding(of: MdsEncoding) -> MdsEncoding:
    """Four bytes that nobody uses, then the parts."""
    return MdsEncoding(
        encode=lambda value: bytes(4) + _join_parts([of.encode(item) for item in _require_type(value, list)]),
        decode=lambda view: [of.decode(part) for part in _split_parts(view[4:])],
        decoded_bytes=_decoded_bytes_of_parts(of, 4),
    )


def _decoded_bytes_of_parts(of: MdsEncoding, begin: int) -> Callable[[memoryview], int] | None:
    expands = of.decoded_bytes
    return None if expands is None else lambda view: sum(map(expands, _split_parts(view[begin:])))


def _encode_jpegs(value: Any) -> bytes:
    """Already compressed ones. None at all could be written, but mosaicml-streaming could not read it."""
    if not _require_type(value, list, tuple):
        raise ValueError("jpeg_array of no image")
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
"""Every encoding without a parameter."""

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
