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

from dtrain.data.stream.formats import images, pickled
from dtrain.errors import ConfigError

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
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
_MOST_AXES = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One way to make bytes of a value.

    Args:
        size: bytes of every value; None where they differ.
        encode: a value's bytes. Raises ``TypeError`` or ``ValueError`` for one that it cannot keep.
        decode: the value of bytes, which are not kept.
        unsafe: whether decoding runs what the bytes say.
        expands: the bytes of a decoded value, by its header, where they may be many more than those that it comes from.
    """

    size: int | None = None
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], Any]
    unsafe: bool = False
    expands: Callable[[memoryview], int] | None = None


def encoding_named(text: str) -> Encoding:
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
    return _ndarray(dtype or None, tuple(map(int, sizes)) or None)


def encoding_for(value: Any) -> str:
    """The encoding that keeps values like this one.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        name = f"ndarray:{value.dtype.name}"
    elif isinstance(value, np.ndarray | np.generic):
        name = value.dtype.name
    else:
        name = next((name for kind, name in _KINDS.items() if type(value) is kind), "") or images.encoding_for(value)
    if name.partition(":")[2] not in ("", *_NUMBER_OF) or (name not in ENCODINGS and not name.startswith("ndarray")):
        raise ConfigError(f"a value of type {type(value).__name__} has no encoding of its own; give columns={{name: encoding}}")
    return name


