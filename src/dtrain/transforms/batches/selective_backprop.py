"""Selective backprop: train on the samples of a batch with the largest losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dtrain.arguments import check_number
from dtrain.data.batch import (
    BatchSpec,
    FailedBatch,
    check_microbatch_size,
    check_rows,
    count_samples_and_tokens,
    list_tensors,
    select_samples,
    to_device,
)
from dtrain.dist.collective_replay import EQUAL_MICROBATCHES_ADVICE, check_collectives
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.incident import report_missing_ranks
from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration, parse_window
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.unshard import current_params
from dtrain.state import TrainState
from dtrain.step.microbatches import BatchWatch, Microbatches, split_microbatches
from dtrain.step.transform import GradFn, Transform, make_step_context
from dtrain.typing import Batch, Metrics, Schedule, TransformState

_NAME = "selective_backprop"

SampleLossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""Function ``(model, batch) -> losses [batch]``: one number per sample."""


def select_by_loss(
    losses: Tensor, keep: float, *, generator: torch.Generator | None = None, uniforms: Tensor | None = None
) -> Tensor:
    """Return indices of a random fraction of the samples, with a larger chance for larger losses.

    Formula: ``ceil(keep * n)`` of ``n`` samples, drawn one after another without replacement, each with a chance proportional
    to ``percentile ** (1 / keep - 1)`` among the remaining samples, where ``percentile = (rank + 0.5) / n`` and ``rank`` counts
    the samples with a smaller loss

    The paper keeps a sample with the probability ``percentile ** exponent``. With this exponent its mean is ``keep``. A fixed
    number of samples keeps the shapes and the cost of all steps equal. Percentiles are computed within ``losses``.

    Args:
        losses: ``[n]``, any float dtype; NaN counts as the largest loss.
        keep: fraction of the samples, ``0 < keep <= 1``.
        generator: generator on the device of ``losses``.
        uniforms: ``[n]`` in ``[0, 1]``, instead of a generator; samples are taken in descending order of
            ``log(uniform) / chance``.

    Returns:
        Ascending indices, int64 ``[ceil(keep * n)]``, on the device of ``losses``.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> losses = torch.tensor([0.1, 0.9, 0.5, 0.2])
        >>> dt.transforms.select_by_loss(losses, 0.5, uniforms=torch.full((4,), 0.5)).tolist()
        [1, 2]
        >>> dt.transforms.select_by_loss(
        ...     losses, 0.5, uniforms=torch.tensor([0.99, 0.5, 0.01, 0.5])
        ... ).tolist()
        [0, 1]

    Raises:
        ConfigError: ``keep`` is out of its range, ``losses`` or ``uniforms`` has another shape, or not exactly one of
            ``generator`` and ``uniforms`` is given.

    Source: Jiang et al. 2019, arXiv:1910.00762, section 3; drawing by keys, Efraimidis and Spirakis 2006.
    """
    check_number("select_by_loss", "keep", keep, above=0, maximum=1)
    if losses.ndim != 1:
        raise ConfigError(
            f"select_by_loss: losses must be [n], one per sample, got shape {tuple(losses.shape)}. "
            "Return the losses without their mean."
        )
    if (generator is None) == (uniforms is None):
        got = "neither" if generator is None else "both"
        raise ConfigError(f"select_by_loss: exactly one of generator and uniforms must be given, got {got}. Pass one of them.")
    count = len(losses)
    if uniforms is None:
        uniforms = torch.rand(count, generator=generator, dtype=torch.float64, device=losses.device)
    elif uniforms.shape != losses.shape:
        raise ConfigError(
            f"select_by_loss: uniforms must be [{count}], one per loss, got shape {tuple(uniforms.shape)}. "
            "Draw one number per sample."
        )
    ordered = losses.detach().double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    percentiles = (torch.searchsorted(ordered.sort().values, ordered) + 0.5).double() / count
    # Compare the logarithm of the key -log(uniform) / chance, because a chance may underflow in float64.
    keys = (-uniforms.double().log()).log() - (1.0 / keep - 1.0) * percentiles.log()
    # The subtrahend corrects a rounding: 0.9 * 10 is slightly more than 9.
    kept = max(math.ceil(keep * count - 1e-9), min(count, 1))
    return torch.argsort(keys, stable=True)[:kept].sort().values


