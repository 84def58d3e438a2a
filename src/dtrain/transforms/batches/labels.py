"""Convert targets between class indices and probabilities, so that mixup, label smoothing and soft cross entropy compose.

A target is a class index or a probability vector. Class indices are int64 ``[*]``, and ``ignore_index`` marks an ignored
target. Probabilities are float ``[*, classes]``. The sum of a row, its mass, is the weight of the target in the loss, so a row
of zeros is ignored. The first method whose result is not an index converts to probabilities. Later methods accept
probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.arguments import check_int
from dtrain.errors import ConfigError


def as_probabilities(
    targets: Tensor,
    num_classes: int | None = None,
    *,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert class indices to probabilities ``[*, classes]``. Probabilities are returned unchanged.

    Formula: ``result[..., c] = 1 if targets == c else 0``; a row of zeros where ``targets == ignore_index``.

    Args:
        targets: int64 ``[*]``, each in ``[0, num_classes)`` or ``ignore_index``; or float ``[*, classes]``.
        num_classes: number of classes; required for indices, checked for probabilities.
        ignore_index: index of ignored targets.
        dtype: dtype of the result.

    Example:
        >>> import dtrain as dt
        >>> dt.transforms.as_probabilities(torch.tensor([1, -100]), 3)
        tensor([[0., 1., 0.],
                [0., 0., 0.]])

    Raises:
        ConfigError: indices without ``num_classes``, another number of classes, or another dtype. (An index out of range raises
            a torch error, on a GPU asynchronously.)

    Source: the convention of this library; one-hot vectors with weights.
    """
    return to_probabilities(targets, num_classes, ignore_index=ignore_index, dtype=dtype, caller="as_probabilities")


def to_probabilities(
    targets: Tensor, num_classes: int | None, *, ignore_index: int, dtype: torch.dtype = torch.float32, caller: str
) -> Tensor:
    """Convert as ``as_probabilities`` does, with the name of the calling function in errors.

    Raises:
        ConfigError: as ``as_probabilities``.
    """
    check_num_classes(num_classes, caller)
    if targets.is_floating_point():
        if num_classes is not None and (targets.ndim == 0 or targets.shape[-1] != num_classes):
            raise ConfigError(f"{caller}: targets must be [*, {num_classes}], got shape {tuple(targets.shape)}.")
        return targets
    check_class_indices(targets, caller)
    if num_classes is None:
        raise ConfigError(f"{caller}: num_classes must be given for class indices, got None. Give num_classes=.")
    valid = targets != ignore_index
    probabilities = torch.zeros((*targets.shape, num_classes), dtype=dtype, device=targets.device)
    return probabilities.scatter_(-1, torch.where(valid, targets, 0).unsqueeze(-1), valid.to(dtype).unsqueeze(-1))


def check_class_indices(targets: Tensor, caller: str) -> None:
    """Raise ``ConfigError`` unless non-float targets are int64."""
    if targets.dtype != torch.int64:
        raise ConfigError(f"{caller}: targets must be class indices (int64) or probabilities (float), got {targets.dtype}.")


def check_num_classes(num_classes: int | None, caller: str) -> None:
    """Raise ``ConfigError`` unless ``num_classes`` is None or an int of at least 1."""
    if num_classes is not None:
        check_int(caller, "num_classes", num_classes)
