"""Compute the gradient of the global weighted mean loss, for any split into microbatches and ranks."""

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
    "microbatch_step: loss_fn must not call backward(), because the step calls backward itself. Return the LossSum alone "
    "(torch.autograd.grad with respect to inputs is allowed)."
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

    The mean is the sum of ``LossSum.total`` over all microbatches and ranks, divided by the sum of ``LossSum.weight``. Up to
    rounding, the mean does not depend on the microbatch size, the world size or the split. With ``terms`` the loss is the sum
    of one such mean per term. Between ``split_replicas`` and ``join_replicas`` the mean covers this rank's replica only.

    Ranks may have different numbers of samples, or none. A rank that runs out of microbatches repeats one at weight zero, so
    that all ranks run the same number of forwards and backwards. A loss that gathers the samples of all ranks would see the
    repeated samples; use ``grad_cache_step`` for such a loss.

    Args:
        state: the newest state of the run, which stays valid; its parameters do not change.
        batch: this rank's samples, on any device; microbatches are moved to the model's device.
        loss_fn: function that returns the summed loss and the weight of one microbatch.
        microbatch_size: samples per forward and backward; None uses the whole local batch.
        batch_spec: position of the batch axis and count of tokens; None uses the first axis and counts no tokens.
        split: ``(batch, microbatch_size) -> microbatches``, for a batch without a ``batch_spec`` or tensors to split.
        count: ``batch -> samples``, or ``(samples, tokens)``, for a batch that only you can count.
        weight_fn: this rank's weight of a whole batch, a number or ``[]``, or by term (``{"loss": ..., "router": ...}``).
            Losses with ``terms`` need a ``weight_fn`` that counts the same things.

    Returns:
        ``state`` with the counts that ranks agreed on, and metrics ``loss``, the terms and ``aux``, as local sums.

    Mutates: ``.grad`` of the parameters; earlier gradients are dropped. Buffers that the model's forward changes, which are
    then synchronized across ranks as ``shard_model(buffers=...)`` says.
    Collective: one record on the control group before forward, and for a sharded model on several ranks one after backward;
    the model's own gathers; in the first step of a sharded model one record per unit, which compares the order of units; one
    reduction of gradients per unit (in the last microbatch's backward; with ``accumulate="sharded"`` in each backward); one
    all-reduce of weights (float64); one of the gradients of ignored parameters; one or two of changed buffers.
    Host sync: none, except some values of the first batches on several ranks, if the batches are on a device. These values
    detect ranks that train on equal batches; see ``Step.init(allow_equal_batches=)``.

    Example:
        state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=8)
        dt.clip_grad_norm_(state.params, 1.0)
        state, metrics = dt.optimizer_step(state, metrics)

    Raises:
        StaleStateError: ``state`` was stepped already.
        Exception: any error of ``loss_fn`` or the model. The gradients are dropped, so all ranks may run the step again.
        ConfigError: a batch that cannot be counted or split, a loss that is not a ``LossSum`` of single numbers, or a loss and
            a ``weight_fn`` with different terms.
        PeerError: another rank raised one of these errors.
        DistError: a collective timed out or lost a peer; the message names the missing ranks.
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
    """Function that runs all forwards and backwards of a step, and leaves the gradient of the summed loss."""

    def __call__(
        self,
        state: TrainState,
        microbatches: Microbatches,
        num_microbatches: int,
        normalizer: LossNormalizer,
        guard: StepGuard | None,
    ) -> Metrics:
        """Run ``num_microbatches``, or fewer if ``guard`` limits them, and report each phase of the step to ``guard``."""


def run_step(
    state: TrainState,
    batch: Batch,
    prepare: Callable[[], tuple[Microbatches, Mapping[str, Tensor | float]]],
    accumulate: AccumulateFn,
    *,
    caller: str,
) -> tuple[TrainState, Metrics]:
    """Run ``accumulate`` between the two synchronizations of ranks, reduce its gradients, and roll back a failed step.

    Args:
        batch: this rank's samples, with their position in the loader.
        prepare: function that counts this rank's batch and returns its declared weights; its errors reach all ranks.
        caller: name of the step, for messages.
    """
    spans.begin("step", 0)
    try:
        check_state(state, caller, f"state, metrics = dt.{caller}(state, batch, loss_fn=loss_fn)")
        state._check_not_stale(caller)
        _check_sharded(state, caller)
        state = state if state.step_batch is not None else begin_step(state, batch)
        error: Exception | None = None
        try:
            microbatches, weights = prepare()
        # User functions may raise any exception; it is raised below, on all ranks.
        except Exception as problem:  # noqa: BLE001
            microbatches, weights, error = Microbatches(batch=None), {}, problem
        guard = current_guard(state.run_context)
        counts = _sync_before_forward(state, microbatches, list(weights), error, guard)
        state.drop_gradients()
        grad_sync, buffers = grad_sync_of(state.model), buffer_sync_of(state.model)
        grad_sync.begin_step(within_replica=state.spec.replica_info is not None)
        buffers.begin_step()
        try:
            with report_missing_ranks(caller):
                normalizer, metrics = _forward_backward(state, microbatches, counts, accumulate, weights, guard)
                outcome = _sync_after_backward(state, grad_sync, buffers, normalizer, metrics, guard, counts)
                grad_sync.confirm_order()
                if guard is None or guard.max_microbatches is None:
                    check_rng_in_sync(counts, state.device)
                    _finish_gradients(state, buffers, outcome, normalizer, metrics)
                    nonfinite_loss_counter(state).record(state.step, metrics["loss"].total)
        except BaseException:
            grad_sync.abort()
            state.drop_gradients()
            raise
        grad_sync.end_step()
        return with_agreed_position(state._replace(step_counts=counts)), metrics
    finally:
        spans.end("step")


