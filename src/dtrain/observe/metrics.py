"""``reduce_metrics`` and ``tokens_per_second``: numbers for people, out of what the step returns."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtrain.clock import Clock
from dtrain.dist.init import current
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, StepError
from dtrain.types import Metrics


def reduce_metrics(metrics: Metrics) -> dict[str, float]:
    """The global weighted mean of every metric: sum of totals over sum of weights, over all ranks.

    Args:
        metrics: local sums, with the same names on every rank; those of several steps may be added first.

    Collective: one all-reduce of float64, two numbers a name and a check of the names, in whole rows of 64.
    Host sync: one, to read the numbers.

    Raises:
        ConfigError: no metrics.
        StepError: a metric whose weight is zero on all ranks together, or names that differ between ranks.
    """
    if not metrics:
        raise ConfigError("reduce_metrics: there is no metric to reduce")
    names, ranks = sorted(metrics), current().world_size
    parts = [part.to(torch.float64) for name in names for part in metrics[name]]
    label = derive_seed(*names) % 2**32  # its sum over ranks is exact in float64
    # A whole number of rows of 64, so that ranks with a few more names meet in the collective, and then both raise.
    sums = torch.zeros(-(-(len(parts) + 1) // 64) * 64, dtype=torch.float64, device=parts[0].device)
    sums[: len(parts)] = torch.stack(parts)
    sums[-1].fill_(label)
    if ranks > 1:
        dist.all_reduce(sums)
    *values, labels = sums.tolist()
    if labels != ranks * label:
        raise StepError(f"reduce_metrics: ranks have metrics of different names; this one has {names}, give all the same")
    values = values[: len(parts)]
    totals = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
    empty = [name for name, (_, weight) in totals.items() if weight == 0]
    if empty:
        raise StepError(
            f"reduce_metrics: {empty[0]!r} has weight 0 on all ranks together, so it has no mean; was anything counted?"
        )
    return {name: total / weight for name, (total, weight) in totals.items()}


def tokens_per_second(since: Clock, now: Clock) -> float:
    """Tokens of all ranks per second of wall time between two clocks of one run; 0 when no time has passed."""
    seconds = now.seconds - since.seconds
    return (now.tokens - since.tokens) / seconds if seconds > 0 else 0.0
