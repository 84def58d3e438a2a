"""How far this rank's clock is ahead of that of rank 0."""

from __future__ import annotations

import time
from typing import NamedTuple

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import current

_ROUNDS = 8  # the best of them counts, and the first ones are slow


class Offset(NamedTuple):
    """Of a clock, in nanoseconds: the true value is within ``bound_ns`` of ``ahead_ns``."""

    ahead_ns: int
    bound_ns: int


def clock_offset() -> Offset:
    """This rank's ``time.time_ns`` less that of rank 0, at one moment; zeros for one rank and on rank 0.

    Nobody leaves a gather before all have entered it. So what rank r read after it is later than what rank 0 read before it,
    and the other way round: each round gives a lower and an upper bound, and the tightest ones of some rounds are used. That
    holds whatever the network does; only a clock that is set meanwhile would spoil it.

    Collective: ten all-gathers of two numbers on the control group, about a millisecond.
    """
    info = current()
    if info.world_size == 1:
        return Offset(0, 0)
    zero = time.time_ns() // 10**9  # by rank: float64 holds the seconds since it to a fraction of a nanosecond
    starts = [int(row[0]) for row in all_gather_numbers([zero, 0], where="profile")]
    entered, firsts, left = [], [], [0.0]
    for _ in range(_ROUNDS + 1):
        entered.append(float(time.time_ns() - zero * 10**9))
        rows = all_gather_numbers([entered[-1], left[-1]], where="profile")  # with when the gather before was left
        firsts.append(rows[0])
        left.append(float(time.time_ns() - zero * 10**9))
    least = max(mine - later[1] for mine, later in zip(entered[:-1], firsts[1:], strict=True))
    most = min(mine - first[0] for mine, first in zip(left[1:-1], firsts[:-1], strict=True))
    apart = (zero - starts[0]) * 10**9
    if info.rank == 0:
        return Offset(0, 0)
    return Offset(apart + round((least + most) / 2), round(abs(most - least) / 2))
