"""Documents to pack, whose every token names its place, and the expected result of packing them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 12), max_size=12)
SEQ = st.integers(1, 9)


def documents(lengths: list[int]) -> list[list[int]]:
    """Token ``t`` of document ``d`` is ``1 + 100 * d + t``; none is 0, which pads."""
    return [[1 + 100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def unpacked(blocks: Iterable[dict[str, Any]], count: int) -> list[list[int]]:
    """Return the documents, read back from the blocks."""
    tokens = defaultdict(list)
    for block in blocks:
        for token, number in zip(block["input_ids"].tolist(), block["documents"].tolist(), strict=True):
            if number >= 0:
                tokens[number].append(token)
    return [tokens[number] for number in range(count)]


def plain(blocks: Iterable[dict[str, Any]]) -> list[dict[str, list[int]]]:
    return [{name: values.tolist() for name, values in block.items()} for block in blocks]
