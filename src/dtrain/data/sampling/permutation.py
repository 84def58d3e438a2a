"""``permute``: evaluate a keyed permutation of a range at any positions, without storing the permutation.

The arithmetic uses NumPy, which starts no threads. So it costs the same in a rank, in a thread and in a forked worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.dist.rng import derive_seed

IntArray: TypeAlias = NDArray[np.int64]

_ROUNDS = 6
# Permutations up to this size are sorted: a Feistel network of so few bits has few permutations.
_SORT_LIMIT = 1024
# First bits of a hash (32 bits) and of a range's number (21 bits) in a 63-bit sort key. The lowest bits hold the member.
_MEMBER_BIT, _OWNER_BIT = 10, 42
_HASH_MASK = (1 << (_OWNER_BIT - _MEMBER_BIT)) - 1
# 2**64 / golden ratio, as a signed 64-bit number.
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
# Number of values per vectorised pass, so that the arrays fit in the processor's cache.
_CHUNK = 1 << 15


def permute(positions: Tensor, n: int, key: int) -> Tensor:
    """Evaluate the permutation ``key`` of ``range(n)`` at ``positions``.

    Args:
        positions: ``[k]`` int64 in ``[0, n)``.
        n: size of the permuted range, at least 1.
        key: key of the permutation.

    Returns:
        ``[k]`` int64 in ``[0, n)``; distinct for distinct positions.

    Source: a Feistel network with six rounds over the next power of two (Luby and Rackoff 1988), with cycle walking until the
    value is inside the range (Black and Rogaway 2002), at most two steps on average. Up to 1024 samples: the order of their
    hashes.
    """
    return torch.from_numpy(permute_array(positions.numpy(), n, key))


def permute_array(positions: IntArray, n: int, key: int) -> IntArray:
    """Evaluate ``permute`` for arrays: ``[k]`` int64 to ``[k]`` int64, a new array."""
    keys = round_keys(key)
    if n <= _SORT_LIMIT:
        return np.argsort(mix_bits(mix_bits(np.arange(n), keys[0]), keys[1]), kind="stable")[positions]
    out = np.empty_like(positions)
    for first in range(0, len(positions), _CHUNK):
        out[first : first + _CHUNK] = _cycle_walk(positions[first : first + _CHUNK], n, (n - 1).bit_length(), keys)
    return out


def permute_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, key: int) -> IntArray:
    """Permute offsets in many ranges at once, with one permutation per range.

    Args:
        offsets: ``[k]`` int64, each in ``[0, size of its range)``.
        sizes: ``[k]`` int64, size of each offset's range.
        ids: ``[k]`` int64, number of each offset's range; the permutation depends on ``key`` and on this number. The call is
            fast if the offsets of a range are adjacent.
        key: key of all permutations.

    Returns:
        ``[k]`` int64, the permuted offsets.
    """
    keys, out = round_keys(key), np.empty_like(offsets)
    for first in range(0, len(offsets), _CHUNK):
        part = slice(first, first + _CHUNK)
        small = sizes[part] <= _SORT_LIMIT
        if small.all() or not small.any():
            out[part] = (_sort_in_ranges if small.all() else _cycle_walk_in_ranges)(offsets[part], sizes[part], ids[part], keys)
        else:
            for chosen, permute_fn in ((small, _sort_in_ranges), (~small, _cycle_walk_in_ranges)):
                out[part][chosen] = permute_fn(offsets[part][chosen], sizes[part][chosen], ids[part][chosen], keys)
    return out


def round_keys(key: int) -> list[int]:
    """Return a signed 63-bit number per round."""
    return [derive_seed("permute", key, r) - 2**62 for r in range(_ROUNDS)]


def mix_bits(values: IntArray, key: int | IntArray) -> IntArray:
    """Mix each value with ``key`` to 63 bits, in a new array. The int64 arithmetic wraps around."""
    x = values + key
    x *= _GOLDEN_RATIO
    x ^= x >> 29
    x *= _GOLDEN_RATIO
    x ^= x >> 32
    return x


def _bit_lengths(sizes: IntArray) -> IntArray:
    """Return ``(n - 1).bit_length()`` of each size above 1."""
    # The conversion to float64 is exact below 2**53.
    exponents: IntArray = np.frexp((sizes - 1).astype(np.float64))[1].astype(np.int64)
    return exponents


def _cycle_walk(positions: IntArray, n: int | IntArray, bits: int | IntArray, keys: Sequence[int | IntArray]) -> IntArray:
    """Apply the Feistel network again to values outside of ``[0, n)``, until all values are inside."""
    values = _feistel(positions, bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = _feistel(values[outside], _select(bits, outside), [_select(key, outside) for key in keys])
        values[outside] = walked
        outside = outside[walked >= _select(n, outside)]
    return values


def _select(value: int | IntArray, chosen: IntArray) -> int | IntArray:
    return value if isinstance(value, int) else value[chosen]


def _feistel(values: IntArray, bits: int | IntArray, keys: Sequence[int | IntArray]) -> IntArray:
    """Permute ``[0, 2**bits)``: mix a half of ``bits // 2`` bits and the other half in turn."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    low, high = values & low_mask, values >> low_bits
    for r, key in enumerate(keys):
        if r % 2 == 0:
            high ^= mix_bits(low, key) & high_mask
        else:
            low ^= mix_bits(high, key) & low_mask
    high <<= low_bits
    high |= low
    return high


def _cycle_walk_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, keys: list[int]) -> IntArray:
    first, lengths = _find_runs(ids)
    range_ids = ids[first]
    range_keys = [np.repeat(mix_bits(mix_bits(range_ids, key), keys[0]), lengths) for key in keys]
    return _cycle_walk(offsets, sizes, np.repeat(_bit_lengths(sizes[first]), lengths), range_keys)


def _find_runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the start and length of each run of equal ids. The same id may occur in several runs."""
    first: IntArray = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    return first, np.diff(first, append=len(ids))


def _sort_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, keys: list[int]) -> IntArray:
    """Sort all members of small ranges by the hashes of the members, and return the members at ``offsets``."""
    first, run_lengths = _find_runs(ids)
    range_ids, lengths = ids[first], sizes[first]
    begins = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(range_ids)), lengths)
    members = np.arange(len(owner)) - begins[owner]
    hashes = mix_bits(members, mix_bits(mix_bits(range_ids, keys[0]), keys[1])[owner])
    # One number holds range, hash and member, and is unique. Sorting numbers is 3 times as fast as lexsort.
    ordered = np.sort((owner << _OWNER_BIT) | ((hashes & _HASH_MASK) << _MEMBER_BIT) | members)
    at: IntArray = ordered[np.repeat(begins, run_lengths) + offsets]
    return at & (_SORT_LIMIT - 1)
