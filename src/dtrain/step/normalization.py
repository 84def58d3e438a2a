"""Normalize the summed loss by the global token (or sample) count, known after backward or declared before it.

Also check the return value of a loss function, make metrics, and add up those of a step's microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from numbers import Real
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dtrain.data.batch import BatchSpec, list_microbatches
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.dtensor import scale_
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.run_context import AsyncScalar
from dtrain.shard.spec import ShardSpec
from dtrain.state import TrainState
from dtrain.typing import Batch, LossSum, Metric, Metrics

# Relative tolerance: weights are counts, or sums of a few thousand float32 numbers.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossNormalizer:
    """Weights declared by ``batch_spec.weight``, and the factors ``1 / global weight``; empty without declared weights.

    While replicas train separately, a factor belongs to the weight of this rank's replica. All values are numbers if the host
    of the only rank knows them, else float64 ``[]``.

    Args:
        local_weights: this rank's weight by term.
        factors: factor by term; 0 for a term without weight.
        global_weight: global weight of the main loss; None without declared weights.
    """

    local_weights: Mapping[str, Tensor | float]
    factors: Mapping[str, Tensor | float]
    global_weight: Tensor | float | None = None

    def scaled_loss(self, loss: LossSum, total: Tensor) -> Tensor:
        """Return the objective of one microbatch, for ``backward``.

        Args:
            loss: loss of the microbatch.
            total: ``loss.total``, with the units that this rank skipped in its graph.

        Raises:
            ConfigError: the loss has terms without declared weights, or its terms differ from those of the weights.
            StepError: the loss has no graph.
        """
        if self.global_weight is None:
            if loss.terms:
                raise ConfigError(
                    f"microbatch_step: the loss has further terms ({', '.join(loss.terms)}) with their own weights. Pass "
                    "batch_spec=dt.batch_spec(weight=...), which returns the weights of a batch before its first backward."
                )
            return total if total.requires_grad else _require_graph(total)
        if (names := {"loss", *loss.terms}) != {*self.factors}:
            raise ConfigError(
                f"microbatch_step: batch_spec.weight must return a weight per loss term, got {sorted(self.factors)} for "
                f"{sorted(names)}. Return a weight for each term of the loss."
            )
        objective = _scale_term(total, self.factors["loss"])
        if loss.terms:
            terms = [_scale_term(term, self.factors[name]) for name, (term, _) in loss.terms.items()]
            objective = torch.stack([objective, *terms]).sum()
        return objective if objective.requires_grad else _require_graph(objective)

    def weights_mismatch(self, state: TrainState, metrics: Metrics) -> bool:
        """Return True if the losses had other weights than declared; on a GPU the next step reports a weight of zero.

        Mutates: ``state._run_context.monitor.pending_weight``, which carries the declared weight, or NaN, to the host.
        """
        if self.global_weight is None:
            return False
        local: Mapping[str, Any] = self.local_weights
        off = [abs(metrics[name].weight - weight) - _TOLERANCE * abs(weight) for name, weight in local.items()]
        if not isinstance(self.global_weight, Tensor):
            # Also for a weight that is NaN.
            return not all(float(excess) <= 0 for excess in off)
        value = _send_to_host(state, torch.where(torch.stack(off).max() <= 0, self.global_weight, torch.nan))
        if value is None or not math.isnan(value):
            return False
        _weight_scalar(state, self.global_weight.device).clear()
        return True


SUM_NORMALIZER = LossNormalizer(local_weights={}, factors={})
"""Normalizer without declared weights: losses stay sums, and gradients are divided after backward."""


def _scale_term(term: Tensor, factor: Tensor | float) -> Tensor:
    term = term.reshape(()) if term.ndim else term
    return term * (factor.to(term.dtype) if isinstance(factor, Tensor) else factor)


def _require_graph(total: Tensor) -> Tensor:
    if not total.requires_grad:
        raise StepError(
            "microbatch_step: the loss of a microbatch depends on no trainable parameter. Compute it from the model's output "
            "without no_grad or detach. If nothing counts, return 0.0 times the output."
        )
    return total


def declared_weights(batch_spec: BatchSpec | None, batch: Batch) -> dict[str, Tensor | float]:
    """Return this rank's weights by term from ``batch_spec.weight``; the main loss is called ``"loss"``.

    Raises:
        ConfigError: ``batch_spec.weight`` returns a mapping without ``"loss"``, or a weight that is not one number.
    """
    if batch_spec is None or batch_spec.weight is None:
        return {}
    weights: dict[str, Tensor | float] = {}
    for microbatch in list_microbatches(batch):
        result = batch_spec.weight(microbatch)
        for name, weight in (result if isinstance(result, Mapping) else {"loss": result}).items():
            weights[name] = weights[name] + weight if name in weights else weight
    for name, weight in weights.items():
        if not is_number(weight):
            raise ConfigError(
                f"microbatch_step: batch_spec.weight must return one number for {name!r}, got {describe_value(weight)}. "
                "Sum the weight."
            )
    if "loss" not in weights:
        raise ConfigError(
            f"microbatch_step: batch_spec.weight must return a weight for 'loss', the main term, got {sorted(weights)}. "
            "Return {'loss': weight}."
        )
    return {name: weights[name] for name in sorted(weights)}


def build_normalizer(
    local: Mapping[str, Tensor | float], device: torch.device, spec: ShardSpec, world_size: int
) -> LossNormalizer:
    """All-reduce the declared weights, at least one, and return the factor of every term.

    Collective: one all-reduce (float64), on several ranks.
    """
    on_host = device.type == "cpu" and world_size == 1 and _get_current_dispatch_mode() is None
    if on_host and not any([isinstance(weight, Tensor) for weight in local.values()]):  # noqa: C419  # a list is faster for a few
        numbers = {name: float(weight) for name, weight in local.items()}
        inverse = {name: 1.0 / weight if weight > 0 else 0.0 for name, weight in numbers.items()}
        return LossNormalizer(local_weights=numbers, factors=inverse, global_weight=numbers["loss"])
    stacked = torch.stack([torch.as_tensor(w, dtype=torch.float64, device=device).detach().reshape(()) for w in local.values()])
    replica_weights, global_weights = _all_reduce_weights(stacked, spec)
    factors = torch.where(replica_weights > 0, 1.0 / replica_weights, 0.0)
    return LossNormalizer(
        local_weights=dict(zip(local, stacked.unbind(), strict=True)),
        factors=dict(zip(local, factors.unbind(), strict=True)),
        global_weight=global_weights[list(local).index("loss")],
    )


def expect_weight(loss: LossSum, microbatches: int) -> Tensor | float | None:
    """Return the weight of all microbatches of the only rank, if they weigh as much as the first one; None if it is unknown.

    Args:
        loss: loss of the first microbatch.
        microbatches: number of microbatches.

    Returns:
        A number, or ``[]`` for the tensor of the only microbatch, infinite without weight. None also for losses in fewer bits
        than float32, in which the reciprocal would be rounded.
    """
    if loss.total.dtype not in (torch.float32, torch.float64):
        return None
    if not isinstance(loss.weight, Tensor):
        return float(loss.weight) * microbatches if loss.weight > 0 else None
    if microbatches > 1:
        return None
    weight = loss.weight.detach().reshape(()).to(loss.total)
    return torch.where(weight > 0, weight, math.inf)


def compute_grad_divisor(
    state: TrainState,
    normalizer: LossNormalizer,
    metrics: Metrics,
    *,
    global_weight: float | None = None,
    loss_divisor: Tensor | float | None = None,
) -> Tensor | float:
    """Return the number that turns the gradients of a step into those of the mean loss: the global weight.

    Args:
        state: state of the step.
        normalizer: weights that ``batch_spec.weight`` declared, if any; they scaled the losses before backward.
        metrics: local sums of the step.
        global_weight: sum of the ``host_weight`` of all ranks, from ``sync_after_backward``; None if some host does not know
            its weight.
        loss_divisor: result of ``expect_weight``, if backward has divided the losses by it.

    Returns:
        A number, or float64 ``[]`` on the device; 1 with declared weights, infinity without weight.

    Collective: none with ``global_weight`` or declared weights, else one all-reduce of float64 ``[]``.
    Host sync: none. On a GPU the weight reaches the host late: the gradient is zero now, and the next step raises.

    Raises:
        StepError: the global weight is zero.
    """
    if normalizer.global_weight is not None:
        _check_weight(state, _read_if_on_cpu(state, normalizer.global_weight))
        return 1.0
    divisor: Tensor | float
    if global_weight is not None:
        _check_weight(state, global_weight)
        divisor = global_weight
    else:
        replica_weight, weight = _all_reduce_weights(metrics["loss"].weight, state.spec)
        _check_weight(state, _send_to_host(state, weight))
        # On a GPU the host does not know the weight without waiting, and a division by zero would write NaN into parameters.
        # The weight of one replica may be zero without an error; its gradient is zero then.
        divisor = torch.where(replica_weight > 0, replica_weight, math.inf)
    # The tensor of one microbatch is the weight itself.
    return 1.0 if isinstance(loss_divisor, Tensor) else divisor / (loss_divisor or 1.0)


def divide_(grads: Sequence[Tensor], divisor: Tensor | float) -> None:
    """Divide gradients by a number, or by ``[]``: one pass over all of them, none for the number 1. Mutates: ``grads``."""
    if isinstance(divisor, Tensor) or divisor != 1.0:
        scale_(grads, 1.0 / divisor)


def divide_grads(state: TrainState) -> TrainState:
    """Return ``state`` with complete gradients, for a function that reads ``.grad`` and does not know of a divisor.

    A step passes over all gradients once less if the function that changes them next also divides them: clipping by their norm,
    or a fused optimizer. ``state._grad_divisor`` is the product of their divisors.

    Mutates: ``.grad``, if there is a divisor.
    """
    if state._grad_divisor is None:
        return state
    divide_([grad for param in state._trainable.values() if (grad := param.grad) is not None], state._grad_divisor)
    return state._replace(_grad_divisor=None)


def _check_weight(state: TrainState, weight: float | None) -> None:
    """Raise ``StepError`` if the host knows that the global ``weight`` is not positive."""
    if weight is None or weight > 0:
        return
    if (pending := state._run_context.monitor.pending_weight) is not None:
        pending.clear()
    raise StepError(
        f"microbatch_step: step {state.step}: the weights of all ranks add up to {weight:g}, so the mean loss is undefined. "
        "Look for a batch in which every position is masked."
    )


def host_weight(state: TrainState, weight: Tensor | float) -> float | None:
    """Return this rank's ``weight`` as a number; None if the host would wait for a device, or if replicas train separately.

    Host sync: none.
    """
    if state.spec.replica_info is not None:
        return None
    if not state.spec.counts_in_loss:
        return 0.0
    if not isinstance(weight, Tensor):
        return float(weight)
    value = None
    if weight.is_cpu:
        value = _send_to_host(state, weight)
        # The weight of this rank alone may be zero, so the next step must not report it.
        _weight_scalar(state, weight.device).clear()
    return value


def _weight_scalar(state: TrainState, device: torch.device) -> AsyncScalar:
    """Return the run's one ``AsyncScalar`` for weights, created on first use."""
    monitor = state._run_context.monitor
    monitor.pending_weight = monitor.pending_weight or AsyncScalar(device)
    return monitor.pending_weight