def selective_backprop(
    sample_losses: SampleLossFn,
    keep: float | Schedule = 0.5,
    *,
    start: Duration | int | str = 0,
    end: Duration | int | str | None = None,
    interrupt: Duration | int | str | None = None,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
) -> Transform:
    """Train on a fraction of each batch, with a larger chance for samples with larger losses.

    A forward without gradients, in the model's own mode, computes the losses of this rank's samples, and ``select_by_loss``
    draws samples. The step continues with these samples: its gradient is that of the mean over the kept samples. Each rank
    keeps this fraction of its own samples. The clock counts the kept samples. Buffers that the first forward changes (BatchNorm
    statistics) are restored. Dropout in the first forward uses the global generator, as in any forward.

    Formula: ``batch = batch[select_by_loss(sample_losses(model, batch), keep)]``

    Args:
        sample_losses: function ``(model, batch) -> losses [batch]``, called without loss wrappers and autocast. The function
            may shrink the images first, which Composer calls a scale factor.
        keep: fraction of the samples, ``0 < keep <= 1``, or a schedule.
        start: start of the selection. Composer's default is ``"0.5dur"``; the paper starts at once.
        end: end of the selection; None never ends. Composer's default is ``"0.9dur"``.
        interrupt: interval of full batches: the first step of each interval uses the whole batch. ``2`` is every second step,
            as in Composer.
        microbatch_size: samples per forward without gradients; None uses the whole batch.
        batch_spec: axes of the batch, as for ``microbatch_step``; None uses the first axis. Samples are selected by row.

    Mutates: as any step.
    Collective: one record on the control channel, and the gathers of the additional forwards. All ranks run as many forwards as
    the rank with the most samples.
    Host sync: none; one for each sequence in a batch that has an entry per sample (file names).

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> selective = dt.transforms.selective_backprop(
        ...     lambda model, x: model(x)[:, 0], keep=0.01
        ... )
        >>> step = dt.compose_step(loss_fn, [selective])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(
        ...     state, torch.tensor([[1.0], [4.0], [2.0]])
        ... )  # the chance of 4 is 1 - 2e-22
        >>> metrics["loss"].total.item(), model.weight.item(), state.clock.samples
        (4.0, -1.0, 1)

    Raises:
        ConfigError: ``sample_losses`` is not a function, or ``keep`` or a bound is out of its range. From ``Step.init`` on: a
            mesh with context parallelism, whose ranks have a part of each sample. In a step: a value of the schedule ``keep``
            is out of its range, or the losses are not ``[batch]``.
        Exception: any error of ``sample_losses`` or the model.

    Source: Jiang et al. 2019, arXiv:1910.00762; a fixed number of samples, and percentiles within a batch, as in Composer.

    Suggested values:
        ImageNet, ResNet-50; CIFAR-10, ResNet-56: ``keep=0.5``, ``start="0.5dur"``, ``end="0.9dur"``, ``interrupt=2`` (MosaicML
            Composer, method card of selective backprop)
        digits, ResNet-8: ``keep=0.5`` in every step (dtrain, ``benchmarks/ablation.py``)
    When not to use: labels are noisy: wrong labels have the largest losses and are kept. The extra forward also costs more than
        the smaller backward saves if ``keep`` is near 1.
    """
    if not callable(sample_losses):
        raise ConfigError(
            f"selective_backprop: sample_losses must be a function (model, batch) -> losses, got {sample_losses!r}. "
            "Pass a function that returns a loss per sample."
        )
    # A schedule is evaluated only in the active window, so Step.init does not check it.
    keep_at = hyperparameter(keep, "selective_backprop: keep", "(0, 1]")
    active, size = _active_window(start, end, interrupt), microbatch_size
    if size is not None:
        check_microbatch_size(size)

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if active(state):
                batch = _select_samples(state, batch, keep_at(state.clock), sample_losses, size, batch_spec)
            return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    return Transform(name=_NAME, init=_check_no_context_parallel, grad=grad, uses_grad=False)


