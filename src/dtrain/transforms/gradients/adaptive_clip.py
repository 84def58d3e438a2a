"""Adaptive gradient clipping (AGC): clip each unit's gradient relative to the norm of the unit's weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.gradients.grad_transform import grad_transform, sum_dtype, unit_sums
from dtrain.typing import Params, Schedule


def clip_grad_adaptive_(params: Params, clipping: float = 0.01, *, eps: float = 1e-3) -> None:
    """Scale each unit's gradient in place to a norm of at most ``clipping`` times the norm of the unit's weights.

    Formula: ``grad_i = grad_i * min(1, clipping * max(norm(w_i), eps) / norm(grad_i))`` for each unit ``i``

    A unit is a row: all weights of one output. The outputs are the first dim of torch's layers. A vector (a bias, the scales of
    a norm) or a scalar is one unit.

    Args:
        params: parameters by name, plain or DTensor, any shape; parameters with ``grad is None`` are skipped.
        clipping: largest ratio of the norms, > 0.
        eps: smallest norm of weights in the formula, > 0, so that units that begin at zero can move.

    Mutates: ``.grad``.
    Collective: one all-reduce per mesh axis that shards units: vectors under FSDP2, and rows that a plan shards along another
    dim than the first. The squares of all units share this all-reduce.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> w = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
        >>> w.grad = torch.tensor([[0.6, 0.8], [0.0, 2.0]])
        >>> dt.transforms.clip_grad_adaptive_({"w": w}, 0.1, eps=0.01)
        >>> [[round(value, 4) for value in row] for row in w.grad.tolist()]
        [[0.3, 0.4], [0.0, 0.001]]

    Raises:
        ConfigError: ``clipping`` is not positive, or ``eps`` is not a finite number > 0.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4; vectors as one unit as in the paper's own code.
    """
    if not clipping > 0:
        raise ConfigError(f"clip_grad_adaptive_: clipping must be positive, got {clipping=}. Pass 0.01, for example.")
    check_number("clip_grad_adaptive_", "eps", eps, above=0)
    with_grad = [param for param in params.values() if param.grad is not None]
    grads = [param.grad for param in with_grad if param.grad is not None]
    with torch.no_grad():
        squares = unit_sums([*with_grad, *grads], _squared_norms)
        for grad, weight_square, grad_square in zip(grads, squares[: len(grads)], squares[len(grads) :], strict=True):
            largest = clipping * weight_square.sqrt().clamp(min=eps)
            shard = to_local(grad)
            # A zero gradient has an infinite quotient, clamped to 1. An infinite gradient has the quotient 0 and becomes NaN.
            shard.mul_((largest / grad_square.sqrt()).clamp(max=1.0).to(shard.dtype))


def adaptive_clip(clipping: float | Schedule = 0.01, *, eps: float = 1e-3) -> Transform:
    """Scale each unit's gradient to at most ``clipping`` times the norm of the unit's weights before the update.

    The paper excludes the last linear layer: ``masked(adaptive_clip(), lambda name, param: not name.startswith("head."))``.

    Formula: ``grad_i = grad_i * min(1, clipping * max(norm(w_i), eps) / norm(grad_i))`` for each unit ``i``, the rows of a
    weight and the whole of a vector

    Args:
        clipping: number > 0 or a schedule; use smaller values for larger batches.
        eps: smallest norm of weights in the formula, > 0.

    Mutates: ``.grad``, in the step. Collective: as ``clip_grad_adaptive_``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.adaptive_clip(0.1)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, _ = step(
        ...     state, torch.tensor([[6.0, 8.0]])
        ... )  # the norm 10 is clipped to 0.1 * 5
        >>> [round(value, 4) for value in model.weight[0].tolist()]
        [2.7, 3.6]

    Raises:
        ConfigError: ``clipping`` is not positive (a schedule is checked in each step), or ``eps`` is not a finite number > 0.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4.

    Suggested values:
        ImageNet, NFNet-F0 to F6, batch 4096: ``clipping=0.01``, ``eps=1e-3`` (Brock et al. 2021)
        ImageNet, NF-ResNet-50, smaller batches: ``clipping`` up to 0.16; larger batches need smaller values (Brock et al. 2021,
            comparison of batch sizes)
    When not to use: the model has batch norm, which already bounds the size of updates. The paper also leaves out the last
        linear layer: select the other parameters with ``masked``.
    """
    clipping_at = hyperparameter(clipping, "adaptive_clip: clipping", "(0, inf]")
    check_number("adaptive_clip", "eps", eps, above=0)
    return grad_transform(partial(clip_grad_adaptive_, eps=eps), name="adaptive_clip", at_clock={"clipping": clipping_at})


def _squared_norms(shard: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = sum_dtype(shard)
    norms: Tensor = torch.linalg.vector_norm(shard, dim=dims, keepdim=True, dtype=wide) if dims else shard.to(wide)
    return norms.square()
