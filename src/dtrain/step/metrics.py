"""Make and add metrics."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.typing import Metric, Metrics


def make_metric(total: Tensor | float, weight: Tensor | float, device: torch.device | None = None) -> Metric:
    """Make a ``Metric`` in float64 on ``device``, without a host sync. Sums of many tokens stay exact.

    Args:
        total: weighted sum on this rank, scalar ``[]`` or a number.
        weight: weight of the sum, scalar ``[]`` or a number.
        device: device of the metric, such as ``state.device``. None takes the device of ``total`` or ``weight``, and for
            two numbers the device of this rank.

    Example:
        >>> import dtrain as dt
        >>> metric = dt.step.make_metric(torch.tensor(3.0), 2)
        >>> metric.total.item(), metric.weight.item()
        (3.0, 2.0)
    """
    if device is None:
        tensor = next((x for x in (total, weight) if isinstance(x, Tensor)), None)
        device = tensor.device if tensor is not None else get_dist_info().device

    def scalar(x: Tensor | float) -> Tensor:
        # torch.full fills on the device. torch.tensor would copy from the host.
        return (
            x.detach().to(device, torch.float64)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=device)
        )

    return Metric(scalar(total), scalar(weight))


def unit_weight(device: torch.device) -> Tensor:
    """Return the weight of a metric that counts once: float64 ``[]``, cached per device, never modified."""
    weight = _ones(device)
    # A simulated step makes fake tensors, which must not be cached.
    if type(weight) is not Tensor:
        _ones.cache_clear()
    return weight


@cache
def _ones(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float64, device=device)


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Add two metrics: totals and weights of shared names are added, other names are kept.

    Start with ``{}`` and add the metrics of each step. ``reduce_metrics`` of the sum is the exact mean over all steps, in one
    exchange. A mean of the steps' means would overweight short steps.

    Args:
        a: metrics by name.
        b: metrics by name.

    Example:
        >>> import dtrain as dt
        >>> step_metrics = {"loss": Metric(torch.tensor(4.0), torch.tensor(2.0))}
        >>> dt.step.add_metrics(dt.step.add_metrics({}, step_metrics), step_metrics)["loss"]
        Metric(total=tensor(8.), weight=tensor(4.))
    """
    return {**a, **b, **{name: a[name] + b[name] for name in a if name in b}}


def add_names_of_peers(metrics: Metrics, device: torch.device) -> Metrics:
    """Return ``metrics`` with zeros for the metrics that only other ranks have.

    Collective: one exchange of JSON on the control group.
    """
    names = cast("list[list[str]]", all_gather_json(list(metrics), caller="step"))
    missing = [name for name in dict.fromkeys(chain.from_iterable(names)) if name not in metrics]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {**metrics, **{name: Metric(zero, zero) for name in missing}}
