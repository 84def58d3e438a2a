"""Control when the gradients of a sharded model are reduced within a step, and record parameters without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dtrain.dist.init import get_dist_info
from dtrain.fqn import parameters_by_fqn, unwrap_module
from dtrain.shard.fsdp2_private import (
    add_end_of_backward_hook,
    add_reduction_hook,
    averaged_gradients,
    ensure_unsharded_once,
    forbid_double_backward,
    free_reduce_buffer,
    fsdp_param_groups,
    has_pending_backward,
    has_unreduced_grads,
    intercept_reduction,
    is_idle,
    is_unit,
    reduced_params,
    replace_views_of_empty_units,
    reset_iteration,
    reshard_groups,
    run_empty,
    set_last_backward,
    sharded_params,
    unit_forwards,
    unsharded_params,
    wait_for_reduction,
    zero_fill_missing_grads,
)
from dtrain.shard.params import DataAssignments, ParamHooks, StepHook, UsesOutside, has_grad_hook, raise_hooks_outside_of_step
from dtrain.shard.precision import add_stashed_grads_, has_low_precision_grads, stash_low_precision_grads_
from dtrain.shard.replica_check import ForwardWrites
from dtrain.shard.replicate import BucketReducer
from dtrain.shard.skipped_units import ExchangeFn, ModelUnits, SkippedUnits
from dtrain.shard.spec import ShardSpec
from dtrain.shard.unshard import GRAD_SYNC_ATTRIBUTE, GatheredCopies, is_unsharded
from dtrain.state import TrainState


class GradSync:
    """Controls FSDP2, or a ``BucketReducer``, through the microbatches of one step. A plain model, on no mesh, has neither.

    Call ``begin_step``, then ``before_microbatch`` for each microbatch, then ``finish_backwards`` and ``end_step``, or
    ``abort`` after an exception.
    """

    def __init__(self, model: nn.Module, spec: ShardSpec, reducer: BucketReducer | None = None) -> None:
        self._model = model
        self._spec = spec
        self.reducer = reducer
        self._sharded = is_unit(model)
        self._groups = fsdp_param_groups(model)
        self._order: list[int] = []
        self._present: set[tuple[int, int]] = set()
        self._missing: set[tuple[int, int]] = set()
        self._last: bool | None = None
        self._in_step = False
        # True if a callback of ``on_grad_ready`` has taken a gradient of this step.
        self.grads_taken = False
        self._within_replica = False
        # Gradients of earlier microbatches, by parameter, that accumulation in ``.grad`` would round.
        self._stashed_grads: dict[int, Tensor] = {} if reducer is None else reducer.stashed_grads
        for index, group in enumerate(self._groups):
            intercept_reduction(group, partial(self._reduce_in_order, index))
            forbid_double_backward(group)
        # Replicated parameters need no gathers, so ranks may run different units if all ranks reduce in one order.
        self._fixed_order = list(reversed(range(len(self._groups)))) if spec.strategy == "replicate" else []
        self._deferred: dict[int, Callable[[bool], None]] = {}
        self._num_reduced = 0
        if self._fixed_order:
            add_end_of_backward_hook(model, self._reduce_unreached)
        world_size = get_dist_info().world_size
        # A rank must take part in the collectives of each microbatch of the other ranks.
        self.needs_all_microbatches = self._sharded and spec.strategy != "replicate" and world_size > 1
        on_all_ranks = spec.mesh is not None and spec.mesh.size() == world_size
        self.units = ModelUnits(model, gathers=self.needs_all_microbatches, on_all_ranks=on_all_ranks)
        self._skipped = SkippedUnits(self.units)
        # After the hooks of SkippedUnits, which compares the outputs of nested units.
        for unit in unit_forwards(model):
            unit.prepare_outputs()
        replace_views_of_empty_units(model)
        self.hooks = ParamHooks()
        self.writes = ForwardWrites(model, 1 if spec.mesh is None else spec.mesh.size())
        self._assignments = DataAssignments(parameters_by_fqn(model)[0] if self._sharded else {})
        self.uses = UsesOutside()
        self._watched_digest: int | None = None
        # Outside of all other hooks.
        self.copies = GatheredCopies(model)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # A copy of the model is a plain model.
        return type(None), ()

    def begin_step(self, state: TrainState | None = None) -> None:
        """Start a step. Mutates: FSDP2's units, if a forward outside of a step left state; hooks of plain parameters.

        While replicas train separately, gradients are summed within each replica only.

        Args:
            state: state of the step; without a state, a ``BucketReducer`` has no effect.
        """
        within_replica = state is not None and state.spec.replica_info is not None
        self.copies.begin_step()
        self._in_step, self._within_replica, self.grads_taken = True, within_replica, False
        if self._spec.mesh is not None:
            self._begin_sharded_step(state, within_replica=within_replica)
        if state is not None:
            self.hooks.detach(state._trainable)

    def _begin_sharded_step(self, state: TrainState | None, *, within_replica: bool) -> None:
        if self._sharded and not is_idle(self._model, self._groups):
            reset_iteration(self._model)
        if state is not None and self._sharded:
            self.uses.described.clear()
            # Either may replace the parameters, or the trainable ones among them.
            if self._assignments.check(state.params) or self._watched_digest != state._trainable_digest:
                self._watched_digest = state._trainable_digest
                self.uses.watch(state._trainable, reduced_params(self._groups))
        self._deferred.clear()
        self._num_reduced = 0
        self._order.clear()
        self._present.clear()
        self._missing.clear()
        if self.reducer is not None and state is None:
            self.reducer.reset()
        if state is not None:
            if self.reducer is not None:
                self.reducer.begin_step(state._trainable, communicate=not within_replica)
            self.writes.begin_step(state.params, compare=not within_replica)
        self._skipped.end_step()

    @property
    def _in_last_backward(self) -> bool:
        """True if the backward that runs now is the last of its step, whose gradients are final."""
        return self._in_step and bool(self._last)

    @property
    def follows_other_models(self) -> bool:
        """True if the loss may run other sharded models, whose collectives need all ranks; equal on all ranks."""
        return self._spec.mesh is not None and self.units.has_others

    def knows_order(self, plan: Hashable) -> bool:
        """Return True if a rank without a microbatch knows the units of ``plan``; equal on all ranks."""
        is_known = not self.needs_all_microbatches or self._skipped.knows_order(plan)
        return is_known and not self.follows_other_models

    def follow_plan(
        self, plan: Callable[[], Hashable], *, compare: bool, exchange: ExchangeFn | None = None, uneven: bool = False
    ) -> None:
        """Have this rank take part in the collectives of skipped units; see ``SkippedUnits``. No effect on replicas.

        Args:
            plan: returns the facts that determine the order of units; equal on all ranks.
            compare, exchange, uneven: as in ``SkippedUnits.begin_step``.
        """
        if self.needs_all_microbatches or (uneven and exchange and self.follows_other_models):
            self._skipped.begin_step(plan(), compare=compare, exchange=exchange, uneven=uneven)

    def complete_forward(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch. Return ``loss`` with the units that this rank skipped in its graph.

        Collective, Raises: as ``SkippedUnits.complete_forward``.
        """
        self.writes.after_forward(last=self._last is not False)
        return self._skipped.complete_forward(loss)

    def describe_params(self, *, uneven: bool) -> list[str]:
        """Return hooks, uses and writes of parameters as text that ranks compare. ``uneven``: see ``ForwardWrites``."""
        return [*self.hooks.described, *self.uses.described, *self.writes.describe(uneven=uneven)]

    def forward_empty(self) -> Tensor | None:
        """Take part in the collectives of a microbatch of other ranks. Return a zero for backward, None if nothing waits."""
        self.writes.after_forward(last=self._last is not False)
        empty = self._skipped.forward_empty()
        # Under ``replicate`` the end of any backward reduces all units.
        if self._fixed_order and self._last:
            empty = run_empty(self._model) + empty
        return empty if empty.requires_grad else None

    def confirm_order(self) -> None:
        """Rely on the order of units of this step, which succeeded on all ranks. All ranks must call, or none."""
        self._skipped.confirm_order()

    def before_microbatch(self, *, last: bool, params: Iterable[Tensor] = ()) -> None:
        """Set whether the next backward reduces its gradients.

        Args:
            last: if True, the microbatch is the last of its step.
            params: parameters of the model; gradients of earlier microbatches with fewer bits than float32 are stashed.

        Mutates: flags of FSDP2's units, if the flags change; ``.grad`` of ``params``.
        """
        if params and (self.reducer is None or self.reducer.has_low_precision):
            for group in self._groups if has_low_precision_grads(params) else ():
                wait_for_reduction(group)
            stash_low_precision_grads_(params, self._stashed_grads)
        if self._spec.mesh is not None:
            self._skipped.begin_microbatch()
        if self.reducer is not None and last and self._in_step:
            self.reducer.begin_last_backward()
        if last == self._last:
            return
        self._last = last
        if not self._sharded:
            return
        # With these strategies parameters are gathered once a step, not once a microbatch.
        gathered_once = self._spec.strategy in ("shard_grad_op", "replicate")
        reduce, reshard = last or self._spec.accumulate == "sharded", last if gathered_once else None
        set_last_backward(self._model, self._groups, last, reduce=reduce, reshard=reshard)

    def has_grads(self, params: Iterable[Tensor]) -> bool:
        """Return True if a backward of this step reached any of ``params``, all parameters of the model."""
        if self._present or (self.reducer and self.reducer.has_grads):
            return True
        if self._groups and any(map(has_unreduced_grads, self._groups)):
            return True
        for param in params:
            if param.grad is not None:
                return not self._missing
        return False

    def finish_backwards(self, params: Iterable[Tensor]) -> None:
        """Complete the gradients of ``params``, all parameters, after the last backward. Mutates: ``.grad``.

        Collective: one all-reduce for each bucket of plain parameters that the last backward has not reduced.
        """
        if self.reducer is not None:
            self.reducer.finish()
        if self._stashed_grads:
            add_stashed_grads_(params, self._stashed_grads)

    def end_step(self) -> None:
        """Restore FSDP2's flags and the hooks of plain parameters after a step."""
        self._in_step = self._within_replica = False
        self.copies.end_step()
        self._stashed_grads.clear()
        self.hooks.restore()
        if self._spec.mesh is None:
            return
        self.before_microbatch(last=True)
        if self.reducer is not None:
            self.reducer.reset()
        self._skipped.end_step()

    def reshard(self) -> None:
        """Free unsharded parameters before parameters change. Mutates: FSDP2's units.

        Raises:
            StepError: the copies were written.
        """
        reshard_groups(self._groups)
        self.copies.check()

    def abort(self) -> None:
        """Reset FSDP2 after an exception in forward or backward. Mutates: FSDP2's units."""
        others = self._skipped.other_models()
        self.end_step()
        self.writes.abort()
        reset_iteration(self._model)
        for model in others:
            grad_sync_of(model).reset()

    def abort_all(self) -> None:
        """Run ``abort``, also for other models of the process, because a loss may run several models.

        Mutates: FSDP2's units of every sharded model of this process, except models in ``unshard_params``.
        """
        self.abort()
        for model in self.units.other_sharded_models():
            grad_sync_of(model).reset()

    def reset(self) -> None:
        """Discard an interrupted forward of a model in another model's step. Mutates: FSDP2's units."""
        if self._sharded and not is_unsharded(self._model) and not is_idle(self._model, self._groups):
            reset_iteration(self._model)

    def unsharded_params(self) -> list[nn.Parameter]:
        """Return the unsharded parameters that forwards compute with."""
        return [param for group in self._groups for param in unsharded_params(group)]

    @property
    def reduction_order(self) -> Sequence[int]:
        """Return the indices of the units reduced in this step, in order."""
        return self._order

    def params_without_grad(self, state: TrainState) -> list[str]:
        """Return the trainable parameters without a gradient from this rank's microbatches, by name, in order of ``params``."""
        if self.reducer is not None:
            absent = self.reducer.missing
            return [name for name, param in state._trainable.items() if id(param) in absent] if absent else []
        ignored = [
            name for name in self._spec.ignored_params if state.params[name].requires_grad and state.params[name].grad is None
        ]
        missing = self._missing - self._present
        if not missing:
            return ignored
        sharded = {id(sharded_params(self._groups[index])[position]) for index, position in missing}
        return [name for name, param in state._trainable.items() if id(param) in sharded or name in ignored]

    @contextmanager
    def on_grad_ready(self, params: Sequence[Tensor], call: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
        """Call ``call`` with parameters whose gradients are final, during the backward of the last microbatch.

        Parameters of one unit arrive together. Parameters that this rank's samples did not reach are skipped, and units for
        which FSDP2 expects a further backward.

        Args:
            params: all trainable parameters; parameters of a sharded model outside of all units are skipped.
            call: consumes the gradients. On a GPU, ``call`` must use the current stream and call ``record_stream``, because
                FSDP2 may allocate gradients in another stream.

        Mutates: hooks of the parameters, while the context lasts.
        """
        handles: list[RemovableHandle | None] = []
        if self.reducer is not None:
            self.reducer.on_reduced = partial(self._on_bucket_reduced, call)
        elif self._sharded:
            handles = [
                add_reduction_hook(group, partial(self._on_reduced, index, call)) for index, group in enumerate(self._groups)
            ]
        else:
            hook = StepHook(self._on_accumulated, call)
            handles = [param.register_post_accumulate_grad_hook(hook) for param in params if param.requires_grad]
        try:
            yield
        finally:
            if self.reducer is not None:
                self.reducer.on_reduced = None
            for handle in handles:
                if handle is not None:
                    handle.remove()

    def _on_bucket_reduced(self, call: Callable[[Sequence[Tensor]], None], params: Sequence[Tensor]) -> None:
        self.grads_taken |= bool(params)
        call(params)

    def _on_accumulated(self, call: Callable[[Sequence[Tensor]], None], param: Tensor) -> None:
        if self._in_last_backward:
            add_stashed_grads_([param], self._stashed_grads)
            self.grads_taken = True
            call([param])

    def _on_reduced(self, index: int, call: Callable[[Sequence[Tensor]], None]) -> None:
        if self._in_last_backward and not has_pending_backward(self._groups[index]):
            for earlier in self._order[:-1]:
                free_reduce_buffer(self._groups[earlier])
            missing = self._missing - self._present
            params = enumerate(sharded_params(self._groups[index]))
            final = [param for position, param in params if param.grad is not None and (index, position) not in missing]
            add_stashed_grads_(final, self._stashed_grads)
            self.grads_taken |= bool(final)
            call(final)

    def _reduce_in_order(self, index: int, reduce: Callable[[bool], None]) -> None:
        """Reduce a unit, or defer the reduction until all earlier units of the fixed order are reduced."""
        position = self._fixed_order.index(index) if self._fixed_order and self._in_last_backward else -1
        if position < self._num_reduced:
            self._reduce(index, reduce)
            return
        if has_pending_backward(self._groups[index]):
            # The unit ran several times. Its gradients of this backward are reduced together.
            return
        self._deferred[index] = reduce
        while (
            self._num_reduced < len(self._fixed_order)
            and (deferred := self._deferred.pop(self._fixed_order[self._num_reduced], None)) is not None
        ):
            self._num_reduced += 1
            self._reduce(self._fixed_order[self._num_reduced - 1], deferred)

    def _reduce_unreached(self) -> None:
        """Reduce at the end of a backward the units that this rank's samples did not reach, and all deferred units."""
        if not self._in_last_backward:
            return
        for index in self._fixed_order[self._num_reduced :]:
            self._num_reduced += 1
            ensure_unsharded_once(self._groups[index])
            self._groups[index].post_backward()
        self._deferred.clear()
        # The loss may run a further backward.
        self._num_reduced = 0

    def _reduce(self, index: int, reduce: Callable[[bool], None]) -> None:
        present, missing = zero_fill_missing_grads(self._groups[index])
        if self._in_step:
            # Replicated parameters are all-reduced in the last microbatch only.
            if self._last or not self._fixed_order:
                self._order.append(index)
            self._present.update([(index, position) for position in present])
            self._missing.update([(index, position) for position in missing])
        elif any(map(has_grad_hook, sharded_params(self._groups[index]))):
            # The hooks belong to the sharded parameters, and the model has the unsharded ones now.
            self.reshard()
            raise_hooks_outside_of_step(self._model)
        elif not self.copies.step_runs:
            # The mean over ranks, as without dtrain. A step divides sums by the global weight.
            with averaged_gradients(self._groups[index]):
                reduce(self._within_replica)
            return
        reduce(self._within_replica)


def attach_grad_sync(model: nn.Module, spec: ShardSpec, reducer: BucketReducer | None) -> None:
    """Give a sharded ``model`` its ``GradSync``. Mutates: ``model`` (one attribute, and hooks in FSDP2's groups).

    Args:
        reducer: reducer of plain parameters; None for a model with units of FSDP2.
    """
    setattr(unwrap_module(model), GRAD_SYNC_ATTRIBUTE, GradSync(model, spec, reducer))


def grad_sync_of(model: nn.Module) -> GradSync:
    """Return the ``GradSync`` of a model; for a plain model, an instance without effect."""
    # nn.Module.__getattr__ is slow for missing attributes.
    inner = unwrap_module(model)
    attached = inner.__dict__.get(GRAD_SYNC_ATTRIBUTE)
    if isinstance(attached, GradSync):
        return attached
    plain = _OF_PLAIN_MODELS.get(inner)
    # Every plain model needs its own sums, because a loss function may run a step of another model.
    if plain is None:
        plain = _OF_PLAIN_MODELS[inner] = GradSync(nn.Identity(), ShardSpec())
    return plain


# A plain model is the user's own object, so it gets no attribute.
_OF_PLAIN_MODELS: weakref.WeakKeyDictionary[nn.Module, GradSync] = weakref.WeakKeyDictionary()
