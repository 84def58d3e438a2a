"""``Sums``: the metrics of a step's microbatches, collected as they come and added up once."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.types import LossSum, Metric, Metrics

Values = list["Tensor | float"]


class Sums:
    """Totals and weights by name. Adding them one by one would be several small operations per microbatch."""

    __slots__ = ("_device", "_found")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, tuple[Values, Values]] = {}

    def add(self, loss: LossSum) -> None:
        """Take over the numbers of one microbatch: ``loss``, ``terms`` and ``aux``."""
        self._put("loss", loss.total, loss.weight)
        for sums in (loss.terms, loss.aux):
            for name, (total, weight) in sums.items():
                self._put(name, total, weight)

    def name(self, loss: LossSum) -> None:
        """Take over the names of a microbatch that does not count: all ranks have the same metrics."""
        for name in ("loss", *loss.terms, *loss.aux):
            self._found.setdefault(name, ([], []))

    def metrics(self) -> Metrics:
        """The sums so far: float64 scalars ``[]`` on the device, so that those of many tokens stay exact. Host sync: none."""
        return {name: Metric(self._sum(totals), self._sum(weights)) for name, (totals, weights) in self._found.items()}

    def _put(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        totals, weights = self._found.setdefault(name, ([], []))
        totals.append(total.detach() if isinstance(total, Tensor) else total)
        weights.append(weight.detach() if isinstance(weight, Tensor) else weight)

    def _sum(self, values: Values) -> Tensor:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values) > 0:
            return torch.stack(_alike(tensors, self._device)).sum(dtype=torch.float64)
        numbers = sum(value for value in values if not isinstance(value, Tensor))
        # torch.full fills on the device, where torch.tensor would copy from the host.
        whole = torch.full((), numbers, dtype=torch.float64, device=self._device)
        return whole + self._sum([*tensors]) if tensors else whole


def _alike(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on one device, in one dtype and shape; the same objects where they are so already."""
    kinds = {(t.dtype, t.device, t.shape) for t in tensors}
    if kinds == {(tensors[0].dtype, device, torch.Size())}:
        return tensors
    return [t.reshape(()).to(device, torch.float64) for t in tensors]
