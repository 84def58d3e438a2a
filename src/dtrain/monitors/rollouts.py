"""Compare the log-probabilities of a rollout with those of the training forward: ``rollout_mismatch``."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.errors import ConfigError


def rollout_mismatch(training: Tensor, rollout: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum the difference between the log-probabilities of training and of the rollout, as metrics of a loss.

    In the first update behind a rollout both come from the same weights, so a difference is an error of the sampler: other
    kernels, another dtype, stale weights, another temperature or mask. In later updates it also grows by the updates.

    Formula: with ``d = training - rollout``, the means of ``exp(d) - 1 - d`` (``rollout_kl``), of ``|exp(training) -
    exp(rollout)|`` (``rollout_gap``) and of ``1`` where ``|d| > 0.01``, else 0 (``rollout_differs``), over the tokens

    Args:
        training: log-probabilities of the sampled tokens in training, any shape; no gradient flows.
        rollout: those that the sampler wrote beside the tokens, same shape.
        mask: tokens that count, same shape; None counts all.

    Returns:
        Sum and number of tokens by metric, for ``LossSum(aux=...)``, so that ``dt.reduce_metrics`` makes global means.

    Example:
        >>> import dtrain as dt
        >>> now, then = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5])
        >>> sums = dt.monitors.rollout_mismatch(now, then)
        >>> {name: round((total / count).item(), 4) for name, (total, count) in sums.items()}
        {'rollout_kl': 0.0533, 'rollout_gap': 0.0439, 'rollout_differs': 0.5}

    Raises:
        ConfigError: tensors of different shapes.

    Source: the estimator of the divergence is k3 of Schulman 2020, "Approximating KL divergence".
    """
    for name, given in {"rollout": rollout, "mask": mask}.items():
        if given is not None and given.shape != training.shape:
            raise ConfigError(
                f"rollout_mismatch: {name} must have the shape of training {tuple(training.shape)}, got {tuple(given.shape)}. "
                "Give one number per token."
            )
    now, then = training.detach(), rollout.detach().to(training.device)
    wide = torch.promote_types(torch.promote_types(now.dtype, then.dtype), torch.float32)
    now, then = now.to(wide), then.to(wide)
    counts = torch.ones_like(now, dtype=torch.bool) if mask is None else mask.to(now.device) != 0
    apart = (now - then).masked_fill(~counts, 0.0)
    values = {
        "rollout_kl": apart.expm1() - apart,
        "rollout_gap": (now.exp() - then.exp()).abs().masked_fill(~counts, 0.0),
        "rollout_differs": (apart.abs() > 0.01).to(wide),
    }
    return {name: (value.sum(), counts.sum()) for name, value in values.items()}
