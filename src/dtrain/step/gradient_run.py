"""Run the parts that all gradient functions share: synchronization of ranks, reduction, normalization and rollback."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain import spans
from dtrain.arguments import format_error_line, warn
from dtrain.data.batch import get_batch_infos
from dtrain.dist.collective_replay import EQUAL_MICROBATCHES_ADVICE, CheckedGuard, check_collectives
from dtrain.dist.incident import is_collective_error, report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import axis_size
from dtrain.dist.rng import hash_rng_state, seeded_rng
from dtrain.dist.step_sync import (
    BackwardSync,
    ForwardRecord,
    RankStatus,
    StepCounts,
    check_rng_in_sync,
    sync_after_backward,
    sync_before_forward,
)
from dtrain.errors import ConfigError, StepError
from dtrain.memory.device_memory import release_cached_memory
from dtrain.shard.buffers import BufferSync, buffer_sync_of
from dtrain.shard.grad_sync import GradSync, grad_sync_of
from dtrain.shard.params import USED_OUTSIDE, raise_if_hooks_differ, raise_if_used_outside
from dtrain.shard.replica_check import raise_if_written, replica_check_of
from dtrain.shard.replicate import all_reduce_grads_
from dtrain.shard.skipped_units import ExchangeFn
from dtrain.state import TrainState, check_state
from dtrain.step.microbatches import BatchWatch, Microbatches, check_first_run
from dtrain.step.normalization import (
    SUM_NORMALIZER,
    LossNormalizer,
    MetricAccumulator,
    add_names_of_peers,
    build_normalizer,
    compute_grad_divisor,
    divide_,
    expect_weight,
    host_weight,
)
from dtrain.step.oom_guard import StepGuard
from dtrain.step.optimizer import takes_grad_scale
from dtrain.step.optimizer_state import describe_options, raise_if_options_differ
from dtrain.step.sanity_checks import hash_first_batch, warn_if_equal_batches
from dtrain.step.step_clock import begin_step, with_agreed_position
from dtrain.typing import Batch, LossSum, Metrics

PrepareFn = Callable[[], tuple[Microbatches, Mapping[str, Tensor | float]]]
_NO_MICROBATCHES = Microbatches(batch=None)
# Made once, because a step without other ranks enters it twice.
_NO_CONTEXT = nullcontext()


def run_gradient(
    state: TrainState,
    batch: Batch,
    caller: str,
    prepare: PrepareFn,
    accumulate: Callable[[GradientRun], None],
    *,
    records_units: bool = False,
) -> tuple[TrainState, Metrics]:
    """Run forwards and backwards between the synchronizations that all gradient functions share.

    Ranks agree on the step, and earlier gradients are dropped. After ``accumulate`` gradients are reduced and normalized. An
    exception drops the gradients. If the step is guarded, an out-of-memory error ends ``accumulate``, and the step is rolled
    back on all ranks.

    Args:
        state: state whose gradient is computed.
        batch: this rank's samples, with their position in the loader.
        caller: name of the gradient function, for messages.
        prepare: function that counts and splits this batch, and returns its declared weights. Its errors reach all ranks.
        accumulate: function that runs forwards and backwards, and adds their losses to ``run.sums``.
        records_units: if True, a rank without a microbatch calls the recorded units of the model empty.

    Returns:
        The state with its counts, and the metrics.

    Collective: one record before ``accumulate``, and one all-reduce of the declared weights, if there are any; after it the
    reductions of plain parameters (``replicate``) that the last backward has not begun, one record, for a sharded model on
    several ranks or a guarded step, and the reductions of gradients that FSDP2 does not reduce, of buffers, and of weights.

    Raises:
        StepAborted: a guarded step failed on some rank, and is rolled back on all ranks.
    """
    entered = spans.begin_step_once()
    watch: BatchWatch | None = None
    try:
        # The inner functions of a composed step may run several times in a step.
        if entered and isinstance(state, TrainState) and state._step_counts is not None:
            state = _begin_again(state, batch, caller)
        run = _begin_run(state, batch, caller)
        error: Exception | None = None
        try:
            run.microbatches, run.weights = prepare()
            check_first_run(run.state, run.microbatches.tensors)
            watch = BatchWatch(run.microbatches.tensors)
        # User functions may raise any exception; it is raised below, on all ranks.
        except Exception as problem:  # noqa: BLE001
            error = problem
        run.counts = run._sync_before_forward(error)
        run.state._drop_trainable_gradients()
        try:
            with report_missing_ranks(caller) if run.state.spec.mesh is not None else _NO_CONTEXT:
                run.grad_sync.begin_step(run.state)
                run.buffers.begin_step()
                with run._guarded(records_units) as run.checked:
                    run._begin_forwards()
                    try:
                        accumulate(run)
                    except Exception as failure:
                        if run.state.spec.mesh is not None and run.guard is None and run.checked is None:
                            run._explain_to_caller(failure)
                        raise
                    run._end_backwards()
                return run._finish()
        except BaseException as failure:
            run.grad_sync.abort()
            run.state.drop_gradients()
            mesh = run.state.spec.mesh
            # torch has no class for this error. Under tensor parallelism it may have another cause.
            of_dtensor = type(failure) is RuntimeError and "DTensor" in str(failure)
            if of_dtensor and mesh is not None and axis_size(mesh, "tp") == 1:
                raise StepError(
                    f"{caller}: {USED_OUTSIDE.format(name='')} torch says: {format_error_line(failure)}"
                ) from failure
            raise
    finally:
        if watch is not None:
            watch.record(state)
        if entered:
            spans.end("step")


def _begin_again(state: TrainState, batch: Batch, caller: str) -> TrainState:
    """Return the state for a further gradient before the update: at the position of ``batch`` if it is another batch.

    Warn if the gradient of another batch would be lost.
    """
    before, infos = state._step_batch, get_batch_infos(batch)
    origin = None if before is None else before.info
    if origin is not None and any(info.loader is origin.loader and info.begin == origin.begin for info in infos):
        return state
    if any([param.grad is not None for param in state._trainable.values()]):  # noqa: C419
        warn(
            f"{caller} drops the gradient of an earlier batch, which no update applied. To accumulate gradients, join the "
            "batches and pass microbatch_size. To skip an update, call state.drop_gradients() before."
        )
    return state if before is None else begin_step(state._replace(_step_batch=None, clock=before.clock_before), batch)


def _begin_run(state: TrainState, batch: Batch, caller: str) -> GradientRun:
    """Check the state, and find the batch's position in its loader, unless a composed step has found it."""
    if not isinstance(state, TrainState):
        check_state(state, caller, f"state, metrics = dt.{caller}(state, batch, loss_fn=loss_fn)")
    # A composed step has begun the batch, and has checked the state before.
    if state._step_batch is None or state._step_counts is not None:
        state._check_not_stale(caller)
    if state._step_batch is None:
        state = begin_step(state, batch)
    state = state._with_trainable()
    world_size = get_dist_info().world_size
    if state.spec.mesh is None and world_size > 1:
        raise ConfigError(
            f"{caller}: {world_size} ranks run, but the model is on no mesh, so gradients would not be reduced. Call "
            "dt.shard_model before Step.init."
        )
    context = state._run_context
    if context.model_syncs is None:
        context.model_syncs = grad_sync_of(state.model), buffer_sync_of(state.model)
    grad_sync, buffers = context.model_syncs
    return GradientRun(
        state=state,
        caller=caller,
        grad_sync=grad_sync,
        buffers=buffers,
        guard=state._guard,
        device=state.device,
        world_size=world_size,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class GradientRun:
    """One gradient in progress; see ``run_gradient``.

    Args:
        state: state whose gradient is computed, with the position of its batch.
        caller: name of the gradient function.
        grad_sync: synchronization of the model's gradients.
        buffers: synchronization of the model's buffers.
        guard: guard of the step; None unless ``auto_microbatch`` has set one.
        device: device on which the model computes.
        world_size: number of ranks.
        microbatches: this rank's microbatches.
        weights: declared weights of this rank by term.
        counts: counts that ranks agreed on.
        normalizer: normalizer of the losses.
        loss_divisor: number by which backward divides the losses; None if it does not.
        sums: sums of the losses, which the gradient function adds up.
        checked: guard that compares the collectives of the first step with different numbers of microbatches.
        uneven_plan: facts of a step in which ranks have different numbers of microbatches; None after its first success.
        metrics: metrics of all microbatches, after the last backward.
    """

    state: TrainState
    caller: str
    grad_sync: GradSync
    buffers: BufferSync
    guard: StepGuard | None
    device: torch.device
    world_size: int
    microbatches: Microbatches = _NO_MICROBATCHES
    weights: Mapping[str, Tensor | float] = field(default_factory=dict)
    counts: StepCounts = field(init=False)
    normalizer: LossNormalizer = SUM_NORMALIZER
    loss_divisor: Tensor | float | None = None
    sums: MetricAccumulator = field(init=False)
    checked: CheckedGuard | None = None
    uneven_plan: tuple[object, ...] | None = None
    metrics: Metrics = field(init=False)

    def _sync_before_forward(self, error: Exception | None) -> StepCounts:
        state, microbatches, guard = self.state, self.microbatches, self.guard
        monitor, spec, now = state._run_context.monitor, state.spec, time.monotonic()
        weight = None if monitor.pending_weight is None else monitor.pending_weight.try_read()
        weightless = weight is not None and not weight > 0
        if weightless and monitor.pending_weight is not None:
            # Report a zero weight once; the next step reports its own weight.
            monitor.pending_weight.clear()
        first_nonfinite = monitor.nonfinite_losses.first_failed_step()
        elapsed_s = 0.0 if monitor.last_step_started_at is None else now - monitor.last_step_started_at
        monitor.last_step_started_at = now
        several = spec.mesh is not None
        replicas = replica_check_of(state) if several else None
        batch_hash = hash_first_batch(state, microbatches.batch) if several and error is None and microbatches.samples else 0
        record = ForwardRecord(
            samples=microbatches.samples,
            tokens=microbatches.tokens,
            microbatches=len(microbatches.batches),
            late_failure=-1 if weightless else 0 if first_nonfinite is None else first_nonfinite + 1,
            rng_hash=hash_rng_state(state.device) if spec.ranks_per_batch > 1 else 0,
            batch_hash=batch_hash,
            plan_digest=guard.traces.digest(*self.replay_conditions(), guard.max_microbatches or 0) if guard and several else 0,
            shapes_hash=0 if guard is None or spec.ranks_per_batch == 1 else microbatches.hash_shapes(spec.data_rank),
            replica_digest=0.0 if replicas is None else replicas.begin_step(state),
            elapsed_s=elapsed_s,
        )
        counts = sync_before_forward(
            record,
            error=error,
            batch_info=state._step_batch.info if state._step_batch is not None else None,
            loss_terms=list(self.weights),
            trainable=state._trainable,
            trainable_digest=state._trainable_digest,
            nonfinite_limit=monitor.nonfinite_losses.limit or 0,
            ranks_per_batch=spec.ranks_per_batch,
            run_key=id(state._run_context),
            step=state.step,
        )
        if replicas is not None:
            replicas.end_exchange(counts.replica_digest, state)
            warn_if_equal_batches(state, counts, batch_hash)
        if guard is not None and not counts.same_plan:
            guard.traces.clear()
        # A second call for one step (a retry, a method with two gradients) adds its time to the time of the first call.
        return counts._replace(seconds=counts.seconds + state._step_counts.seconds) if state._step_counts else counts

    @property
    def required_microbatches(self) -> int:
        """Number of microbatches of the rank with the most microbatches."""
        return self.counts.microbatches

    @property
    def num_microbatches(self) -> int:
        """Number of forwards and backwards, equal on all ranks: fewer in a probe."""
        required = self.counts.microbatches
        return required if self.guard is None else self.guard.limit_microbatches(required)

    @property
    def is_uneven(self) -> bool:
        """True if ranks have different numbers of microbatches."""
        return self.counts.fewest_microbatches < self.counts.microbatches

    def replay_conditions(self) -> tuple[int, ...]:
        """Return the facts that decide the collectives of a step: the mode of the model and the trainable parameters."""
        state = self.state
        return (state.model.training, state.spec.replica_info is not None, state._trainable_digest)

    @property
    def exchange_events(self) -> ExchangeFn | None:
        """Function by which ranks with a microbatch lead the others through the units, in the first step of its kind."""
        guard = self.checked if self.guard is None else self.guard.collective_guard
        return guard.exchange_event if self.uneven_plan is not None and isinstance(guard, CheckedGuard) else None

    def _guarded(self, records_units: bool) -> AbstractContextManager[CheckedGuard | None]:
        """Return the context of all forwards and backwards, which ends at an out-of-memory error of a guarded step."""
        guard = self.guard
        if guard is None and not self.is_uneven:
            return _NO_CONTEXT
        conditions = self.replay_conditions()
        if self.is_uneven:
            plan = (self.caller, *conditions)
            is_known = not records_units or self.grad_sync.knows_order(conditions)
            self.uneven_plan = None if is_known and plan in self.state._run_context.monitor.uneven_plans else plan
        if guard is None:
            return check_collectives(self.caller, EQUAL_MICROBATCHES_ADVICE) if self.uneven_plan is not None else _NO_CONTEXT
        guard.samples = self.microbatches.samples
        # The plan holds only facts that ranks agree on: ranks with different plans would run in different modes.
        run_plan = (self.num_microbatches, self.counts.shapes_hash, *conditions)
        # A rank without a microbatch is led through the units by records, which a trace lacks.
        return guard.attempt(run_plan, traced=self.uneven_plan is None)

    def _explain_to_caller(self, failure: Exception) -> None:
        """Say in a note of an error of the loss that other ranks may wait for this rank. Mutates: ``failure``."""
        if self.world_size == 1 or is_collective_error(failure):
            return
        failure.add_note(
            f"{self.caller}: if ranks other than {get_dist_info().rank} did not raise this error, they wait in this step until "
            "this rank ends, or until the timeout_s of init_dist. Let the error end this rank. Steps can go on only after an "
            "error on all ranks, or with dt.auto_microbatch, which raises on all ranks."
        )

    def _begin_forwards(self) -> None:
        if self.guard is not None:
            self.guard.capture_buffers()
        if self.weights:
            self.normalizer = build_normalizer(self.weights, self.device, self.state.spec, self.world_size)
        self.sums = MetricAccumulator(self.device)

    def divide_losses_by_weight(self, loss: LossSum) -> Tensor | None:
        """Divide the losses of the only rank by their expected weight, if nothing else divides for free.

        A fused update divides in its kernel. Gradients in fewer bits than float32 keep the range and the rounding of sums.

        Returns:
            Gradient ``[]`` of each loss, for ``backward``; None for sums.
        """
        if self.state._grad_divisor is None or self.normalizer.global_weight is not None or self.world_size > 1:
            return None
        if takes_grad_scale(self.state.optimizer):
            return None
        divisor = self.loss_divisor = expect_weight(loss, len(self.microbatches.batches))
        if divisor is None or isinstance(divisor, Tensor):
            return None if divisor is None else 1.0 / divisor
        return torch.full((), 1.0 / divisor, dtype=loss.total.dtype, device=loss.total.device)

    def _end_backwards(self) -> None:
        self.grad_sync.finish_backwards(self.state._trainable.values())
        self.sums.add_names(self.weights)
        self.metrics = self.sums.metrics()
        if self.guard is not None:
            _check_reduction_memory(self.state, self.buffers)

    def _finish(self) -> tuple[TrainState, Metrics]:
        """Synchronize after backward, reduce and normalize the gradients; return the state with its counts, and the metrics."""
        guard, state = self.guard, self.state
        if guard is not None and guard.failed:
            guard.roll_back(self._free_memory)
        outcome = self._sync_after_backward()
        metrics = self.metrics
        if state.spec.mesh is not None:
            if len(outcome.param_facts) > 1:
                raise_if_options_differ(state, outcome.param_facts, self.caller)
            param_facts = [facts[:-1] for facts in outcome.param_facts]
            if self.grad_sync.uses.described or len(param_facts) > 1:
                raise_if_used_outside(param_facts, self.caller)
            raise_if_hooks_differ(param_facts)
            raise_if_written(param_facts, state.spec.strategy, uneven=self.is_uneven)
            self.grad_sync.confirm_order()
        if self.uneven_plan is not None:
            state._run_context.monitor.uneven_plans.add(self.uneven_plan)
        is_probe = guard is not None and guard.max_microbatches is not None
        divisor = state._grad_divisor
        if not is_probe:
            if state.spec.ranks_per_batch > 1:
                check_rng_in_sync(self.counts, state.device)
            divisor = self._reduce_and_normalize(outcome)
            if not self.counts.fewest_microbatches:
                metrics = add_names_of_peers(metrics, state.device)
            state._run_context.monitor.nonfinite_losses.record(state.step, self.sums.loss()[0])
        self.grad_sync.end_step()
        if self.grad_sync.hooks.exist and not is_probe:
            with seeded_rng(state.seed, "param hooks", state.step) if state.spec.mesh else nullcontext():
                self.grad_sync.hooks.run_(state.params)
        return with_agreed_position(state._replace(_step_counts=self.counts, _grad_divisor=divisor)), metrics

    def _free_memory(self) -> None:
        self.grad_sync.abort_all()
        self.state.drop_gradients()
        release_cached_memory(self.state.device)

    def _sync_after_backward(self) -> BackwardSync:
        """Exchange the outcome of backward between ranks. A guarded step that failed on any rank ends here."""
        guard, state = self.guard, self.state
        status = RankStatus.OK if guard is None else guard.status
        # A probe has not run all microbatches that the weights belong to.
        complete = guard is None or (guard.max_microbatches is None and not guard.failed)
        weight, mismatch = None, False
        if complete and self.normalizer.global_weight is None:
            weight = host_weight(state, self.sums.loss()[1])
        elif complete:
            mismatch = self.normalizer.weights_mismatch(state, self.metrics)
        if state.spec.mesh is None and not mismatch:
            outcome = BackwardSync(weight=weight, statuses=[status])
        else:
            outcome = sync_after_backward(
                unit_order=self.grad_sync.reduction_order,
                params_without_grad=self.grad_sync.params_without_grad(state),
                changed_buffers=self.buffers.changed_modules(),
                weights_mismatch=mismatch,
                param_facts=[*self.grad_sync.describe_params(uneven=self.is_uneven), describe_options(state)],
                status=status,
                collective_index=0 if guard is None else guard.collectives_issued,
                weight=weight,
            )
        if guard is not None:
            guard.raise_if_failed(outcome, self.counts)
        return outcome

    def _reduce_and_normalize(self, outcome: BackwardSync) -> Tensor | float | None:
        """Reduce the gradients of ignored parameters, which FSDP2 does not reduce, and divide by the global weight.

        If the step divides later, return the divisor.
        """
        state = self.state
        for name in outcome.unused_params:
            state.params[name].grad = None
        if state.spec.mesh is not None:
            used = [state.params[name] for name in state.spec.ignored_params if name not in outcome.unused_params]
            ignored = [param for param in used if param.requires_grad]
            for param in ignored:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            if ignored:
                all_reduce_grads_([param.grad for param in ignored if param.grad is not None], state.spec)
            has_samples = None if self.counts.fewest_microbatches else bool(self.microbatches.batches)
            self.buffers.sync_(outcome.changed_buffers, ranks_differ=outcome.buffers_differ, has_samples=has_samples)
        if not self.grad_sync.grads_taken and all([param.grad is None for param in state._trainable.values()]):  # noqa: C419
            raise StepError("microbatch_step: no parameter got a gradient. Make the loss depend on a trainable parameter.")
        divisor = compute_grad_divisor(
            state, self.normalizer, self.metrics, global_weight=outcome.weight, loss_divisor=self.loss_divisor
        )
        if state._grad_divisor is not None and not self.grad_sync.hooks.exist:
            return divisor
        divide_([grad for param in state._trainable.values() if (grad := param.grad) is not None], divisor)
        return None


def _check_reduction_memory(state: TrainState, buffers: BufferSync) -> None:
    """Allocate the memory of the final reductions once, so that a shortage raises before ranks exchange their outcome."""
    if state.spec.mesh is None:
        return
    ignored = [state.params[name] for name in state.spec.ignored_params if state.params[name].requires_grad]
    if ignored or buffers.num_bytes:
        missing = [torch.empty_like(param) for param in ignored if param.grad is None]
        largest = max(2 * sum(param.numel() * param.element_size() for param in ignored), 3 * buffers.num_bytes)
        flat = torch.empty(largest, dtype=torch.uint8, device=state.device)
        del missing, flat
