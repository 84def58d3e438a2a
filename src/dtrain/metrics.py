"""Make and add metrics, and measure language models: token accuracy for ``LossSum.aux``, and perplexity of a loss."""

from __future__ import annotations

import math
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.collectives import all_gather_json
from dtrain.dtensor import local_last_dim
from dtrain.errors import ConfigError
from dtrain.typing import Metric, Metrics


def make_metric(total: Tensor | float, weight: Tensor | float, device: torch.device) -> Metric:
    """Make a ``Metric`` in float64 on ``device``, without a host sync. Sums of many tokens stay exact.

    Args:
        total: weighted sum on this rank, scalar ``[]`` or a number.
        weight: weight of the sum, scalar ``[]`` or a number.
        device: device of the metric, such as ``state.device``.

    Example:
        >>> import dtrain as dt
        >>> metric = dt.monitors.make_metric(3.0, 2.0, torch.device("cpu"))
        >>> metric.total.item(), metric.weight.item()
        (3.0, 2.0)
    """

    def scalar(x: Tensor | float) -> Tensor:
        # torch.full fills on the device. torch.tensor would copy from the host.
        return (
            x.detach().to(device, torch.float64)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=device)
        )

    return Metric(scalar(total), scalar(weight))


_UNIT_WEIGHTS: dict[torch.device, Tensor] = {}


def unit_weight(device: torch.device) -> Tensor:
    """Return the weight of a metric that counts once: float64 ``[]``, cached per device, never modified."""
    weight = _UNIT_WEIGHTS.get(device)
    if weight is None:
        weight = torch.ones((), dtype=torch.float64, device=device)
        # A simulated step makes fake tensors, which must not be cached.
        if type(weight) is Tensor:
            _UNIT_WEIGHTS[device] = weight
    return weight


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
        >>> dt.monitors.add_metrics(dt.monitors.add_metrics({}, step_metrics), step_metrics)[
        ...     "loss"
        ... ]
        Metric(total=tensor(8.), weight=tensor(4.))
    """
    both = {name: Metric(a[name].total + b[name].total, a[name].weight + b[name].weight) for name in a if name in b}
    return {**a, **b, **both}


def token_accuracy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Count the targets with the largest logit, and the targets that count, for ``LossSum.aux``.

    The metric is exact over microbatches and ranks of any size.

    Formula: ``sum(counts * (argmax(logits) == targets))``, ``sum(counts)`` with ``counts = (targets != ignore_index) & mask``

    Args:
        logits: ``[*, classes]``, any float dtype. A DTensor that is sharded along the classes is not gathered.
        targets: ``[*]`` int64.
        ignore_index: target that does not count, as in ``cross_entropy``.
        mask: ``[*]`` bool, or numbers of which 0 does not count; None counts all. For a part of the tokens, such as answers.

    Returns:
        Two scalars ``[]``, float64, on the device of ``logits``, without gradient. Of equal logits the first is the largest. A
        row with NaN is never correct.

    Collective: for a DTensor that is sharded along the classes two all-reduces of one number per token.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 2.0]])
        >>> correct, counted = dt.monitors.token_accuracy(logits, torch.tensor([0, 1, 1, -100]))
        >>> correct.item(), counted.item()
        (2.0, 3.0)

    Raises:
        ConfigError: shapes that do not match, or a DTensor that is sharded along another axis.

    Source: the share of correct predictions.
    """
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"token_accuracy: needs logits [*, classes] and targets [*], got {tuple(logits.shape)} and {tuple(targets.shape)}. "
            "Give one target per prediction."
        )
    if mask is not None and mask.shape != targets.shape:
        raise ConfigError(
            f"token_accuracy: mask must be {tuple(targets.shape)} like targets, got {tuple(mask.shape)}. "
            "Compute the mask from the targets."
        )
    counts = targets != ignore_index
    if mask is not None:
        counts = counts & (mask != 0)
    predictions = _argmax(logits.detach())
    return ((predictions == targets) & counts).sum().double(), counts.sum().double()


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit ``[*]``, the first of equal logits; an invalid index if a logit is NaN."""
    local, first_class, group = local_last_dim(logits, caller="token_accuracy")
    local = local.detach()
    largest, index = local.max(dim=-1)
    no_class = torch.iinfo(torch.int64).max
    if group is None:
        return torch.where(largest.isnan(), no_class, index)
    wide = torch.where(largest.isnan(), math.inf, largest.float() if largest.dtype.itemsize < 4 else largest)
    # The maximum must not contain NaN, because backends differ in the maximum of NaN.
    maximum = wide.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    winner = torch.where(wide == maximum, index + first_class, no_class)
    # NaN on one rank gives -1, the minimum over ranks, which is not a class.
    winner = torch.where(largest.isnan(), -1, winner)
    dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return winner


def perplexity(loss: float) -> float:
    """Compute the perplexity of a mean cross entropy in nats; infinite if too large for a float.

    Pass the mean loss over all tokens. A mean of perplexities would be wrong.

    Formula: ``exp(loss)``

    Source: Jelinek et al. 1977, Perplexity: a measure of the difficulty of speech recognition tasks.

    Args:
        loss: mean cross entropy per token, in nats.

    Example:
        >>> import dtrain as dt
        >>> metrics = {"loss": 2.0}  # from dt.reduce_metrics
        >>> round(dt.monitors.perplexity(metrics["loss"]), 3)
        7.389
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def add_names_of_peers(metrics: Metrics, device: torch.device) -> Metrics:
    """Return ``metrics`` with zeros for the metrics that only other ranks have.

    Collective: one exchange of JSON on the control group.
    """
    names = cast("list[list[str]]", all_gather_json(list(metrics), caller="step"))
    missing = [name for name in dict.fromkeys(chain.from_iterable(names)) if name not in metrics]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {**metrics, **{name: Metric(zero, zero) for name in missing}}
