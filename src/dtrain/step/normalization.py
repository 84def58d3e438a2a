"""What a step's losses are divided by: weights of the whole global batch, learnt after backward or promised before it.

``Sums``: the metrics of a step's microbatches, checked and collected as they come, and added up once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dtensor import scale_
from dtrain.errors import ConfigError, StepError
from dtrain.run_context import AsyncScalar
from dtrain.state import ShardSpec, TrainState
from dtrain.typing import Batch, LossSum, Metric, Metrics, WeightFn

_TOLERANCE = 1e-6  # relative; weights are counts, or sums of a few thousand float32 numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossNormalizer:
    """The weights that ``weight_fn`` promised: this rank's, and the factors ``1 / global weight``; none without one.

    While copies of the model train apart, a factor is of the weight of this rank's copy.

    Args:
        local_weights: by term, float64 ``[]``.
        factors: by term, float64 ``[]``; 0 for a term without weight.
        global_weight: the global weight of the main loss, float64 ``[]``.
    """

    local_weights: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    global_weight: Tensor | None = None

    def scaled_loss(self, loss: LossSum) -> Tensor:
        """What to call ``backward`` on for one microbatch.

        Raises:
            ConfigError: terms without ``weight_fn``, or other terms than it has weights for.
            StepError: nothing to go back through.
        """
        if self.global_weight is None:
            if loss.terms:
                raise ConfigError(
                    f"microbatch_step: the loss has further terms ({', '.join(loss.terms)}) with weights of their own; pass "
                    "weight_fn=, which gives the weights of a batch before its first backward"
                )
            return _require_graph(loss.total)
        sums = {"loss": loss.total, **{name: total for name, (total, _) in loss.terms.items()}}
        if sums.keys() != self.factors.keys():
            raise ConfigError(
                f"microbatch_step: weight_fn has weights for {sorted(self.factors)}, the loss has terms {sorted(sums)}"
            )
        parts = [total.reshape(()) * self.factors[name].to(total.dtype) for name, total in sums.items()]
        return _require_graph(torch.stack(parts).sum() if len(parts) > 1 else parts[0])

    def weights_mismatch(self, state: TrainState, metrics: Metrics) -> bool:
        """Whether the losses surely came with other weights than promised; on a GPU the next step learns it, as of weight zero.

        Mutates: ``state.shared.weight``, which takes the promised weight to the host, or NaN.
        """
        if self.global_weight is None:
            return False
        off = [(metrics[name].weight - weight).abs() - _TOLERANCE * weight.abs() for name, weight in self.local_weights.items()]
        value = _send_to_host(state, torch.where(torch.stack(off).max() <= 0, self.global_weight, torch.nan))
        if value is None or not math.isnan(value):
            return False
        _weight_scalar(state, self.global_weight.device).clear()
        return True


def _require_graph(total: Tensor) -> Tensor:
    if not total.requires_grad:
        raise StepError(
            "microbatch_step: the loss of a microbatch depends on no trainable parameter; compute it from the model's output, "
            "without no_grad or detach, and where nothing counts as 0.0 times that"
        )
    return total


def declared_weights(weight_fn: WeightFn | None, batch: Batch) -> dict[str, Tensor | float]:
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
            raise ConfigError(
                f"microbatch_step: weight_fn must give one number for {name!r}, got {describe_value(weight)}; sum it"
            )
    if "loss" not in weights:
        raise ConfigError(f"microbatch_step: weight_fn must give a weight for 'loss', the main term; got {sorted(weights)}")
    return {name: weights[name] for name in sorted(weights)}


def build_normalizer(local: Mapping[str, Tensor | float], device: torch.device, spec: ShardSpec) -> LossNormalizer:
    """The factors of every term.

    Collective: one all-reduce (float64), none without terms.
    """
    if not local:
        return LossNormalizer(local_weights={}, factors={})
    mine = torch.stack([torch.as_tensor(w, dtype=torch.float64).detach().reshape(()).to(device) for w in local.values()])
    shared, whole = _all_reduce_weights(mine, spec)
    factors = torch.where(shared > 0, 1.0 / shared, 0.0)
    return LossNormalizer(
        local_weights=dict(zip(local, mine.unbind(), strict=True)),
        factors=dict(zip(local, factors.unbind(), strict=True)),
        global_weight=whole[list(local).index("loss")],
    )


def normalize_grads_(grads: Sequence[Tensor], state: TrainState, normalizer: LossNormalizer, metrics: Metrics) -> None:
    """Make the mean's gradient of the sum's, unless the losses were divided before backward; a step without weight raises.

    Mutates: ``grads``. Collective: one all-reduce of float64 ``[]``, unless ``weight_fn`` promised the weight.
    Host sync: none. On a GPU the weight reaches the host late: the gradient is zero now, and the next step raises.
    """
    if normalizer.global_weight is None:
        shared, weight = _all_reduce_weights(metrics["loss"].weight, state.spec)
    else:
        shared = weight = normalizer.global_weight
    value = _send_to_host(state, weight) if normalizer.global_weight is None else _read_if_on_cpu(state, weight)
    if value is not None and not value > 0:
        _weight_scalar(state, weight.device).clear()
        raise StepError(
            f"microbatch_step: step {state.step}: the weights of all ranks add up to {value:g}, so the mean loss is undefined; "
            "look for a batch in which everything is masked"
        )
    if normalizer.global_weight is None:
        # On a GPU nothing is known of the weight here, without waiting: zero must not poison the parameters with NaN. That of a
        # copy that trains apart may be zero, and is no error: its gradient is.
        known = value is not None and state.spec.replica_info is None
        factor = weight.reciprocal() if known else torch.where(shared > 0, 1.0 / shared, 0.0)
        scale_(grads, factor)


def _weight_scalar(state: TrainState, device: torch.device) -> AsyncScalar:
    """The run's one scalar on its way to the host, made on first use."""
    state.run_context.pending_weight = state.run_context.pending_weight or AsyncScalar(device)
    return state.run_context.pending_weight


