"""Gradient centralization: subtract the mean from the gradient of each output unit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtrain.dist.dtensor import to_local
from dtrain.step.transform import Transform
from dtrain.transforms.gradients.grad_transform import grad_transform, sum_dtype, unit_sums
from dtrain.typing import Params


def centralize_gradients_(params: Params) -> None:
    """Subtract from each weight's gradient, in place, the mean over all dims but the first (the outputs).

    Formula: ``grad_i = grad_i - mean(grad_i)`` for each row ``i`` of a weight of two or more dims

    Vectors and scalars are unchanged. Omit weights whose first dim is not the outputs (transposed convolutions, embeddings)
    from ``params``.

    Args:
        params: parameters by name, plain or DTensor, any shape; parameters with ``grad is None`` are skipped.

    Mutates: ``.grad``.
    Collective: none for whole rows, as under FSDP2. For sharded rows one all-reduce per mesh axis that shards rows, for the
    sums of all rows together.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> w.grad = torch.tensor([[1.0, 3.0], [0.0, -4.0]])
        >>> dt.transforms.centralize_gradients_({"w": w})
        >>> w.grad.tolist()
        [[-1.0, 1.0], [2.0, -2.0]]

    Source: Yong et al. 2020, arXiv:2004.01461, section 3.
    """
    grads = [param.grad for param in params.values() if param.grad is not None and param.grad.ndim > 1]
    for grad, sums in zip(grads, unit_sums(grads, _sum_over_dims), strict=True):
        shard = to_local(grad)
        shard.sub_((sums / math.prod(grad.shape[1:])).to(shard.dtype))


def centralize_gradients() -> Transform:
    """Subtract from each weight's gradient the mean over all dims but the first before the update.

    The order with clipping matters, because the two operations do not commute. Exclude weights with a mask:
    ``masked(centralize_gradients(), lambda name, param: "embedding" not in name)``.

    Formula: ``grad_i = grad_i - mean(grad_i)`` for each row ``i`` of a weight of two or more dims

    Mutates: ``.grad``, in the step. Collective: as ``centralize_gradients_``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.centralize_gradients()])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, _ = step(state, torch.tensor([[1.0, 3.0]]))
        >>> model.weight.tolist()
        [[1.0, -1.0]]

    Source: Yong et al. 2020, arXiv:2004.01461, section 3.

    Suggested values:
        CIFAR-100 and ImageNet, ResNet-50, SGD with momentum: convolutions and linear layers (Yong et al. 2020, section 4)
        Fine-grained images, pretrained ResNet-50: convolutions and linear layers (Yong et al. 2020, section 4)
    When not to use: rows of a weight must change by a common value, as in embedding tables. Select the other weights with
        ``masked``.
    """
    return grad_transform(centralize_gradients_, name="centralize_gradients")


def _sum_over_dims(shard: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.sum(shard, dim=dims, keepdim=True, dtype=sum_dtype(shard))
