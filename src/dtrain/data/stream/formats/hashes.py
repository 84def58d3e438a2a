"""Digests of files, by the names that indexes of shards give them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import xxhash

from dtrain.errors import ConfigError

_OF_XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_OF_HASHLIB = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512")

HASHES = (*_OF_XXHASH, *_OF_HASHLIB, "blake2b", "blake2s")
"""Every algorithm that is known."""


def new_hash(algorithm: str) -> Any:
    """An object with ``update(data)`` and ``hexdigest()``.

    Raises:
        ConfigError: an algorithm that is not known.
    """
    if algorithm not in HASHES:
        raise ConfigError(f"hash {algorithm!r} is not known; known: {', '.join(HASHES)}")
    return getattr(xxhash, algorithm)() if algorithm in _OF_XXHASH else hashlib.new(algorithm, usedforsecurity=False)


def digests_of(data: bytes | memoryview, algorithms: Iterable[str]) -> dict[str, str]:
    """algorithm -> hex digest of ``data``.

    Raises:
        ConfigError: an algorithm that is not known.
    """
    found = {}
    for algorithm in algorithms:
        state = new_hash(algorithm)
        state.update(data)
        found[algorithm] = state.hexdigest()
    return found
