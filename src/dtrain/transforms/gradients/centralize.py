"""Gradient centralisation: gradients of a unit that sum to zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtrain.dtensor import to_local
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.gradients.adaptive_clip import sum_dtype, unit_sums
from dtrain.typing import Metrics, Params


def centralize_gradients_(params: Params) -> None:
    """Subtract from the gradient of each weight, in place, its mean over all dims but the first, that of the outputs.

    Formula: ``grad_i = grad_i - mean(grad_i)`` for each row ``i`` of a weight of two or more dims

    Vectors and numbers are left alone. So should be weights whose first dim is not that of the outputs (transposed
    convolutions, embeddings): leave them out of ``params``.

    Args:
        params: parameters by name, plain or DTensor, any shape; those with ``grad is None`` are left out.

    Mutates: ``.grad``.
    Collective: none where rows are whole, as under FSDP2; where they are cut, one all-reduce per mesh axis that they are cut
    along, in which the sums of all rows travel together.
    Host sync: none.

    Source: Yong et al. 2020, arXiv:2004.01461, section 3.

    Example:
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> w.grad = torch.tensor([[1.0, 3.0], [0.0, -4.0]])
        >>> centralize_gradients_({"w": w})
        >>> w.grad.tolist()
        [[-1.0, 1.0], [2.0, -2.0]]
    """
    grads = [param.grad for param in params.values() if param.grad is not None and param.grad.ndim > 1]
    for grad, sums in zip(grads, unit_sums(grads, _sum_over_dims), strict=True):
        shard = to_local(grad)
        shard.sub_((sums / math.prod(grad.shape[1:])).to(shard.dtype))


def centralize_gradients() -> Transform:
    """Subtract from each weight's gradient its mean over all dims but the first before it is applied.

    List it after what clips, or before, as meant: they do not commute. Weights to be left alone are masked:
    ``masked(centralize_gradients(), lambda name, param: "embedding" not in name)``.

    Formula: ``grad_i = grad_i - mean(grad_i)`` for each row ``i`` of a weight of two or more dims

    Mutates: ``.grad``, in the step. Collective: as ``centralize_gradients_``. Host sync: none.

    Source: Yong et al. 2020, arXiv:2004.01461, section 3.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [centralize_gradients()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, _ = step(state, torch.tensor([[1.0, 3.0]]))
        >>> model.weight.tolist()
        [[1.0, -1.0]]
    """

    def update(inner: UpdateFn) -> UpdateFn:
        def centralized(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            centralize_gradients_(state.params)
            return inner(state, metrics)

        return centralized

    return Transform(name="centralize_gradients", update=update)


def _sum_over_dims(shard: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.sum(shard, dim=dims, keepdim=True, dtype=sum_dtype(shard))
