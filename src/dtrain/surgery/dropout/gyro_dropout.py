"""Replace dropout by gyro dropout, which trains a fixed number of subnetworks: ``gyro_dropout``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.arguments import check_int, check_number
from dtrain.dist.rng import generator
from dtrain.errors import ConfigError
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, apply_policies


def subnetwork_masks(count: int, features: int, p: float, *, seed: int, name: str = "") -> Tensor:
    """Return the features that each of ``count`` subnetworks keeps: bool ``[count, features]``, on the CPU.

    Formula: ``rand(count, features) >= p``, from a random stream of ``seed`` and ``name``

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.subnetwork_masks(2, 3, 0.0, seed=0).tolist()
        [[True, True, True], [True, True, True]]
        >>> first, second = (
        ...     dt.surgery.subnetwork_masks(4, 8, 0.5, seed=0, name="a") for _ in range(2)
        ... )
        >>> bool((first == second).all())
        True
    """
    return torch.rand(count, features, generator=generator("cpu", "gyro_dropout", seed, name), device="cpu") >= p


def drop_by_masks(x: Tensor, masks: Tensor, p: float, *, axis: int = -1) -> Tensor:
    """Apply one mask to each group of consecutive samples of ``x`` ``[batch, ...]``.

    Formula: ``y[i] = x[i] * masks[i * len(masks) // batch] / (1 - p)``

    Args:
        x: samples along the first axis.
        masks: ``[count, features]``; with fewer samples than masks, each sample gets a different mask.
        p: fraction of features that masks drop.
        axis: feature axis of ``x``.

    Host sync: none.

    Source: Lee et al. 2022, MLSys.

    Example:
        >>> import dtrain as dt
        >>> masks = torch.tensor([[True, False], [False, True]])
        >>> dt.surgery.drop_by_masks(torch.ones(4, 2), masks, 0.5).tolist()
        [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]
    """
    batch = x.shape[0]
    rows = torch.arange(batch, device=x.device) * len(masks) // max(batch, 1)
    shape = [1] * x.ndim
    shape[0], shape[axis] = batch, x.shape[axis]
    return x * (masks[rows].to(x.dtype) / (1.0 - p)).view(shape)


class GyroDropout(nn.Dropout):
    """Dropout with ``sigma`` fixed masks; each forward trains ``tau`` of these subnetworks.

    torch's global generator selects the ``tau`` subnetworks, as in ``nn.Dropout``. Ranks select independently, a checkpoint
    continues the selection, and a recomputed forward repeats the selection. The masks are equal on all ranks. The masks are
    computed from ``seed`` and ``name`` at first use, and are in no state dict.

    Formula: ``y[i] = x[i] * masks[selected[i * tau // batch]] / (1 - p)``; in evaluation ``y = x``

    Args:
        p: fraction of features that a mask drops, in ``[0, 1)``.
        sigma: total number of subnetworks.
        tau: subnetworks per forward, each for consecutive samples.
        seed: seed of the masks.
        name: name of the layer, so that each layer has different masks.
        axis: feature axis; the first axis is the sample axis.

    Host sync: none, except in the first forward, which copies the masks to the device.

    Example:
        >>> import dtrain as dt
        >>> layer = dt.surgery.GyroDropout(0.5, sigma=1, tau=1, seed=0)
        >>> first, second = layer(torch.ones(3, 8))[0], layer(torch.ones(3, 8))[1]
        >>> (
        ...     bool((first == second).all()),
        ...     sorted(set(first.tolist())),
        ...     bool((layer.eval()(first) == first).all()),
        ... )
        (True, [0.0, 2.0], True)

    Raises:
        ConfigError: ``p`` outside of ``[0, 1)``, or not ``1 <= tau <= sigma``; in a forward, an input with fewer than two dims.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys. There, as in MosaicML
        Composer, ``tau`` subnetworks train for ``tau / sigma`` of the run. Here each forward selects new subnetworks, so each
        subnetwork trains equally often and the length of the run is not needed.
    """

    def __init__(
        self, p: float = 0.5, *, sigma: int = 256, tau: int = 16, seed: int = 0, name: str = "", axis: int = -1
    ) -> None:
        check_number("gyro_dropout", "p", p, minimum=0, below=1)
        check_int("gyro_dropout", "sigma", sigma)
        check_int("gyro_dropout", "tau", tau, maximum=sigma)
        super().__init__(p)
        self.sigma, self.tau, self.seed, self.name, self.axis = sigma, tau, seed, name, axis
        self._mask_cache: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        """Drop features of ``[batch, ...]``; the shape does not change."""
        if not self.training or self.p == 0.0:
            return input
        if input.ndim < 2:
            raise ConfigError(
                f"gyro_dropout: input must be [batch, ..., features], got shape {tuple(input.shape)} in {self.name!r}. "
                "Give the input a batch axis."
            )
        selected = torch.rand(self.sigma, device=input.device).argsort()[: self.tau]
        return drop_by_masks(input, self._get_masks(input.shape[self.axis], input.device)[selected], self.p, axis=self.axis)

    def _get_masks(self, features: int, device: torch.device) -> Tensor:
        """Return cached masks, bool ``[sigma, features]``."""
        masks = self._mask_cache.get((features, device))
        if masks is None:
            masks = subnetwork_masks(self.sigma, features, self.p, seed=self.seed, name=self.name).to(device)
            # Fake tensors of a simulated step must not stay in the cache.
            if type(masks) is Tensor:
                self._mask_cache[(features, device)] = masks
        return masks

    def extra_repr(self) -> str:
        """Return the constructor arguments."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}, seed={self.seed}, axis={self.axis}"


def gyro_dropout(
    model: nn.Module, *, p: float | None = None, sigma: int = 256, tau: int = 16, seed: int = 0, axis: int = -1
) -> nn.Module:
    """Replace ``nn.Dropout`` by ``GyroDropout``; return the model.

    Formula: ``y[i] = x[i] * masks[selected[i * tau // batch]] / (1 - p)``

    Args:
        model: model with ``nn.Dropout``, before ``shard_model``. If a module only reads ``p`` of its dropout (attention of
            transformers), the replacement has no effect.
        p: fraction of features to drop; None keeps the ``p`` of each layer (MosaicML Composer uses 0.5).
        sigma: total number of subnetworks; memory is ``sigma`` bytes per feature.
        tau: subnetworks per forward.
        seed: seed of the masks.
        axis: feature axis; the first axis is the sample axis.

    Mutates: ``model``.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.gyro_dropout(
        ...     nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), sigma=8, tau=2
        ... )[1]
        GyroDropout(p=0.1, sigma=8, tau=2, seed=0, axis=-1)

    Raises:
        ConfigError: no ``nn.Dropout``, an invalid ``p``, ``sigma`` or ``tau``, or a sharded model.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys; see ``GyroDropout``.

    Suggested values:
        AlexNet, LeNet: ``sigma=256``, ``tau=16`` (MosaicML Composer, method card of gyro dropout, by authors of the paper)
        ResNet-18, BERT: ``sigma=1024``, ``tau=8`` (MosaicML Composer, method card of gyro dropout, by authors of the paper)
    When not to use: a step has fewer samples than ``tau``, or the model has no ``nn.Dropout``, as most decoders today.
    """

    def policy(module: nn.Module, name: str) -> nn.Module:
        assert isinstance(module, nn.Dropout), "the policy selects nn.Dropout"
        return GyroDropout(module.p if p is None else p, sigma=sigma, tau=tau, seed=seed, name=name, axis=axis)

    policies: dict[ModuleSelector, ReplacementPolicy] = {nn.Dropout: policy}
    return apply_policies(model, policies, caller="gyro_dropout").model
