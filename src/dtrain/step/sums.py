"""``Sums``: the metrics of a step's microbatches, checked and collected as they come, and added up once."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from dtrain.errors import ConfigError
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
        full: dict[float, Tensor] = {}  # of what is no tensor: many sums may have the same weight
        return {
            name: Metric(self._sum(totals, full), self._sum(weights, full)) for name, (totals, weights) in self._found.items()
        }

    def _sum(self, values: Values, full: dict[float, Tensor]) -> Tensor:
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = sum(value for value in values if not isinstance(value, Tensor))
        if not tensors:
            # torch.full fills on the device, where torch.tensor would copy from the host.
            if numbers not in full:
                full[numbers] = torch.full((), numbers, dtype=torch.float64, device=self._device)
            return full[numbers]
        if len(tensors) == 1 and tensors[0].dtype == torch.float64 and not tensors[0].ndim and not numbers:
            return tensors[0].detach().to(self._device, copy=True)  # it may be one that the loss function goes on counting in
        if any(tensor.ndim or tensor.device != self._device for tensor in tensors):
            tensors = [tensor.reshape(()).to(self._device) for tensor in tensors]
        whole = torch.stack(tensors).detach().sum(dtype=torch.float64)
        return whole + numbers if numbers else whole


def checked_loss(loss: object, *, where: str) -> LossSum:
    """``loss``, if it is what a loss function may return: sums that are single numbers.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(loss, LossSum):
        raise ConfigError(f"{where}: loss_fn must return a LossSum, got {_returned(loss)}")
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        raise ConfigError(f"{where}: LossSum.total must be one number (a tensor []), got {shown(loss.total)}; sum it")
    if not is_number(loss.weight):
        raise ConfigError(f"{where}: LossSum.weight must be one number, got {shown(loss.weight)}; sum it")
    if loss.terms or loss.aux:
        _check_further(loss, where)
    return loss


_WRAP = 'wrap it in dt.mean_loss(loss_fn, weight=lambda batch: len(batch["labels"]))'


def _returned(value: object) -> str:
    """What a loss function returned instead of a ``LossSum``, and what to do."""
    kind = type(value).__name__
    if value is None:
        return "None; end it with `return dt.LossSum(total=loss, weight=count)`"
    if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
        return f"{kind} [{_shape(value)}] without a graph; leave out .detach() and no_grad, and if it is a mean, {_WRAP}"
    if isinstance(value, Tensor):
        return (
            f"{kind} [{_shape(value)}]; if it is a mean, {_WRAP}; if it is a sum, return dt.LossSum(total=loss, weight=count)"
        )
    if is_number(value):
        return f"the number {value!r}, which has no graph; return the tensor without .item(), and if it is a mean, {_WRAP}"
    if isinstance(getattr(value, "loss", None), Tensor):  # an output of transformers: a mapping with attributes
        return f"{kind}; take the mean loss from it: dt.mean_loss(lambda model, batch: model(**batch).loss, weight=count)"
    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}; return dt.LossSum(total=loss, weight=count, aux={{'accuracy': (right, count)}})"
    return f"{kind}; return dt.LossSum(total=loss, weight=count), or if it returns a mean, {_WRAP}"


def _shape(tensor: Tensor) -> str:
    """The sizes of ``tensor`` for a message."""
    return ", ".join(map(str, tensor.shape))


def _check_further(loss: LossSum, where: str) -> None:
    for kind, further in (("terms", loss.terms), ("aux", loss.aux)):
        for name, pair in further.items():
            if name == "loss":
                raise ConfigError(f"{where}: LossSum.{kind}: 'loss' is the name of the main loss; give it another one")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"{where}: LossSum.{kind}[{name!r}] must be (total, weight), got {shown(pair)}")
            odd = [part for part in pair if not is_number(part)]
            if odd:
                raise ConfigError(f"{where}: LossSum.{kind}[{name!r}] must be of single numbers, got {shown(odd[0])}; sum it")
    both = [name for name in loss.terms if name in loss.aux]
    if both:
        raise ConfigError(f"{where}: {both[0]!r} is the name of a term and of an aux; a term is a metric already")


def is_number(value: object) -> bool:
    """Whether ``value`` is one number: Python's, NumPy's, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | Real)


def shown(value: object) -> str:
    """``value`` for a message: of a tensor its shape."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