def _send_to_host(state: TrainState, value: Tensor) -> float | None:
    """Send ``value`` ``[]`` to the host; what arrives there at once, which is nothing on a GPU."""
    _weight_scalar(state, value.device).copy_from(value)
    return _read_if_on_cpu(state, value)


def _read_if_on_cpu(state: TrainState, value: Tensor) -> float | None:
    return _weight_scalar(state, value.device).try_read() if value.device.type == "cpu" else None


def _all_reduce_weights(local: Tensor, spec: ShardSpec) -> tuple[Tensor, Tensor]:
    """``local`` added up over the ranks that share their gradients, and over all: the same unless copies train apart.

    Collective: one all-reduce over all ranks.
    """
    if get_dist_info().world_size == 1:
        return local, local
    counted = local if spec.counts_in_loss else torch.zeros_like(local)
    if spec.replica_info is None:
        whole = counted.clone()
        dist.all_reduce(whole)
        return whole, whole
    copies = local.new_zeros(spec.replica_info.count, *local.shape)
    copies[spec.replica_info.index] = counted
    dist.all_reduce(copies)
    return copies[spec.replica_info.index], copies.sum(0)


Scalars = list["Tensor | float"]


class MetricAccumulator:
    """Totals and weights by name. Adding them one by one would be several small operations per microbatch."""

    __slots__ = ("_device", "_found", "_totals", "_weights")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: Scalars = []
        self._weights: Scalars = []
        self._found = {"loss": (self._totals, self._weights)}

    def add(self, loss: LossSum) -> None:
        """Take over the numbers of one microbatch: ``loss``, ``terms`` and ``aux``."""
        self._totals.append(loss.total.detach())
        self._weights.append(loss.weight)
        for further in (loss.terms, loss.aux):
            for name, (total, weight) in further.items():
                totals, weights = self._found.setdefault(name, ([], []))
                totals.append(total.detach() if isinstance(total, Tensor) else total)
                weights.append(weight)

    def add_names(self, loss: LossSum) -> None:
        """Take over the names of a microbatch that does not count: all ranks have the same metrics."""
        for name in (*loss.terms, *loss.aux):
            self._found.setdefault(name, ([], []))

    def metrics(self) -> Metrics:
        """The sums so far: float64 scalars ``[]`` on the device, so that those of many tokens stay exact. Host sync: none."""
        full: dict[float, Tensor] = {}  # of what is no tensor: many sums may have the same weight
        return {
            name: Metric(self._sum(totals, full), self._sum(weights, full)) for name, (totals, weights) in self._found.items()
        }

    def _sum(self, values: Scalars, full: dict[float, Tensor]) -> Tensor:
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = sum(value for value in values if not isinstance(value, Tensor))
        if not tensors:
            # torch.full fills on the device, where torch.tensor would copy from the host.
            if numbers not in full:
                full[numbers] = torch.full((), numbers, dtype=torch.float64, device=self._device)
            return full[numbers]
        if len(tensors) == 1 and tensors[0].dtype == torch.float64 and not tensors[0].ndim and not numbers:
            return tensors[0].detach().to(self._device, copy=True)  # it may be one that the loss function goes on counting in
        if any(tensor.ndim or tensor.device != self._device for tensor in tensors):
            tensors = [tensor.reshape(()).to(self._device) for tensor in tensors]
        whole = torch.stack(tensors).detach().sum(dtype=torch.float64)
        return whole + numbers if numbers else whole