def _active_window(
    start: Duration | int | str, end: Duration | int | str | None, interrupt: Duration | int | str | None
) -> Callable[[TrainState], bool]:
    """Return a predicate of the state: True if the next step selects samples. The result is the same on all ranks."""
    first, last = Duration.parse(start, allow_zero=True), None
    if end is not None:
        first, last = parse_window(_NAME, start, end)
    full_batch = None if interrupt is None else Duration.parse(interrupt)

    def active(state: TrainState) -> bool:
        clock = state.clock
        inside = clock.reached(first) and (last is None or not clock.reached(last))
        return inside and (full_batch is None or not clock.crossed(full_batch))

    return active


def _check_no_context_parallel(state: TrainState) -> TransformState:
    mesh = state.spec.mesh
    if mesh is not None and "cp" in (mesh.mesh_dim_names or ()) and mesh["cp"].size() > 1:
        raise ConfigError(
            f"selective_backprop: the mesh must not have cp, got cp={mesh['cp'].size()}. Ranks along cp have parts "
            "of samples, so they would select different samples."
        )
    return {}


def _select_samples(
    state: TrainState, batch: Batch, keep: float, sample_losses: SampleLossFn, size: int | None, spec: BatchSpec | None
) -> Batch:
    """Return the samples of ``batch`` to train on, or a ``FailedBatch`` whose error the step raises."""
    parts, error = Microbatches(batch=batch), None
    try:
        if not isinstance(batch, FailedBatch):
            batch = to_device(batch, state.device)
        parts = split_microbatches(batch, size, spec)
        check_rows(batch, spec, parts.samples)
    # The step raises any error on all ranks.
    except Exception as problem:  # noqa: BLE001
        error = problem
    rows, watch = all_gather_numbers([len(parts), error is not None], caller=_NAME), BatchWatch(list_tensors(batch))
    if any(failed for _, failed in rows):
        return batch if error is None else FailedBatch(error)
    # The model's own mode, and random numbers of the global generator.
    with report_missing_ranks(_NAME), current_params(state.model), torch.no_grad(), restore_buffers(state.model):
        outputs = _score(state.model, parts.batches, sample_losses, [int(count) for count, _ in rows])
    try:
        watch.check(_NAME, "sample_losses")
        losses = [_check_losses(output, microbatch, spec) for output, microbatch in zip(outputs, parts.batches, strict=True)]
        if not losses:
            return batch
        generator = make_step_context(state, _NAME).generator
        return select_samples(batch, select_by_loss(torch.cat(losses), keep, generator=generator), spec)
    # The step raises any error on all ranks.
    except Exception as problem:  # noqa: BLE001
        return FailedBatch(problem)


def _score(model: nn.Module, microbatches: Sequence[Batch], fn: SampleLossFn, counts: Sequence[int]) -> list[object]:
    """Return the losses of each microbatch. A rank without a further one takes part in the forwards of the model's units.

    Args:
        counts: number of microbatches of each rank.
    """
    if len(set(counts)) == 1:
        return [fn(model, microbatch) for microbatch in microbatches]
    grad_sync, outputs = grad_sync_of(model), list[object]()
    try:
        with check_collectives(_NAME, EQUAL_MICROBATCHES_ADVICE) as guard:
            grad_sync.follow_plan(lambda: None, compare=False, exchange=guard.exchange_event, uneven=True)
            for index in range(max(counts)):
                grad_sync.before_microbatch(last=True)
                if index < len(microbatches):
                    outputs.append(fn(model, microbatches[index]))
                    grad_sync.complete_forward(torch.zeros((), device="cpu"))
                else:
                    grad_sync.forward_empty()
    finally:
        grad_sync.end_step()
    return outputs


def _check_losses(losses: object, microbatch: Batch, spec: BatchSpec | None) -> Tensor:
    samples = count_samples_and_tokens(microbatch, spec)[0]
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ConfigError(
            f"selective_backprop: sample_losses must return a tensor [{samples}], one loss per sample, got {got}. "
            "Use reduction='none' in torch losses."
        )
    return losses
