"""``Reduction``: when the gradients of a sharded model are reduced within a step, and which parameters had none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.dist.init import get_dist_info
from dtrain.dtensor import from_local_like, to_local
from dtrain.fqn import unwrap_module
from dtrain.shard.fsdp2_private import (
    add_end_of_backward_hook,
    add_reduction_hook,
    ensure_unsharded_once,
    forbid_double_backward,
    free_reduce_buffer,
    fsdp_param_groups,
    has_pending_backward,
    has_unreduced_grads,
    intercept_reduction,
    is_idle,
    reset_iteration,
    reshard_groups,
    sharded_params,
    unsharded_params,
    wait_for_reduction,
    zero_fill_missing_grads,
)
from dtrain.shard.precision import accumulation_dtype
from dtrain.shard.skipped_units import SkippedUnits
from dtrain.shard.unshard import is_unsharded
from dtrain.state import ShardSpec, TrainState

_GRAD_SYNC_ATTRIBUTE = "_dtrain_reduction"  # the attribute of a model that shard_model leaves its Reduction in


_INSTANCES: weakref.WeakSet[GradSync] = weakref.WeakSet()  # of this process; each lives as long as its model


class GradSync:
    """Steers FSDP2 through the microbatches of one step at a time. A plain model has one too, with nothing to steer.

    ``begin_step``, then ``before_microbatch`` for each, then ``end_step``; ``abort`` instead after an exception.
    """

    def __init__(self, model: nn.Module, spec: ShardSpec) -> None:
        self._model = model
        self._spec = spec
        _INSTANCES.add(self)
        self._sharded = isinstance(model, FSDPModule)
        self._groups = fsdp_param_groups(model)
        self._order: list[int] = []
        self._present: set[tuple[int, int]] = set()
        self._missing: set[tuple[int, int]] = set()
        self._last: bool | None = None
        self._in_step = False
        self._within_replica = False
        self._stashed_grads: dict[int, Tensor] = {}  # by parameter: gradients of earlier microbatches that .grad would round
        for index, group in enumerate(self._groups):
            intercept_reduction(group, partial(self._reduce_in_order, index))
            forbid_double_backward(group)
        # Whole parameters need no gathers: units may differ between ranks, if reductions come in one order on all of them.
        self._fixed_order = list(reversed(range(len(self._groups)))) if spec.strategy == "replicate" else []
        self._deferred: dict[int, Callable[[bool], None]] = {}
        self._num_reduced = 0  # so many of the turns
        if self._fixed_order:
            add_end_of_backward_hook(model, self._reduce_unreached)
        cut = self._sharded and spec.strategy != "replicate" and get_dist_info().world_size > 1
        self._skipped = SkippedUnits(model) if cut else None

    def begin_step(self, *, within_replica: bool = False) -> None:
        """Start a step. Mutates: FSDP2's units, where a forward outside of a step has left something.

        Args:
            within_replica: whether gradients are summed within each copy of the model only.
        """
        if self._sharded and not is_idle(self._model, self._groups):
            reset_iteration(self._model)
        self._in_step, self._within_replica = True, within_replica
        self._stashed_grads.clear()
        self._deferred.clear()
        self._num_reduced = 0
        self._order.clear()
        self._present.clear()
        self._missing.clear()
        if self._skipped is not None:
            self._skipped.end_step()

    def follow_plan(self, plan: Callable[[], Hashable], *, compare: bool) -> None:
        """Have this rank take part in units that it skips; see ``SkippedUnits``. Does nothing if parameters are whole.

        Args:
            plan: returns whatever the order of units depends on; equal on all ranks.
            compare: if True, ranks compare their order in the first step of a plan.
        """
        if self._skipped is not None:
            self._skipped.begin_step(plan(), compare=compare)

    def complete_forward(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch: ``loss``, with the units that this rank has skipped in its graph.

        Collective: gathers of skipped units; in the first step of a plan one exchange.

        Raises:
            StepError: in the first step of a plan ranks run different units; on all ranks.
        """
        return loss if self._skipped is None else self._skipped.complete_forward(loss)

    def confirm_order(self) -> None:
        """The step has succeeded on all ranks: rely on its order of units. Every rank must, or none."""
        if self._skipped is not None:
            self._skipped.confirm_order()

    def before_microbatch(self, *, last: bool, params: Iterable[Tensor] = ()) -> None:
        """Say what the next backward does with its gradients.

        Args:
            last: if True, the microbatch is the last one of its step.
            params: the parameters of the model, whose gradients of earlier microbatches are put aside if ``.grad`` has fewer
                bits than float32.

        Mutates: flags of FSDP2's units, where they change; ``.grad`` of ``params``.
        """
        self._stash_low_precision_grads(params)
        if self._skipped is not None:
            self._skipped.begin_microbatch()
        if last == self._last:
            return
        self._last = last
        if not self._sharded:
            return
        model, spec = self._model, self._spec
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or spec.accumulate == "sharded")
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        if spec.strategy in ("shard_grad_op", "replicate"):
            model.set_reshard_after_backward(last)  # gathered once a step, not once a microbatch

    def has_grads(self, params: Iterable[Tensor]) -> bool:
        """Return True if a backward of this step has reached any of ``params``, which are all parameters of the model."""
        if self._present or any(map(has_unreduced_grads, self._groups)):
            return True
        return any(param.grad is not None for param in params) and not self._missing

    def _stash_low_precision_grads(self, params: Iterable[Tensor]) -> None:
        low = [param for param in params if param.grad is not None and accumulation_dtype(param.grad.dtype) != param.grad.dtype]
        if low:
            for group in self._groups:
                wait_for_reduction(group)
        for param in low:
            assert param.grad is not None
            grad, before = to_local(param.grad), self._stashed_grads.get(id(param))
            self._stashed_grads[id(param)] = grad.to(accumulation_dtype(grad.dtype)) if before is None else before.add_(grad)
            if grad.is_cuda:  # FSDP2 has made it in another stream, which would use its memory again too early
                grad.record_stream(torch.cuda.current_stream(grad.device))
            param.grad = None

    def add_stashed_grads(self, params: Iterable[Tensor]) -> None:
        """Add the gradients that were put aside to those of the last microbatch. Mutates: ``.grad`` of ``params``."""
        for param in params:
            before = self._stashed_grads.pop(id(param), None)
            if before is not None:
                last = param.grad
                whole = before if last is None else before.add_(to_local(last))
                param.grad = from_local_like(param, whole.to(param.dtype)) if last is None else last
                if last is not None:
                    to_local(last).copy_(whole)

    def end_step(self) -> None:
        """Leave FSDP2's flags as they were before the step."""
        self.before_microbatch(last=True)
        self._in_step = self._within_replica = False
        self._stashed_grads.clear()
        if self._skipped is not None:
            self._skipped.end_step()

    def reshard(self) -> None:
        """Drop gathered copies of parameters that are about to change. Mutates: FSDP2's units."""
        reshard_groups(self._groups)

    def abort(self) -> None:
        """Forget the forward and backward that an exception has ended. Mutates: FSDP2's units."""
        self.end_step()
        reset_iteration(self._model)

    def abort_all(self) -> None:
        """``abort``, also in other models: a loss may run several, and the exception has ended a forward of each.

        Mutates: FSDP2's units of every sharded model of this process, but for those that are whole just now.
        """
        self.abort()
        for other in list(_INSTANCES):
            model = other._model
            if other is not self and other._sharded and not is_unsharded(model) and not is_idle(model, other._groups):
                reset_iteration(model)

    def unsharded_params(self) -> list[nn.Parameter]:
        """The full-size parameters that forwards of this process compute with, in the place of those that are cut."""
        return [param for group in self._groups for param in unsharded_params(group)]

    @property
    def reduction_order(self) -> Sequence[int]:
        """Which units were reduced in this step, one after another."""
        return self._order

    def params_without_grad(self, state: TrainState) -> list[str]:
        """Names of the trainable parameters that got no gradient from this rank's microbatches, in the order of ``params``."""
        whole = [
            name for name in self._spec.ignored_params if state.params[name].requires_grad and state.params[name].grad is None
        ]
        lacking = self._missing - self._present
        if not lacking:
            return whole
        cut = {id(sharded_params(self._groups[index])[at]) for index, at in lacking}
        return [name for name, param in state.params.items() if id(param) in cut or name in whole]

    @contextmanager
    def on_grad_ready(self, params: Sequence[Tensor], call: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
        """A context in which ``call`` gets parameters whose gradient is final, within the last microbatch's backward.

        A unit's come together. Left for later are those that this rank's samples did not reach, which may have no gradient on
        any rank, and units that ran before in a way from which FSDP2 expects a further backward.

        Args:
            params: all parameters of the model; those of a sharded one that no unit holds are left out.
            call: takes their gradients away. On a GPU it is to work in the stream that is current when it is called, and to
                tell the allocator so, by ``record_stream``: FSDP2 may have made them in another one.

        Mutates: hooks of the parameters, while the context lasts.
        """
        if self._sharded:
            handles = [
                add_reduction_hook(group, partial(self._on_reduced, index, call)) for index, group in enumerate(self._groups)
            ]
        else:
            hook = partial(self._on_accumulated, call)
            handles = [param.register_post_accumulate_grad_hook(hook) for param in params if param.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                if handle is not None:
                    handle.remove()

    def _on_accumulated(self, call: Callable[[Sequence[Tensor]], None], param: Tensor) -> None:
        if self._in_step and self._last:
            self.add_stashed_grads([param])
            call([param])

    def _on_reduced(self, index: int, call: Callable[[Sequence[Tensor]], None]) -> None:
        if self._in_step and self._last and not has_pending_backward(self._groups[index]):
            for earlier in self._order[:-1]:
                free_reduce_buffer(self._groups[earlier])
            lacking = self._missing - self._present
            params = enumerate(sharded_params(self._groups[index]))
            final = [param for at, param in params if param.grad is not None and (index, at) not in lacking]
            self.add_stashed_grads(final)
            call(final)

    def _reduce_in_order(self, index: int, reduce: Callable[[bool], None]) -> None:
        """Reduce a unit, or hold it until all units before it in the turns were reduced."""
        turn = self._fixed_order.index(index) if self._fixed_order and self._in_step and self._last else -1
        if turn < self._num_reduced:
            self._reduce(index, reduce)
            return
        if has_pending_backward(self._groups[index]):
            return  # the unit was called several times: its gradients of this backward are reduced together
        self._deferred[index] = reduce
        while (
            self._num_reduced < len(self._fixed_order)
            and (held := self._deferred.pop(self._fixed_order[self._num_reduced], None)) is not None
        ):
            self._num_reduced += 1
            self._reduce(self._fixed_order[self._num_reduced - 1], held)

    def _reduce_unreached(self) -> None:
        """Reduce, at the end of a backward, the units that this rank's samples did not reach, and those that wait for them."""
        if not (self._in_step and self._last):
            return
        for index in self._fixed_order[self._num_reduced :]:
            self._num_reduced += 1
            ensure_unsharded_once(self._groups[index])
            self._groups[index].post_backward()
        self._deferred.clear()
        self._num_reduced = 0  # of the next backward, if the loss runs several

    def _reduce(self, index: int, reduce: Callable[[bool], None]) -> None:
        present, missing = zero_fill_missing_grads(self._groups[index])
        if self._in_step:
            if self._last or not self._fixed_order:  # whole parameters are summed over ranks in the last microbatch only
                self._order.append(index)
            self._present.update((index, at) for at in present)
            self._missing.update((index, at) for at in missing)
        reduce(self._within_replica)


def attach_grad_sync(model: nn.Module, spec: ShardSpec) -> None:
    """Give a sharded ``model`` its ``Reduction``. Mutates: ``model`` (one attribute, and hooks in FSDP2's groups)."""
    setattr(unwrap_module(model), _GRAD_SYNC_ATTRIBUTE, GradSync(model, spec))


def grad_sync_of(model: nn.Module) -> GradSync:
    """The ``Reduction`` of a model; one that steers nothing when ``shard_model`` never saw it."""
    found = unwrap_module(model).__dict__.get(_GRAD_SYNC_ATTRIBUTE)  # nn.Module is slow to say that it has no such attribute
    if isinstance(found, GradSync):
        return found
    plain = _OF_PLAIN_MODELS.get(unwrap_module(model))
    if plain is None:  # each has its own sums: a loss function may run a step of another model
        plain = _OF_PLAIN_MODELS[unwrap_module(model)] = GradSync(nn.Identity(), ShardSpec())
    return plain


_OF_PLAIN_MODELS: weakref.WeakKeyDictionary[nn.Module, GradSync] = weakref.WeakKeyDictionary()


def all_reduce_grads_(grads: Sequence[Tensor], spec: ShardSpec) -> None:
    """Sum plain gradients over all ranks that count, in at least float32; all ranks get the sum.

    While copies of the model train apart, the ranks are those of this rank's copy.

    Mutates: ``grads``. Collective: one all-reduce per dtype; for a copy one per axis of its mesh.
    """
    for dtype in {grad.dtype: None for grad in grads}:
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same]).to(accumulation_dtype(dtype))
        if not spec.counts_in_loss:
            flat.zero_()
        for group in [None] if spec.replica_info is None else spec.replica_info.within_groups:
            dist.all_reduce(flat, group=group)
        pieces = flat.split([grad.numel() for grad in same])
        torch._foreach_copy_(same, [piece.view_as(grad) for piece, grad in zip(pieces, same, strict=True)])