def _check_sharded(state: TrainState, caller: str) -> None:
    if state.spec.mesh is None and get_dist_info().world_size > 1:
        raise ConfigError(
            f"{caller}: {get_dist_info().world_size} ranks run, but the model is on no mesh, so gradients would not be "
            "reduced. Call dt.shard_model before Step.init."
        )


def _sync_before_forward(
    state: TrainState, microbatches: Microbatches, terms: Sequence[str], error: Exception | None, guard: StepGuard | None
) -> StepCounts:
    weight = state.run_context.pending_weight
    value = weight.try_read() if weight is not None else None
    weightless = value is not None and not value > 0
    if weightless and weight is not None:
        # Report a zero weight once; the next step reports its own weight.
        weight.clear()
    loss_counter = nonfinite_loss_counter(state)
    first = loss_counter.first_failed_step()
    context, now = state.run_context, time.monotonic()
    seconds = 0.0 if context.last_step_started_at is None else now - context.last_step_started_at
    context.last_step_started_at = now
    batch_hash = hash_first_batch(state, microbatches.batch) if error is None and microbatches.samples else 0
    counts = sync_before_forward(
        samples=microbatches.samples,
        tokens=microbatches.tokens,
        microbatches=len(microbatches),
        zero_weight_seen=weightless,
        diverged_at=0 if first is None else first + 1,
        nonfinite_limit=loss_counter.limit or 0,
        loss_terms=terms,
        error=error,
        run_key=id(state.run_context),
        step=state.step,
        ranks_per_batch=state.spec.ranks_per_batch,
        rng_hash=hash_rng_state(state.device) if state.spec.ranks_per_batch > 1 else 0,
        batch_hash=batch_hash,
        plan_digest=0 if guard is None else guard.traces.digest(*_replay_conditions(state), guard.max_microbatches or 0),
        batch_info=state.step_batch.info if state.step_batch is not None else None,
        elapsed_s=seconds,
    )
    warn_if_equal_batches(state, counts, batch_hash)
    if guard is not None and not counts.same_plan:
        guard.traces.clear()
    # A second call for one step (a retry, a method with two gradients) adds its time to the time of the first call.
    return replace(counts, seconds=counts.seconds + state.step_counts.seconds) if state.step_counts else counts


def _replay_conditions(state: TrainState) -> list[int]:
    """Return the facts that decide the collectives of a step: the mode of the model and the frozen parameters."""
    return [
        state.model.training,
        state.spec.replica_info is not None,
        *(param.requires_grad for param in state.params.values()),
    ]


def _forward_backward(
    state: TrainState,
    microbatches: Microbatches,
    counts: StepCounts,
    accumulate: AccumulateFn,
    weights: Mapping[str, Tensor | float],
    guard: StepGuard | None,
) -> tuple[LossNormalizer, Metrics]:
    """Run forward and backward of the whole step; a ``guard`` records a failure and undoes the step."""
    if guard is None:
        normalizer = build_normalizer(weights, state.device, state.spec)
        return normalizer, accumulate(state, microbatches, counts.microbatches, normalizer, None)

    def body() -> tuple[LossNormalizer, Metrics]:
        guard.enter_phase("before")
        normalizer = build_normalizer(weights, state.device, state.spec)
        metrics = accumulate(state, microbatches, counts.microbatches, normalizer, guard)
        _check_reduction_memory(state, buffer_sync_of(state.model))
        return normalizer, metrics

    def undo() -> None:
        grad_sync_of(state.model).abort_all()
        state.drop_gradients()
        release_cached_memory(state.device)

    guard.samples = microbatches.samples
    # The plan holds only facts that ranks agree on: ranks with different plans would run in different modes.
    plan = (min(counts.microbatches, guard.max_microbatches or counts.microbatches), *_replay_conditions(state))
    return guard.execute(body, plan=plan, undo=undo) or (LossNormalizer(local_weights={}, factors={}), {})


