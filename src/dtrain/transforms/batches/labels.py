"""How targets are written, so that batch methods compose: mixup, then label smoothing, then soft cross entropy.

A target is a class index, int64 ``[*]``, where ``ignore_index`` stands for one that is left out; or probabilities, float
``[*, classes]``, where the sum of a row, its mass, is the weight it has in the loss: a row of zeros is left out. The first
method that cannot say its result in indices makes probabilities of them, and the later ones take those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.errors import ConfigError


def as_probabilities(
    targets: Tensor,
    num_classes: int | None = None,
    *,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
    caller: str = "as_probabilities",
) -> Tensor:
    """Targets as probabilities ``[*, classes]``; those that are so already are returned as they are.

    Formula: ``made[..., c] = 1 if targets == c else 0``; a row of zeros where ``targets == ignore_index``.

    Args:
        targets: int64 ``[*]``, each in ``[0, num_classes)`` or ``ignore_index``; or float ``[*, classes]``.
        num_classes: how many there are; needed for indices, checked for probabilities.
        ignore_index: the index that is left out.
        dtype: of what is made.
        caller: who asks, for the error.

    Raises:
        ConfigError: indices without ``num_classes``, another number of classes, or another dtype. (An index out of range is an
            error of torch's: on a GPU nobody looks at it before.)

    Source: the convention of this library; one-hot vectors with weights.

    Example:
        >>> as_probabilities(torch.tensor([1, -100]), 3)
        tensor([[0., 1., 0.],
                [0., 0., 0.]])
    """
    check_num_classes(num_classes, caller)
    if targets.is_floating_point():
        if num_classes is not None and (targets.ndim == 0 or targets.shape[-1] != num_classes):
            raise ConfigError(f"{caller}: needs targets [*, {num_classes}], got shape {tuple(targets.shape)}")
        return targets
    check_class_indices(targets, caller)
    if num_classes is None:
        raise ConfigError(f"{caller}: class indices become probabilities, for which it needs num_classes=...")
    kept = targets != ignore_index
    made = torch.zeros((*targets.shape, num_classes), dtype=dtype, device=targets.device)
    return made.scatter_(-1, torch.where(kept, targets, 0).unsqueeze(-1), kept.to(dtype).unsqueeze(-1))


def check_class_indices(targets: Tensor, caller: str) -> None:
    """Raise ``ConfigError`` unless targets that are not float are int64."""
    if targets.dtype != torch.int64:
        raise ConfigError(f"{caller}: targets are class indices (int64) or probabilities (float), got {targets.dtype}")


def check_num_classes(num_classes: int | None, caller: str) -> None:
    """Raise ``ConfigError`` unless ``num_classes`` is None or a whole number of at least 1."""
    if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
        raise ConfigError(f"{caller}: needs a whole num_classes of at least 1, got {num_classes=}")
