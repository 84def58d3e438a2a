"""``microbatch_step``: the gradient of the global weighted mean loss, for any split into microbatches and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dtrain import spans
from dtrain.batch import BatchSpec, to_device
from dtrain.dist.control import Outcome, Tally, Verdict, agree_after_backward, agree_before_step, check_drawn
from dtrain.dist.init import current
from dtrain.dist.rng import draws_digest
from dtrain.dist.timeouts import naming_missing
from dtrain.errors import ConfigError, StepError
from dtrain.memory.gauge import release_cached
from dtrain.shard.reduction import Reduction, reduce_whole_, reduction_of
from dtrain.shard.replicas import BufferWatch, buffers_of, buffers_restored
from dtrain.state import TrainState, check_state
from dtrain.step.attempt import Attempt, attempt_of
from dtrain.step.equal_batches import hash_to_compare, warn_of_equal_batches
from dtrain.step.finite import loss_watch
from dtrain.step.means import warn_of_mean
from dtrain.step.parts import CountFn, Parts, SplitFn, cut
from dtrain.step.place import begin_step, with_agreed_place
from dtrain.step.sums import Sums, checked_loss
from dtrain.step.weights import Weights, divide_, global_weights, promised
from dtrain.types import Batch, LossFn, LossSum, Metrics, WeightFn

_BACKWARD = (
    "microbatch_step: the loss function has called backward(). The step calls backward itself; return the LossSum alone "
    "(torch.autograd.grad with respect to inputs is allowed)"
)


def microbatch_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    split: SplitFn | None = None,
    count: CountFn | None = None,
    weight_fn: WeightFn | None = None,
) -> tuple[TrainState, Metrics]:
    """Leave the gradient of the mean loss over the global batch in ``.grad``, and return the state and local metrics.

    The mean is the sum of ``LossSum.total`` over all microbatches and ranks, divided by the sum of ``LossSum.weight``: the
    same for every microbatch size, world size and split, up to rounding. With ``terms`` it is the sum of such means. A rank
    may have fewer samples than the others, or none: it repeats a microbatch with weight zero, so that all ranks run the same
    number of forwards and backwards. Between ``split_replicas`` and ``join_replicas`` it is the mean over the samples of this
    rank's copy of the model. A loss that gathers the samples of other ranks would see that repetition: take
    ``cached_microbatch_step`` for it, where a rank has no row that is not in the batch.

    Args:
        state: not spent; its parameters are not changed.
        batch: this rank's samples, on any device; microbatches are moved to the model's device.
        loss_fn: summed loss and weight of one microbatch.
        microbatch_size: samples per forward and backward; None takes the whole local batch at once.
        batch_spec: where the batch axis is and how tokens are counted; None takes the first axis and counts no tokens.
        split: cuts a batch that neither describes: ``(batch, microbatch_size) -> microbatches``.
        count: counts one: ``batch -> samples``, or ``(samples, tokens)``.
        weight_fn: this rank's weight of a whole batch, a number or ``[]``, or by term (``{"loss": ..., "router": ...}``).
            Losses with ``terms`` need it; it must count what the losses count.

    Returns:
        ``state`` with the ranks' agreed tally, and metrics ``loss``, the terms, and the loss function's ``aux``, as local sums.

    Mutates: ``.grad`` of the parameters; what was there before is dropped. Buffers that the model's forward changes, which are
    then made equal on all ranks as ``shard_model(buffers=...)`` says.
    Collective: one record on the control group before, and for a sharded model on several ranks one after backward; the
    model's own gathers; in the first step of a model whose parameters are cut one record per unit, which compares the order of
    units; one reduction of gradients per unit (in the last microbatch's backward; with ``accumulate="sharded"``
    in each); one all-reduce of weights (float64); one of gradients that were left out of sharding; one or two of changed
    buffers.
    Host sync: none, but for some values of the first batches on several ranks, if they are on a device: ranks that train on
    equal batches are told; see ``Step.init(equal_batches=)``.

    Raises:
        StaleStateError: ``state`` was stepped already.
        Exception: whatever ``loss_fn`` or the model raises; no gradient of the broken step is left then, so it may be tried
            again if all ranks do.
        ConfigError: a batch that cannot be counted or cut, a loss that is no ``LossSum`` of single numbers, a loss and a
            ``weight_fn`` that do not fit.
        PeerError: so on another rank.
        DistError: a collective timed out or lost a peer; it names the ranks that did not come.
        NonFiniteError: the losses of ten steps in a row were infinite or NaN on some rank. All ranks raise, in a later step,
            because nothing waits for the device. ``dt.nonfinite`` changes the number, or stops the check.
        StepError: no rank has a sample, no parameter got a gradient, ranks ran different units or have weights of different
            terms, or the global weight is zero. On a GPU the weight reaches the host late: the gradient of such a step is zero,
            and the next step raises.
    """
    return run_step(
        state,
        batch,
        lambda: (cut(batch, microbatch_size, spec=batch_spec, split=split, count=count), promised(weight_fn, batch)),
        partial(_accumulate, loss_fn),
        where="microbatch_step",
    )


class Accumulate(Protocol):
    """What a step runs between the ranks' two records: forwards and backwards that leave the gradient of the summed loss."""

    def __call__(
        self, state: TrainState, parts: Parts, microbatches: int, weights: Weights, attempt: Attempt | None
    ) -> Metrics:
        """Run ``microbatches``, or as many of them as the ``attempt`` asks for, and tell it which part of the step begins."""
        ...


