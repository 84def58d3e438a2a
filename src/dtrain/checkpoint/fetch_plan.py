"""Plan which bytes of a file are fetched together, so that the needed blocks are read completely and once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import split_blocks
from dtrain.checkpoint.layout import Blocks

# A server sends so many bytes in the time of a request, so smaller gaps between needed blocks are read as well.
_MAX_REMOTE_GAP_BYTES = 2**20


class Fetch(NamedTuple):
    """Bytes ``[begin, end)`` of a file that are read together, and the numbers of their blocks."""

    begin: int
    end: int
    blocks: range


def plan_fetches(blocks: Blocks | None, spans: Iterable[tuple[int, int]], *, size: int, is_remote: bool) -> list[Fetch]:
    """Plan the fetches of a file, in order.

    Args:
        blocks: blocks of the file; None for a file without digests, of which chunks are fetched in part.
        spans: needed byte ranges in the order of their begin.
        size: size of the file.
        is_remote: if True, a gap between blocks is read rather than a further request made.
    """
    if blocks is None:
        return _plan_undigested(spans, size)
    needed: list[range] = []
    reach = -1
    gap = _MAX_REMOTE_GAP_BYTES if is_remote else 0
    for begin, end in spans:
        # Most spans are small, and in the block of the span before.
        if end <= reach or begin == end:
            continue
        numbers = blocks.numbers_of(begin, end)
        if needed and blocks.begin_of(numbers.start) - reach <= gap:
            needed[-1] = range(needed[-1].start, max(numbers.stop, needed[-1].stop))
        else:
            needed.append(numbers)
        reach = blocks.ends[needed[-1].stop - 1]
    return [
        Fetch(blocks.begin_of(part.start), blocks.ends[part.stop - 1], part)
        for numbers in needed
        for part in split_blocks(blocks, numbers)
    ]


def _plan_undigested(spans: Iterable[tuple[int, int]], size: int) -> list[Fetch]:
    chunk_bytes = layout.CHUNK_BYTES
    numbers = sorted({at for begin, end in spans if begin < end for at in range(begin // chunk_bytes, -(-end // chunk_bytes))})
    # The file may be shorter than its header says.
    return [Fetch(at * chunk_bytes, max(at * chunk_bytes, min((at + 1) * chunk_bytes, size)), range(0)) for at in numbers]
