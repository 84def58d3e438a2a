"""Names for the values that cross module borders: batches, losses, metrics, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = Any
"""Whatever the loss function takes: a tensor, a mapping or sequence of them, a TensorDict."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Data that JSON can hold: the only kind, besides tensors, that goes into a checkpoint or between ranks."""

TransformState: TypeAlias = dict[str, Any]
"""A transform's own state: nested dicts of tensors, int, float and str, keyed by parameter name where that applies."""

Params: TypeAlias = Mapping[str, Tensor]
"""Parameters by clean name, plain or DTensor."""

Schedule: TypeAlias = Callable[[float], float]
"""A pure function of a number (by convention the step about to run)."""


class Metric(NamedTuple):
    """A weighted sum: ``total`` and ``weight`` are scalars ``[]`` on the device, local to the rank; metrics add."""

    total: Tensor
    weight: Tensor


Metrics: TypeAlias = dict[str, Metric]
"""Metrics of a step by name. Microbatches, steps and ranks simply add; ``reduce_metrics`` makes means of them."""


def is_tensordict(value: Any) -> bool:
    """Whether ``value`` is a TensorDict, without importing tensordict (1-2 s) where nothing is one."""
    return type(value).__module__.startswith("tensordict")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LossSum:
    """What a loss function returns for one microbatch: a sum and the weight it is to be divided by.

    Args:
        total: the *summed* loss, scalar ``[]``, attached to the graph.
        weight: what the sum counts (tokens, samples), scalar ``[]`` or a number; no gradient flows through it.
        aux: further sums by name, each ``(total, weight)``, for metrics only.
        terms: further losses by name, each a summed ``(total, weight)`` with a denominator of its own: what is trained on is
            the sum of all means. They need ``microbatch_step(weight_fn=...)``.

    The step divides by the weight of the whole global batch, so a mean taken here would be wrong for ragged batches.
    """

    total: Tensor
    weight: Tensor | float
    aux: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    terms: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LossSum(total={float(self.total):.6g}, weight={float(self.weight):.6g}, aux={sorted(self.aux)})"


LossFn: TypeAlias = Callable[[nn.Module, Batch], LossSum]
"""The loss of one microbatch: ``(model, batch) -> LossSum``."""

WeightFn: TypeAlias = "Callable[[Batch], Tensor | float | Mapping[str, Tensor | float]]"
"""The weight of a whole local batch, or the weights of a loss's terms by name, the main one called ``"loss"``."""


def make_metric(total: Tensor | float, weight: Tensor | float, device: torch.device) -> Metric:
    """A ``Metric`` in float64 on ``device``: sums of many tokens stay exact, and no host sync is made."""

    def scalar(x: Tensor | float) -> Tensor:
        # torch.full fills on the device, where torch.tensor would copy from the host.
        return (
            x.detach().to(device, torch.float64)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=device)
        )

    return Metric(scalar(total), scalar(weight))


_UNIT_WEIGHTS: dict[torch.device, Tensor] = {}


def unit_weight(device: torch.device) -> Tensor:
    """The weight of a metric that counts once: float64 ``[]``, made once per device; never written into."""
    one = _UNIT_WEIGHTS.get(device)
    if one is None:
        one = torch.ones((), dtype=torch.float64, device=device)
        if type(one) is Tensor:  # not the fake one of a step that is only planned
            _UNIT_WEIGHTS[device] = one
    return one


def index_tensor(indices: Sequence[int], device: torch.device) -> Tensor:
    """``indices`` as int64 ``[n]`` on ``device``. Host sync: none; a plain copy to a GPU waits for all that it has to do."""
    if device.type != "cuda":
        return torch.tensor(indices, device=device)
    return torch.tensor(indices, pin_memory=True).to(device, non_blocking=True)


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """The union of two metrics, totals and weights of a shared name added.

    Start with ``{}``, add those of each step, and ``reduce_metrics`` of the sum is the exact mean over all of them, in one
    collective; a mean of the steps' means would count a short step too much.

    Example:
        >>> one = {"loss": Metric(torch.tensor(4.0), torch.tensor(2.0))}
        >>> add_metrics(add_metrics({}, one), one)["loss"]
        Metric(total=tensor(8.), weight=tensor(4.))
    """
    both = {name: Metric(a[name].total + b[name].total, a[name].weight + b[name].weight) for name in a if name in b}
    return {**a, **b, **both}
