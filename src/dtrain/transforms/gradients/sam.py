"""Sharpness-aware minimisation: the gradient at the worst point nearby."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dtrain.dtensor import add_scaled_, from_local_like, global_norm, to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter, is_number
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics, Params, Schedule

_NORM_EPS = 1e-12  # added to the norm: where the gradient is 0, so is the way


def perturb_params_(params: Params, rho: float, *, adaptive: bool = False, eta: float = 0.01) -> dict[str, Tensor]:
    """Move parameters in place by ``rho`` along their gradient, and return copies of them from before, for ``restore_params_``.

    Formula: ``param = param + rho * grad / norm(grad)`` with the norm over all parameters together; adaptive, with
    ``t = abs(param) + eta``: ``param = param + rho * t**2 * grad / norm(t * grad)``

    With a gradient of 0 nothing moves. The second gradient, at the moved parameters, is for the optimizer:
    ``kept = perturb_(params, 0.05)``, ``loss().backward()`` anew, ``restore_params_(params, kept)``, ``optimizer.step()``.

    Args:
        params: parameters by name, plain or DTensor, any shape; those with ``grad is None`` stay.
        rho: length of the way, > 0.
        adaptive: whether the neighbourhood is larger for larger weights.
        eta: smallest such size, >= 0; of use with ``adaptive`` only.

    Returns:
        Copies of what was moved, laid out like the parameters: the shards of this rank.

    Mutates: the parameters.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Raises:
        ConfigError: ``rho`` is not positive, or ``eta`` no finite number >= 0.

    Source: Foret et al. 2021, arXiv:2010.01412, equation 2; adaptive, Kwon et al. 2021, arXiv:2102.11600, section 3.

    Example:
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> kept = perturb_({"w": w}, 0.5)
        >>> [round(value, 6) for value in w.tolist()]
        [1.3, 2.4]
        >>> restore_({"w": w}, kept)
        >>> w.tolist()
        [1.0, 2.0]
    """
    _check("perturb_", rho, eta)
    moved = {name: param for name, param in params.items() if param.grad is not None}
    grads = [param.grad for param in moved.values() if param.grad is not None]
    with torch.no_grad():
        kept = {name: from_local_like(param, to_local(param).clone()) for name, param in moved.items()}
        if not adaptive:
            norm, way = global_norm(grads), grads
        else:
            sizes = [to_local(param).abs() + eta for param in moved.values()]
            scaled = [from_local_like(grad, size * to_local(grad)) for size, grad in zip(sizes, grads, strict=True)]
            norm = global_norm(scaled)
            way = [from_local_like(each, size * to_local(each)) for size, each in zip(sizes, scaled, strict=True)]
        add_scaled_(list(moved.values()), way, rho / (norm + _NORM_EPS))
    return kept


def restore_params_(params: Params, saved: Mapping[str, Tensor]) -> None:
    """Give parameters back, bit for bit, the values that ``perturb_params_`` has kept.

    Formula: ``param = kept``

    Mutates: the parameters named in ``saved``. Collective: none. Host sync: none.

    Source: as ``perturb_params_``.

    Example:
        >>> w = torch.tensor([0.1], requires_grad=True)
        >>> restore_({"w": w}, {"w": torch.tensor([0.25])})
        >>> w.tolist()
        [0.25]
    """
    with torch.no_grad():
        for name, value in saved.items():
            to_local(params[name]).copy_(to_local(value))


def sam(
    rho: float | Schedule = 0.05, *, adaptive: bool = False, eta: float = 0.01, interval: Duration | int | str = 1
) -> Transform:
    """Train with the gradient at the point, ``rho`` away, to which the loss rises most steeply.

    A step computes two gradients. What it reports is of the first one, at the parameters themselves; dropout draws anew for
    the second, and the buffers of the model (the statistics of BatchNorm) are those that the first has left. A gradient of 0
    is a step like any other. List it before ``auto_microbatch``, and after what prepares batches.

    Formula: ``grad = grad_of_loss(param + rho * g / norm(g))`` where ``g = grad_of_loss(param)``, with the norm over all
    parameters together; adaptive as in ``perturb_params_``

    Args:
        rho: > 0, or a schedule of such, read at the step about to run. With ``adaptive`` about ten times as large.
        adaptive: ASAM, whose neighbourhood does not depend on how layers are scaled.
        eta: smallest size of a weight in it, >= 0.
        interval: the first step of each acts, as with ``every``; the others cost nothing.

    Mutates: while the second gradient is computed, parameters and buffers; then, also after an exception, they are what the
    first has left. It takes the memory of one copy of this rank's shards of the parameters, two more with ``adaptive``.
    Collective: those of the second gradient, and one all-reduce of a scalar per mesh axis that gradients are sharded on.
    Host sync: none.

    Raises:
        ConfigError: ``rho`` is not positive; of a schedule, in the step for which it is not. ``eta`` is no finite number >= 0,
            ``interval`` no duration.

    Source: Foret et al. 2021, arXiv:2010.01412, algorithm 1; adaptive, Kwon et al. 2021, arXiv:2102.11600. Other than in
    Composer, whose closure takes a loss of 0 for none, a step at loss 0 is made.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss = mean_loss(lambda model, x: model(x).square().mean(), weight=len)
        >>> step = compose_step(loss, [sam(0.5)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, _ = step(state, torch.ones(1, 1))  # the gradient of w**2 at 2 + 0.5 is 5
        >>> model.weight.item()
        1.5
    """
    rho_at, each = hyperparameter(rho, "sam: rho", "(0, inf]"), Duration.parse(interval)
    _check("sam", 1.0, eta)

    def grad(inner: GradFn) -> GradFn:
        def sharp(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if state.step and not state.clock.crossed(each):
                return inner(state, batch, microbatch_size=microbatch_size)
            now = rho_at(state.clock)
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            with _perturb_params(state, now, adaptive=adaptive, eta=eta), restore_buffers(state.model):
                state, _ = inner(state, batch, microbatch_size=microbatch_size)
            return state, metrics

        return sharp

    return Transform(name="sam", grad=grad, hyperparameters=(rho_at,))


@contextmanager
def _perturb_params(state: TrainState, rho: float, *, adaptive: bool, eta: float) -> Iterator[None]:
    kept = perturb_params_(state.params, rho, adaptive=adaptive, eta=eta)
    try:
        yield
    finally:
        grad_sync_of(state.model).reshard()  # a look at the model since the gradient has left copies, of what was moved
        restore_params_(state.params, kept)


def _check(caller: str, rho: float, eta: float) -> None:
    if not rho > 0:
        raise ConfigError(f"{caller}: needs a positive rho, got {rho=}")
    if not is_number(eta) or not 0 <= eta < math.inf:
        raise ConfigError(f"{caller}: needs a finite eta >= 0, got {eta=}")
