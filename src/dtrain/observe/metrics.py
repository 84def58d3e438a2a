"""``reduce_metrics`` and ``tokens_per_second``: numbers for people, out of what the step returns."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtrain.clock import Clock
from dtrain.dist.init import current
from dtrain.errors import ConfigError, StepError
from dtrain.types import Metrics


def reduce_metrics(metrics: Metrics) -> dict[str, float]:
    """The global weighted mean of every metric: sum of totals over sum of weights, over all ranks.

    Args:
        metrics: local sums, with the same names on every rank; those of several steps may be added first.

    Collective: one all-reduce of a float64 ``[2 * names]``.
    Host sync: one, to read the numbers.

    Raises:
        ConfigError: no metrics.
        StepError: a metric whose weight is zero on all ranks together.
    """
    if not metrics:
        raise ConfigError("reduce_metrics: there is no metric to reduce")
    names = sorted(metrics)
    sums = torch.stack([part.to(torch.float64) for name in names for part in metrics[name]])
    if current().world_size > 1:
        dist.all_reduce(sums)
    values = sums.tolist()
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
