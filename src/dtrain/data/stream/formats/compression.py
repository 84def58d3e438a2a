"""Compression of whole files, by the names that indexes of shards give it. What unpacks it is imported where it is used."""

from __future__ import annotations

import bz2
import gzip
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from dtrain.errors import ConfigError, DataError
from dtrain.optional_dependencies import missing_extra_error

_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
_DEFAULT_LEVELS = {"br": 11, "bz2": 9, "gz": 9, "snappy": 0, "zstd": 3}

COMPRESSIONS = tuple(_LEVELS)
"""Every compression that is known."""

COMPRESSION_SUFFIXES = {".zst": "zstd", ".zstd": "zstd", ".gz": "gz", ".br": "br", ".bz2": "bz2", ".snappy": "snappy"}
"""How names of compressed files end."""

_OUTPUT_CHUNK_BYTES = 2**22  # that are asked for at a time
_ZSTD_INPUT_BYTES = 2**9  # put in at a time: its library gives out all that this makes, at worst 32,768 times as much

ByteChunks = Iterable[bytes | memoryview]


def parse_compression(text: str) -> tuple[str, int]:
    """(name, level) of ``"zstd"`` or ``"zstd:7"``.

    Raises:
        ConfigError: a name or a level that is not known.
    """
    name, colon, level = text.partition(":")
    if name not in _LEVELS:
        raise ConfigError(f"compression {text!r} is not known; known: {', '.join(COMPRESSIONS)}")
    if not colon:
        return name, _DEFAULT_LEVELS[name]
    levels = _LEVELS[name]
    if not (level.isascii() and level.isdecimal()) or int(level) not in levels:
        known = f"levels of {name} are {levels[0]} to {levels[-1]}" if levels else f"{name} has no levels"
        raise ConfigError(f"compression {text!r}: {known}")
    return name, int(level)


def check_compression(text: str | None) -> None:
    """
    Raises:
        ConfigError: a name or a level that is not known, or a package that is not installed.
    """
    if text is not None and (name := parse_compression(text)[0]) in _PACKAGES:
        _import_package(name)


def compress(text: str, data: bytes) -> bytes:
    """``data`` compressed, as ``"zstd"`` or ``"zstd:7"`` says; equal data give equal bytes.

    Raises:
        ConfigError: a name or a level that is not known, or a package that is not installed.
    """
    name, level = parse_compression(text)
    if name == "gz":
        return gzip.compress(data, level, mtime=0)
    if name == "bz2":
        return bz2.compress(data, level)
    library = _import_package(name)
    if name == "zstd":
        return bytes(library.ZstdCompressor(level=level).compress(data))
    return bytes(library.compress(data, quality=level) if name == "br" else library.compress(data))


def decompress(name: str, pieces: ByteChunks, *, limit: int | None = None) -> Iterator[bytes]:
    """The raw bytes of a compressed file, whose bytes come in ``pieces``; a few MiB are held at a time (of snappy: all).

    Args:
        name: one of ``COMPRESSIONS``.
        pieces: of any size.
        limit: raw bytes; more are an error, so that a small file cannot fill a disk.

    Raises:
        ConfigError: a package that is not installed, or a name that is not known.
        DataError: the bytes are not of that compression, end too early, or are more than ``limit`` when unpacked.
    """
    if name not in _DECOMPRESSORS:
        raise ConfigError(f"compression {name!r} is not known; known: {', '.join(COMPRESSIONS)}")
    done = 0
    for raw in _DECOMPRESSORS[name](pieces, limit):
        done += len(raw)
        if limit is not None and done > limit:
            raise _too_large_error(name, limit)
        if raw:
            yield raw


def _corrupt_error(name: str, error: Exception) -> DataError:
    return DataError(f"{name}: cannot be unpacked: {error}; the file is damaged, or of something else")


def _too_large_error(name: str, limit: int) -> DataError:
    what = "the file is not what its index says, or larger than max_shard_bytes"
    return DataError(f"{name}: more than {limit} bytes come out; {what}")


