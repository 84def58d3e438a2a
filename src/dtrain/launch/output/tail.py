"""The last lines of a rank, kept for the report of its failure."""

from __future__ import annotations

from collections import deque
from itertools import count

from dtrain.launch.output.lines import harmless

KEPT_LINES = 50  # of each stream
_LONGEST = 2000  # bytes of a line


class Tail:
    """The last lines of one stream, each with the moment in which it ended, so that two streams can be told in order."""

    def __init__(self, clock: count[int]) -> None:
        self._clock = clock
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=KEPT_LINES)
        self._partial = b""

    def feed(self, chunk: bytes) -> None:
        """Take in what was written."""
        *ended, rest = (self._partial + chunk).rsplit(b"\n", KEPT_LINES + 1)
        now = next(self._clock)
        # Where the chunk had more lines than are kept, the first piece is all of those before.
        self._lines.extend((now, line[-_LONGEST:]) for line in ended[-KEPT_LINES:])
        self._partial = rest[-_LONGEST:]

    def lines(self) -> list[tuple[int, str]]:
        """What is kept, the line without an end last."""
        kept = [*self._lines, *([(next(self._clock), self._partial)] if self._partial else [])]
        return [(at, text) for at, line in kept if (text := _last_drawn(line)).strip()]


def last_lines(tails: tuple[Tail, Tail], n: int) -> list[str]:
    """The last ``n`` lines of both streams that are not empty, in the order in which they ended.

    Half of them are kept for the second stream: what a rank says about its end must not be lost in what it prints.
    """
    out, err = (tail.lines() for tail in tails)
    kept = len(err) - min(len(err), n // 2)
    others = sorted([*out, *err[:kept]], key=_at)
    rest = n - (len(err) - kept)
    return [text for _, text in sorted([*(others[-rest:] if rest > 0 else []), *err[kept:]], key=_at)]


def _at(line: tuple[int, str]) -> int:
    return line[0]


def _last_drawn(line: bytes) -> str:
    """What a progress bar that was drawn over and over shows in the end."""
    return harmless(line.rstrip(b"\r").rpartition(b"\r")[2]).decode()