def _send_to_host(state: TrainState, value: Tensor) -> float | None:
    """Send ``value`` ``[]`` to the host and return the number; None on a GPU, where the copy takes time."""
    _weight_scalar(state, value.device).copy_from(value)
    return _read_if_on_cpu(state, value)


def _read_if_on_cpu(state: TrainState, value: Tensor | float) -> float | None:
    if not isinstance(value, Tensor):
        return value
    return _weight_scalar(state, value.device).try_read() if value.device.type == "cpu" else None


def _all_reduce_weights(local: Tensor, spec: ShardSpec) -> tuple[Tensor, Tensor]:
    """Return the sums of ``local`` over the ranks that share gradients and over all ranks; equal unless replicas are split.

    Collective: one all-reduce over all ranks.
    """
    if get_dist_info().world_size == 1:
        return local, local
    counted = local if spec.counts_in_loss else torch.zeros_like(local)
    if spec.replica_info is None:
        total = counted.clone()
        dist.all_reduce(total)
        return total, total
    by_replica = local.new_zeros(spec.replica_info.count, *local.shape)
    by_replica[spec.replica_info.index] = counted
    dist.all_reduce(by_replica)
    return by_replica[spec.replica_info.index], by_replica.sum(0)


class MetricAccumulator:
    """Sums of totals and weights by name, in float64, exact for many tokens. Host sync: none.

    Sums of numbers stay numbers. A CPU tensor is read, because its value is there: a float of Python adds as float64 does, in a
    fifth of the time of tensors. A dispatch mode that counts or simulates operations sees the operations of a GPU instead.
    """

    __slots__ = ("_device", "_reads_cpu", "_sums", "_wide")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reads_cpu = device.type == "cpu" and _get_current_dispatch_mode() is None
        self._wide: Tensor | None = None
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": (0, 0)}

    def add(self, loss: LossSum) -> None:
        """Add the numbers of one microbatch: ``loss``, ``terms`` and ``aux``."""
        sums, weight = self._sums, loss.weight
        totals, weights = sums["loss"]
        # Most weights are counts, and most losses have one total.
        sums["loss"] = self._plus(totals, loss.total), weights + weight if type(weight) is int else self._plus(weights, weight)
        if loss.terms or loss.aux:
            for name, (total, weight) in (*loss.terms.items(), *loss.aux.items()):
                totals, weights = sums.get(name, (0, 0))
                sums[name] = self._plus(totals, total), self._plus(weights, weight)

    def _plus(self, current: Tensor | float, value: Tensor | float) -> Tensor | float:
        """Return the sum. Mutates: ``current``, if it is a tensor."""
        if type(value) is Tensor and self._reads_cpu and value.is_cpu:
            return current + value.item()
        if not isinstance(value, Tensor):
            return current + value
        value = value.detach()
        if value.ndim:
            value = value.reshape(())
        if isinstance(current, Tensor):
            if self._wide is None:
                self._wide = torch.empty_like(current)
            # A copy to float64 and an addition take half the time of an addition that converts.
            return current.add_(self._wide.copy_(value))
        # A copy, because the loss function may keep adding to its own tensor.
        first = value.to(self._device, torch.float64, copy=True)
        return first + current if current else first

    def add_names(self, names: Iterable[str]) -> None:
        """Add metrics of weight zero, so that a rank without samples has the same metrics as the others."""
        for name in names:
            self._sums.setdefault(name, (0, 0))

    def metrics(self) -> Metrics:
        """Return the sums so far as scalars ``[]`` on the device."""
        # Many sums have the same weight as a Python number, so its tensor is shared.
        constants: dict[float, Tensor] = {}
        return {
            name: Metric(self._as_tensor(total, constants), self._as_tensor(weight, constants))
            for name, (total, weight) in self._sums.items()
        }

    def _as_tensor(self, value: Tensor | float, constants: dict[float, Tensor]) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value not in constants:
            # torch.full fills on the device; torch.tensor would copy from the host.
            constants[value] = torch.full((), value, dtype=torch.float64, device=self._device)
        return constants[value]

    def loss(self) -> tuple[Tensor | float, Tensor | float]:
        """Return total and weight of the loss so far: numbers where the host knows them."""
        return self._sums["loss"]


