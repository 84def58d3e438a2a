"""``cyclic``: in which steps the profiler is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from dtrain.errors import ConfigError

Phase: TypeAlias = Literal["skip", "wait", "warmup", "active", "save"]
"""Of a step. ``warmup``: the profiler is prepared; ``active``: it records; ``save``: likewise, then the trace is written."""

Phases: TypeAlias = Callable[[int], Phase]
"""The phase of a step by its index, from 0; the same on all ranks."""


def cyclic(*, skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1) -> Phases:
    """The phase of each step: ``skip_first`` steps are skipped, then it waits, warms up and records, ``repeat`` times.

    Args:
        skip_first: steps before all else. The first step of a process compiles, allocates, and tells nothing of the others.
        wait: steps at the start of each cycle in which nothing is done.
        warmup: steps in which the profiler is there and records nothing: what it costs to begin is in none of the others.
        active: steps that are recorded, in one trace for each cycle.
        repeat: cycles, after which the rest is skipped; 0: for ever.

    Raises:
        ConfigError: a number that is none, or below what it may be.

    Example:
        >>> phase = cyclic(skip_first=1, wait=1, warmup=1, active=2)
        >>> [phase(index) for index in range(6)]
        ['skip', 'wait', 'warmup', 'active', 'save', 'skip']
    """
    for name, number, least in (
        ("skip_first", skip_first, 0),
        ("wait", wait, 0),
        ("warmup", warmup, 0),
        ("active", active, 1),
        ("repeat", repeat, 0),
    ):
        if type(number) is not int or number < least:
            raise ConfigError(f"cyclic: {name} is a number of steps >= {least}, got {name}={number!r}")
    cycle = wait + warmup + active

    def phase(index: int) -> Phase:
        at = index - skip_first
        if at < 0 or (repeat and at >= repeat * cycle):
            return "skip"
        at %= cycle
        if at < wait:
            return "wait"
        if at < wait + warmup:
            return "warmup"
        return "active" if at < cycle - 1 else "save"

    return phase
