"""``microbatch_step``: the gradient of the global weighted mean loss, for any split into microbatches and ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.batch import BatchSpec, count_batch, split_batch, to_device, zeros_like_sample
from dtrain.dist.control import Tally, agree_before_step, spare_sample
from dtrain.dist.init import current
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp import discard_backward, reduce_in_backward
from dtrain.state import HostScalar, TrainState
from dtrain.tensors import scale_
from dtrain.types import Batch, LossFn, LossSum, Metrics, add_metrics, as_metric, metrics_of


def microbatch_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
) -> tuple[TrainState, Metrics]:
    """Leave the gradient of the mean loss over the global batch in ``.grad``, and return the state and local metrics.

    The mean is the sum of ``LossSum.total`` over all microbatches and ranks, divided by the sum of ``LossSum.weight``: the
    same for every microbatch size, world size and split, up to rounding. A rank may have fewer samples than the others, or
    none: it repeats a microbatch with weight zero, so that all ranks run the same number of forwards and backwards.

    Args:
        state: not spent; its parameters are not changed.
        batch: this rank's samples, on any device; microbatches are moved to the model's device.
        loss_fn: summed loss and weight of one microbatch.
        microbatch_size: samples per forward and backward; None takes the whole local batch at once.
        batch_spec: where the batch axis is and how tokens are counted; None takes the first axis and counts no tokens.

    Returns:
        ``state`` with the ranks' agreed tally, and metrics ``loss`` plus the loss function's ``aux``, as local sums.

    Mutates: ``.grad`` of the parameters; what was there before is dropped.
    Collective: one record on the control group, the model's own gathers, one reduction of gradients (in the last
    microbatch's backward), and one all-reduce of the weight (float64 ``[]``).
    Host sync: none.

    Raises:
        StaleStateError: ``state`` was stepped already.
        Exception: whatever ``loss_fn`` or the model raises; no gradient of the broken step is left then, so it may be tried
            again if all ranks do.
        StepError: no rank has a sample, no parameter got a gradient, or the global weight is zero. On a GPU the weight
            reaches the host late: the gradient of such a step is zero, and the next step raises.
    """
    state.check_fresh("microbatch_step")
    _check_laid_out(state)
    samples, tokens = count_batch(batch, batch_spec)
    parts = _parts(batch, samples, microbatch_size, batch_spec)
    tally = _agree(state, samples, tokens, len(parts))
    state.drop_gradients()
    metrics: Metrics = {}
    try:
        for index in range(tally.microbatches):
            reduce_in_backward(state.model, now=index == tally.microbatches - 1)
            real = index < len(parts)
            part = to_device(parts[index] if real else _filler(parts, batch), state.device)
            loss = loss_fn(state.model, part)
            (loss.total if real else loss.total * 0.0).backward()
            metrics = add_metrics(metrics, _metrics_of(loss, state.device, real))
    except BaseException:
        discard_backward(state.model)
        state.drop_gradients()
        raise
    finally:
        reduce_in_backward(state.model, now=True)
    _divide_by_global_weight(state, metrics["loss"].weight)
    return replace(state, tally=tally), metrics


def _check_laid_out(state: TrainState) -> None:
    if state.spec.mesh is None and current().world_size > 1:
        raise ConfigError(
            f"microbatch_step: {current().world_size} ranks, but the model is on none of their meshes, so gradients would not "
            "be reduced; call dt.shard_model before Step.init"
        )


def _parts(batch: Batch, samples: int, microbatch_size: int | None, spec: BatchSpec | None) -> list[Batch]:
    if microbatch_size is None:
        return [batch] if samples else []
    return split_batch(batch, microbatch_size, spec=spec)


def _agree(state: TrainState, samples: int, tokens: int, microbatches: int) -> Tally:
    weight = state.shared.weight
    value = weight.peek() if weight is not None else None
    try:
        tally = agree_before_step(
            samples=samples, tokens=tokens, microbatches=microbatches, weightless=value is not None and not value > 0
        )
    except StepError:
        if weight is not None:
            weight.clear()  # said once; the next step is judged by its own weight
        raise
    # A second call for one step (a retry, a method that needs two gradients) adds its time to that of the first.
    return replace(tally, seconds=tally.seconds + (state.tally.seconds if state.tally else 0.0))


def _filler(parts: list[Batch], batch: Batch) -> Batch:
    """A microbatch to run at weight zero: this batch's first, else the sample that the loader spared, else one of zeros.

    It depends on the position in the data alone, not on what this process ran before: dropout draws from the global
    generator for it too, and a resumed run must draw alike.
    """
    if parts:
        return parts[0]
    spare = spare_sample()
    return zeros_like_sample(batch) if spare is None else spare


def _metrics_of(loss: LossSum, device: torch.device, real: bool) -> Metrics:
    metrics = metrics_of(loss, device)
    return metrics if real else {name: as_metric(0.0, 0.0, device) for name in metrics}


def _divide_by_global_weight(state: TrainState, weight: Tensor) -> None:
    weight = weight.clone()
    if current().world_size > 1:
        dist.all_reduce(weight)
    grads = [param.grad for param in state.params.values() if param.grad is not None]
    if not grads:
        raise StepError(
            "microbatch_step: no parameter got a gradient; does the loss depend on the model, and is any parameter trainable?"
        )
    # Nothing is known of the weight here without waiting for the device: zero must not poison the parameters with NaN.
    scale_(grads, torch.where(weight > 0, 1.0 / weight, 0.0))
    host = state.shared.weight = state.shared.weight or HostScalar(weight.device)
    host.post(weight)
    value = host.peek() if weight.device.type == "cpu" else None
    if value is not None and not value > 0:
        host.clear()
        raise StepError(
            f"microbatch_step: step {state.step}: the weights of all ranks add up to {value:g}, so the mean loss is undefined; "
            "look for a batch in which everything is masked"
        )
