"""Dropout that trains a fixed number of subnetworks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.dist.rng import generator
from dtrain.errors import ConfigError
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, replace_modules


def subnetwork_masks(count: int, features: int, p: float, *, seed: int, name: str = "") -> Tensor:
    """Which features each of ``count`` subnetworks keeps: bool ``[count, features]``, on the CPU.

    Formula: ``rand(count, features) >= p``, drawn from a stream of ``seed`` and ``name``

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys.

    Example:
        >>> subnetwork_masks(2, 3, 0.0, seed=0).tolist()
        [[True, True, True], [True, True, True]]
        >>> bool((subnetwork_masks(4, 8, 0.5, seed=0, name="a") == subnetwork_masks(4, 8, 0.5, seed=0, name="a")).all())
        True
    """
    return torch.rand(count, features, generator=generator("cpu", "gyro_dropout", seed, name)) >= p


def drop_by_masks(x: Tensor, masks: Tensor, p: float, *, axis: int = -1) -> Tensor:
    """``x`` ``[batch, ...]`` with the first of its samples under the first mask, the next ones under the second, and so on.

    Formula: ``y[i] = x[i] * masks[i * len(masks) // batch] / (1 - p)``

    Args:
        x: samples along the first axis.
        masks: ``[count, features]``; of fewer samples than masks each gets another one.
        p: the share that masks drop.
        axis: of the features in ``x``.

    Host sync: none.

    Source: Lee et al. 2022, MLSys.

    Example:
        >>> masks = torch.tensor([[True, False], [False, True]])
        >>> drop_by_masks(torch.ones(4, 2), masks, 0.5).tolist()
        [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]
    """
    batch = x.shape[0]
    rows = torch.arange(batch, device=x.device) * len(masks) // max(batch, 1)
    shape = [1] * x.ndim
    shape[0], shape[axis] = batch, x.shape[axis]
    return x * (masks[rows].to(x.dtype) / (1.0 - p)).view(shape)


class GyroDropout(nn.Dropout):
    """Dropout with masks out of ``sigma`` that are fixed: each forward trains ``tau`` of these subnetworks.

    Which ``tau`` comes from torch's global generator, as the masks of ``nn.Dropout`` do: ranks choose for themselves, a
    checkpoint carries it on, and a forward that is computed again for its gradients chooses alike. The masks themselves are
    equal on all ranks, and made from ``seed`` and ``name`` when they are first needed; they are in no state dict.

    Formula: ``y[i] = x[i] * masks[chosen[i * tau // batch]] / (1 - p)``; in evaluation ``y = x``

    Args:
        p: the share of features that a mask drops, in ``[0, 1)``.
        sigma: subnetworks in all.
        tau: subnetworks of a forward, each for a share of its samples, one after another.
        seed: of the masks.
        name: of this layer: each has its own masks.
        axis: of the features; the axis of samples is the first one.

    Host sync: none, but in the first forward, which copies the masks to the device.

    Raises:
        ConfigError: ``p`` outside of ``[0, 1)``, not ``1 <= tau <= sigma``; in a forward, a tensor without an axis of samples.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys. There, as in MosaicML
        Composer, ``tau`` subnetworks are trained for a stretch of ``tau / sigma`` of the run; here they are chosen anew for
        each forward, so each is trained as often, and the length of the run need not be known.

    Example:
        >>> layer = GyroDropout(0.5, sigma=1, tau=1, seed=0)
        >>> first, second = layer(torch.ones(3, 8))[0], layer(torch.ones(3, 8))[1]
        >>> bool((first == second).all()), sorted(set(first.tolist())), bool((layer.eval()(first) == first).all())
        (True, [0.0, 2.0], True)
    """

    def __init__(
        self, p: float = 0.5, *, sigma: int = 256, tau: int = 16, seed: int = 0, name: str = "", axis: int = -1
    ) -> None:
        if not 0.0 <= p < 1.0:
            raise ConfigError(f"gyro_dropout: needs 0 <= p < 1, got {p=}")
        if type(sigma) is not int or type(tau) is not int or not 1 <= tau <= sigma:
            raise ConfigError(f"gyro_dropout: needs whole numbers with 1 <= tau <= sigma, got {tau=}, {sigma=}")
        super().__init__(p)
        self.sigma, self.tau, self.seed, self.name, self.axis = sigma, tau, seed, name, axis
        self._mask_cache: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, ...]`` -> the same shape."""
        if not self.training or self.p == 0.0:
            return input
        if input.ndim < 2:
            raise ConfigError(f"gyro_dropout: needs [batch, ..., features], got shape {tuple(input.shape)} in {self.name!r}")
        chosen = torch.rand(self.sigma, device=input.device).argsort()[: self.tau]
        return drop_by_masks(input, self._get_masks(input.shape[self.axis], input.device)[chosen], self.p, axis=self.axis)

    def _get_masks(self, features: int, device: torch.device) -> Tensor:
        """Bool ``[sigma, features]``: kept, since they never change, for each number of features that comes."""
        found = self._mask_cache.get((features, device))
        if found is None:
            found = subnetwork_masks(self.sigma, features, self.p, seed=self.seed, name=self.name).to(device)
            if type(found) is Tensor:  # a rehearsal with fake tensors leaves nothing behind
                self._mask_cache[(features, device)] = found
        return found

    def extra_repr(self) -> str:
        """What it was made from."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}, seed={self.seed}, axis={self.axis}"


def gyro_dropout(
    model: nn.Module, *, p: float | None = None, sigma: int = 256, tau: int = 16, seed: int = 0, axis: int = -1
) -> nn.Module:
    """The model with ``GyroDropout`` in place of ``nn.Dropout``.

    Formula: ``y[i] = x[i] * masks[chosen[i * tau // batch]] / (1 - p)``

    Args:
        model: with ``nn.Dropout`` inside, before ``shard_model``. One that a module only reads ``p`` of (the attention of
            transformers does) has no effect there.
        p: the share of features that is dropped; None keeps that of each layer (MosaicML Composer makes it 0.5).
        sigma: subnetworks in all; memory is ``sigma`` bytes per feature.
        tau: subnetworks of a forward.
        seed: of the masks.
        axis: of the features; the axis of samples is the first one.

    Mutates: ``model``.

    Raises:
        ConfigError: no ``nn.Dropout``, a ``p`` or numbers of subnetworks that cannot be, a model that is sharded already.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys; see ``GyroDropout``.

    Example:
        >>> gyro_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), sigma=8, tau=2)[1]
        GyroDropout(p=0.1, sigma=8, tau=2, seed=0, axis=-1)
    """

    def policy(module: nn.Module, name: str) -> nn.Module:
        assert isinstance(module, nn.Dropout), "that is what is asked for"
        return GyroDropout(module.p if p is None else p, sigma=sigma, tau=tau, seed=seed, name=name, axis=axis)

    policies: dict[ModuleSelector, ReplacementPolicy] = {nn.Dropout: policy}
    return replace_modules(model, policies, caller="gyro_dropout").model