def _truncated_error(name: str) -> DataError:
    return DataError(f"{name}: ends too early; the file is truncated")


def _decompress_gz(pieces: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Members may follow one another, and zeros the last one."""
    member, members = None, 0
    for piece in pieces:
        rest = bytes(piece)
        while rest:
            if member is None:
                if members and not (rest := rest.lstrip(b"\0")):
                    break
                member, members = zlib.decompressobj(31), members + 1
            try:
                raw = member.decompress(rest, _OUTPUT_CHUNK_BYTES)
            except zlib.error as error:
                raise _corrupt_error("gz", error) from error
            yield raw
            rest = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                member = None
    if member is not None or not members:
        raise _truncated_error("gz")


def _decompress_bz2(pieces: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Members may follow one another."""
    member, members = None, 0
    for piece in pieces:
        rest = bytes(piece)
        while rest or (member is not None and not member.needs_input):
            if member is None:
                member, members = bz2.BZ2Decompressor(), members + 1
            try:
                raw = member.decompress(rest, _OUTPUT_CHUNK_BYTES)
            except (OSError, ValueError) as error:
                raise _corrupt_error("bz2", error) from error
            yield raw
            rest = member.unused_data if member.eof else b""
            if member.eof:
                member = None
    if member is not None or not members:
        raise _truncated_error("bz2")


def _decompress_zstd(pieces: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Frames may follow one another."""
    library = _import_package("zstd")
    frame, frames = None, 0
    for piece in pieces:
        view = memoryview(piece)
        for begin in range(0, len(view), _ZSTD_INPUT_BYTES):
            rest = bytes(view[begin : begin + _ZSTD_INPUT_BYTES])
            while rest:
                if frame is None:
                    frame, frames = library.ZstdDecompressor().decompressobj(), frames + 1
                try:
                    raw = frame.decompress(rest)
                except library.ZstdError as error:
                    raise _corrupt_error("zstd", error) from error
                yield raw
                rest = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    if frame is not None or not frames:
        raise _truncated_error("zstd")


def _decompress_br(pieces: ByteChunks, limit: int | None) -> Iterator[bytes]:
    library = _import_package("br")
    stream = library.Decompressor()
    for piece in chain(pieces, (None,)):
        rest, raw = bytes(piece or b""), b"more"
        while rest or not stream.can_accept_more_data() or (piece is None and raw and not stream.is_finished()):
            if stream.is_finished():
                raise DataError("br: there are bytes after the end; the file is damaged, or of something else")
            try:
                raw = stream.process(rest, output_buffer_limit=_OUTPUT_CHUNK_BYTES)
            except library.error as error:
                raise _corrupt_error("br", error) from error
            yield raw
            rest = b""
    if not stream.is_finished():
        raise _truncated_error("br")


def _decompress_snappy(pieces: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Blocks without a frame, which can only be unpacked whole; their first bytes say how large that will be."""
    library = _import_package("snappy")
    data = b"".join(map(bytes, pieces))
    size = _snappy_size(data)
    if limit is not None and size > limit:
        raise _too_large_error("snappy", limit)
    try:
        raw = bytes(library.uncompress(data))
    except Exception as error:  # its errors are of three packages, one for each way to build it
        raise _corrupt_error("snappy", error) from error
    if len(raw) != size:
        raise _truncated_error("snappy")
    yield raw


def _snappy_size(data: bytes) -> int:
    size = 0
    for place, byte in enumerate(data[:5]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            return size
    raise _truncated_error("snappy")


_DECOMPRESSORS: dict[str, Callable[[ByteChunks, int | None], Iterator[bytes]]] = {
    "br": _decompress_br,
    "bz2": _decompress_bz2,
    "gz": _decompress_gz,
    "snappy": _decompress_snappy,
    "zstd": _decompress_zstd,
}

_PACKAGES = {"br": "brotli", "snappy": "snappy", "zstd": "zstandard"}


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError:
        raise missing_extra_error(f"compression {name} needs the package {_PACKAGES[name]}", "compression") from None
