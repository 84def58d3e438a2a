"""Notice a loss that is a mean already, in the autograd graph of its total."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from dtrain.dist.init import current
from dtrain.types import LossSum

_SAME_VALUE = (
    "Neg",
    "ToCopy",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Alias",
    "Clone",
    "Squeeze",
    "Unsqueeze",
)
_MEAN = 1
"""The number of ``reduction="mean"`` in torch's own losses; a sum is 2."""


def warn_of_mean(loss: LossSum, where: str) -> None:
    """Warn on rank 0 if a total of ``loss`` is a mean although its weight counts several things.

    It looks at the operations that made the total, not at its value. So it finds the means of torch's own losses and of
    ``mean``, and a sum divided by the tensor that is the weight, unless they are multiplied again. It does not see into
    compiled code, and takes no sum for a mean.
    Host sync: one if a mean was found and its weight is a tensor on a device.
    """
    if current().rank != 0:
        return
    for name, (total, weight) in (("total", (loss.total, loss.weight)), *loss.terms.items()):
        # A weight of another class of tensors is a stand-in without a value, as in a plan of memory.
        has_value = not isinstance(weight, Tensor) or type(weight) is Tensor
        if has_value and isinstance(total, Tensor) and _is_mean(total.grad_fn, weight) and float(weight) > 1:
            warnings.warn(
                f"{where}: {name} of the LossSum is a mean, and its weight is {float(weight):g}. The step divides by the "
                "weight once more, so the gradient is so many times too small. Return the sum (reduction='sum'), or the mean "
                "times the weight, as dt.mean_loss does.",
                stacklevel=2,
            )


def _is_mean(node: Any, weight: Tensor | float) -> bool:
    """Return True if the result of ``node`` is a mean, in all of its terms."""
    if node is None:
        return False
    kind = node.name().removeprefix("torch::autograd::").partition("Backward")[0]
    inputs = [inner for inner, _ in node.next_functions]
    if kind in _SAME_VALUE:
        return _is_mean(inputs[0], weight)
    if kind in ("Add", "Sub"):
        return all(_is_mean(inner, weight) for inner in inputs)
    if kind == "Div":
        divisor = _saved(node, "other")
        # The value is not read: a saved tensor may stand for a number of Python, which dispatch modes do not take.
        same = type(divisor) is type(weight) is Tensor and divisor.data_ptr() == weight.data_ptr()
        return same and _is_kind(inputs[0], "Sum")
    if kind == "Mean":
        # The mean of sums over the batch is a sum; the mean of one number is the number.
        return int(_saved(node, "self_sym_numel") or 0) > 1 and not _is_kind(inputs[0], "Sum")
    return bool(_saved(node, "reduction") == _MEAN)


def _is_kind(node: Any, kind: str) -> bool:
    while node is not None and node.name().partition("Backward")[0] in _SAME_VALUE:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(f"{kind}Backward")


def _saved(node: Any, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)
