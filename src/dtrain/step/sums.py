"""``Sums``: the metrics of a step's microbatches, collected as they come and added up once."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.types import LossSum, Metric, Metrics

Values = list["Tensor | float"]


class Sums:
    """Totals and weights by name. Adding them one by one would be several small operations per microbatch."""

    __slots__ = ("_device", "_found", "_totals", "_weights")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: Values = []
        self._weights: Values = []
        self._found = {"loss": (self._totals, self._weights)}

    def add(self, loss: LossSum) -> None:
        """Take over the numbers of one microbatch: ``loss``, ``terms`` and ``aux``."""
        self._totals.append(loss.total.detach())
        self._weights.append(loss.weight)
        for further in (loss.terms, loss.aux):
            for name, (total, weight) in further.items():
                totals, weights = self._found.setdefault(name, ([], []))
                totals.append(total.detach() if isinstance(total, Tensor) else total)
                weights.append(weight)

    def name(self, loss: LossSum) -> None:
        """Take over the names of a microbatch that does not count: all ranks have the same metrics."""
        for name in (*loss.terms, *loss.aux):
            self._found.setdefault(name, ([], []))

    def metrics(self) -> Metrics:
        """The sums so far: float64 scalars ``[]`` on the device, so that those of many tokens stay exact. Host sync: none."""
        return {name: Metric(self._sum(totals), self._sum(weights)) for name, (totals, weights) in self._found.items()}

    def _sum(self, values: Values) -> Tensor:
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = sum(value for value in values if not isinstance(value, Tensor))
        if not tensors:
            # torch.full fills on the device, where torch.tensor would copy from the host.
            return torch.full((), numbers, dtype=torch.float64, device=self._device)
        if any(tensor.ndim or tensor.device != self._device for tensor in tensors):
            tensors = [tensor.reshape(()).to(self._device) for tensor in tensors]
        whole = torch.stack(tensors).detach().sum(dtype=torch.float64)
        return whole + numbers if numbers else whole
