"""Random draws of tests."""

from __future__ import annotations

import torch


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator of the CPU."""
    return torch.Generator().manual_seed(seed)