def run_step(
    state: TrainState,
    batch: Batch,
    prepare: Callable[[], tuple[Parts, Mapping[str, Tensor | float]]],
    accumulate: Accumulate,
    *,
    where: str,
) -> tuple[TrainState, Metrics]:
    """The frame of a gradient step around ``accumulate``: what ranks agree on, the reduction, and that failures leave nothing.

    Args:
        batch: this rank's, which knows its place in its loader's data.
        prepare: counts this rank's batch, and says its promised weights; its errors reach all ranks.
        where: the name of the step, for messages.
    """
    spans.begin("step", 0)
    try:
        check_state(state, where, f"state, metrics = dt.{where}(state, batch, loss_fn=loss_fn)")
        state.check_fresh(where)
        _check_laid_out(state, where)
        state = state if state.begun is not None else begin_step(state, batch)
        error: Exception | None = None
        try:
            parts, weights = prepare()
        except Exception as problem:  # noqa: BLE001  # of any kind: these are the user's functions; raised below, on all ranks
            parts, weights, error = Parts(batch=None), {}, problem
        attempt = attempt_of(state.shared)
        tally = _agree(state, parts, list(weights), error, attempt)
        state.drop_gradients()
        reduction, buffers = reduction_of(state.model), buffers_of(state.model)
        reduction.begin(apart=state.spec.apart is not None)
        buffers.begin()
        try:
            with naming_missing(where):  # the model's collectives and ours: if one fails, because of whom
                known, metrics = _backward(state, parts, tally, accumulate, weights, attempt)
                outcome = _agree_after(state, reduction, buffers, known, metrics, attempt, tally)
                reduction.keep_order()
                if attempt is None or attempt.at_most is None:
                    check_drawn(tally, state.device)
                    _settle(state, buffers, outcome, known, metrics)
                    loss_watch(state).note(state.step, metrics["loss"].total)
        except BaseException:
            reduction.abort()
            state.drop_gradients()
            raise
        reduction.end()
        return with_agreed_place(state.but(tally=tally)), metrics
    finally:
        spans.end("step")


def _check_laid_out(state: TrainState, where: str) -> None:
    if state.spec.mesh is None and current().world_size > 1:
        raise ConfigError(
            f"{where}: {current().world_size} ranks, but the model is on none of their meshes, so gradients would not "
            "be reduced; call dt.shard_model before Step.init"
        )


