"""Reduce metrics over all ranks, and compute metrics of tokens: their rate, their accuracy, their mismatch with a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain import spans
from dtrain.dist.dtensor import local_part
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.ragged import all_gather_by_rank
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, StepError
from dtrain.launch import heartbeats
from dtrain.schedules.clock import Clock
from dtrain.step.normalization import make_metric
from dtrain.typing import Metrics


def reduce_metrics(metrics: Metrics) -> dict[str, float]:
    """Compute the global weighted mean of every metric: sum of totals over sum of weights, over all ranks.

    Args:
        metrics: local sums and weights, with the same names on every rank; sums of several steps may be added first. A pair
            ``(total, weight)`` may hold numbers in place of scalar tensors.

    Collective: one all-reduce of float64, two numbers a name and a check of the names, in whole rows of 64.
    Host sync: one, to read the numbers.

    Example:
        import dtrain as dt

        for batch in loader:
            state, metrics = step(state, batch)
            if state.crossed("100ba"):
                log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: no metrics, one metric without its name, or a metric that is not a pair of scalars.
        StepError: a metric has weight zero over all ranks, or names differ between ranks.
        DistError: a rank did not come, or is lost.
    """
    # The comparison with a dict is faster than that with an abstract class.
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"reduce_metrics: metrics must be the metrics of a step by name, got {type(metrics).__name__}. "
            "Pass all of them, and take one of the result: dt.reduce_metrics(metrics)['loss']."
        )
    if not metrics:
        raise ConfigError("reduce_metrics: metrics must have at least 1 metric, got none. Pass the metrics of a step.")
    names, ranks = sorted(metrics), get_dist_info().world_size
    scalars = [scalar for name in names for scalar in metrics[name]]
    if {*map(type, scalars)} != {Tensor}:
        scalars = _as_tensors(metrics, names)
    heartbeats.heartbeat("reduce_metrics")
    if ranks > 1:
        values = _all_reduce(scalars, names, ranks)
    else:
        values = [scalar.item() for scalar in scalars] if scalars[0].is_cpu else _stack(scalars).tolist()
    totals, weights = values[::2], values[1::2]
    if 0 in weights:
        raise StepError(
            f"reduce_metrics: metric {names[weights.index(0)]!r} must have a positive weight, got 0 over all ranks. "
            "Check that the loss counts some sample on some rank."
        )
    return {name: total / weight for name, total, weight in zip(names, totals, weights, strict=True)}


def _as_tensors(metrics: Metrics, names: Sequence[str]) -> list[Tensor]:
    """Return totals and weights as scalar tensors on one device: that of the first tensor, else that of this rank.

    Raises:
        ConfigError: a value is neither a number nor a tensor.
    """
    for name in names:
        if len(metrics[name]) != 2 or not all(isinstance(value, Tensor | int | float) for value in metrics[name]):
            raise ConfigError(
                f"reduce_metrics: metric {name!r} must be a pair of scalars (total, weight), got {metrics[name]!r}. "
                "Use dt.step.make_metric(total, weight)."
            )
    values = [value for name in names for value in metrics[name]]
    device = next((value.device for value in values if isinstance(value, Tensor)), get_dist_info().device)
    return [scalar for name in names for scalar in make_metric(*metrics[name], device)]


def _all_reduce(scalars: Sequence[Tensor], names: Sequence[str], ranks: int) -> list[float]:
    """Return the sums over all ranks. Collective: as ``reduce_metrics``."""
    label, count = _hash_names(tuple(names)), len(scalars)
    # Rows of 64 let ranks with a few more names join the same collective, so that all ranks raise.
    row = torch.zeros(-(-(count + 1) // 64) * 64, dtype=torch.float64, device=scalars[0].device)
    row[:count] = _stack(scalars)
    row[-1].fill_(label)
    # On a GPU the read waits for earlier work. That time belongs to the step or to the enclosing span.
    with spans.span("reduce") if row.is_cpu else nullcontext(), report_missing_ranks("reduce_metrics"):
        dist.all_reduce(row)
        *values, labels = row.tolist()
    if labels != ranks * label:
        raise StepError(
            f"reduce_metrics: metrics must have equal names on all ranks, got {names} on this rank. "
            "Return the same metrics from loss_fn on every rank."
        )
    return values[:count]


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    # The comparison of dtypes is faster than a call of double().
    return torch.stack([scalar if scalar.dtype == torch.float64 else scalar.double() for scalar in scalars])


@lru_cache(maxsize=64)
def _hash_names(names: tuple[str, ...]) -> int:
    """Return a number below 2**32, so that its sum over ranks is exact in float64."""
    return derive_seed(*names) % 2**32


def gather_metric_states(state: Tensor, group: Any = None, *, mesh: DeviceMesh | None = None) -> list[Tensor]:
    """Gather the state of a metric from every rank, in the form of torchmetrics' ``dist_sync_fn``.

    ``MulticlassAccuracy(10, dist_sync_fn=partial(dt.monitors.gather_metric_states, mesh=mesh))`` counts a sample once if
    several ranks share the sample, and accepts ranks that never called ``update``. torchmetrics' own function assumes
    different data on all ranks and fails on an empty state that is not floating-point or has several axes.

    Args:
        state: tensor of any shape; an empty tensor is the state of a rank without data.
        group: argument of torchmetrics; must be None, all ranks.
        mesh: device mesh, as in ``all_gather_ragged``.

    Returns:
        One tensor for each rank with different data, without gradient.

    Collective: that of ``all_gather_ragged``; every rank must call ``compute``.

    Example:
        from functools import partial

        import dtrain as dt

        accuracy = MulticlassAccuracy(10, dist_sync_fn=partial(dt.monitors.gather_metric_states, mesh=mesh))
        accuracy.update(logits, labels)
        log(state.clock.step, {"eval/accuracy": float(accuracy.compute())})

    Raises:
        ConfigError: ``group`` is given, or dtypes or shapes differ beyond the first axis.
        PeerError: the same error on another rank.
    """
    if group is not None:
        raise ConfigError("gather_metric_states: process_group must be None, got a group. Remove process_group and pass mesh=.")
    batched = state.unsqueeze(0) if state.ndim == 0 else state
    states = all_gather_by_rank(batched if batched.numel() else None, mesh=mesh) or [batched]
    return [cast(Tensor, each[0]) for each in states] if state.ndim == 0 else states


def tokens_per_second(since: Clock, now: Clock) -> float:
    """Compute the tokens per second of all ranks between two clocks of a run; 0 if no time has passed.

    Example:
        >>> import dtrain as dt
        >>> from dtrain.schedules.clock import Clock
        >>> dt.monitors.tokens_per_second(Clock(), Clock(step=1, tokens=1000, seconds=2.0))
        500.0
    """
    seconds = now.seconds - since.seconds
    return (now.tokens - since.tokens) / seconds if seconds > 0 else 0.0


def token_accuracy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Count the targets with the largest logit, and the targets that count, for ``LossSum.aux``.

    The metric is exact over microbatches and ranks of any size.

    Formula: ``sum(counts * (argmax(logits) == targets))``, ``sum(counts)`` with ``counts = (targets != ignore_index) & mask``

    Args:
        logits: ``[*, classes]``, any float dtype. A DTensor that is sharded along the classes is not gathered.
        targets: ``[*]`` int64.
        ignore_index: target that does not count, as in ``cross_entropy``.
        mask: ``[*]`` bool, or numbers of which 0 does not count; None counts all. For a part of the tokens, such as answers.

    Returns:
        Two scalars ``[]``, float64, on the device of ``logits``, without gradient. Of equal logits the first is the largest. A
        row with NaN is never correct.

    Collective: for a DTensor that is sharded along the classes two all-reduces of one number per token.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 2.0]])
        >>> correct, counted = dt.monitors.token_accuracy(logits, torch.tensor([0, 1, 1, -100]))
        >>> correct.item(), counted.item()
        (2.0, 3.0)

    Raises:
        ConfigError: shapes that do not match, or a DTensor that is sharded along another axis.

    Source: the share of correct predictions.
    """
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"token_accuracy: needs logits [*, classes] and targets [*], got {tuple(logits.shape)} and {tuple(targets.shape)}. "
            "Give one target per prediction."
        )
    if mask is not None and mask.shape != targets.shape:
        raise ConfigError(
            f"token_accuracy: mask must be {tuple(targets.shape)} like targets, got {tuple(mask.shape)}. "
            "Compute the mask from the targets."
        )
    counts = targets != ignore_index
    if mask is not None:
        counts = counts & (mask != 0)
    predictions = _argmax(logits.detach())
    return ((predictions == targets) & counts).sum().double(), counts.sum().double()


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit ``[*]``, the first of equal logits; an invalid index if a logit is NaN."""
    local, first_class, group = local_part(logits, caller="token_accuracy")
    local = local.detach()
    largest, index = local.max(dim=-1)
    no_class = torch.iinfo(torch.int64).max
    if group is None:
        return torch.where(largest.isnan(), no_class, index)
    wide = torch.where(largest.isnan(), math.inf, largest.float() if largest.dtype.itemsize < 4 else largest)
    # The maximum must not contain NaN, because backends differ in the maximum of NaN.
    maximum = wide.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    winner = torch.where(wide == maximum, index + first_class, no_class)
    # NaN on one rank gives -1, the minimum over ranks, which is not a class.
    winner = torch.where(largest.isnan(), -1, winner)
    dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return winner


def perplexity(loss: float) -> float:
    """Compute the perplexity of a mean cross entropy in nats; infinite if too large for a float.

    Pass the mean loss over all tokens. A mean of perplexities would be wrong.

    Formula: ``exp(loss)``

    Source: Jelinek et al. 1977, Perplexity: a measure of the difficulty of speech recognition tasks.

    Args:
        loss: mean cross entropy per token, in nats.

    Example:
        >>> import dtrain as dt
        >>> metrics = {"loss": 2.0}  # from dt.reduce_metrics
        >>> round(dt.monitors.perplexity(metrics["loss"]), 3)
        7.389
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def rollout_mismatch(training: Tensor, rollout: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum the difference between the log-probabilities of training and of the rollout, as metrics of a loss.

    In the first update behind a rollout both come from the same weights, so a difference is an error of the sampler: other
    kernels, another dtype, stale weights, another temperature or mask. In later updates it also grows by the updates.

    Formula: with ``d = training - rollout``, the means of ``exp(d) - 1 - d`` (``rollout_kl``), of ``|exp(training) -
    exp(rollout)|`` (``rollout_gap``) and of ``1`` where ``|d| > 0.01``, else 0 (``rollout_differs``), over the tokens

    Args:
        training: log-probabilities of the sampled tokens in training, any shape; no gradient flows.
        rollout: those that the sampler wrote beside the tokens, same shape.
        mask: tokens that count, same shape; None counts all.

    Returns:
        Sum and number of tokens by metric, for ``LossSum(aux=...)``, so that ``dt.reduce_metrics`` makes global means.

    Example:
        >>> import dtrain as dt
        >>> now, then = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5])
        >>> sums = dt.monitors.rollout_mismatch(now, then)
        >>> {name: round((total / count).item(), 4) for name, (total, count) in sums.items()}
        {'rollout_kl': 0.0533, 'rollout_gap': 0.0439, 'rollout_differs': 0.5}

    Raises:
        ConfigError: tensors of different shapes.

    Source: the estimator of the divergence is k3 of Schulman 2020, "Approximating KL divergence".
    """
    for name, given in {"rollout": rollout, "mask": mask}.items():
        if given is not None and given.shape != training.shape:
            raise ConfigError(
                f"rollout_mismatch: {name} must have the shape of training {tuple(training.shape)}, got {tuple(given.shape)}. "
                "Give one number per token."
            )
    now, then = training.detach(), rollout.detach().to(training.device)
    wide = torch.promote_types(torch.promote_types(now.dtype, then.dtype), torch.float32)
    now, then = now.to(wide), then.to(wide)
    counts = torch.ones_like(now, dtype=torch.bool) if mask is None else mask.to(now.device) != 0
    apart = (now - then).masked_fill(~counts, 0.0)
    values = {
        "rollout_kl": apart.expm1() - apart,
        "rollout_gap": (now.exp() - then.exp()).abs().masked_fill(~counts, 0.0),
        "rollout_differs": (apart.abs() > 0.01).to(wide),
    }
    return {name: (value.sum(), counts.sum()) for name, value in values.items()}
