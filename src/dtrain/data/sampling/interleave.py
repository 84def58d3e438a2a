"""Interleave several sources in exact proportions: the source of any position, from a closed form.

Two sources with weights ``p : q - p``: the first source has ``floor(n p / q + 1/2)`` of the first ``n`` positions. More than
two: a binary tree of such splits, least weights first (Huffman's tree). Each split counts only the positions that reach it.

Error bound of the count of a source of weight ``w`` against ``n w``: a split adds at most 1/2, and scales the error of its
parent by its share. Along the path from the source (weight ``v0``) to the root (``v1``, ``v2``, ...) the sum is
``1/2 sum(v0 / vj)`` without the root. In Huffman's tree ``v(j+2) >= v(j+1) + v(j)``, because the node merged with ``v(j+1)``
was no less than ``v(j)``. So the terms fall like 1, 1, 1/2, 1/3, 1/5, ..., and the sum is below 3.36. In the first ``n``
positions a source deviates from its share by at most 1/2 with two sources, less than 1 with three, and less than 1.68 with
any number. In any other range the deviation is less than twice that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dtrain.data.sampling.permutation import IntArray

SplitTree: TypeAlias = "Split | int"
# Denominators up to this limit leave room for 2**16 positions in 63 bits.
_MAX_INT64_DENOMINATOR = 2**44
_CHUNK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Node that sends ``numerator / denominator`` of the positions ``left``, the rest ``right``; a leaf is a source number."""

    numerator: int
    denominator: int
    left: SplitTree
    right: SplitTree

    def count_left(self, positions: int) -> int:
        """Count the positions among the first ``positions`` that go left. A negative number extends the sequence backwards."""
        return (2 * positions * self.numerator + self.denominator) // (2 * self.denominator)


def build_tree(weights: Sequence[Fraction]) -> SplitTree:
    """Build the tree for sources of these weights. A source of weight 0 is not in the tree."""
    heap: list[tuple[Fraction, int, SplitTree]] = [(weight, index, index) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    for number in range(len(heap) - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        ratio = first[0] / (first[0] + second[0])
        split = Split(numerator=ratio.numerator, denominator=ratio.denominator, left=first[2], right=second[2])
        heapq.heappush(heap, (first[0] + second[0], len(weights) + number, split))
    return heap[0][2]


def count_sources(tree: SplitTree, sources: int, positions: int) -> list[int]:
    """Count the positions of each source among the first ``positions``."""
    counts, nodes = [0] * sources, [(tree, positions)]
    while nodes:
        node, count = nodes.pop()
        if isinstance(node, int):
            counts[node] = count
        else:
            left_count = node.count_left(count)
            nodes += [(node.left, left_count), (node.right, count - left_count)]
    return counts


def source_of(tree: SplitTree, start: int, stop: int) -> IntArray:
    """Return the source of each position from ``start`` to ``stop``: ``[stop - start]`` int64."""
    sources = np.empty(stop - start, dtype=np.int64)
    for first in range(start, stop, _CHUNK):
        _fill(tree, first, sources[first - start :][:_CHUNK])
    return sources


def _fill(tree: SplitTree, start: int, out: IntArray) -> None:
    """Write the source of each position. Mutates: ``out``."""
    if isinstance(tree, int):
        out[:] = tree
        return
    goes_left = _goes_left(tree, start, len(out))
    left_count = tree.count_left(start)
    for node, mask, first in ((tree.left, goes_left, left_count), (tree.right, ~goes_left, start - left_count)):
        part = np.empty(int(mask.sum()), dtype=np.int64)
        _fill(node, first, part)
        out[mask] = part


def _goes_left(split: Split, start: int, positions: int) -> NDArray[np.bool_]:
    # Beyond 63 bits, use Python integers, which are about 10 times slower.
    if split.denominator > _MAX_INT64_DENOMINATOR:
        counts = np.array([split.count_left(start + i) - split.count_left(start) for i in range(positions + 1)], dtype=np.int64)
    else:
        rest = (2 * start * split.numerator + split.denominator) % (2 * split.denominator)
        counts = (rest + 2 * split.numerator * np.arange(positions + 1)) // (2 * split.denominator)
    grows: NDArray[np.bool_] = counts[1:] > counts[:-1]
    return grows