def check_loss(loss: object, *, caller: str) -> LossSum:
    """Return ``loss`` if it is a ``LossSum`` of single numbers, and its weights have no graph.

    Raises:
        ConfigError: ``loss`` is another value.
    """
    if not isinstance(loss, LossSum):
        raise ConfigError(f"{caller}: loss_fn must return a LossSum, got {_describe_return_value(loss)}.")
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        raise ConfigError(
            f"{caller}: LossSum.total must be one number (a tensor []), got {describe_value(loss.total)}. Sum it."
        )
    # Most weights are counts.
    if type(loss.weight) is not int:
        _check_weight_value(loss.weight, caller)
    if loss.terms or loss.aux:
        _check_terms_and_aux(loss, caller)
    return loss


def _check_weight_value(weight: Tensor | float, caller: str) -> None:
    if not is_number(weight):
        raise ConfigError(f"{caller}: LossSum.weight must be one number, got {describe_value(weight)}. Sum it.")
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise _weight_with_graph(caller, "LossSum.weight")


def _weight_with_graph(caller: str, name: str) -> ConfigError:
    return ConfigError(
        f"{caller}: {name} must be a constant, got a tensor with a graph, whose gradient the step would leave out: it adds up "
        "the weights of all ranks, and divides by the sum. Pass weight.detach() if the weight is a count. For the gradient of "
        "a quotient, divide in the loss, and count samples: dt.LossSum(total=len(x) * loss / weight, weight=len(x))."
    )


