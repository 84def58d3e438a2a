"""``permute``: a keyed permutation of a range that is never stored; any stretch of it is one vectorised call.

The arithmetic is NumPy's: it starts no threads, so it costs the same in a rank, in a thread and in a forked worker.
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
_SORT_LIMIT = 1024  # up to here a permutation is sorted out whole: halves of few bits would have few permutations
_MEMBER_BIT, _OWNER_BIT = (
    10,
    42,
)  # where in 63 bits a number below _SMALL, 32 bits of a hash and 21 bits of a range's number begin
_HASH_MASK = (1 << (_OWNER_BIT - _MEMBER_BIT)) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as a signed 64-bit number
_CHUNK = 1 << 15  # values worked on at once: they and what is made of them stay in the processor's cache


def permute(positions: Tensor, n: int, key: int) -> Tensor:
    """The permutation ``key`` of ``range(n)``, evaluated at ``positions``.

    Args:
        positions: ``[k]`` int64 in ``[0, n)``.
        n: size of the permuted range, at least 1.
        key: which permutation.

    Returns:
        ``[k]`` int64 in ``[0, n)``; distinct for distinct positions.

    Source: a Feistel network with six rounds over the next power of two (Luby and Rackoff 1988), walked until it lands
    inside the range (cycle walking: Black and Rogaway 2002), at most two steps on average; up to 1024 samples, the order of
    their hashes.
    """
    return torch.from_numpy(permute_array(positions.numpy(), n, key))


def permute_array(positions: IntArray, n: int, key: int) -> IntArray:
    """``permute`` for arrays: ``[k]`` int64 to ``[k]`` int64, a new array."""
    keys = round_keys(key)
    if n <= _SORT_LIMIT:
        return np.argsort(mix_bits(mix_bits(np.arange(n), keys[0]), keys[1]), kind="stable")[positions]
    out = np.empty_like(positions)
    for first in range(0, len(positions), _CHUNK):
        out[first : first + _CHUNK] = _cycle_walk(positions[first : first + _CHUNK], n, (n - 1).bit_length(), keys)
    return out


def permute_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, key: int) -> IntArray:
    """Offsets in many ranges at once, each permuted by the permutation of its own range.

    Args:
        offsets: ``[k]`` int64, each in ``[0, size of its range)``.
        sizes: ``[k]`` int64, the size of the range that each offset is in.
        ids: ``[k]`` int64, which range that is: its permutation depends on ``key`` and on this. Fast where the offsets of a
            range stand together.
        key: of them all.

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
            for chosen, each in ((small, _sort_in_ranges), (~small, _cycle_walk_in_ranges)):
                out[part][chosen] = each(offsets[part][chosen], sizes[part][chosen], ids[part][chosen], keys)
    return out


def round_keys(key: int) -> list[int]:
    """A signed 63-bit number per round."""
    return [derive_seed("permute", key, r) - 2**62 for r in range(_ROUNDS)]


def mix_bits(values: IntArray, key: int | IntArray) -> IntArray:
    """A 63-bit mix of each value with ``key``: a new array; int64 arithmetic wraps around."""
    x = values + key
    x *= _GOLDEN_RATIO
    x ^= x >> 29
    x *= _GOLDEN_RATIO
    x ^= x >> 32
    return x


def _bit_lengths(sizes: IntArray) -> IntArray:
    """``(n - 1).bit_length()`` of each size above 1."""
    exponents: IntArray = np.frexp((sizes - 1).astype(np.float64))[1].astype(np.int64)
    return exponents  # exact below 2**53


def _cycle_walk(positions: IntArray, n: int | IntArray, bits: int | IntArray, keys: Sequence[int | IntArray]) -> IntArray:
    """The Feistel network, applied again to values outside of ``[0, n)`` until none is left."""
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
    """A bijection of ``[0, 2**bits)``: halves of ``bits // 2`` and the rest, mixed in turn."""
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
    of = ids[first]
    own = [np.repeat(mix_bits(mix_bits(of, key), keys[0]), lengths) for key in keys]
    return _cycle_walk(offsets, sizes, np.repeat(_bit_lengths(sizes[first]), lengths), own)


def _find_runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Where equal ids that stand together begin, and how many there are. The same id may come again later."""
    first: IntArray = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    return first, np.diff(first, append=len(ids))


def _sort_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, keys: list[int]) -> IntArray:
    """Small ranges in the order of the hashes of their members: all members of each range are made and sorted."""
    first, asked = _find_runs(ids)
    of, lengths = ids[first], sizes[first]
    begins = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(of)), lengths)
    members = np.arange(len(owner)) - begins[owner]
    hashes = mix_bits(members, mix_bits(mix_bits(of, keys[0]), keys[1])[owner])
    # One number holds range, hash and member, and is never the same twice: sorting numbers is 3 times as fast as lexsort.
    ordered = np.sort((owner << _OWNER_BIT) | ((hashes & _HASH_MASK) << _MEMBER_BIT) | members)
    at: IntArray = ordered[np.repeat(begins, asked) + offsets]
    return at & (_SORT_LIMIT - 1)
