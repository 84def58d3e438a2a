"""``ElasticSampler``: the order of an epoch as a function of seed and epoch, computable at any position.

The shuffle is a keyed permutation of ``range(n)`` that is never stored: any stretch of it is computed in one vectorised
call, so seeking costs nothing and every rank can compute its own part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError

_ROUNDS = 6
_SMALL = 1024  # up to here a permutation is sorted out whole: halves of few bits would have few permutations
_MIX = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as a signed 64-bit number


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
    keys = [derive_seed("permute", key, r) - 2**62 for r in range(_ROUNDS)]
    if n <= _SMALL:
        return _hash(_hash(torch.arange(n), keys[0]), keys[1]).argsort(stable=True)[positions]
    bits = (n - 1).bit_length()
    values = _feistel(positions, bits, keys)
    outside = (values >= n).nonzero().squeeze(1)
    while outside.numel():
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= n]
    return values


def _feistel(values: Tensor, bits: int, keys: list[int]) -> Tensor:
    """A bijection of ``[0, 2**bits)``: halves of ``bits // 2`` and the rest, mixed in turn."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low, high = values & ((1 << low_bits) - 1), values >> low_bits
    for r, key in enumerate(keys):
        if r % 2 == 0:
            high = high ^ (_hash(low, key) & ((1 << high_bits) - 1))
        else:
            low = low ^ (_hash(high, key) & ((1 << low_bits) - 1))
    return (high << low_bits) | low


def _hash(values: Tensor, key: int) -> Tensor:
    """A 63-bit mix of each value with ``key``; int64 arithmetic wraps around."""
    x = (values + key) * _MIX
    x = (x ^ (x >> 29)) * _MIX
    return x ^ (x >> 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSampler:
    """Which sample stands where in an epoch: a pure function of ``seed``, the epoch and the position.

    Args:
        size: samples in the dataset, at least 1.
        seed: of the shuffle.
        shuffle: False keeps the dataset's order in every epoch.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"ElasticSampler: the dataset needs at least one sample, got size={self.size}")

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        if not 0 <= start <= stop <= self.size:
            raise ConfigError(f"ElasticSampler: needs 0 <= start <= stop <= {self.size}, got {start=} {stop=}")
        positions = torch.arange(start, stop, dtype=torch.int64)
        return permute(positions, self.size, derive_seed(self.seed, "epoch", epoch)) if self.shuffle else positions


def rank_share(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The contiguous part of positions ``start`` to ``stop`` of data rank ``index`` of ``count``; sizes differ by at most one.

    >>> [rank_share(0, 8, i, 3) for i in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    size, longer = divmod(stop - start, count)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)
