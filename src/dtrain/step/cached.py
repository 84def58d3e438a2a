"""``cached_microbatch_step``: the gradient of a loss that sees the whole batch at once, for the memory of a microbatch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from dtrain.batch import BatchSpec, FailedBatch, check_microbatch_size, to_device
from dtrain.errors import ConfigError
from dtrain.shard.reduction import reduction_of
from dtrain.shard.replicas import buffers_restored
from dtrain.state import TrainState
from dtrain.step.attempt import Attempt, attempt_of
from dtrain.step.cached_calls import Calls, StandIn
from dtrain.step.means import warn_of_mean
from dtrain.step.microbatch import run_step
from dtrain.step.parts import CountFn, Parts, samples_and_tokens
from dtrain.step.sums import Sums, checked_loss
from dtrain.step.weights import Weights, promised
from dtrain.types import Batch, LossFn, Metrics, WeightFn

_WHERE = "cached_microbatch_step"


def cached_microbatch_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
    weight_fn: WeightFn | None = None,
) -> tuple[TrainState, Metrics]:
    """``microbatch_step`` for a loss whose samples see each other, as negatives do: the model is cut, the loss is not.

    A contrastive loss of a part of the batch is another loss, with fewer negatives. So here ``loss_fn`` is called once, with
    the whole local batch and a stand-in for the model, which embeds microbatch by microbatch without keeping activations.
    Backward of the loss then stops at these embeddings. At last each microbatch is run again, with the same random numbers,
    and the embeddings' gradient goes back through it. With ``f`` the model and ``L`` the loss of all embeddings ``z``,

        dL/dw = sum over microbatches i of (df(x_i)/dw)^T dL/dz_i,    z_i = f(x_i)

    which is the gradient of the unsplit step, up to rounding, for one further forward. Where everybody has one microbatch, its
    activations are kept, and nothing runs twice.

        def loss_fn(model, batch):
            z = torch.nn.functional.normalize(model(batch), dim=1)
            return my_loss(z, dt.all_gather_with_grad(z))  # a LossSum of this rank's rows against everybody's

        step = dt.compose_step(loss_fn, grad=partial(dt.cached_microbatch_step, microbatch_size=32))

    It takes the place of ``microbatch_step``, also under ``auto_microbatch``, and the same ``loss_fn`` runs with either.

    Args:
        state: not spent; its parameters are not changed.
        batch: this rank's samples, on any device; all of them are moved to the model's device.
        loss_fn: summed loss and weight of the local batch. It calls ``model(...)`` once or several times, on tensors that need
            no gradient; in them and in what the model returns the first axis is that of the samples (or so many rows for each).
            What the model returns is kept whole: let it return embeddings, not hidden states. Parameters that the loss takes
            from the model itself, such as a learned temperature, get their gradient too.
        microbatch_size: samples per forward; None takes the whole local batch at once.
        batch_spec: how samples and tokens of ``batch`` are counted; None takes the first axis and counts no tokens.
        count: counts one: ``batch -> samples``, or ``(samples, tokens)``.
        weight_fn: as of ``microbatch_step``.

    Returns:
        ``state`` with the ranks' agreed tally, and metrics ``loss``, the terms, and the loss function's ``aux``, as local sums.

    A rank without samples calls ``loss_fn`` with its empty batch, so that it is in the loss's collectives with no rows; its
    model runs on zeros, which count nowhere.

    Mutates: as ``microbatch_step``. Buffers change once per microbatch; what a forward under ``no_grad`` would do to them is
        taken back.
    Collective: as ``microbatch_step``, with the model's gathers once more for each microbatch, and those of ``loss_fn`` once.
    Host sync: none.

    Raises:
        ConfigError: the loss never called ``model(...)``; rows of its arguments, or of what it returned, that cannot be told;
            arguments that need a gradient; a sharded part of the model that was called in another way than by ``model(...)``.
        Exception: all that ``microbatch_step`` raises, and as it does.

    Source: Gao et al. 2021, arXiv:2101.06983, section 3.2 (there called GradCache).
    """
    attempt = attempt_of(state.shared)
    if attempt is not None:
        attempt.traces.always_check = True  # how many gathers there are depends on the number of microbatches
    return run_step(
        state,
        batch,
        lambda: (_counted(batch, microbatch_size, batch_spec, count), promised(weight_fn, batch)),
        partial(_accumulate, loss_fn),
        where=_WHERE,
    )


def _counted(batch: Batch, microbatch_size: int | None, spec: BatchSpec | None, count: CountFn | None) -> Parts:
    """What ``batch`` counts, and how many microbatches that makes; they are cut where the model is called."""
    if isinstance(batch, FailedBatch):
        raise batch.error
    samples, tokens = samples_and_tokens(batch, spec=spec, count=count)
    if microbatch_size is not None:
        check_microbatch_size(microbatch_size)
    starts = range(0, samples, microbatch_size or max(samples, 1))
    return Parts(batch=batch, parts=starts, samples=samples, tokens=tokens)


def _accumulate(
    loss_fn: LossFn, state: TrainState, parts: Parts, microbatches: int, weights: Weights, attempt: Attempt | None
) -> Metrics:
    """The three passes; a rehearsal runs the first two whole, since their memory is that of the whole batch."""
    reduction = reduction_of(state.model)
    calls = Calls(state.model, [*parts.parts, parts.samples], microbatches)
    with buffers_restored(state.model) if calls.cached else nullcontext():
        loss = loss_fn(cast(nn.Module, StandIn(calls)), to_device(parts.batch, state.device))
    checked_loss(loss, where=_WHERE)
    if state.step == 0:
        warn_of_mean(loss, _WHERE)
    direct = _gradients(state, calls, weights.objective(loss))
    if calls.cached:
        reduction.begin(apart=state.spec.apart is not None)  # forwards without a backward have left parameters gathered
    run = microbatches if attempt is None else attempt.microbatches(microbatches)
    for index in range(run):
        last = index == run - 1
        reduction.before_microbatch(last=last, params=state.params.values())
        if attempt is not None:
            attempt.enter("forward, later" if index else "forward, first")
        with nullcontext() if calls.counts(index) else buffers_restored(state.model):
            outputs = calls.again(index)
        if attempt is not None:
            attempt.enter("backward, last" if last else "backward, early")
        pairs = outputs if index else [*outputs, *direct]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
    reduction.add_up(state.params.values())
    sums = Sums(state.device)
    sums.add(loss)
    return sums.metrics()


def _gradients(state: TrainState, calls: Calls, objective: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Give ``calls`` the gradient of what they returned; that of parameters which the loss takes from the model itself.

    Those of a sharded model are its gathered ones, since what the loss can see of it is the outermost unit after its forward.
    """
    spec = state.spec
    whole = [state.params[name] for name in spec.left_out] if spec.mesh is not None else list(state.params.values())
    own = [param for param in (*whole, *reduction_of(state.model).gathered()) if param.requires_grad]
    kept = calls.kept()
    if not kept:
        raise ConfigError(
            f"{_WHERE}: the loss never called model(...) for a gradient, so there is nothing to cut into microbatches; embed "
            "by model(...), not by another method of it, or use dt.microbatch_step"
        )
    if any(leaf.grad is not None for leaf in kept):
        raise ConfigError(
            f"{_WHERE}: the loss function has called backward(). The step calls backward itself; return the LossSum"
        )
    found = torch.autograd.grad(objective, [*kept, *own], allow_unused=True)
    if any(param.grad is not None for param in state.params.values()):
        raise ConfigError(
            f"{_WHERE}: the loss ran a sharded part of the model in another way than by model(...), so its gradient would be "
            "lost; do that in the model's forward"
        )
    calls.take(found[: len(kept)])
    return [(param, grad) for param, grad in zip(own, found[len(kept) :], strict=True) if grad is not None]
