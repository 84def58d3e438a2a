"""Define types for values that cross module borders: batches, losses, metrics, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from dtrain.device import is_accelerator
from dtrain.errors import ConfigTypeError

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
    """Weighted sum: ``total`` and ``weight`` are scalars ``[]`` on the device, local to the rank. Metrics can be added.

    A metric is no number: ``reduce_metrics`` computes the numbers of all metrics, over all ranks.
    """

    total: Tensor
    weight: Tensor

    def __float__(self) -> float:
        raise _refuse_number("float()")

    def __format__(self, spec: str) -> str:
        if spec:
            raise _refuse_number(f"the format {spec!r}")
        return str(self)

    def item(self) -> float:
        """Refuse the conversion to a number, which would be the number of one rank.

        Raises:
            ConfigTypeError: always; the message names ``reduce_metrics``.
        """
        raise _refuse_number("item()")

    def __add__(self, other: Any) -> Any:
        # A tuple would be longer after the addition.
        if isinstance(other, Metric):
            return Metric(self.total + other.total, self.weight + other.weight)
        raise _refuse_number("+")

    def __radd__(self, other: Any) -> Any:
        raise _refuse_number("+")


def _refuse_number(operation: str) -> ConfigTypeError:
    return ConfigTypeError(
        f"metrics: {operation} needs a number, got the sum and the weight of one rank. Write "
        "dt.reduce_metrics(metrics)['loss'], on all ranks."
    )


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
            all means. Terms need ``batch_spec(weight=...)``.

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


@runtime_checkable
class Stateful(Protocol):
    """Protocol of an object that returns its state as plain data and tensors, and loads this state again."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


LossFn: TypeAlias = Callable[[nn.Module, Batch], LossSum]
"""Loss function of one microbatch: ``(model, batch) -> LossSum``."""

CountFn: TypeAlias = "Callable[[Batch], int | tuple[int, int]]"
"""``batch -> samples``, or ``batch -> (samples, tokens)``."""

SplitFn: TypeAlias = Callable[[Batch, int], Sequence[Batch]]
"""``(batch, microbatch_size) -> microbatches`` of at most that many samples, in order."""

WeightFn: TypeAlias = "Callable[[Batch], Tensor | float | Mapping[str, Tensor | float]]"
"""Weight of a whole local batch, or weights of the terms of a loss by name, with the main loss as ``"loss"``."""


def index_tensor(indices: Sequence[int], device: torch.device) -> Tensor:
    """Make an int64 tensor ``[n]`` on ``device``. Host sync: none, because the copy to a GPU is asynchronous."""
    if not is_accelerator(device):
        return torch.tensor(indices, device=device)
    return torch.tensor(indices, device="cpu", pin_memory=True).to(device, non_blocking=True)