_WRAP_ADVICE = 'wrap loss_fn in dt.mean_loss(loss_fn, weight=lambda batch: len(batch["labels"]))'


def _describe_return_value(value: object) -> str:
    """Describe a return value that is not a ``LossSum``, with advice."""
    kind = type(value).__name__
    if value is None:
        return "None. End loss_fn with `return dt.LossSum(total=loss, weight=count)`"
    if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
        return f"{kind} {list(value.shape)} without a graph. Leave out .detach() and no_grad. For a mean, {_WRAP_ADVICE}"
    if isinstance(value, Tensor):
        return f"{kind} {list(value.shape)}. For a mean, {_WRAP_ADVICE}. For a sum, return dt.LossSum(total=loss, weight=count)"
    if is_number(value):
        return f"the number {value!r}, which has no graph. Return the tensor without .item(). For a mean, {_WRAP_ADVICE}"
    # An output of transformers is a mapping with attributes.
    if isinstance(getattr(value, "loss", None), Tensor):
        return f"{kind}. Use dt.transformers_loss as loss_fn, which counts the labels of model(**batch)"
    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}. Return dt.LossSum(total=loss, weight=count, aux={{'accuracy': (right, count)}})"
    return f"{kind}. Return dt.LossSum(total=loss, weight=count). For a mean, {_WRAP_ADVICE}"


