"""Define types for values that cross module borders: batches, losses, metrics, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = Any
"""Argument of the loss function: a tensor, a mapping or sequence of tensors, a TensorDict."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Data that JSON can represent. Besides tensors, only plain data goes into checkpoints or between ranks."""

TransformState: TypeAlias = dict[str, Any]
"""State of a transform: nested dicts of tensors, int, float and str, with parameter names as keys where possible."""

Params: TypeAlias = Mapping[str, Tensor]
"""Parameters by clean name, plain or DTensor."""

Schedule: TypeAlias = Callable[[float], float]
"""Pure function of a number, by convention of the next step."""


class Metric(NamedTuple):
    """Weighted sum: ``total`` and ``weight`` are scalars ``[]`` on the device, local to the rank. Metrics can be added."""

    total: Tensor
    weight: Tensor


Metrics: TypeAlias = dict[str, Metric]
"""Metrics of a step by name. Metrics of microbatches, steps and ranks are added; ``reduce_metrics`` computes means."""


def is_tensordict(value: Any) -> bool:
    """Return True if ``value`` is a TensorDict. Does not import tensordict, which takes 1-2 s."""
    return type(value).__module__.startswith("tensordict")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LossSum:
    """Loss of one microbatch: a sum, and the weight to divide the sum by.

    The step divides by the weight of the whole global batch, so a mean would be wrong for ragged batches.

    Args:
        total: *summed* loss, scalar ``[]``, attached to the graph.
        weight: number of items in the sum (tokens, samples), scalar ``[]`` or a number, without gradient.
        aux: further sums by name, each ``(total, weight)``, for metrics only.
        terms: further losses by name, each a summed ``(total, weight)`` with its own denominator. The step trains on the sum of
            all means. Terms need ``microbatch_step(weight_fn=...)``.

    Example:
        def loss_fn(model, batch):
            errors = model(batch["x"]) - batch["y"]  # [n]
            absolute = (errors.abs().sum(), len(errors))
            return dt.LossSum(total=errors.square().sum(), weight=len(errors), aux={"absolute_error": absolute})
    """

    total: Tensor
    weight: Tensor | float
    aux: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    terms: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LossSum(total={float(self.total):.6g}, weight={float(self.weight):.6g}, aux={sorted(self.aux)})"


LossFn: TypeAlias = Callable[[nn.Module, Batch], LossSum]
"""Loss function of one microbatch: ``(model, batch) -> LossSum``."""

WeightFn: TypeAlias = "Callable[[Batch], Tensor | float | Mapping[str, Tensor | float]]"
"""Weight of a whole local batch, or weights of the terms of a loss by name, with the main loss as ``"loss"``."""


def make_metric(total: Tensor | float, weight: Tensor | float, device: torch.device) -> Metric:
    """Make a ``Metric`` in float64 on ``device``, without a host sync. Sums of many tokens stay exact."""

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


def index_tensor(indices: Sequence[int], device: torch.device) -> Tensor:
    """Make an int64 tensor ``[n]`` on ``device``. Host sync: none, because the copy to a GPU is asynchronous."""
    if device.type != "cuda":
        return torch.tensor(indices, device=device)
    return torch.tensor(indices, pin_memory=True).to(device, non_blocking=True)


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
        >>> dt.monitors.add_metrics(dt.monitors.add_metrics({}, step_metrics), step_metrics)["loss"]
        Metric(total=tensor(8.), weight=tensor(4.))
    """
    both = {name: Metric(a[name].total + b[name].total, a[name].weight + b[name].weight) for name in a if name in b}
    return {**a, **b, **both}
