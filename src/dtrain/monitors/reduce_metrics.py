"""``reduce_metrics`` and ``tokens_per_second``: numbers for people, out of what the step returns.

``gather_metric_states`` lets metrics of torchmetrics be as exact.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain import heartbeats, spans
from dtrain.clock import Clock
from dtrain.dist.init import get_dist_info
from dtrain.dist.ragged import all_gather_by_rank
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, StepError
from dtrain.typing import Metrics


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
    names, ranks = sorted(metrics), get_dist_info().world_size
    given = [part for name in names for part in metrics[name]]
    parts = [part if part.dtype == torch.float64 else part.double() for part in given]  # to ask torch takes longer
    label = derive_seed(*names) % 2**32  # its sum over ranks is exact in float64
    # A whole number of rows of 64, so that ranks with a few more names meet in the collective, and then both raise.
    sums = torch.zeros(-(-(len(parts) + 1) // 64) * 64, dtype=torch.float64, device=parts[0].device)
    sums[: len(parts)] = torch.stack(parts)
    sums[-1].fill_(label)
    # On a GPU this waits for what was computed before: that time is the step's, or of the span that this is in.
    heartbeats.heartbeat("reduce_metrics")
    with spans.span("reduce") if sums.is_cpu else nullcontext():
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


def gather_metric_states(state: Tensor, group: Any = None, *, mesh: DeviceMesh | None = None) -> list[Tensor]:
    """The state of a metric on every rank, in the way that torchmetrics asks for: pass it as ``dist_sync_fn``.

    ``MulticlassAccuracy(10, dist_sync_fn=partial(dt.monitors.gather_metric_states, mesh=mesh))`` counts a sample once that several ranks
    work on together, and a rank may never have called ``update`` (which takes no empty batch): torchmetrics' own function takes
    all ranks for different data, and fails on an empty state that is not of floats or has several axes.

    Args:
        state: a tensor of any shape; one without elements is that of a rank that has seen nothing.
        group: what torchmetrics passes on; it must be None, all ranks.
        mesh: see ``all_gather_ragged``.

    Returns:
        One tensor for each rank whose data differ, without gradient.

    Collective: that of ``all_gather_ragged``; every rank must call ``compute``.

    Raises:
        ConfigError: a ``group``; states of other dtypes or shapes than the first axis allows.
        PeerError: so on another rank.
    """
    if group is not None:
        raise ConfigError("gather_metric_states: takes no process_group; leave it out of the metric, and pass mesh=")
    whole = state.unsqueeze(0) if state.ndim == 0 else state
    found = all_gather_by_rank(whole if whole.numel() else None, mesh=mesh) or [whole]
    return [cast(Tensor, each[0]) for each in found] if state.ndim == 0 else found


def tokens_per_second(since: Clock, now: Clock) -> float:
    """Tokens of all ranks per second of wall time between two clocks of one run; 0 when no time has passed."""
    seconds = now.seconds - since.seconds
    return (now.tokens - since.tokens) / seconds if seconds > 0 else 0.0