def _agree(state: TrainState, parts: Parts, terms: Sequence[str], error: Exception | None, attempt: Attempt | None) -> Tally:
    weight = state.shared.weight
    value = weight.peek() if weight is not None else None
    weightless = value is not None and not value > 0
    if weightless and weight is not None:
        weight.clear()  # said once; the next step is judged by its own weight
    watch = loss_watch(state)
    first = watch.first_of_too_many()
    shared, now = state.shared, time.monotonic()
    seconds, shared.stepped_at = 0.0 if shared.stepped_at is None else now - shared.stepped_at, now
    content = hash_to_compare(state, parts.batch) if error is None and parts.samples else 0
    tally = agree_before_step(
        samples=parts.samples,
        tokens=parts.tokens,
        microbatches=len(parts),
        weightless=weightless,
        diverged=0 if first is None else first + 1,
        in_a_row=watch.limit or 0,
        terms=terms,
        error=error,
        run=id(state.shared),
        step=state.step,
        copies=state.spec.copies,
        draws=draws_digest(state.device) if state.spec.copies > 1 else 0,
        content=content,
        plan=0 if attempt is None else attempt.traces.digest(*_conditions(state), attempt.at_most or 0),
        origin=state.begun.origin if state.begun is not None else None,
        seconds=seconds,
    )
    warn_of_equal_batches(state, tally, content)
    if attempt is not None and not tally.alike:
        attempt.traces.forget()
    # A second call for one step (a retry, a method that needs two gradients) adds its time to that of the first.
    return replace(tally, seconds=tally.seconds + state.tally.seconds) if state.tally else tally


def _conditions(state: TrainState) -> list[int]:
    """What the collectives of a step depend on, beside the number of microbatches: parameters may be frozen, or thawed."""
    return [state.model.training, state.spec.apart is not None, *(param.requires_grad for param in state.params.values())]


def _backward(
    state: TrainState,
    parts: Parts,
    tally: Tally,
    accumulate: Accumulate,
    weights: Mapping[str, Tensor | float],
    attempt: Attempt | None,
) -> tuple[Weights, Metrics]:
    """Forward and backward of the whole step; with an ``attempt`` its failure is noted there, and nothing of it is left."""
    if attempt is None:
        known = global_weights(weights, state.device, state.spec)
        return known, accumulate(state, parts, tally.microbatches, known, None)

    def body() -> tuple[Weights, Metrics]:
        attempt.enter("before")
        known = global_weights(weights, state.device, state.spec)
        metrics = accumulate(state, parts, tally.microbatches, known, attempt)
        _reserve(state, buffers_of(state.model))
        return known, metrics

    def undo() -> None:
        reduction_of(state.model).abort_all()
        state.drop_gradients()
        release_cached(state.device)

    attempt.samples = parts.samples
    # Of what is agreed alone: ranks with different plans would run in different modes.
    plan = (min(tally.microbatches, attempt.at_most or tally.microbatches), *_conditions(state))
    return attempt.guarded(body, plan=plan, undo=undo) or (Weights(local={}, factors={}), {})