def _accumulate(
    loss_fn: LossFn,
    state: TrainState,
    microbatches: Microbatches,
    num_microbatches: int,
    normalizer: LossNormalizer,
    guard: StepGuard | None,
) -> Metrics:
    """Run forward and backward for every microbatch. Padding microbatches contribute zero loss."""
    device, grad_sync = state.device, grad_sync_of(state.model)
    num_microbatches = num_microbatches if guard is None else guard.limit_microbatches(num_microbatches)
    needs_copy = not microbatches.is_on(device)
    sums = MetricAccumulator(device)
    grad_sync.follow_plan(lambda: tuple(_replay_conditions(state)), compare=guard is None or not guard.multi_rank)
    for index in range(num_microbatches):
        last = index == num_microbatches - 1
        grad_sync.before_microbatch(last=last, params=state.params.values())
        if guard is not None:
            guard.enter_phase("forward, later" if index else "forward, first")
        if index < len(microbatches):
            microbatch = microbatches.batches[index]
            loss = loss_fn(state.model, to_device(microbatch, device) if needs_copy else microbatch)
            # The first loss is checked; later losses come from the same function.
            if index == 0:
                check_loss(loss, caller="microbatch_step")
                if grad_sync.has_grads(state.params.values()):
                    raise ConfigError(_BACKWARD_CALLED)
                if state.step == 0:
                    warn_if_mean(loss, "microbatch_step")
            objective = normalizer.scaled_loss(_attach_skipped_units(loss, grad_sync))
            if guard is not None:
                guard.enter_phase("backward, last" if last else "backward, early")
            objective.backward()
            sums.add(loss)
        else:
            # Padding must not change the statistics of BatchNorm.
            with restore_buffers(state.model):
                loss = check_loss(
                    loss_fn(state.model, to_device(microbatches.padding_microbatch(state.padding_sample), device)),
                    caller="microbatch_step",
                )
                objective = normalizer.scaled_loss(_attach_skipped_units(loss, grad_sync)) * 0.0
                if guard is not None:
                    guard.enter_phase("backward, last" if last else "backward, early")
                objective.backward()
            sums.add_names(loss)
    grad_sync.add_stashed_grads(state.params.values())
    return sums.metrics()


def _attach_skipped_units(loss: LossSum, grad_sync: GradSync) -> LossSum:
    total = grad_sync.complete_forward(loss.total)
    return loss if total is loss.total else replace(loss, total=total)


def _sync_after_backward(
    state: TrainState,
    grad_sync: GradSync,
    buffers: BufferSync,
    normalizer: LossNormalizer,
    metrics: Metrics,
    guard: StepGuard | None,
    counts: StepCounts,
) -> BackwardSync:
    """Exchange the outcome of backward between ranks. A guarded step that failed on any rank ends here."""
    status = RankStatus.OK if guard is None else guard.status
    # A probe has not run all microbatches that the weights belong to.
    complete = guard is None or guard.max_microbatches is None
    mismatch = complete and not status.failed and bool(metrics) and normalizer.weights_mismatch(state, metrics)
    outcome = BackwardSync(statuses=[status])
    if state.spec.mesh is not None or mismatch:
        missing = grad_sync.params_without_grad(state)
        changed = buffers.changed_modules()
        outcome = sync_after_backward(
            unit_order=grad_sync.reduction_order,
            params_without_grad=missing,
            changed_buffers=changed,
            weights_mismatch=mismatch,
            status=status,
            collective_index=0 if guard is None else guard.collectives_issued,
        )
    if guard is not None:
        guard.raise_if_failed(outcome, counts)
    return outcome


def _finish_gradients(
    state: TrainState, buffers: BufferSync, outcome: BackwardSync, normalizer: LossNormalizer, metrics: Metrics
) -> None:
    """Reduce the gradients of ignored parameters, which FSDP2 does not reduce, and divide by the global weight."""
    for name in outcome.unused_params:
        state.params[name].grad = None
    if state.spec.mesh is not None:
        _reduce_ignored_params(state, outcome.unused_params)
        buffers.sync_(outcome.changed_buffers)
    grads = [param.grad for param in state.params.values() if param.grad is not None]
    if not grads and not state.run_context.partially_stepped:
        raise StepError("microbatch_step: no parameter got a gradient. Make the loss depend on a trainable parameter.")
    normalize_grads_(grads, state, normalizer, metrics)


def _check_reduction_memory(state: TrainState, buffers: BufferSync) -> None:
    """Allocate the memory of the final reductions once, so that a shortage raises before ranks exchange their outcome."""
    ignored = [state.params[name] for name in state.spec.ignored_params if state.params[name].requires_grad]
    if state.spec.mesh is not None and (ignored or buffers.num_bytes):
        missing = [torch.empty_like(param) for param in ignored if param.grad is None]
        largest = max(2 * sum(param.numel() * param.element_size() for param in ignored), 3 * buffers.num_bytes)
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