def _checked(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{' or '.join(kind.__name__ for kind in kinds)} wanted, got {type(value).__name__}")
    return value


def _text(kind: Callable[[str], Any], *kinds: type) -> Encoding:
    """A number as its digits: of any size, and exact."""
    return Encoding(encode=lambda value: str(_checked(value, *kinds)).encode(), decode=lambda view: kind(str(view, "utf-8")))


def _scalar(name: str) -> Encoding:
    dtype = np.dtype(name).newbyteorder("<")

    def encode(value: Any) -> bytes:
        kept = dtype.type(value)
        if dtype.kind != "f" and kept != value:
            raise ValueError(f"{value!r} is not of type {name}")
        return bytes(np.array(kept, dtype).tobytes())

    unpack = struct.Struct("<" + _STRUCT[f"{dtype.kind}{dtype.itemsize}"]).unpack  # half the time of an array of one
    return Encoding(size=dtype.itemsize, encode=encode, decode=lambda view: dtype.type(*unpack(view)))


def _int64(value: Any) -> bytes:
    return operator.index(value).to_bytes(8, "little", signed=True)


def _ndarray(dtype: str | None, shape: tuple[int, ...] | None) -> Encoding:
    """Values, before them the sizes unless all arrays have the same, before those the dtype unless it is the same."""
    item = None if dtype is None else np.dtype(dtype).newbyteorder("<")
    size = None if item is None or shape is None else item.itemsize * math.prod(shape)
    return Encoding(size=size, encode=partial(_array_bytes, dtype, shape), decode=partial(_array, item, shape))


def _array_bytes(dtype: str | None, shape: tuple[int, ...] | None, value: Any) -> bytes:
    _checked(value, np.ndarray)
    if value.dtype.name not in _NUMBER_OF or dtype not in (None, value.dtype.name):
        raise TypeError(f"array of dtype {dtype or ', '.join(_NUMBER_OF)} wanted, got {value.dtype.name}")
    if shape not in (None, value.shape):
        raise ValueError(f"array of shape {shape} wanted, got {value.shape}")
    if not value.size or not 1 <= value.ndim <= _MOST_AXES:
        raise ValueError(f"array of 1 to {_MOST_AXES} axes and at least one element wanted, got shape {value.shape}")
    head = b"" if dtype else bytes([_NUMBER_OF[value.dtype.name]])
    if shape is None:
        width = next(width for width in range(4) if max(value.shape) < 1 << (8 << width))
        head += bytes([value.ndim << 2 | width]) + b"".join(size.to_bytes(1 << width, "little") for size in value.shape)
    return head + bytes(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())


def _array(item: np.dtype[Any] | None, shape: tuple[int, ...] | None, view: memoryview) -> Any:
    """A copy: what is mapped from a file neither stays alive for it nor is written to."""
    begin = 0
    if item is None:
        item, begin = np.dtype(_DTYPE_OF[view[0]]), 1
    if shape is None:
        axes, width = view[begin] >> 2, 1 << (view[begin] & 3)
        shape = tuple(np.frombuffer(view, f"<u{width}", axes, begin + 1).tolist())
        begin += 1 + axes * width
    return np.frombuffer(view, item, offset=begin).reshape(shape).copy()


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _sized(parts: list[bytes]) -> bytes:
    """How many, how large each, and they."""
    return np.array([len(parts), *map(len, parts)], "<u4").tobytes() + b"".join(parts)


def _parts(view: memoryview) -> list[memoryview]:
    count = int.from_bytes(view[:4], "little")
    ends = 4 + 4 * count + np.cumsum(np.frombuffer(view, "<u4", count, 4), dtype=np.int64)
    bounds = [4 + 4 * count, *ends.tolist()]
    if bounds[-1] != len(view):
        raise ValueError(f"{count} parts of {bounds[-1]} bytes in {len(view)} bytes")
    return [view[begin:end] for begin, end in pairwise(bounds)]


def _list(of: Encoding) -> Encoding:
    """Four bytes that nobody uses, then the parts."""
    return Encoding(
        encode=lambda value: bytes(4) + _sized([of.encode(item) for item in _checked(value, list)]),
        decode=lambda view: [of.decode(part) for part in _parts(view[4:])],
        expands=_expands_in_parts(of, 4),
    )


def _expands_in_parts(of: Encoding, begin: int) -> Callable[[memoryview], int] | None:
    expands = of.expands
    return None if expands is None else lambda view: sum(map(expands, _parts(view[begin:])))


def _jpegs_bytes(value: Any) -> bytes:
    """Already compressed ones. None at all could be written, but mosaicml-streaming could not read it."""
    if not _checked(value, list, tuple):
        raise ValueError("jpeg_array of no image")
    return _sized([bytes(_checked(item, bytes, bytearray)) for item in value])


_BYTES = Encoding(encode=lambda value: bytes(_checked(value, bytes, bytearray)), decode=bytes)
_PIL = Encoding(encode=images.raw_bytes, decode=images.from_raw, expands=images.announced_raw)
_JPEG = Encoding(encode=partial(images.file_bytes, "JPEG"), decode=images.opened, expands=images.announced)
_PNG = Encoding(encode=partial(images.file_bytes, "PNG"), decode=images.opened, expands=images.announced)
_JPEGS = Encoding(
    encode=_jpegs_bytes,
    decode=lambda view: [images.opened(part) for part in _parts(view)],
    expands=_expands_in_parts(_JPEG, 0),
)

ENCODINGS: Mapping[str, Encoding] = {
    "bytes": _BYTES,
    "str": Encoding(encode=lambda value: bytes(_checked(value, str).encode()), decode=lambda view: str(view, "utf-8")),
    "int": Encoding(size=8, encode=_int64, decode=lambda view: int.from_bytes(view, "little", signed=True)),
    **{name: _scalar(name) for name in _SCALARS},
    "ndarray": _ndarray(None, None),
    "str_int": _text(int, int),
    "str_float": _text(float, float),
    "str_decimal": _text(Decimal, Decimal),
    "json": Encoding(encode=_json_bytes, decode=lambda view: json.loads(str(view, "utf-8"))),
    "pil": _PIL,
    "jpeg": _JPEG,
    "png": _PNG,
    "list[pil]": _list(_PIL),
    "list[jpeg]": _list(_JPEG),
    "list[png]": _list(_PNG),
    "jpeg_array": _JPEGS,
    "jpegarray": _JPEGS,
    "pkl": Encoding(encode=pickled.dumps, decode=pickled.loads, unsafe=True),
}
"""Every encoding without a parameter."""

_KINDS = {
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
