"""Selective backprop: gradients of the samples with the largest losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dtrain.batch import BatchSpec, FailedBatch, check_microbatch_size, count_samples_and_tokens, select_samples, to_device
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.shard.buffers import BufferSnapshot
from dtrain.shard.unshard import is_unsharded, reshard
from dtrain.state import TrainState
from dtrain.step.microbatches import Microbatches, split_microbatches
from dtrain.transform import GradFn, Transform, make_step_context
from dtrain.typing import Batch, Metrics, Schedule, TransformState

_NAME = "selective_backprop"

SampleLossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""``(model, batch) -> losses [batch]``: one number for each sample."""


def select_by_loss(
    losses: Tensor, keep: float, *, generator: torch.Generator | None = None, uniforms: Tensor | None = None
) -> Tensor:
    """The indices of a share of the samples, drawn so that those with large losses are likelier to be in it.

    Formula: ``ceil(keep * n)`` of ``n`` samples, drawn one after another without putting back, each with a chance proportional
    to ``percentile ** (1 / keep - 1)`` among those left, where ``percentile = (rank + 0.5) / n`` and ``rank`` counts the
    samples with a smaller loss

    The exponent is the one at which the paper's probability of keeping a sample, ``percentile ** exponent``, has the mean
    ``keep``; drawing a fixed number keeps shapes, and costs, the same in each step. Percentiles are those within ``losses``.

    Args:
        losses: ``[n]``, of any float dtype; NaN counts as the largest.
        keep: the share kept, ``0 < keep <= 1``.
        generator: on the device of ``losses``.
        uniforms: ``[n]`` in ``[0, 1]``, in place of what would be drawn: the sample with the largest
            ``log(uniform) / chance`` comes first, and so on.

    Returns:
        Ascending indices, int64 ``[ceil(keep * n)]``, on the device of ``losses``.

    Host sync: none.

    Raises:
        ConfigError: ``keep`` out of its range, ``losses`` or ``uniforms`` of another shape, or not one of ``generator`` and
            ``uniforms``.

    Source: Jiang et al. 2019, arXiv:1910.00762, section 3; drawing by keys, Efraimidis and Spirakis 2006.

    Example:
        >>> losses = torch.tensor([0.1, 0.9, 0.5, 0.2])
        >>> select_by_loss(losses, 0.5, uniforms=torch.full((4,), 0.5)).tolist()  # the largest, when all draw alike
        [1, 2]
        >>> select_by_loss(losses, 0.5, uniforms=torch.tensor([0.99, 0.5, 0.01, 0.5])).tolist()
        [0, 1]
    """
    _check_keep("select_by_loss", keep)
    if losses.ndim != 1:
        raise ConfigError(f"select_by_loss: needs losses [n], one for each sample, got shape {tuple(losses.shape)}")
    if (generator is None) == (uniforms is None):
        raise ConfigError("select_by_loss: needs a generator, or uniforms in its place; give one of them")
    count = len(losses)
    if uniforms is None:
        uniforms = torch.rand(count, generator=generator, dtype=torch.float64, device=losses.device)
    elif uniforms.shape != losses.shape:
        raise ConfigError(f"select_by_loss: needs a uniform for each of {count} losses, got shape {tuple(uniforms.shape)}")
    known = losses.detach().double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    percentiles = (torch.searchsorted(known.sort().values, known) + 0.5).double() / count
    # The key is -log(uniform) / chance, and its logarithm is compared: chances may be smaller than the smallest float64.
    keys = (-uniforms.double().log()).log() - (1.0 / keep - 1.0) * percentiles.log()
    return torch.argsort(keys, stable=True)[: _num_kept(count, keep)].sort().values


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
    """Train on a share of each batch, in which samples with large losses are likelier to be.

    A forward without gradients, in the model's own mode, gives the losses of this rank's samples; ``select_by_loss`` draws
    among them, and the step goes on with those drawn: the gradient is that of the mean over the samples kept. Each rank keeps
    that share of its own samples. The clock counts the samples that are trained on. Buffers that the first forward changes
    (the statistics of BatchNorm) are put back; dropout draws in it from the global generator as in any other.

    Formula: ``batch = batch[select_by_loss(sample_losses(model, batch), keep)]``

    Args:
        sample_losses: ``(model, batch) -> losses [batch]``. Loss wrappers and autocast are not around it. It may look at
            smaller pictures: what Composer calls a scale factor is an ``interpolate`` in this function.
        keep: the share, ``0 < keep <= 1``, or a schedule of such, read at the step about to run.
        start: from when on. Composer's is ``"0.5dur"``; the paper begins at once.
        end: until when, None for ever. Composer's is ``"0.9dur"``.
        interrupt: the first step after each such interval takes the whole batch, ``2`` every second one, as in Composer.
        microbatch_size: samples of a forward without gradients; None takes all at once.
        batch_spec: where the batch axis is; None takes the first one. The same that ``microbatch_step`` was given.

    Mutates: as any step.
    Collective: one record on the control group, and the gathers of the further forwards, of which all ranks run as many as the
    rank that has most samples.
    Host sync: none; one for each sequence in a batch that has an entry per sample (names of files).

    Raises:
        ConfigError: ``sample_losses`` is no function, ``keep`` or a bound is out of its range; from ``Step.init`` on, a mesh
            with context parallelism, whose ranks see a part of each sample; in a step, ``keep`` of a schedule, or losses of
            another shape than ``[batch]``.
        Exception: whatever ``sample_losses`` or the model raises.

    Source: Jiang et al. 2019, arXiv:1910.00762; a fixed number of samples, and percentiles within a batch, as in Composer.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [selective_backprop(lambda model, x: model(x)[:, 0], keep=0.01)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(state, torch.tensor([[1.0], [4.0], [2.0]]))  # the chance of 4 is 1 - 2e-22
        >>> metrics["loss"].total.item(), model.weight.item(), state.clock.samples
        (4.0, -1.0, 1)
    """
    if not callable(sample_losses):
        raise ConfigError(f"selective_backprop: needs a function (model, batch) -> losses [batch], got {sample_losses!r}")
    # A schedule is read only while the method is active, so it is not checked ahead.
    keep_at = hyperparameter(keep, "selective_backprop: keep", "(0, 1]")
    active, size = _active_window(start, end, interrupt), microbatch_size
    if size is not None:
        check_microbatch_size(size)

    def grad(inner: GradFn) -> GradFn:
        def selected(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if active(state):
                batch = _select_samples(state, batch, keep_at(state.clock), sample_losses, size, batch_spec)
            return inner(state, batch, microbatch_size=microbatch_size)

        return selected

    return Transform(name=_NAME, init=_check_no_context_parallel, grad=grad, uses_grad=False)


def _active_window(
    start: Duration | int | str, end: Duration | int | str | None, interrupt: Duration | int | str | None
) -> Callable[[TrainState], bool]:
    """Whether samples are left out in the step that a state is about to make; the same on all ranks."""
    first = Duration.parse(start, allow_zero=True)
    last, whole = (None if length is None else Duration.parse(length) for length in (end, interrupt))
    if last is not None and first.unit == last.unit and first.value >= last.value:
        raise ConfigError(f"selective_backprop: needs start < end, got start={str(first)!r}, end={str(last)!r}")

    def active(state: TrainState) -> bool:
        clock = state.clock
        inside = clock.reached(first) and (last is None or not clock.reached(last))
        return inside and (whole is None or not clock.crossed(whole))

    return active


def _check_no_context_parallel(state: TrainState) -> TransformState:
    mesh = state.spec.mesh
    if mesh is not None and "cp" in (mesh.mesh_dim_names or ()) and mesh["cp"].size() > 1:
        raise ConfigError(
            "selective_backprop: ranks along cp have a part of each sample, and so of its loss, and would choose differently; "
            "use a mesh without cp"
        )
    return {}


def _select_samples(
    state: TrainState, batch: Batch, keep: float, sample_losses: SampleLossFn, size: int | None, spec: BatchSpec | None
) -> Batch:
    """The samples of ``batch`` to train on; in its place a ``FailedBatch`` where there is an error, for the step to raise."""
    parts, error = Microbatches(batch=batch), None
    try:
        if not isinstance(batch, FailedBatch):
            batch = to_device(batch, state.device)
        parts = split_microbatches(batch, size, batch_spec=spec, split=None, count=None)
    except Exception as problem:  # noqa: BLE001  # of any kind; raised in the step, by all ranks
        error = problem
    rows = all_gather_numbers([len(parts), error is not None], caller=_NAME)
    if any(failed for _, failed in rows):
        return batch if error is None else FailedBatch(error)
    with report_missing_ranks(_NAME), _forward_only(state.model):
        filler = [] if len(parts) else [to_device(parts.padding_microbatch(state.padding_sample), state.device)]
        given = [parts.batches[at] if at < len(parts) else (filler or parts.batches)[0] for at in range(int(max(rows)[0]))]
        found = [sample_losses(state.model, part) for part in given]
    try:
        losses = [_check_losses(losses, part, spec) for losses, part in zip(found, given, strict=True)][: len(parts)]
        if not losses:
            return batch
        return select_samples(
            batch, select_by_loss(torch.cat(losses), keep, generator=make_step_context(state, _NAME).generator), spec
        )
    except Exception as problem:  # noqa: BLE001  # as above
        return FailedBatch(problem)


def _check_losses(losses: object, part: Batch, spec: BatchSpec | None) -> Tensor:
    samples = count_samples_and_tokens(part, spec)[0]
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ConfigError(
            f"selective_backprop: sample_losses must return a tensor [{samples}], a loss for each sample, got {got}; in torch "
            "that is reduction='none'"
        )
    return losses


@contextmanager
def _forward_only(model: nn.Module) -> Iterator[None]:
    """Forwards without gradients in the model's own mode, of which nothing is left but the random numbers drawn.

    They compute with the parameters as they are on entering, also when an earlier forward has left gathered copies.
    """
    whole, buffers = is_unsharded(model), BufferSnapshot(model)
    buffers.capture()
    if not whole:
        reshard(model)
    try:
        with torch.no_grad():
            yield
    finally:
        if not whole:
            reshard(model)
        buffers.restore()


def _num_kept(count: int, keep: float) -> int:
    """``ceil(keep * count)``, where rounding has not made the product a little too large; of some samples at least one."""
    return max(math.ceil(keep * count - 1e-9), min(count, 1))


def _check_keep(caller: str, keep: float) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"{caller}: needs 0 < keep <= 1, got {keep=}")