def _accumulate(
    loss_fn: LossFn, state: TrainState, parts: Parts, microbatches: int, weights: Weights, attempt: Attempt | None
) -> Metrics:
    """Forward and backward of every microbatch; those beyond this rank's own count nothing."""
    device, reduction = state.device, reduction_of(state.model)
    microbatches = microbatches if attempt is None else attempt.microbatches(microbatches)
    away = not parts.lie_on(device)
    sums = Sums(device)
    reduction.follow(lambda: tuple(_conditions(state)), compare=attempt is None or not attempt.shared)
    for index in range(microbatches):
        last = index == microbatches - 1
        reduction.before_microbatch(last=last, params=state.params.values())
        if attempt is not None:
            attempt.enter("forward, later" if index else "forward, first")
        if index < len(parts):
            part = parts.parts[index]
            loss = loss_fn(state.model, to_device(part, device) if away else part)
            if index == 0:  # the others are of the same function
                checked_loss(loss, where="microbatch_step")
                if reduction.has_gradients(state.params.values()):
                    raise ConfigError(_BACKWARD)
                if state.step == 0:
                    warn_of_mean(loss, "microbatch_step")
            objective = weights.objective(_with_skipped(loss, reduction))
            if attempt is not None:
                attempt.enter("backward, last" if last else "backward, early")
            objective.backward()
            sums.add(loss)
        else:
            with buffers_restored(state.model):  # it must not leave its mark in BatchNorm's statistics
                loss = checked_loss(loss_fn(state.model, to_device(parts.filler(state.spare), device)), where="microbatch_step")
                objective = weights.objective(_with_skipped(loss, reduction)) * 0.0
                if attempt is not None:
                    attempt.enter("backward, last" if last else "backward, early")
                objective.backward()
            sums.name(loss)
    reduction.add_up(state.params.values())
    return sums.metrics()


def _with_skipped(loss: LossSum, reduction: Reduction) -> LossSum:
    total = reduction.complete(loss.total)
    return loss if total is loss.total else replace(loss, total=total)


def _agree_after(
    state: TrainState,
    reduction: Reduction,
    buffers: BufferWatch,
    weights: Weights,
    metrics: Metrics,
    attempt: Attempt | None,
    tally: Tally,
) -> Outcome:
    """After backward: what it left on all ranks. An attempt that failed on any of them ends here."""
    verdict = Verdict.FINE if attempt is None else attempt.verdict
    whole = attempt is None or attempt.at_most is None  # a rehearsal has not seen all that the weights are of
    fault = whole and not verdict.failed and bool(metrics) and weights.broken(state, metrics)
    outcome = Outcome(verdicts=[verdict])
    if state.spec.mesh is not None or fault:
        missing = reduction.missing(state)
        changed = buffers.changed()
        outcome = agree_after_backward(
            order=reduction.order,
            missing=missing,
            changed=changed,
            fault=fault,
            verdict=verdict,
            place=0 if attempt is None else attempt.place,
        )
    if attempt is not None:
        attempt.judge(outcome, tally)
    return outcome


def _settle(state: TrainState, buffers: BufferWatch, outcome: Outcome, weights: Weights, metrics: Metrics) -> None:
    """Reduce what FSDP2 does not, divide by the global weight."""
    for name in outcome.unused:
        state.params[name].grad = None
    if state.spec.mesh is not None:
        _reduce_left_out(state, outcome.unused)
        buffers.make_equal_(outcome.changed)
    grads = [param.grad for param in state.params.values() if param.grad is not None]
    if not grads and not state.shared.stepped_early:
        raise StepError(
            "microbatch_step: no parameter got a gradient; does the loss depend on the model, and is any parameter trainable?"
        )
    divide_(grads, state, weights, metrics)


def _reserve(state: TrainState, buffers: BufferWatch) -> None:
    """Have what comes after the vote fail before it: nobody could stand in for a rank that runs out of memory then."""
    whole = [state.params[name] for name in state.spec.left_out if state.params[name].requires_grad]
    if state.spec.mesh is not None and (whole or buffers.bytes):
        missing = [torch.empty_like(param) for param in whole if param.grad is None]
        largest = max(2 * sum(param.numel() * param.element_size() for param in whole), 3 * buffers.bytes)
        flat = torch.empty(largest, dtype=torch.uint8, device=state.device)
        del missing, flat


def _reduce_left_out(state: TrainState, unused: Sequence[str]) -> None:
    params = [state.params[name] for name in state.spec.left_out if name not in unused and state.params[name].requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    reduce_whole_([param.grad for param in params if param.grad is not None], state.spec)
