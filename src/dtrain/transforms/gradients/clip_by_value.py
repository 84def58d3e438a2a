"""Clamp every element of the gradient."""

from __future__ import annotations

import torch

from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.gradients.grad_transform import grad_transform
from dtrain.typing import Params, Schedule


def clip_grad_value_(params: Params, limit: float) -> None:
    """Clamp every element of every gradient to ``[-limit, limit]`` in place.

    Formula: ``grad = min(max(grad, -limit), limit)``

    Args:
        params: parameters by name, plain or DTensor, any shape; parameters with ``grad is None`` are skipped.
        limit: largest absolute value, > 0. Infinite elements become ``limit`` with their sign; NaN stays NaN.

    Mutates: ``.grad``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> w = torch.zeros(3, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, -0.5, -7.0])
        >>> dt.transforms.clip_grad_value_({"w": w}, 1.0)
        >>> w.grad.tolist()
        [1.0, -0.5, -1.0]

    Raises:
        ConfigError: ``limit`` is not positive.

    Source: the element-wise clipping of Pascanu et al. 2013, arXiv:1211.5063, section 3.2 (from Mikolov's thesis, 2012).
    """
    if not limit > 0:
        raise ConfigError(f"clip_grad_value_: limit must be positive, got {limit=}. Pass 1.0, for example.")
    shards = [to_local(param.grad) for param in params.values() if param.grad is not None]
    if shards:
        torch._foreach_clamp_max_(shards, limit)
        torch._foreach_clamp_min_(shards, -limit)


def clip_by_value(limit: float | Schedule) -> Transform:
    """Clamp every element of the gradient to ``[-limit, limit]`` before the update.

    Unlike ``clip_by_norm``, the clamp changes the direction of the gradient. List ``clip_by_value`` after ``loss_scale`` and
    ``nonfinite``: the clamp makes infinite elements finite, so these transforms would no longer skip the update.

    Formula: ``grad = min(max(grad, -limit), limit)``

    Args:
        limit: number > 0 or a schedule.

    Mutates: ``.grad``, in the step. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.clip_by_value(1.0)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, _ = step(state, torch.tensor([[3.0, -0.5]]))
        >>> model.weight.tolist()
        [[-1.0, 0.5]]

    Raises:
        ConfigError: ``limit`` is not positive (a schedule is checked in each step).

    Source: as ``clip_grad_value_``.

    Suggested values:
        Digits, ResNet-8, SGD at 0.1: ``limit=0.1`` (dtrain, ``benchmarks/ablation.py``; no published value is known)
    When not to use: the direction of the gradient matters: clipping of elements changes the direction, and ``clip_by_norm``
        does not.
    """
    limit_at = hyperparameter(limit, "clip_by_value: limit", "(0, inf]")
    return grad_transform(clip_grad_value_, name="clip_by_value", at_clock={"limit": limit_at})
