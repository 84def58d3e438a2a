"""``memory_timeline``: what allocations add up to, over the steps of a trace."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dtrain import storage
from dtrain.report.trace.parsed import Trace, read_trace


class Held(NamedTuple):
    """What a device's allocator held from a time on: seconds after the first step began, and bytes."""

    at: float
    bytes: int


def memory_timeline(trace: Trace | str | Path, out: str | Path | None = None) -> dict[str, list[Held]]:
    """What is held after each allocation, by device (``"cpu"``, ``"cuda:0"``); empty without ``profile(memory=True)``.

    On CUDA that is all of the caching allocator. On a CPU torch counts from the beginning of the recording: parameters made
    before are not in it, and what was there before and is freed may bring it below zero.

    Args:
        trace: a file, or what ``read_trace`` made of it.
        out: a file for it, replaced if it is there: ``{"rank": ..., "devices": {"cpu": [[seconds, bytes], ...]}}``.

    Raises:
        ConfigError: there is no such trace.
        DataError: it is damaged, or no trace.
    """
    trace = trace if isinstance(trace, Trace) else read_trace(trace)
    begin = trace.steps[0].start if trace.steps else (trace.allocated[0].at if trace.allocated else 0.0)
    found: dict[str, list[Held]] = {}
    for each in trace.allocated:
        found.setdefault(each.device, []).append(Held((each.at - begin) / 1e6, each.bytes))
    if out is not None:
        storage.replace_file(storage.place(out), json.dumps({"rank": trace.rank, "devices": found}).encode())
    return found


def peak_and_median(timeline: list[Held]) -> tuple[int, int]:
    """The most bytes, and those that half of the time no more than were held.

    >>> peak_and_median([Held(0.0, 10), Held(1.0, 50), Held(1.5, 20), Held(3.0, 0)])
    (50, 20)
    """
    times = sorted((now.bytes, later.at - now.at) for now, later in pairwise(timeline))
    peak = max((held.bytes for held in timeline), default=0)
    left = sum(seconds for _, seconds in times) / 2
    for held, seconds in times:
        left -= seconds
        if left <= 0:
            return peak, held
    return peak, peak
