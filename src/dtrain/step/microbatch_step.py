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
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import hash_rng_state
from dtrain.dist.step_sync import (
    BackwardSync,
    RankStatus,
    StepCounts,
    check_rng_in_sync,
    sync_after_backward,
    sync_before_forward,
)
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError, StepError
from dtrain.memory.device_memory import release_cached_memory
from dtrain.shard.buffers import BufferSync, buffer_sync_of, restore_buffers
from dtrain.shard.grad_sync import GradSync, all_reduce_grads_, grad_sync_of
from dtrain.state import TrainState, check_state
from dtrain.step.finite import nonfinite_loss_counter
from dtrain.step.microbatches import CountFn, Microbatches, SplitFn, split_microbatches
from dtrain.step.normalization import (
    LossNormalizer,
    MetricAccumulator,
    build_normalizer,
    check_loss,
    declared_weights,
    normalize_grads_,
)
from dtrain.step.oom_guard import StepGuard, current_guard
from dtrain.step.sanity_checks import hash_first_batch, warn_if_equal_batches, warn_if_mean
from dtrain.step.step_clock import begin_step, with_agreed_position
from dtrain.typing import Batch, LossFn, LossSum, Metrics, WeightFn

_BACKWARD_CALLED = (
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
    ``grad_cache_step`` for it, where a rank has no row that is not in the batch.

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
            because nothing waits for the device. ``dt.transforms.nonfinite`` changes the number, or stops the check.
        StepError: no rank has a sample, no parameter got a gradient, ranks ran different units or have weights of different
            terms, or the global weight is zero. On a GPU the weight reaches the host late: the gradient of such a step is zero,
            and the next step raises.
    """
    return run_step(
        state,
        batch,
        lambda: (
            split_microbatches(batch, microbatch_size, batch_spec=batch_spec, split=split, count=count),
            declared_weights(weight_fn, batch),
        ),
        partial(_accumulate, loss_fn),
        caller="microbatch_step",
    )


class AccumulateFn(Protocol):
    """What a step runs between the ranks' two records: forwards and backwards that leave the gradient of the summed loss."""

    def __call__(
        self, state: TrainState, parts: Microbatches, microbatches: int, normalizer: LossNormalizer, guard: StepGuard | None
    ) -> Metrics:
        """Run ``microbatches``, or as many of them as the ``guard`` asks for, and tell it which part of the step begins."""
        ...


def run_step(
    state: TrainState,
    batch: Batch,
    prepare: Callable[[], tuple[Microbatches, Mapping[str, Tensor | float]]],
    accumulate: AccumulateFn,
    *,
    caller: str,
) -> tuple[TrainState, Metrics]:
    """The frame of a gradient step around ``accumulate``: what ranks agree on, the reduction, and that failures leave nothing.

    Args:
        batch: this rank's, which knows its place in its loader's data.
        prepare: counts this rank's batch, and says its promised weights; its errors reach all ranks.
        caller: the name of the step, for messages.
    """
    spans.begin("step", 0)
    try:
        check_state(state, caller, f"state, metrics = dt.{caller}(state, batch, loss_fn=loss_fn)")
        state._check_not_stale(caller)
        _check_sharded(state, caller)
        state = state if state.step_batch is not None else begin_step(state, batch)
        error: Exception | None = None
        try:
            parts, weights = prepare()
        except Exception as problem:  # noqa: BLE001  # of any kind: these are the user's functions; raised below, on all ranks
            parts, weights, error = Microbatches(batch=None), {}, problem
        attempt = current_guard(state.run_context)
        tally = _sync_before_forward(state, parts, list(weights), error, attempt)
        state.drop_gradients()
        reduction, buffers = grad_sync_of(state.model), buffer_sync_of(state.model)
        reduction.begin_step(within_replica=state.spec.replica_info is not None)
        buffers.begin_step()
        try:
            with report_missing_ranks(caller):  # the model's collectives and ours: if one fails, because of whom
                known, metrics = _forward_backward(state, parts, tally, accumulate, weights, attempt)
                outcome = _sync_after_backward(state, reduction, buffers, known, metrics, attempt, tally)
                reduction.confirm_order()
                if attempt is None or attempt.max_microbatches is None:
                    check_rng_in_sync(tally, state.device)
                    _finish_gradients(state, buffers, outcome, known, metrics)
                    nonfinite_loss_counter(state).record(state.step, metrics["loss"].total)
        except BaseException:
            reduction.abort()
            state.drop_gradients()
            raise
        reduction.end_step()
        return with_agreed_position(state._replace(step_counts=tally)), metrics
    finally:
        spans.end("step")


def _check_sharded(state: TrainState, caller: str) -> None:
    if state.spec.mesh is None and get_dist_info().world_size > 1:
        raise ConfigError(
            f"{caller}: {get_dist_info().world_size} ranks, but the model is on none of their meshes, so gradients would not "
            "be reduced; call dt.shard_model before Step.init"
        )


def _sync_before_forward(
    state: TrainState, parts: Microbatches, terms: Sequence[str], error: Exception | None, guard: StepGuard | None
) -> StepCounts:
    weight = state.run_context.pending_weight
    value = weight.try_read() if weight is not None else None
    weightless = value is not None and not value > 0
    if weightless and weight is not None:
        weight.clear()  # said once; the next step is judged by its own weight
    watch = nonfinite_loss_counter(state)
    first = watch.first_failed_step()
    shared, now = state.run_context, time.monotonic()
    seconds, shared.last_step_started_at = (
        0.0 if shared.last_step_started_at is None else now - shared.last_step_started_at,
        now,
    )
    content = hash_first_batch(state, parts.batch) if error is None and parts.samples else 0
    tally = sync_before_forward(
        samples=parts.samples,
        tokens=parts.tokens,
        microbatches=len(parts),
        zero_weight_seen=weightless,
        diverged_at=0 if first is None else first + 1,
        nonfinite_limit=watch.limit or 0,
        loss_terms=terms,
        error=error,
        run_key=id(state.run_context),
        step=state.step,
        ranks_per_batch=state.spec.ranks_per_batch,
        rng_hash=hash_rng_state(state.device) if state.spec.ranks_per_batch > 1 else 0,
        batch_hash=content,
        plan_digest=0 if guard is None else guard.traces.digest(*_replay_conditions(state), guard.max_microbatches or 0),
        batch_info=state.step_batch.info if state.step_batch is not None else None,
        elapsed_s=seconds,
    )
    warn_if_equal_batches(state, tally, content)
    if guard is not None and not tally.same_plan:
        guard.traces.clear()
    # A second call for one step (a retry, a method that needs two gradients) adds its time to that of the first.
    return replace(tally, seconds=tally.seconds + state.step_counts.seconds) if state.step_counts else tally


def _replay_conditions(state: TrainState) -> list[int]:
    """What the collectives of a step depend on, beside the number of microbatches: parameters may be frozen, or thawed."""
    return [
        state.model.training,
        state.spec.replica_info is not None,
        *(param.requires_grad for param in state.params.values()),
    ]


def _forward_backward(
    state: TrainState,
    parts: Microbatches,
    tally: StepCounts,
    accumulate: AccumulateFn,
    weights: Mapping[str, Tensor | float],
    guard: StepGuard | None,
) -> tuple[LossNormalizer, Metrics]:
    """Forward and backward of the whole step; with an ``guard`` its failure is noted there, and nothing of it is left."""
    if guard is None:
        known = build_normalizer(weights, state.device, state.spec)
        return known, accumulate(state, parts, tally.microbatches, known, None)

    def body() -> tuple[LossNormalizer, Metrics]:
        guard.enter_phase("before")
        known = build_normalizer(weights, state.device, state.spec)
        metrics = accumulate(state, parts, tally.microbatches, known, guard)
        _check_reduction_memory(state, buffer_sync_of(state.model))
        return known, metrics

    def undo() -> None:
        grad_sync_of(state.model).abort_all()
        state.drop_gradients()
        release_cached_memory(state.device)

    guard.samples = parts.samples
    # Of what is agreed alone: ranks with different plans would run in different modes.
    plan = (min(tally.microbatches, guard.max_microbatches or tally.microbatches), *_replay_conditions(state))
    return guard.execute(body, plan=plan, undo=undo) or (LossNormalizer(local_weights={}, factors={}), {})


def _accumulate(
    loss_fn: LossFn,
    state: TrainState,
    parts: Microbatches,
    microbatches: int,
    normalizer: LossNormalizer,
    guard: StepGuard | None,
) -> Metrics:
    """Forward and backward of every microbatch; those beyond this rank's own count nothing."""
    device, reduction = state.device, grad_sync_of(state.model)
    microbatches = microbatches if guard is None else guard.limit_microbatches(microbatches)
    away = not parts.is_on(device)
    sums = MetricAccumulator(device)
    reduction.follow_plan(lambda: tuple(_replay_conditions(state)), compare=guard is None or not guard.multi_rank)
    for index in range(microbatches):
        last = index == microbatches - 1
        reduction.before_microbatch(last=last, params=state.params.values())
        if guard is not None:
            guard.enter_phase("forward, later" if index else "forward, first")
        if index < len(parts):
            part = parts.batches[index]
            loss = loss_fn(state.model, to_device(part, device) if away else part)
            if index == 0:  # the others are of the same function
                check_loss(loss, caller="microbatch_step")
                if reduction.has_grads(state.params.values()):
                    raise ConfigError(_BACKWARD_CALLED)
                if state.step == 0:
                    warn_if_mean(loss, "microbatch_step")
            objective = normalizer.scaled_loss(_attach_skipped_units(loss, reduction))
            if guard is not None:
                guard.enter_phase("backward, last" if last else "backward, early")
            objective.backward()
            sums.add(loss)
        else:
            with restore_buffers(state.model):  # it must not leave its mark in BatchNorm's statistics
                loss = check_loss(
                    loss_fn(state.model, to_device(parts.padding_microbatch(state.padding_sample), device)),
                    caller="microbatch_step",
                )
                objective = normalizer.scaled_loss(_attach_skipped_units(loss, reduction)) * 0.0
                if guard is not None:
                    guard.enter_phase("backward, last" if last else "backward, early")
                objective.backward()
            sums.add_names(loss)
    reduction.add_stashed_grads(state.params.values())
    return sums.metrics()


def _attach_skipped_units(loss: LossSum, reduction: GradSync) -> LossSum:
    total = reduction.complete_forward(loss.total)
    return loss if total is loss.total else replace(loss, total=total)


def _sync_after_backward(
    state: TrainState,
    reduction: GradSync,
    buffers: BufferSync,
    normalizer: LossNormalizer,
    metrics: Metrics,
    guard: StepGuard | None,
    counts: StepCounts,
) -> BackwardSync:
    """After backward: what it left on all ranks. An attempt that failed on any of them ends here."""
    verdict = RankStatus.OK if guard is None else guard.status
    whole = guard is None or guard.max_microbatches is None  # a rehearsal has not seen all that the weights are of
    fault = whole and not verdict.failed and bool(metrics) and normalizer.weights_mismatch(state, metrics)
    outcome = BackwardSync(statuses=[verdict])
    if state.spec.mesh is not None or fault:
        missing = reduction.params_without_grad(state)
        changed = buffers.changed_modules()
        outcome = sync_after_backward(
            unit_order=reduction.reduction_order,
            params_without_grad=missing,
            changed_buffers=changed,
            weights_mismatch=fault,
            status=verdict,
            collective_index=0 if guard is None else guard.collectives_issued,
        )
    if guard is not None:
        guard.raise_if_failed(outcome, counts)
    return outcome


def _finish_gradients(
    state: TrainState, buffers: BufferSync, outcome: BackwardSync, normalizer: LossNormalizer, metrics: Metrics
) -> None:
    """Reduce what FSDP2 does not, divide by the global weight."""
    for name in outcome.unused_params:
        state.params[name].grad = None
    if state.spec.mesh is not None:
        _reduce_ignored_params(state, outcome.unused_params)
        buffers.sync_(outcome.changed_buffers)
    grads = [param.grad for param in state.params.values() if param.grad is not None]
    if not grads and not state.run_context.partially_stepped:
        raise StepError(
            "microbatch_step: no parameter got a gradient; does the loss depend on the model, and is any parameter trainable?"
        )
    normalize_grads_(grads, state, normalizer, metrics)


def _check_reduction_memory(state: TrainState, buffers: BufferSync) -> None:
    """Have what comes after the vote fail before it: nobody could stand in for a rank that runs out of memory then."""
    whole = [state.params[name] for name in state.spec.ignored_params if state.params[name].requires_grad]
    if state.spec.mesh is not None and (whole or buffers.num_bytes):
        missing = [torch.empty_like(param) for param in whole if param.grad is None]
        largest = max(2 * sum(param.numel() * param.element_size() for param in whole), 3 * buffers.num_bytes)
        flat = torch.empty(largest, dtype=torch.uint8, device=state.device)
        del missing, flat


def _reduce_ignored_params(state: TrainState, unused: Sequence[str]) -> None:
    params = [
        state.params[name] for name in state.spec.ignored_params if name not in unused and state.params[name].requires_grad
    ]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    all_reduce_grads_([param.grad for param in params if param.grad is not None], state.spec)
