"""What a step's losses are divided by: weights of the whole global batch, learnt after backward or promised before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import current
from dtrain.errors import ConfigError, StepError
from dtrain.host_scalar import HostScalar
from dtrain.state import ShardSpec, TrainState
from dtrain.step.sums import is_number, shown
from dtrain.tensors import scale_
from dtrain.types import Batch, LossSum, Metrics, WeightFn

_SLACK = 1e-6  # relative; weights are counts, or sums of a few thousand float32 numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The weights that ``weight_fn`` promised: this rank's, and the factors ``1 / global weight``; none without one.

    While copies of the model train apart, a factor is of the weight of this rank's copy.

    Args:
        local: by term, float64 ``[]``.
        factors: by term, float64 ``[]``; 0 for a term without weight.
        loss: the global weight of the main loss, float64 ``[]``.
    """

    local: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    loss: Tensor | None = None

    def objective(self, loss: LossSum) -> Tensor:
        """What to call ``backward`` on for one microbatch.

        Raises:
            ConfigError: terms without ``weight_fn``, or other terms than it has weights for.
            StepError: nothing to go back through.
        """
        if self.loss is None:
            if loss.terms:
                raise ConfigError(
                    f"microbatch_step: the loss has further terms ({', '.join(loss.terms)}) with weights of their own; pass "
                    "weight_fn=, which gives the weights of a batch before its first backward"
                )
            return _attached(loss.total)
        sums = {"loss": loss.total, **{name: total for name, (total, _) in loss.terms.items()}}
        if sums.keys() != self.factors.keys():
            raise ConfigError(
                f"microbatch_step: weight_fn has weights for {sorted(self.factors)}, the loss has terms {sorted(sums)}"
            )
        parts = [total.reshape(()) * self.factors[name].to(total.dtype) for name, total in sums.items()]
        return _attached(torch.stack(parts).sum() if len(parts) > 1 else parts[0])

    def broken(self, state: TrainState, metrics: Metrics) -> bool:
        """Whether the losses surely came with other weights than promised; on a GPU the next step learns it, as of weight zero.

        Mutates: ``state.shared.weight``, which takes the promised weight to the host, or NaN.
        """
        if self.loss is None:
            return False
        off = [(metrics[name].weight - weight).abs() - _SLACK * weight.abs() for name, weight in self.local.items()]
        value = _to_host(state, torch.where(torch.stack(off).max() <= 0, self.loss, torch.nan))
        if value is None or not math.isnan(value):
            return False
        _host(state, self.loss.device).clear()
        return True


def _attached(total: Tensor) -> Tensor:
    if not total.requires_grad:
        raise StepError(
            "microbatch_step: the loss of a microbatch depends on no trainable parameter; compute it from the model's output, "
            "without no_grad or detach, and where nothing counts as 0.0 times that"
        )
    return total


def promised(weight_fn: WeightFn | None, batch: Batch) -> dict[str, Tensor | float]:
    """This rank's weights by term, as ``weight_fn`` gives them; the main loss is called ``"loss"``.

    Raises:
        ConfigError: a mapping without ``"loss"``, or a weight that is not one number.
    """
    if weight_fn is None:
        return {}
    given = weight_fn(batch)
    weights = given if isinstance(given, Mapping) else {"loss": given}
    for name, weight in weights.items():
        if not is_number(weight):
            raise ConfigError(f"microbatch_step: weight_fn must give one number for {name!r}, got {shown(weight)}; sum it")
    if "loss" not in weights:
        raise ConfigError(f"microbatch_step: weight_fn must give a weight for 'loss', the main term; got {sorted(weights)}")
    return {name: weights[name] for name in sorted(weights)}


def global_weights(local: Mapping[str, Tensor | float], device: torch.device, spec: ShardSpec) -> Weights:
    """The factors of every term.

    Collective: one all-reduce (float64), none without terms.
    """
    if not local:
        return Weights(local={}, factors={})
    mine = torch.stack([torch.as_tensor(w, dtype=torch.float64).detach().reshape(()).to(device) for w in local.values()])
    shared, whole = _summed(mine, spec)
    factors = torch.where(shared > 0, 1.0 / shared, 0.0)
    return Weights(
        local=dict(zip(local, mine.unbind(), strict=True)),
        factors=dict(zip(local, factors.unbind(), strict=True)),
        loss=whole[list(local).index("loss")],
    )


def divide_(grads: Sequence[Tensor], state: TrainState, weights: Weights, metrics: Metrics) -> None:
    """Make the mean's gradient of the sum's, unless the losses were divided before backward; a step without weight raises.

    Mutates: ``grads``. Collective: one all-reduce of float64 ``[]``, unless ``weight_fn`` promised the weight.
    Host sync: none. On a GPU the weight reaches the host late: the gradient is zero now, and the next step raises.
    """
    if weights.loss is None:
        shared, weight = _summed(metrics["loss"].weight, state.spec)
    else:
        shared = weight = weights.loss
    value = _to_host(state, weight) if weights.loss is None else _seen(state, weight)
    if value is not None and not value > 0:
        _host(state, weight.device).clear()
        raise StepError(
            f"microbatch_step: step {state.step}: the weights of all ranks add up to {value:g}, so the mean loss is undefined; "
            "look for a batch in which everything is masked"
        )
    if weights.loss is None:
        # On a GPU nothing is known of the weight here, without waiting: zero must not poison the parameters with NaN. That of a
        # copy that trains apart may be zero, and is no error: its gradient is.
        known = value is not None and state.spec.apart is None
        factor = weight.reciprocal() if known else torch.where(shared > 0, 1.0 / shared, 0.0)
        scale_(grads, factor)


def _host(state: TrainState, device: torch.device) -> HostScalar:
    """The run's one scalar on its way to the host, made on first use."""
    state.shared.weight = state.shared.weight or HostScalar(device)
    return state.shared.weight


def _to_host(state: TrainState, value: Tensor) -> float | None:
    """Send ``value`` ``[]`` to the host; what arrives there at once, which is nothing on a GPU."""
    _host(state, value.device).post(value)
    return _seen(state, value)


def _seen(state: TrainState, value: Tensor) -> float | None:
    return _host(state, value.device).peek() if value.device.type == "cpu" else None


def _summed(local: Tensor, spec: ShardSpec) -> tuple[Tensor, Tensor]:
    """``local`` added up over the ranks that share their gradients, and over all: the same unless copies train apart.

    Collective: one all-reduce over all ranks.
    """
    if current().world_size == 1:
        return local, local
    counted = local if spec.counts else torch.zeros_like(local)
    if spec.apart is None:
        whole = counted.clone()
        dist.all_reduce(whole)
        return whole, whole
    copies = local.new_zeros(spec.apart.count, *local.shape)
    copies[spec.apart.place] = counted
    dist.all_reduce(copies)
    return copies[spec.apart.place], copies.sum(0)
