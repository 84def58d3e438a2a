"""Compress, decompress and hash whole files, by the names of compressions and digests in indexes.

Packages are imported on first use."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import xxhash

from dtrain.errors import ConfigError, DataError
from dtrain.packages import missing_extra_error

_LEVELS = MappingProxyType({"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)})
_DEFAULT_LEVELS = MappingProxyType({"br": 11, "bz2": 9, "gz": 9, "snappy": 0, "zstd": 3})
_PACKAGES = MappingProxyType({"br": "brotli", "snappy": "snappy", "zstd": "zstandard"})

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
        problem = f"the level of {name} must be {levels[0]} to {levels[-1]}" if levels else f"{name} has no levels"
        raise ConfigError(f"compression {text!r}: {problem}. Pass {name!r} for the default.")
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
    if name not in _LEVELS:
        raise ConfigError(f"compression {name!r} is unknown. Use one of {', '.join(COMPRESSIONS)}.")
    byte_count = 0
    for raw in _DECOMPRESSORS.get(name, partial(_decompress_members, name))(chunks, limit):
        byte_count += len(raw)
        if limit is not None and byte_count > limit:
            raise _too_large_error(name, limit)
        if raw:
            yield raw


def _decompress_members(name: str, chunks: ByteChunks, limit: int | None) -> Iterator[bytes]:
    """Decompress the members of a gz or bz2 file, or the frames of a zstd file, in sequence."""
    open_member: Callable[[], Any]
    failure: Any
    max_output: tuple[int, ...]
    if name == "gz":
        open_member, failure, max_output = partial(zlib.decompressobj, 31), zlib.error, (_OUTPUT_CHUNK_BYTES,)
    elif name == "bz2":
        open_member, failure, max_output = bz2.BZ2Decompressor, (OSError, ValueError), (_OUTPUT_CHUNK_BYTES,)
    else:
        library = _import_package("zstd")
        open_member, failure, max_output = lambda: library.ZstdDecompressor().decompressobj(), library.ZstdError, ()
        chunks = (
            chunk[begin : begin + _ZSTD_INPUT_BYTES] for chunk in chunks for begin in range(0, len(chunk), _ZSTD_INPUT_BYTES)
        )
    member, members = None, 0
    for chunk in chunks:
        remaining = bytes(chunk)
        # A member of bz2 may have more output without more input.
        while remaining or (member is not None and not getattr(member, "needs_input", True)):
            if member is None:
                # Zeros may follow the last member of gz.
                if name == "gz" and members and not (remaining := remaining.lstrip(b"\0")):
                    break
                member, members = open_member(), members + 1
            try:
                raw = member.decompress(remaining, *max_output)
            except failure as error:
                raise _corrupt_error(name, error) from error
            yield raw
            remaining = member.unused_data if member.eof else getattr(member, "unconsumed_tail", b"")
            if member.eof:
                member = None
    if member is not None or not members:
        raise _truncated_error(name)


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
    """Decompress a block, which is possible as a whole only."""
    library = _import_package("snappy")
    data = b"".join(map(bytes, chunks))
    # The first bytes of a block are its raw size, seven bits each. The last of them is below 128.
    length = next((number for number, byte in enumerate(data[:5], 1) if byte < 128), None)
    if length is None:
        raise _truncated_error("snappy")
    size = sum((byte & 127) << 7 * number for number, byte in enumerate(data[:length]))
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


_DECOMPRESSORS = MappingProxyType({"br": _decompress_br, "snappy": _decompress_snappy})


def _corrupt_error(name: str, error: Exception) -> DataError:
    return DataError(f"{name}: cannot be decompressed: {error}. The file is damaged, or has another format.")


def _too_large_error(name: str, limit: int) -> DataError:
    advice = "The file differs from its index, or is larger than max_shard_bytes"
    return DataError(f"{name}: decompresses to more than {limit} bytes. {advice}")


def _truncated_error(name: str) -> DataError:
    return DataError(f"{name}: ends too early. The file is truncated.")


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError:
        raise missing_extra_error(f"compression {name} needs the package {_PACKAGES[name]}", "compression") from None


_XXHASH_NAMES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_HASHLIB_NAMES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512")

HASHES = (*_XXHASH_NAMES, *_HASHLIB_NAMES, "blake2b", "blake2s")
"""Names of all supported algorithms of digests."""


def new_hash(algorithm: str) -> Any:
    """Create a hash object with ``update(data)`` and ``hexdigest()``.

    Raises:
        ConfigError: the algorithm is unknown.
    """
    if algorithm not in HASHES:
        raise ConfigError(f"hash {algorithm!r} is unknown. Use one of {', '.join(HASHES)}.")
    return getattr(xxhash, algorithm)() if algorithm in _XXHASH_NAMES else hashlib.new(algorithm, usedforsecurity=False)


def compute_digests(data: bytes | memoryview, algorithms: Iterable[str]) -> dict[str, str]:
    """Compute the hex digests of ``data``, by algorithm.

    Raises:
        ConfigError: an algorithm is unknown.
    """
    digests = {}
    for algorithm in algorithms:
        state = new_hash(algorithm)
        state.update(data)
        digests[algorithm] = state.hexdigest()
    return digests
