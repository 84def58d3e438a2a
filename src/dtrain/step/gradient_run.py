"""Run the parts that all gradient functions share: synchronization of ranks, reduction, normalization and rollback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from dtrain import spans
from dtrain.arguments import format_error_line
from dtrain.data.batch import list_tensors
from dtrain.dist.collective_replay import EQUAL_MICROBATCHES_ADVICE, CheckedGuard, check_collectives
from dtrain.dist.incident import report_missing_ranks
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
from dtrain.shard.params import raise_if_hooks_differ
from dtrain.shard.replica_check import raise_if_written, replica_check_of
from dtrain.shard.replicate import all_reduce_grads_
from dtrain.shard.skipped_units import ExchangeFn
from dtrain.state import TrainState, check_state
from dtrain.step.metrics import add_names_of_peers
from dtrain.step.microbatches import BatchWatch, Microbatches, check_first_run
from dtrain.step.normalization import (
    SUM_NORMALIZER,
    LossNormalizer,
    MetricAccumulator,
    build_normalizer,
    host_weight,
    normalize_grads_,
)
from dtrain.step.oom_guard import StepGuard
from dtrain.step.sanity_checks import hash_first_batch, warn_if_equal_batches
from dtrain.step.step_clock import begin_step, with_agreed_position
from dtrain.typing import Batch, Metrics

_NO_MICROBATCHES = Microbatches(batch=None)


class GradientRun:
    """Context of one gradient: ranks synchronize before forward and after backward; gradients are reduced and normalized.

        with GradientRun(state, batch, "microbatch_step") as run:
            run.synchronize(prepare)
            with run.guarded():
                ...  # forwards and backwards, between run.begin_forwards and run.end_backwards
            return run.finish()

    An exception drops the gradients. If the step is guarded, ``guarded`` ends at an out-of-memory error, and ``finish`` rolls
    the step back on all ranks.

    Args:
        state: state whose gradient is computed.
        batch: this rank's samples, with their position in the loader.
        caller: name of the gradient function, for messages.
        records_units: if True, a rank without a microbatch calls the recorded units of the model empty.

    Attributes:
        microbatches: this rank's microbatches, after ``synchronize``.
        num_microbatches: number of forwards and backwards, equal on all ranks, after ``begin_forwards``.
    """

    grad_sync: GradSync
    _buffers: BufferSync

    __slots__ = (
        "_batch",
        "_buffers",
        "_caller",
        "_checked",
        "_counts",
        "_loss",
        "_metrics",
        "_normalizer",
        "_records_units",
        "_report",
        "_synchronized",
        "_uneven_plan",
        "_watch",
        "_weights",
        "grad_sync",
        "guard",
        "microbatches",
        "num_microbatches",
        "state",
    )

    def __init__(self, state: TrainState, batch: Batch, caller: str, *, records_units: bool = False) -> None:
        self.state, self._batch, self._caller, self._records_units = state, batch, caller, records_units
        self.microbatches = _NO_MICROBATCHES
        self.num_microbatches = 0
        self._metrics: Metrics = {}
        self._weights: Mapping[str, Tensor | float] = {}
        self._loss: tuple[Tensor | float, Tensor | float] = (0, 0)
        self._normalizer = SUM_NORMALIZER
        self._synchronized = False
        self._watch: BatchWatch | None = None
        self._checked: CheckedGuard | None = None
        self._uneven_plan: tuple[object, ...] | None = None

    def __enter__(self) -> GradientRun:
        spans.begin("step", 0)
        try:
            self._check_state()
        except BaseException:
            spans.end("step")
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._synchronized and self._report is not None:
                self._report.__exit__(kind, error, trace)
        finally:
            if self._watch is not None:
                self._watch.record(self.state)
            if self._synchronized and error is not None:
                self.grad_sync.abort()
                self.state.drop_gradients()
                mesh = self.state.spec.mesh
                # torch has no class for this error. Under tensor parallelism it may have another cause.
                if mesh is not None and axis_size(mesh, "tp") == 1 and type(error) is RuntimeError and "DTensor" in str(error):
                    raise StepError(f"{self._caller}: {_USED_OUTSIDE} torch says: {format_error_line(error)}") from error
            spans.end("step")

    def _check_state(self) -> None:
        """Check the state, and find the batch's position in its loader, unless a composed step has found it."""
        state, caller = self.state, self._caller
        if not isinstance(state, TrainState):
            check_state(state, caller, f"state, metrics = dt.{caller}(state, batch, loss_fn=loss_fn)")
        # A composed step has begun the batch, and has checked the state before.
        if state._step_batch is None or state._step_counts is not None:
            state._check_not_stale(caller)
        if state._step_batch is None:
            self.state = state = begin_step(state, self._batch)
        if state.spec.mesh is None and (world_size := get_dist_info().world_size) > 1:
            raise ConfigError(
                f"{caller}: {world_size} ranks run, but the model is on no mesh, so gradients would not be reduced. Call "
                "dt.shard_model before Step.init."
            )
        self.guard: StepGuard | None = state._guard
        context = state._run_context
        if context.model_syncs is None:
            context.model_syncs = grad_sync_of(state.model), buffer_sync_of(state.model)
        self.grad_sync, self._buffers = context.model_syncs
        self._report = None if state.spec.mesh is None else report_missing_ranks(caller)

    def synchronize(self, prepare: Callable[[], tuple[Microbatches, Mapping[str, Tensor | float]]]) -> None:
        """Agree with all ranks on the step that is about to run, and drop earlier gradients.

        Args:
            prepare: function that counts and splits this rank's batch, and returns its declared weights. Its errors reach all
                ranks.

        Collective: one record.
        """
        error: Exception | None = None
        try:
            self.microbatches, self._weights = prepare()
            # A batch that only the user can split may have no tensors of its own.
            tensors = list_tensors(self._batch) or list_tensors(self.microbatches.batches)
            check_first_run(self.state, tensors)
            self._watch = BatchWatch(tensors)
        # User functions may raise any exception; it is raised below, on all ranks.
        except Exception as problem:  # noqa: BLE001
            error = problem
        self._counts = self._sync_before_forward(error)
        self.state.drop_gradients()
        if self._report is not None:
            self._report.__enter__()
        # From here on an exception must restore what begin_step takes away, such as the gradient hooks.
        self._synchronized = True
        self.grad_sync.begin_step(self.state.params, within_replica=self.state.spec.replica_info is not None)
        self._buffers.begin_step()

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
            plan_digest=0 if guard is None else guard.traces.digest(*self.replay_conditions(), guard.max_microbatches or 0),
            shapes_hash=0 if guard is None or spec.ranks_per_batch == 1 else microbatches.hash_shapes(spec.data_rank),
            replica_digest=0.0 if replicas is None else replicas.begin_step(state),
            elapsed_s=elapsed_s,
        )
        counts = sync_before_forward(
            record,
            error=error,
            batch_info=state._step_batch.info if state._step_batch is not None else None,
            loss_terms=list(self._weights),
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

    def guarded(self) -> AbstractContextManager[object]:
        """Return the context of all forwards and backwards, which ends at an out-of-memory error of a guarded step."""
        guard, required = self.guard, self.required_microbatches
        if self.is_uneven:
            conditions = self.replay_conditions()
            plan = (self._caller, *conditions)
            is_known = not self._records_units or self.grad_sync.knows_order(conditions)
            is_checked = is_known and plan in self.state._run_context.monitor.uneven_plans
            self._uneven_plan = None if is_checked else plan
        if guard is None:
            return nullcontext() if self._uneven_plan is None else self._check_collectives()
        guard.samples = self.microbatches.samples
        # The plan holds only facts that ranks agree on: ranks with different plans would run in different modes.
        run = min(required, guard.max_microbatches or required)
        run_plan = (run, self._counts.shapes_hash, *self.replay_conditions())
        # A rank without a microbatch is led through the units by records, which a trace lacks.
        return guard.attempt(run_plan, traced=self._uneven_plan is None)

    @contextmanager
    def _check_collectives(self) -> Iterator[None]:
        """Check the first step in which ranks have different numbers of microbatches."""
        with check_collectives(self._caller, EQUAL_MICROBATCHES_ADVICE) as self._checked:
            yield

    @property
    def exchange_events(self) -> ExchangeFn | None:
        """Function by which ranks with a microbatch lead the others through the units, in the first step of its kind."""
        guard = self._checked if self.guard is None else self.guard.collective_guard
        return guard.exchange_event if self._uneven_plan is not None and isinstance(guard, CheckedGuard) else None

    @property
    def required_microbatches(self) -> int:
        """Number of microbatches of the rank with the most microbatches."""
        return self._counts.microbatches

    @property
    def is_uneven(self) -> bool:
        """True if ranks have different numbers of microbatches."""
        return self._counts.fewest_microbatches < self._counts.microbatches

    def replay_conditions(self) -> tuple[int, ...]:
        """Return the facts that decide the collectives of a step: the mode of the model and the frozen parameters."""
        state, frozen = self.state, (param.requires_grad for param in self.state.params.values())
        return (state.model.training, state.spec.replica_info is not None, *frozen)

    def begin_forwards(self) -> LossNormalizer:
        """Return the normalizer of the losses. Collective: one all-reduce of the declared weights, if there are any."""
        guard, required = self.guard, self.required_microbatches
        if guard is not None and guard.prepare is not None:
            guard.prepare()
        self.num_microbatches = required if guard is None else guard.limit_microbatches(required)
        if self._weights:
            self._normalizer = build_normalizer(self._weights, self.state.device, self.state.spec)
        return self._normalizer

    def end_backwards(self, sums: MetricAccumulator) -> None:
        """End the forwards and backwards, with the sums of their losses.

        Collective: the reductions of plain parameters (``replicate``) that the last backward has not begun.
        """
        self.grad_sync.finish_backwards(self.state.params.values())
        sums.add_names(self._weights)
        self._metrics, self._loss = sums.metrics(), sums.loss()
        if self.guard is not None:
            _check_reduction_memory(self.state, self._buffers.num_bytes)

    def finish(self) -> tuple[TrainState, Metrics]:
        """Synchronize after backward, reduce and normalize the gradients; return the state with its counts, and the metrics.

        Collective: one record, for a sharded model on several ranks or a guarded step; the reductions of
        gradients that FSDP2 does not reduce, of buffers, and of weights.

        Raises:
            StepAborted: a guarded step failed on some rank, and is rolled back on all ranks.
        """
        guard, state, metrics = self.guard, self.state, self._metrics
        if guard is not None and guard.failed:
            guard.roll_back(self._free_memory)
        outcome = self._sync_after_backward()
        raise_if_hooks_differ(outcome.param_facts)
        raise_if_written(outcome.param_facts, state.spec.strategy, uneven=self.is_uneven)
        self.grad_sync.confirm_order()
        if self._uneven_plan is not None:
            state._run_context.monitor.uneven_plans.add(self._uneven_plan)
        if guard is None or guard.max_microbatches is None:
            if state.spec.ranks_per_batch > 1:
                check_rng_in_sync(self._counts, state.device)
            self._reduce_and_normalize(outcome)
            if not self._counts.fewest_microbatches:
                metrics = add_names_of_peers(metrics, state.device)
            state._run_context.monitor.nonfinite_losses.record(state.step, self._loss[0])
        self.grad_sync.end_step()
        if self.grad_sync.hooks.exist and (guard is None or guard.max_microbatches is None):
            with seeded_rng(state.seed, "param hooks", state.step) if state.spec.mesh else nullcontext():
                self.grad_sync.hooks.run_(state.params)
        return with_agreed_position(state._replace(_step_counts=self._counts)), metrics

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
        mismatch = complete and self._normalizer.weights_mismatch(state, self._metrics)
        weight = host_weight(state, self._loss[1]) if complete and self._normalizer.global_weight is None else None
        if state.spec.mesh is None and not mismatch:
            outcome = BackwardSync(weight=weight, statuses=[status])
        else:
            outcome = sync_after_backward(
                unit_order=self.grad_sync.reduction_order,
                params_without_grad=self.grad_sync.params_without_grad(state),
                changed_buffers=self._buffers.changed_modules(),
                weights_mismatch=mismatch,
                param_facts=self.grad_sync.describe_params(uneven=self.is_uneven),
                status=status,
                collective_index=0 if guard is None else guard.collectives_issued,
                weight=weight,
            )
        if guard is not None:
            guard.raise_if_failed(outcome, self._counts)
        return outcome

    def _reduce_and_normalize(self, outcome: BackwardSync) -> None:
        """Reduce the gradients of ignored parameters, which FSDP2 does not reduce, and divide by the global weight."""
        state = self.state
        for name in outcome.unused_params:
            state.params[name].grad = None
        if state.spec.mesh is not None:
            _reduce_ignored_params(state, outcome.unused_params)
            has_samples = None if self._counts.fewest_microbatches else bool(self.microbatches.batches)
            self._buffers.sync_(outcome.changed_buffers, ranks_differ=outcome.buffers_differ, has_samples=has_samples)
        grads = [grad for param in state.params.values() if (grad := param.grad) is not None]
        if not grads and not self.grad_sync.grads_taken:
            raise StepError("microbatch_step: no parameter got a gradient. Make the loss depend on a trainable parameter.")
        normalize_grads_(grads, state, self._normalizer, self._metrics, global_weight=outcome.weight)


_USED_OUTSIDE = (
    "the loss, or a forward, must not compute with a sharded parameter outside of the forward of its unit. Compute in the "
    "forward of the block that owns the parameter, or name the parameter in ignored_params. Add the gradient of a weight "
    "penalty to .grad in the update of a transform."
)


def _check_reduction_memory(state: TrainState, buffer_bytes: int) -> None:
    """Allocate the memory of the final reductions once, so that a shortage raises before ranks exchange their outcome."""
    ignored = [state.params[name] for name in state.spec.ignored_params if state.params[name].requires_grad]
    if state.spec.mesh is not None and (ignored or buffer_bytes):
        missing = [torch.empty_like(param) for param in ignored if param.grad is None]
        largest = max(2 * sum(param.numel() * param.element_size() for param in ignored), 3 * buffer_bytes)
        flat = torch.empty(largest, dtype=torch.uint8, device=state.device)
        del missing, flat


def _reduce_ignored_params(state: TrainState, unused: Sequence[str]) -> None:
    ignored = [state.params[name] for name in state.spec.ignored_params if name not in unused]
    params = [param for param in ignored if param.requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    all_reduce_grads_([param.grad for param in params if param.grad is not None], state.spec)
