"""Change the gradient before the update: clip by norm, by value or by unit (AGC), and centralize.

A unit is the weights of one output of a layer: a row of a weight, or the whole of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.dist.dtensor import all_reduce_partial_, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import Hyperparameter, hyperparameter
from dtrain.state import TrainState
from dtrain.step.normalization import unit_weight
from dtrain.step.optimizer import clip_state
from dtrain.step.transform import BeforeDivision, Transform, UpdateFn
from dtrain.typing import Metric, Metrics, Params, Schedule


def clip_by_norm(max_norm: float | Schedule, *, eps: float = 1e-6) -> Transform:
    """Scale the gradient to a global L2 norm of at most ``max_norm`` before the update.

    Adds the metric ``grad_norm``, the norm before clipping.

    Formula: ``grad = grad * min(1, max_norm / (norm(grad) + eps))``, with the norm over all parameters together

    Args:
        max_norm: number > 0 or a schedule.
        eps: addition to the norm in the quotient, >= 0.

    Mutates: ``.grad``, in the step.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0, eps=0.0)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, metrics = step(state, torch.tensor([[3.0, 4.0]]))
        >>> (
        ...     metrics["grad_norm"].total.item(),
        ...     [round(value, 4) for value in model.weight[0].tolist()],
        ... )
        (5.0, [-0.6, -0.8])

    Raises:
        ConfigError: ``max_norm`` is not positive (a schedule is checked in each step), or ``eps`` is not a finite number >= 0.

    Source: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.

    Suggested values:
        GPT-3 and other decoders: ``max_norm=1.0`` (Brown et al. 2020, arXiv:2005.14165, appendix B)
        BERT pre-training and fine-tuning: ``max_norm=1.0`` (Devlin et al. 2019, the authors' ``optimization.py``)
        LSTM language model, 650 and 1500 units: ``max_norm=5`` and ``10`` (Zaremba et al. 2014, arXiv:1409.2329, section 4.1)
    When not to use: the reported ``grad_norm`` exceeds ``max_norm`` in most steps. Then the limit acts as a second learning
        rate: lower the rate, or raise the limit.
    """
    limit = hyperparameter(max_norm, "clip_by_norm: max_norm", "(0, inf]")
    check_number("clip_by_norm", "eps", eps, minimum=0)

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, norm = clip_state(state, limit(state.clock), eps=eps)
            # The norm of an empty set of gradients (a mask of frozen parameters) is on the host.
            norm = norm.to(state.device)
            return inner(state, {**metrics, "grad_norm": Metric(norm, unit_weight(norm.device))})

        return update_fn

    return Transform(name="clip_by_norm", update=BeforeDivision(update), hyperparameters=(limit,))


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

    def sums_of_shard(shard: Tensor, dims: tuple[int, ...]) -> Tensor:
        return torch.sum(shard, dim=dims, keepdim=True, dtype=sum_dtype(shard))

    grads = [param.grad for param in params.values() if param.grad is not None and param.grad.ndim > 1]
    for grad, sums in zip(grads, unit_sums(grads, sums_of_shard), strict=True):
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


def grad_transform(fn: Callable[..., None], *, name: str, at_clock: Mapping[str, Hyperparameter] | None = None) -> Transform:
    """Return a transform that calls ``fn`` with the parameters before the update.

    Args:
        fn: function ``(params, ...)`` that changes ``.grad`` in place.
        name: name of the transform.
        at_clock: further keyword arguments of ``fn``, as functions of the clock before the step.
    """
    values = at_clock or {}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            fn(state._trainable, **{option: value_at(state.clock) for option, value_at in values.items()})
            return inner(state, metrics)

        return update_fn

    return Transform(name=name, update=update, hyperparameters=tuple(values.values()))


def unit_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of one unit: all dims but the first (the outputs), or all dims of a vector or scalar."""
    return tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else tuple(range(tensor.ndim))


def unit_sums(tensors: Sequence[Tensor], of_shard: Callable[[Tensor, tuple[int, ...]], Tensor]) -> list[Tensor]:
    """Return each tensor's sums over units, broadcastable to this rank's shard: the dims of a unit have size 1.

    Args:
        tensors: plain tensors or DTensors.
        of_shard: function ``(shard, dims) -> sums`` that keeps the dims.

    Collective: one all-reduce per mesh axis that shards units; whole rows need none.
    """
    dims = [unit_dims(tensor) for tensor in tensors]
    sums = [of_shard(to_local(tensor), over) for tensor, over in zip(tensors, dims, strict=True)]
    all_reduce_partial_(sums, tensors, dims)
    return sums


def sum_dtype(shard: Tensor) -> torch.dtype:
    """Return the dtype for sums over ``shard``: at least float32."""
    return torch.promote_types(shard.dtype, torch.float32)
