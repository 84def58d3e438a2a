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

from dtrain.data.order.permutation import Ints

Tree: TypeAlias = "Split | int"
_EXACT = 2**44  # denominators up to here leave room for 2**16 places in 63 bits
_PLACES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """``share / whole`` of the places go ``left``, the others ``right``; a number is a source."""

    share: int
    whole: int
    left: Tree
    right: Tree

    def to_left(self, places: int) -> int:
        """How many of the first ``places`` go left; below zero the row goes on backwards."""
        return (2 * places * self.share + self.whole) // (2 * self.whole)


def split_by(weights: Sequence[Fraction]) -> Tree:
    """The tree for sources of these weights; those of weight 0 are not in it."""
    heap: list[tuple[Fraction, int, Tree]] = [(weight, index, index) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    for number in range(len(heap) - 1):
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        ratio = one[0] / (one[0] + other[0])
        split = Split(share=ratio.numerator, whole=ratio.denominator, left=one[2], right=other[2])
        heapq.heappush(heap, (one[0] + other[0], len(weights) + number, split))
    return heap[0][2]


def counts(tree: Tree, sources: int, places: int) -> list[int]:
    """How many of the first ``places`` each source has."""
    found, left = [0] * sources, [(tree, places)]
    while left:
        node, reached = left.pop()
        if isinstance(node, int):
            found[node] = reached
        else:
            taken = node.to_left(reached)
            left += [(node.left, taken), (node.right, reached - taken)]
    return found


def owners(tree: Tree, start: int, stop: int) -> Ints:
    """The source of each place from ``start`` to ``stop``: ``[stop - start]`` int64."""
    found = np.empty(stop - start, dtype=np.int64)
    for first in range(start, stop, _PLACES):
        _fill(tree, first, found[first - start :][:_PLACES])
    return found


def _fill(tree: Tree, start: int, out: Ints) -> None:
    """Mutates: ``out``."""
    if isinstance(tree, int):
        out[:] = tree
        return
    goes_left = _goes_left(tree, start, len(out))
    taken = tree.to_left(start)
    for node, mask, first in ((tree.left, goes_left, taken), (tree.right, ~goes_left, start - taken)):
        part = np.empty(int(mask.sum()), dtype=np.int64)
        _fill(node, first, part)
        out[mask] = part


def _goes_left(split: Split, start: int, places: int) -> NDArray[np.bool_]:
    if split.whole > _EXACT:  # beyond 63 bits: Python's numbers, some 10 times slower
        reached = np.array([split.to_left(start + i) - split.to_left(start) for i in range(places + 1)], dtype=np.int64)
    else:
        rest = (2 * start * split.share + split.whole) % (2 * split.whole)
        reached = (rest + 2 * split.share * np.arange(places + 1)) // (2 * split.whole)
    grows: NDArray[np.bool_] = reached[1:] > reached[:-1]
    return grows
