"""Sharpness-aware minimization (SAM): use the gradient at the nearby point of steepest ascent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.dist.dtensor import from_local_like, global_norm, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics, Params, Schedule

# Added to the norm, so that a zero gradient moves no parameter.
_NORM_EPS = 1e-12


def perturb_params_(params: Params, rho: float, *, adaptive: bool = False, eta: float = 0.01) -> dict[str, Tensor]:
    """Move parameters in place by ``rho`` along their gradient, and return copies of their values for ``restore_params_``.

    Formula: ``param = param + rho * grad / norm(grad)`` with the norm over all parameters together; adaptive, with
    ``t = abs(param) + eta``: ``param = param + rho * t**2 * grad / norm(t * grad)``

    A gradient of 0 moves no parameter. The optimizer uses a second gradient at the moved parameters:
    ``saved = perturb_params_(params, 0.05)``, zero the gradients, ``loss().backward()``, ``restore_params_(params, saved)``,
    ``optimizer.step()``.

    Args:
        params: parameters by name, plain or DTensor, any shape; parameters with ``grad is None`` are unchanged.
        rho: distance, > 0.
        adaptive: if True, the neighborhood is larger for larger weights (ASAM).
        eta: smallest size of a weight, >= 0; used with ``adaptive`` only.

    Returns:
        Copies of the moved parameters, laid out like the parameters: the shards of this rank.

    Mutates: the parameters.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> saved = dt.transforms.perturb_params_({"w": w}, 0.5)
        >>> [round(value, 6) for value in w.tolist()]
        [1.3, 2.4]
        >>> dt.transforms.restore_params_({"w": w}, saved)
        >>> w.tolist()
        [1.0, 2.0]

    Raises:
        ConfigError: ``rho`` is not positive, or ``eta`` is not a finite number >= 0.

    Source: Foret et al. 2021, arXiv:2010.01412, equation 2; adaptive, Kwon et al. 2021, arXiv:2102.11600, section 3.
    """
    if not rho > 0:
        raise ConfigError(f"perturb_params_: rho must be positive, got {rho=}. Pass 0.05, for example.")
    check_number("perturb_params_", "eta", eta, minimum=0)
    moved = {name: param for name, param in params.items() if param.grad is not None}
    grads = [param.grad for param in moved.values() if param.grad is not None]
    with torch.no_grad():
        saved = {name: from_local_like(param, to_local(param).clone()) for name, param in moved.items()}
        if not adaptive:
            norm, direction = global_norm(grads), grads
        else:
            sizes = [to_local(param).abs() + eta for param in moved.values()]
            scaled = [from_local_like(grad, size * to_local(grad)) for size, grad in zip(sizes, grads, strict=True)]
            norm = global_norm(scaled)
            direction = [from_local_like(grad, size * to_local(grad)) for size, grad in zip(sizes, scaled, strict=True)]
        _add_scaled_(list(moved.values()), direction, rho / (norm + _NORM_EPS))
    return saved


def restore_params_(params: Params, saved: Mapping[str, Tensor]) -> None:
    """Restore parameters, bit for bit, from the copies of ``perturb_params_``.

    Formula: ``param = saved``

    Mutates: the parameters named in ``saved``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> w = torch.tensor([0.1], requires_grad=True)
        >>> dt.transforms.restore_params_({"w": w}, {"w": torch.tensor([0.25])})
        >>> w.tolist()
        [0.25]

    Source: as ``perturb_params_``.
    """
    with torch.no_grad():
        for name, value in saved.items():
            to_local(params[name]).copy_(to_local(value))


def sam(
    rho: float | Schedule = 0.05, *, adaptive: bool = False, eta: float = 0.01, every: Duration | int | str = 1
) -> Transform:
    """Train with the gradient at the point of steepest ascent at a distance of ``rho``.

    A step computes two gradients and reports the metrics of the first gradient, at the parameters themselves. Dropout uses new
    random numbers for the second gradient. The buffers of the model (BatchNorm statistics) are those of the first forward. A
    gradient of 0 is allowed. List ``sam`` before ``auto_microbatch`` and after transforms that change batches.

    Formula: ``grad = grad_of_loss(param + rho * g / norm(g))`` where ``g = grad_of_loss(param)``, with the norm over all
    parameters together; adaptive as in ``perturb_params_``

    Args:
        rho: number > 0 or a schedule; about ten times larger with ``adaptive``.
        adaptive: if True, use ASAM, whose neighborhood does not depend on the scale of a layer.
        eta: smallest size of a weight in ASAM, >= 0.
        every: duration between SAM steps, as with ``every``; the first step of each interval is a SAM step.

    Mutates: parameters and buffers during the second gradient; both are restored after it, also after an error. The copies take
    the memory of one copy of this rank's parameter shards, two more with ``adaptive``.
    Collective: those of the second gradient, and one all-reduce of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.sam(0.5)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, _ = step(state, torch.ones(1, 1))  # the gradient of w**2 at 2 + 0.5 is 5
        >>> model.weight.item()
        1.5

    Raises:
        ConfigError: ``rho`` is not positive (a schedule is checked in each step), ``eta`` is not a finite number >= 0, or
            ``every`` is not a duration.
        StepError: in a step, the loss wrote into its batch, so the second gradient would have other samples.

    Source: Foret et al. 2021, arXiv:2010.01412, algorithm 1; adaptive, Kwon et al. 2021, arXiv:2102.11600. Composer's closure
    treats a loss of 0 as no loss; here a step at loss 0 is made.

    Suggested values:
        ImageNet and CIFAR-10: ``rho=0.05`` (Foret et al. 2021, section 3)
        CIFAR-100, Wide-ResNet: ``rho=0.1`` (Foret et al. 2021, appendix)
        ImageNet, ResNet-50, little extra time: ``rho=0.5``, ``every=10`` (MosaicML Composer, method card of SAM)
    When not to use: a run has no spare time: a step costs two gradients, unless ``every`` is larger than 1. Other
        regularization, such as ``mixup``, reduces the gain.
    """
    rho_at, interval = hyperparameter(rho, "sam: rho", "(0, inf]"), Duration.parse(every)
    check_number("sam", "eta", eta, minimum=0)

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if state.step and not state.clock.crossed(interval):
                return inner(state, batch, microbatch_size=microbatch_size)
            now = rho_at(state.clock)
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            params, saved = state._trainable, perturb_params_(state._trainable, now, adaptive=adaptive, eta=eta)
            try:
                with restore_buffers(state.model):
                    state, _ = inner(state, batch, microbatch_size=microbatch_size)
            finally:
                # A forward outside of the step leaves unsharded copies of the moved parameters. Free the copies.
                grad_sync_of(state.model).reshard()
                restore_params_(params, saved)
            return state, metrics

        return grad_fn

    return Transform(name="sam", grad=grad, hyperparameters=(rho_at,))


def _add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: Tensor) -> None:
    """Compute ``tensor += factor * other`` for each pair, on the local shards, with a scalar ``factor`` ``[]``.

    The product is computed in the wider dtype, because the factor may exceed the range of float16.

    Mutates: ``tensors``. Host sync: one for CPU (offloaded) tensors if the factor is on another device.
    """
    for tensor, other in zip(tensors, others, strict=True):
        shard, addend, scale = to_local(tensor), to_local(other), factor.to(tensor.device)
        wide = torch.promote_types(addend.dtype, scale.dtype)
        if wide == shard.dtype:
            shard.addcmul_(addend, scale.to(wide))
        else:
            shard.add_((addend.to(wide) * scale.to(wide)).to(shard.dtype))
