"""Compress and decompress whole files, by the names of compressions in indexes. Packages are imported on first use."""

from __future__ import annotations

import bz2
import gzip
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from dtrain.errors import ConfigError, DataError
from dtrain.packages import missing_extra_error

_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
_DEFAULT_LEVELS = {"br": 11, "bz2": 9, "gz": 9, "snappy": 0, "zstd": 3}

COMPRESSIONS = tuple(_LEVELS)
"""Names of all supported compressions."""

COMPRESSION_SUFFIXES = {".zst": "zstd", ".zstd": "zstd", ".gz": "gz", ".br": "br", ".bz2": "bz2", ".snappy": "snappy"}
"""Suffixes of compressed files."""

# Limit of decompressed bytes per call.
_OUTPUT_CHUNK_BYTES = 2**22
# Limit of compressed bytes per call. zstandard has no limit of its output, which may be 32,768 times as large.
_ZSTD_INPUT_BYTES = 2**9

ByteChunks = Iterable[bytes | memoryview]


def parse_compression(text: str) -> tuple[str, int]:
    """Parse ``"zstd"`` or ``"zstd:7"`` to (name, level).

    Raises:
        ConfigError: the name or the level is unknown.
    """
    name, colon, level = text.partition(":")
    if name not in _LEVELS:
        raise ConfigError(f"compression {text!r} is unknown. Use one of {', '.join(COMPRESSIONS)}.")
    if not colon:
        return name, _DEFAULT_LEVELS[name]
    levels = _LEVELS[name]
    if not (level.isascii() and level.isdecimal()) or int(level) not in levels:
        known = f"the level of {name} must be {levels[0]} to {levels[-1]}" if levels else f"{name} has no levels"
        raise ConfigError(f"compression {text!r}: {known}. Pass {name!r} for the default.")
    return name, int(level)


def check_compression(text: str | None) -> None:
    """Check the name and level of a compression, and import its package.

    Raises:
        ConfigError: the name or the level is unknown, or the package is not installed.
    """
    if text is not None and (name := parse_compression(text)[0]) in _PACKAGES:
        _import_package(name)


def compress(text: str, data: bytes) -> bytes:
    """Compress ``data`` with a compression such as ``"zstd"`` or ``"zstd:7"``. Equal data give equal bytes.

    Raises:
        ConfigError: the name or the level is unknown, or the package is not installed.
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


def decompress(name: str, chunks: ByteChunks, *, limit: int | None = None) -> Iterator[bytes]:
    """Decompress a file from chunks of its bytes. A few MiB are in memory at a time; with snappy, the whole file.

    Args:
        name: one of ``COMPRESSIONS``.
        chunks: chunks of any size.
        limit: maximum of raw bytes; more bytes raise an error, so that a small file cannot fill a disk.

    Raises:
        ConfigError: the name is unknown, or the package is not installed.
        DataError: the bytes are not of that compression, are truncated, or decompress to more than ``limit`` bytes.
    """
    if name not in _DECOMPRESSORS:
        raise ConfigError(f"compression {name!r} is unknown. Use one of {', '.join(COMPRESSIONS)}.")
    byte_count = 0
    for raw in _DECOMPRESSORS[name](chunks, limit):
        byte_count += len(raw)
        if limit is not None and byte_count > limit:
            raise _too_large_error(name, limit)
        if raw:
            yield raw


def _corrupt_error(name: str, error: Exception) -> DataError:
    return DataError(f"{name}: cannot be decompressed: {error}. The file is damaged, or has another format.")


def _too_large_error(name: str, limit: int) -> DataError:
    advice = "The file differs from its index, or is larger than max_shard_bytes"
    return DataError(f"{name}: decompresses to more than {limit} bytes. {advice}")


def _truncated_error(name: str) -> DataError:
    return DataError(f"{name}: ends too early. The file is truncated.")


def _decompress_gz(chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Decompress members in sequence. Zeros may follow the last member."""
    member, members = None, 0
    for chunk in chunks:
        remaining = bytes(chunk)
        while remaining:
            if member is None:
                if members and not (remaining := remaining.lstrip(b"\0")):
                    break
                member, members = zlib.decompressobj(31), members + 1
            try:
                raw = member.decompress(remaining, _OUTPUT_CHUNK_BYTES)
            except zlib.error as error:
                raise _corrupt_error("gz", error) from error
            yield raw
            remaining = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                member = None
    if member is not None or not members:
        raise _truncated_error("gz")


def _decompress_bz2(chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Decompress members in sequence."""
    member, members = None, 0
    for chunk in chunks:
        remaining = bytes(chunk)
        while remaining or (member is not None and not member.needs_input):
            if member is None:
                member, members = bz2.BZ2Decompressor(), members + 1
            try:
                raw = member.decompress(remaining, _OUTPUT_CHUNK_BYTES)
            except (OSError, ValueError) as error:
                raise _corrupt_error("bz2", error) from error
            yield raw
            remaining = member.unused_data if member.eof else b""
            if member.eof:
                member = None
    if member is not None or not members:
        raise _truncated_error("bz2")


def _decompress_zstd(chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Decompress frames in sequence."""
    library = _import_package("zstd")
    frame, frames = None, 0
    for chunk in chunks:
        view = memoryview(chunk)
        for begin in range(0, len(view), _ZSTD_INPUT_BYTES):
            remaining = bytes(view[begin : begin + _ZSTD_INPUT_BYTES])
            while remaining:
                if frame is None:
                    frame, frames = library.ZstdDecompressor().decompressobj(), frames + 1
                try:
                    raw = frame.decompress(remaining)
                except library.ZstdError as error:
                    raise _corrupt_error("zstd", error) from error
                yield raw
                remaining = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    if frame is not None or not frames:
        raise _truncated_error("zstd")


def _decompress_br(chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    library = _import_package("br")
    stream = library.Decompressor()
    for chunk in chain(chunks, (None,)):
        remaining, raw = bytes(chunk or b""), b"more"
        while remaining or not stream.can_accept_more_data() or (chunk is None and raw and not stream.is_finished()):
            if stream.is_finished():
                raise DataError("br: has bytes after its end. The file is damaged, or has another format.")
            try:
                raw = stream.process(remaining, output_buffer_limit=_OUTPUT_CHUNK_BYTES)
            except library.error as error:
                raise _corrupt_error("br", error) from error
            yield raw
            remaining = b""
    if not stream.is_finished():
        raise _truncated_error("br")


def _decompress_snappy(chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Decompress a block, which is possible as a whole only. The first bytes of a block contain its raw size."""
    library = _import_package("snappy")
    data = b"".join(map(bytes, chunks))
    size = _snappy_size(data)
    if limit is not None and size > limit:
        raise _too_large_error("snappy", limit)
    try:
        raw = bytes(library.uncompress(data))
    except Exception as error:
        # Each of the packages that provide the module has its own class of errors.
        raise _corrupt_error("snappy", error) from error
    if len(raw) != size:
        raise _truncated_error("snappy")
    yield raw


def _snappy_size(data: bytes) -> int:
    size = 0
    for position, byte in enumerate(data[:5]):
        size |= (byte & 127) << 7 * position
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
