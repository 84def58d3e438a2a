"""Which of several sources each place of an endless row belongs to: exact proportions, from a closed form.

Two sources with weights ``p : q - p``: the first has ``floor(n p / q + 1/2)`` of the first ``n`` places. More than two: a
binary tree of such splits, those of least weight together first (Huffman's tree), each counting only the places that reach it.

How far from ``n w`` the count of a source of weight ``w`` may be: a split adds at most 1/2, and what it was given wrong shrinks
by its share. Along the path from the source (weight ``v0``) up to the root (``v1``, ``v2``, ...) that makes
``1/2 sum(v0 / vj)``, the root left out. In Huffman's tree ``v(j+2) >= v(j+1) + v(j)``, because what is merged with ``v(j+1)``
was no less than ``v(j)``; so the terms fall like 1, 1, 1/2, 1/3, 1/5, ... and the sum stays below 3.36. In the first ``n``
places a source is therefore at most 1/2 away from its share with two sources, less than 1 with three, less than 1.68 with any
number; in a stretch from anywhere, less than twice that.
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
_MAX_INT64_DENOMINATOR = 2**44  # denominators up to here leave room for 2**16 places in 63 bits
_CHUNK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """``share / whole`` of the places go ``left``, the others ``right``; a number is a source."""

    numerator: int
    denominator: int
    left: SplitTree
    right: SplitTree

    def count_left(self, places: int) -> int:
        """How many of the first ``places`` go left; below zero the row goes on backwards."""
        return (2 * places * self.numerator + self.denominator) // (2 * self.denominator)


def build_tree(weights: Sequence[Fraction]) -> SplitTree:
    """The tree for sources of these weights; those of weight 0 are not in it."""
    heap: list[tuple[Fraction, int, SplitTree]] = [(weight, index, index) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    for number in range(len(heap) - 1):
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        ratio = one[0] / (one[0] + other[0])
        split = Split(numerator=ratio.numerator, denominator=ratio.denominator, left=one[2], right=other[2])
        heapq.heappush(heap, (one[0] + other[0], len(weights) + number, split))
    return heap[0][2]


def count_sources(tree: SplitTree, sources: int, places: int) -> list[int]:
    """How many of the first ``places`` each source has."""
    found, left = [0] * sources, [(tree, places)]
    while left:
        node, reached = left.pop()
        if isinstance(node, int):
            found[node] = reached
        else:
            taken = node.count_left(reached)
            left += [(node.left, taken), (node.right, reached - taken)]
    return found


def source_of(tree: SplitTree, start: int, stop: int) -> IntArray:
    """The source of each place from ``start`` to ``stop``: ``[stop - start]`` int64."""
    found = np.empty(stop - start, dtype=np.int64)
    for first in range(start, stop, _CHUNK):
        _fill(tree, first, found[first - start :][:_CHUNK])
    return found


def _fill(tree: SplitTree, start: int, out: IntArray) -> None:
    """Mutates: ``out``."""
    if isinstance(tree, int):
        out[:] = tree
        return
    goes_left = _goes_left(tree, start, len(out))
    taken = tree.count_left(start)
    for node, mask, first in ((tree.left, goes_left, taken), (tree.right, ~goes_left, start - taken)):
        part = np.empty(int(mask.sum()), dtype=np.int64)
        _fill(node, first, part)
        out[mask] = part


def _goes_left(split: Split, start: int, places: int) -> NDArray[np.bool_]:
    if split.denominator > _MAX_INT64_DENOMINATOR:  # beyond 63 bits: Python's numbers, some 10 times slower
        reached = np.array([split.count_left(start + i) - split.count_left(start) for i in range(places + 1)], dtype=np.int64)
    else:
        rest = (2 * start * split.numerator + split.denominator) % (2 * split.denominator)
        reached = (rest + 2 * split.numerator * np.arange(places + 1)) // (2 * split.denominator)
    grows: NDArray[np.bool_] = reached[1:] > reached[:-1]
    return grows
