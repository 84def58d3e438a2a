"""Steps of an optimizer with drawn gradients."""

from __future__ import annotations

import torch
from torch import nn


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    """Return the parameters after steps with gradients that are drawn alike."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()
    return [param.detach().clone() for param in params]