def _check_terms_and_aux(loss: LossSum, caller: str) -> None:
    for kind, metrics in (("terms", loss.terms), ("aux", loss.aux)):
        for name, pair in metrics.items():
            if name == "loss":
                raise ConfigError(f"{caller}: LossSum.{kind}: the name 'loss' belongs to the main loss. Choose another name.")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(
                    f"{caller}: LossSum.{kind}[{name!r}] must be (total, weight), got {describe_value(pair)}. "
                    "Give the sum and the count, not their quotient."
                )
            invalid = [value for value in pair if not is_number(value)]
            if invalid:
                raise ConfigError(
                    f"{caller}: LossSum.{kind}[{name!r}] must be single numbers, got {describe_value(invalid[0])}. Sum it."
                )
            if kind == "terms" and isinstance(pair[1], Tensor) and pair[1].requires_grad:
                raise _weight_with_graph(caller, f"the weight of LossSum.terms[{name!r}]")
    both = [name for name in loss.terms if name in loss.aux]
    if both:
        raise ConfigError(f"{caller}: {both[0]!r} names a term and an aux. Leave out the aux, because a term is a metric, too.")


def is_number(value: object) -> bool:
    """Return True if ``value`` is one number: of Python, of NumPy, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | Real)


def describe_value(value: object) -> str:
    """Return ``value`` for a message; for a tensor, its shape."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def make_metric(total: Tensor | float, weight: Tensor | float, device: torch.device | None = None) -> Metric:
    """Make a ``Metric`` in float64 on ``device``, without a host sync. Sums of many tokens stay exact.

    Args:
        total: weighted sum on this rank, scalar ``[]`` or a number.
        weight: weight of the sum, scalar ``[]`` or a number.
        device: device of the metric, such as ``state.device``. None takes the device of ``total`` or ``weight``, and for
            two numbers the device of this rank.

    Example:
        >>> import dtrain as dt
        >>> metric = dt.step.make_metric(torch.tensor(3.0), 2)
        >>> metric.total.item(), metric.weight.item()
        (3.0, 2.0)
    """
    if device is None:
        tensor = next((x for x in (total, weight) if isinstance(x, Tensor)), None)
        device = tensor.device if tensor is not None else get_dist_info().device

    def scalar(x: Tensor | float) -> Tensor:
        # torch.full fills on the device. torch.tensor would copy from the host.
        return (
            x.detach().to(device, torch.float64)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=device)
        )

    return Metric(scalar(total), scalar(weight))


def unit_weight(device: torch.device) -> Tensor:
    """Return the weight of a metric that counts once: float64 ``[]``, cached per device, never modified."""
    weight = _ones(device)
    # A simulated step makes fake tensors, which must not be cached.
    if type(weight) is not Tensor:
        _ones.cache_clear()
    return weight


@cache
def _ones(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float64, device=device)


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Add two metrics: totals and weights of shared names are added, other names are kept.

    Start with ``{}`` and add the metrics of each step. ``reduce_metrics`` of the sum is the exact mean over all steps, in one
    exchange. A mean of the steps' means would overweight short steps.

    Args:
        a: metrics by name.
        b: metrics by name.

    Example:
        >>> import dtrain as dt
        >>> step_metrics = {"loss": Metric(torch.tensor(4.0), torch.tensor(2.0))}
        >>> dt.step.add_metrics(dt.step.add_metrics({}, step_metrics), step_metrics)["loss"]
        Metric(total=tensor(8.), weight=tensor(4.))
    """
    return {**a, **b, **{name: a[name] + b[name] for name in a if name in b}}


def add_names_of_peers(metrics: Metrics, device: torch.device) -> Metrics:
    """Return ``metrics`` with zeros for the metrics that only other ranks have.

    Collective: one exchange of JSON on the control group.
    """
    names = cast("list[list[str]]", all_gather_json(list(metrics), caller="step"))
    missing = [name for name in dict.fromkeys(chain.from_iterable(names)) if name not in metrics]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {**metrics, **{name: Metric(zero, zero) for name in missing}}
