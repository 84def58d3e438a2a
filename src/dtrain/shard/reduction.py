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

from dtrain.dist.init import current
from dtrain.names import unwrapped
from dtrain.shard.fsdp2 import (
    after_reduction,
    at_end_of_backward,
    before_reduction,
    fill_missing,
    free_gathered,
    gather_once,
    has_waiting_gradients,
    is_idle,
    let_go_of_reduced,
    param_groups,
    refuse_double_backward,
    reset,
    runs_again,
    sharded_params,
    wait_for_reduced,
    whole_params,
)
from dtrain.shard.precision import wide
from dtrain.shard.skipped import SkippedUnits
from dtrain.shard.whole import is_whole
from dtrain.state import ShardSpec, TrainState
from dtrain.tensors import local, with_shard

_REDUCTION = "_dtrain_reduction"  # the attribute of a model that shard_model leaves its Reduction in


_ALL: weakref.WeakSet[Reduction] = weakref.WeakSet()  # of this process; each lives as long as its model


class Reduction:
    """Steers FSDP2 through the microbatches of one step at a time. A plain model has one too, with nothing to steer.

    ``begin``, then ``before_microbatch`` for each, then ``end``; ``abort`` instead after an exception.
    """

    def __init__(self, model: nn.Module, spec: ShardSpec) -> None:
        self._model = model
        self._spec = spec
        _ALL.add(self)
        self._sharded = isinstance(model, FSDPModule)
        self._groups = param_groups(model)
        self._order: list[int] = []
        self._present: set[tuple[int, int]] = set()
        self._missing: set[tuple[int, int]] = set()
        self._last: bool | None = None
        self._in_step = False
        self._apart = False
        self._sums: dict[int, Tensor] = {}  # by parameter: gradients of earlier microbatches that .grad would round
        for index, group in enumerate(self._groups):
            before_reduction(group, partial(self._about_to_reduce, index))
            refuse_double_backward(group)
        # Whole parameters need no gathers: units may differ between ranks, if reductions come in one order on all of them.
        self._turns = list(reversed(range(len(self._groups)))) if spec.strategy == "replicate" else []
        self._held: dict[int, Callable[[bool], None]] = {}
        self._done = 0  # so many of the turns
        if self._turns:
            at_end_of_backward(model, self._reduce_rest)
        cut = self._sharded and spec.strategy != "replicate" and current().world_size > 1
        self._skipped = SkippedUnits(model) if cut else None

    def begin(self, *, apart: bool = False) -> None:
        """Start a step. Mutates: FSDP2's units, where a forward outside of a step has left something.

        Args:
            apart: whether gradients are summed within each copy of the model only.
        """
        if self._sharded and not is_idle(self._model, self._groups):
            reset(self._model)
        self._in_step, self._apart = True, apart
        self._sums.clear()
        self._held.clear()
        self._done = 0
        self._order.clear()
        self._present.clear()
        self._missing.clear()
        if self._skipped is not None:
            self._skipped.end()

    def follow(self, plan: Callable[[], Hashable], *, compare: bool) -> None:
        """Have this rank take part in units that it skips; see ``SkippedUnits``. Does nothing if parameters are whole.

        Args:
            plan: returns whatever the order of units depends on; equal on all ranks.
            compare: if True, ranks compare their order in the first step of a plan.
        """
        if self._skipped is not None:
            self._skipped.begin(plan(), compare=compare)

    def complete(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch: ``loss``, with the units that this rank has skipped in its graph.

        Collective: gathers of skipped units; in the first step of a plan one exchange.

        Raises:
            StepError: in the first step of a plan ranks run different units; on all ranks.
        """
        return loss if self._skipped is None else self._skipped.complete(loss)

    def keep_order(self) -> None:
        """The step has succeeded on all ranks: rely on its order of units. Every rank must, or none."""
        if self._skipped is not None:
            self._skipped.keep()

    def before_microbatch(self, *, last: bool, params: Iterable[Tensor] = ()) -> None:
        """Say what the next backward does with its gradients.

        Args:
            last: if True, the microbatch is the last one of its step.
            params: the parameters of the model, whose gradients of earlier microbatches are put aside if ``.grad`` has fewer
                bits than float32.

        Mutates: flags of FSDP2's units, where they change; ``.grad`` of ``params``.
        """
        self._put_aside(params)
        if self._skipped is not None:
            self._skipped.microbatch()
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

    def has_gradients(self, params: Iterable[Tensor]) -> bool:
        """Return True if a backward of this step has reached any of ``params``, which are all parameters of the model."""
        if self._present or any(map(has_waiting_gradients, self._groups)):
            return True
        return any(param.grad is not None for param in params) and not self._missing

    def _put_aside(self, params: Iterable[Tensor]) -> None:
        low = [param for param in params if param.grad is not None and wide(param.grad.dtype) != param.grad.dtype]
        if low:
            for group in self._groups:
                wait_for_reduced(group)
        for param in low:
            assert param.grad is not None
            grad, before = local(param.grad), self._sums.get(id(param))
            self._sums[id(param)] = grad.to(wide(grad.dtype)) if before is None else before.add_(grad)
            if grad.is_cuda:  # FSDP2 has made it in another stream, which would use its memory again too early
                grad.record_stream(torch.cuda.current_stream(grad.device))
            param.grad = None

    def add_up(self, params: Iterable[Tensor]) -> None:
        """Add the gradients that were put aside to those of the last microbatch. Mutates: ``.grad`` of ``params``."""
        for param in params:
            before = self._sums.pop(id(param), None)
            if before is not None:
                last = param.grad
                whole = before if last is None else before.add_(local(last))
                param.grad = with_shard(param, whole.to(param.dtype)) if last is None else last
                if last is not None:
                    local(last).copy_(whole)

    def end(self) -> None:
        """Leave FSDP2's flags as they were before the step."""
        self.before_microbatch(last=True)
        self._in_step = self._apart = False
        self._sums.clear()
        if self._skipped is not None:
            self._skipped.end()

    def free(self) -> None:
        """Drop gathered copies of parameters that are about to change. Mutates: FSDP2's units."""
        free_gathered(self._groups)

    def abort(self) -> None:
        """Forget the forward and backward that an exception has ended. Mutates: FSDP2's units."""
        self.end()
        reset(self._model)

    def abort_all(self) -> None:
        """``abort``, also in other models: a loss may run several, and the exception has ended a forward of each.

        Mutates: FSDP2's units of every sharded model of this process, but for those that are whole just now.
        """
        self.abort()
        for other in list(_ALL):
            model = other._model
            if other is not self and other._sharded and not is_whole(model) and not is_idle(model, other._groups):
                reset(model)

    def gathered(self) -> list[nn.Parameter]:
        """The full-size parameters that forwards of this process compute with, in the place of those that are cut."""
        return [param for group in self._groups for param in whole_params(group)]

    @property
    def order(self) -> Sequence[int]:
        """Which units were reduced in this step, one after another."""
        return self._order

    def missing(self, state: TrainState) -> list[str]:
        """Names of the trainable parameters that got no gradient from this rank's microbatches, in the order of ``params``."""
        whole = [name for name in self._spec.left_out if state.params[name].requires_grad and state.params[name].grad is None]
        lacking = self._missing - self._present
        if not lacking:
            return whole
        cut = {id(sharded_params(self._groups[index])[at]) for index, at in lacking}
        return [name for name, param in state.params.items() if id(param) in cut or name in whole]

    @contextmanager
    def when_final(self, params: Sequence[Tensor], call: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
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
            handles = [after_reduction(group, partial(self._reduced, index, call)) for index, group in enumerate(self._groups)]
        else:
            hook = partial(self._accumulated, call)
            handles = [param.register_post_accumulate_grad_hook(hook) for param in params if param.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                if handle is not None:
                    handle.remove()

    def _accumulated(self, call: Callable[[Sequence[Tensor]], None], param: Tensor) -> None:
        if self._in_step and self._last:
            self.add_up([param])
            call([param])

    def _reduced(self, index: int, call: Callable[[Sequence[Tensor]], None]) -> None:
        if self._in_step and self._last and not runs_again(self._groups[index]):
            for earlier in self._order[:-1]:
                let_go_of_reduced(self._groups[earlier])
            lacking = self._missing - self._present
            params = enumerate(sharded_params(self._groups[index]))
            final = [param for at, param in params if param.grad is not None and (index, at) not in lacking]
            self.add_up(final)
            call(final)

    def _about_to_reduce(self, index: int, reduce: Callable[[bool], None]) -> None:
        """Reduce a unit, or hold it until all units before it in the turns were reduced."""
        turn = self._turns.index(index) if self._turns and self._in_step and self._last else -1
        if turn < self._done:
            self._reduce(index, reduce)
            return
        if runs_again(self._groups[index]):
            return  # the unit was called several times: its gradients of this backward are reduced together
        self._held[index] = reduce
        while self._done < len(self._turns) and (held := self._held.pop(self._turns[self._done], None)) is not None:
            self._done += 1
            self._reduce(self._turns[self._done - 1], held)

    def _reduce_rest(self) -> None:
        """Reduce, at the end of a backward, the units that this rank's samples did not reach, and those that wait for them."""
        if not (self._in_step and self._last):
            return
        for index in self._turns[self._done :]:
            self._done += 1
            gather_once(self._groups[index])
            self._groups[index].post_backward()
        self._held.clear()
        self._done = 0  # of the next backward, if the loss runs several

    def _reduce(self, index: int, reduce: Callable[[bool], None]) -> None:
        present, missing = fill_missing(self._groups[index])
        if self._in_step:
            if self._last or not self._turns:  # whole parameters are summed over ranks in the last microbatch only
                self._order.append(index)
            self._present.update((index, at) for at in present)
            self._missing.update((index, at) for at in missing)
        reduce(self._apart)


def watch_reductions(model: nn.Module, spec: ShardSpec) -> None:
    """Give a sharded ``model`` its ``Reduction``. Mutates: ``model`` (one attribute, and hooks in FSDP2's groups)."""
    setattr(unwrapped(model), _REDUCTION, Reduction(model, spec))


def reduction_of(model: nn.Module) -> Reduction:
    """The ``Reduction`` of a model; one that steers nothing when ``shard_model`` never saw it."""
    found = unwrapped(model).__dict__.get(_REDUCTION)  # nn.Module is slow to say that it has no such attribute
    if isinstance(found, Reduction):
        return found
    plain = _PLAIN.get(unwrapped(model))
    if plain is None:  # each has its own sums: a loss function may run a step of another model
        plain = _PLAIN[unwrapped(model)] = Reduction(nn.Identity(), ShardSpec())
    return plain


_PLAIN: weakref.WeakKeyDictionary[nn.Module, Reduction] = weakref.WeakKeyDictionary()


def reduce_whole_(grads: Sequence[Tensor], spec: ShardSpec) -> None:
    """Sum plain gradients over all ranks that count, in at least float32; all ranks get the sum.

    While copies of the model train apart, the ranks are those of this rank's copy.

    Mutates: ``grads``. Collective: one all-reduce per dtype; for a copy one per axis of its mesh.
    """
    for dtype in {grad.dtype: None for grad in grads}:
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same]).to(wide(dtype))
        if not spec.counts:
            flat.zero_()
        for group in [None] if spec.apart is None else spec.apart.within:
            dist.all_reduce(flat, group=group)
        pieces = flat.split([grad.numel() for grad in same])
        torch._foreach_copy_(same, [piece.view_as(grad) for piece, grad in zip(pieces, same, strict=True)])
