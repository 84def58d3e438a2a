"""``ElasticSampler``: the order of an epoch as a function of seed and epoch, computable at any position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dtrain.data.order.base import check_same, check_stretch
from dtrain.data.order.permutation import permuted
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSampler:
    """Which sample stands where in an epoch: a pure function of ``seed``, the epoch and the position.

    Args:
        size: samples in the dataset, at least 1.
        seed: of the shuffle.
        shuffle: False keeps the dataset's order in every epoch.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"ElasticSampler: the dataset needs at least one sample, got size={self.size}")

    @property
    def lanes(self) -> int:
        """1: every rank may read every sample."""
        return 1

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_stretch("ElasticSampler", self.size, start, stop)
        positions = np.arange(start, stop)
        if self.shuffle:
            positions = permuted(positions, self.size, derive_seed(self.seed, "epoch", epoch))
        return torch.from_numpy(positions)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: size, seed and shuffle."""
        return {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def resumed(self, state: Mapping[str, int], epoch: int, start: int) -> ElasticSampler:
        """Itself.

        Raises:
            CheckpointMismatchError: another size, seed or shuffle.
        """
        check_same(state, self.state(epoch, start))
        return self
