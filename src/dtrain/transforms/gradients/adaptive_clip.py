"""Sums over units: what belongs to one output of a layer, also where a unit is cut over ranks.

Adaptive clipping: of each unit's gradient by the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.dtensor import all_reduce_partial_, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter, is_number
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Params, Schedule


def unit_dims(tensor: Tensor) -> tuple[int, ...]:
    """The dims of one unit: all but the first, which is that of the outputs; of a vector or a number all, it is one unit."""
    return tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else tuple(range(tensor.ndim))


def unit_sums(tensors: Sequence[Tensor], of_shard: Callable[[Tensor, tuple[int, ...]], Tensor]) -> list[Tensor]:
    """For each tensor its sum over each unit, to be used with this rank's shard: as many dims, those of a unit of size 1.

    Args:
        tensors: plain or DTensor.
        of_shard: ``(shard, dims) -> sums``, with the dims kept.

    Collective: one all-reduce per mesh axis along which units are cut; rows that are whole need none.
    """
    dims = [unit_dims(tensor) for tensor in tensors]
    sums = [of_shard(to_local(tensor), over) for tensor, over in zip(tensors, dims, strict=True)]
    all_reduce_partial_(sums, tensors, dims)
    return sums


def sum_dtype(shard: Tensor) -> torch.dtype:
    """The dtype that sums of ``shard`` are taken in."""
    return torch.promote_types(shard.dtype, torch.float32)


def clip_grad_adaptive_(params: Params, clipping: float = 0.01, *, eps: float = 1e-3) -> None:
    """Scale each unit's gradient in place so that its norm is at most ``clipping`` times the norm of the unit's weights.

    Formula: ``grad_i = grad_i * min(1, clipping * max(norm(w_i), eps) / norm(grad_i))`` for each unit ``i``

    A unit is a row: all weights of one output, which is the first dim of torch's layers. A vector (a bias, the scales of a
    norm) or a number is one unit.

    Args:
        params: parameters by name, plain or DTensor, any shape; those with ``grad is None`` are left out.
        clipping: largest ratio of the norms kept, > 0.
        eps: least norm of weights that counts, so that units that begin at zero can move, > 0.

    Mutates: ``.grad``.
    Collective: one all-reduce per mesh axis along which units are cut: vectors under FSDP2, and rows that a plan has cut along
    another dim than the first; the squares of all of them travel together.
    Host sync: none.

    Raises:
        ConfigError: ``clipping`` is not positive, or ``eps`` no finite number > 0.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4; vectors as one unit as in the paper's own code.

    Example:
        >>> w = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
        >>> w.grad = torch.tensor([[0.6, 0.8], [0.0, 2.0]])
        >>> clip_grad_adaptive_({"w": w}, 0.1, eps=0.01)
        >>> [[round(value, 4) for value in row] for row in w.grad.tolist()]
        [[0.3, 0.4], [0.0, 0.001]]
    """
    _check("clip_grad_adaptive_", clipping, eps)
    chosen = [param for param in params.values() if param.grad is not None]
    grads = [param.grad for param in chosen if param.grad is not None]
    with torch.no_grad():
        squares = unit_sums([*chosen, *grads], _squared_norms)
        for grad, weight_square, grad_square in zip(grads, squares[: len(grads)], squares[len(grads) :], strict=True):
            largest = clipping * weight_square.sqrt().clamp(min=eps)
            shard = to_local(grad)
            # The quotient with a gradient of 0 is infinite and counts as 1; that of an infinite one is 0, and leaves NaN.
            shard.mul_((largest / grad_square.sqrt()).clamp(max=1.0).to(shard.dtype))


def adaptive_clip(clipping: float | Schedule = 0.01, *, eps: float = 1e-3) -> Transform:
    """Scale each unit's gradient to at most ``clipping`` times the norm of the unit's weights before it is applied.

    The paper leaves the last linear layer alone: ``masked(adaptive_clip(), lambda name, param: not name.startswith("head."))``.

    Formula: ``grad_i = grad_i * min(1, clipping * max(norm(w_i), eps) / norm(grad_i))`` for each unit ``i``, the rows of a
    weight and the whole of a vector

    Args:
        clipping: > 0, or a schedule of such, read at the step about to run. The larger the batch, the smaller.
        eps: least norm of weights that counts, > 0.

    Mutates: ``.grad``, in the step. Collective: as ``clip_grad_adaptive_``. Host sync: none.

    Raises:
        ConfigError: ``clipping`` is not positive; of a schedule, in the step for which it is not. ``eps`` is no finite
            number > 0.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [adaptive_clip(0.1)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, _ = step(state, torch.tensor([[6.0, 8.0]]))  # a gradient of norm 10, where 0.1 * 5 are allowed
        >>> [round(value, 4) for value in model.weight[0].tolist()]
        [2.7, 3.6]
    """
    clipping_at = hyperparameter(clipping, "adaptive_clip: clipping", "(0, inf]")
    _check("adaptive_clip", 1.0, eps)

    def update(inner: UpdateFn) -> UpdateFn:
        def clipped(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            clip_grad_adaptive_(state.params, clipping_at(state.clock), eps=eps)
            return inner(state, metrics)

        return clipped

    return Transform(name="adaptive_clip", update=update, hyperparameters=(clipping_at,))


def _squared_norms(shard: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = sum_dtype(shard)
    norms: Tensor = torch.linalg.vector_norm(shard, dim=dims, keepdim=True, dtype=wide) if dims else shard.to(wide)
    return norms.square()


def _check(caller: str, clipping: float, eps: float) -> None:
    if not clipping > 0:
        raise ConfigError(f"{caller}: needs a positive clipping, got {clipping=}")
    if not is_number(eps) or not 0 < eps < math.inf:
        raise ConfigError(f"{caller}: needs a finite eps > 0, got {eps=}")
