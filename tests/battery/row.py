"""``Row``: a transform under contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dtrain as dt

Points = Sequence[tuple[Any, Any]]
"""Pairs of what came out and what is known by hand, of numbers or tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A transform under contract.

    Args:
        make: makes it anew, as a new process would.
        of: the public functions that it is an example of.
        points: a case whose numbers follow from the formula or the paper: at least two pairs (computed,
            expected). Each public function has one, in one of its rows. The right sides are literals or a formula of their own,
            never the code under test.
        task: the model to train: ``vector`` (x [7, 5] to two numbers), ``image`` ([7, 2, 6, 6] to one of three labels) or
            ``text`` (tokens [7, 8] of 11, the next one); ``experts`` is ``vector`` with experts in its last layer.
        per_rank: it draws differently on each rank, so two ranks do not equal one.
        reruns: it runs the model more often than once a step, or on samples of another shape, so dropout draws otherwise than
            in a run without it.
        undoes: a step that fails takes back the draws and counts of the model's forwards.
        syncs: how often a step may make the host wait for the device, beyond a step without it. Any but 0 has its reason in
            the docstring of the function (``Host sync:``).
        passes: number of gradients in a step, so the factor by which it may gather and reduce more than a step without it.
        moves: bytes that a step may send besides.
    """

    make: Callable[[], dt.Transform]
    of: tuple[str, ...] = ()
    points: Callable[[], Points] | None = None
    task: Literal["vector", "image", "text", "experts"] = "vector"
    per_rank: bool = False
    reruns: bool = False
    undoes: bool = False
    syncs: int = 0
    passes: int = 1
    moves: int = 64