def check_loss(loss: object, *, caller: str) -> LossSum:
    """``loss``, if it is what a loss function may return: sums that are single numbers.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(loss, LossSum):
        raise ConfigError(f"{caller}: loss_fn must return a LossSum, got {_describe_return_value(loss)}")
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        raise ConfigError(f"{caller}: LossSum.total must be one number (a tensor []), got {describe_value(loss.total)}; sum it")
    if not is_number(loss.weight):
        raise ConfigError(f"{caller}: LossSum.weight must be one number, got {describe_value(loss.weight)}; sum it")
    if loss.terms or loss.aux:
        _check_terms_and_aux(loss, caller)
    return loss


_WRAP_ADVICE = 'wrap it in dt.mean_loss(loss_fn, weight=lambda batch: len(batch["labels"]))'


def _describe_return_value(value: object) -> str:
    """What a loss function returned instead of a ``LossSum``, and what to do."""
    kind = type(value).__name__
    if value is None:
        return "None; end it with `return dt.LossSum(total=loss, weight=count)`"
    if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
        return f"{kind} [{_shape(value)}] without a graph; leave out .detach() and no_grad, and if it is a mean, {_WRAP_ADVICE}"
    if isinstance(value, Tensor):
        return f"{kind} [{_shape(value)}]; if it is a mean, {_WRAP_ADVICE}; if it is a sum, return dt.LossSum(total=loss, weight=count)"
    if is_number(value):
        return (
            f"the number {value!r}, which has no graph; return the tensor without .item(), and if it is a mean, {_WRAP_ADVICE}"
        )
    if isinstance(getattr(value, "loss", None), Tensor):  # an output of transformers: a mapping with attributes
        return f"{kind}; take the mean loss from it: dt.mean_loss(lambda model, batch: model(**batch).loss, weight=count)"
    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}; return dt.LossSum(total=loss, weight=count, aux={{'accuracy': (right, count)}})"
    return f"{kind}; return dt.LossSum(total=loss, weight=count), or if it returns a mean, {_WRAP_ADVICE}"


def _shape(tensor: Tensor) -> str:
    """The sizes of ``tensor`` for a message."""
    return ", ".join(map(str, tensor.shape))


def _check_terms_and_aux(loss: LossSum, caller: str) -> None:
    for kind, further in (("terms", loss.terms), ("aux", loss.aux)):
        for name, pair in further.items():
            if name == "loss":
                raise ConfigError(f"{caller}: LossSum.{kind}: 'loss' is the name of the main loss; give it another one")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"{caller}: LossSum.{kind}[{name!r}] must be (total, weight), got {describe_value(pair)}")
            odd = [part for part in pair if not is_number(part)]
            if odd:
                raise ConfigError(
                    f"{caller}: LossSum.{kind}[{name!r}] must be of single numbers, got {describe_value(odd[0])}; sum it"
                )
    both = [name for name in loss.terms if name in loss.aux]
    if both:
        raise ConfigError(f"{caller}: {both[0]!r} is the name of a term and of an aux; a term is a metric already")


def is_number(value: object) -> bool:
    """Whether ``value`` is one number: Python's, NumPy's, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | Real)


def describe_value(value: object) -> str:
    """``value`` for a message: of a tensor its shape."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
