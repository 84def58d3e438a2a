"""Sum the gradients of plain parameters over ranks in flat buckets (``BucketReducer``), for the strategy ``replicate``.

Gradients accumulate in ``.grad`` on each rank. In the last backward of a step, each bucket is all-reduced as soon as its
gradients are complete, while backward continues. All ranks reduce the buckets in one order, so ranks may use different
parameters. A bucket with a parameter that gets no gradient waits for the end of backward, and so do the buckets after it.

The reducer learns how many times backward adds to each gradient: usually once, more often under reentrant checkpointing. A
gradient is complete after as many times as in any earlier step. The first step reduces all buckets at the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import is_

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dtrain.arguments import warn
from dtrain.errors import StepError
from dtrain.fqn import parameters_by_fqn
from dtrain.shard.params import StepHook, check_dense
from dtrain.shard.precision import Precision, accumulation_dtype
from dtrain.shard.spec import ShardSpec
from dtrain.shard.wrapping import WrapPlan

# A small first bucket starts the first reduction early in backward. Larger buckets use the network better.
_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """Trainable parameter whose gradient is reduced.

    Args:
        name: clean name.
        param: parameter.
        dtype: dtype of the reduction.
        unit: number of its block.
    """

    name: str
    param: Tensor
    dtype: torch.dtype
    unit: int


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together.

    Args:
        entries: parameters, in order of reduction.
        incomplete: number of gradients that this backward has not completed.
        views: gradients in the flat tensor, one for each parameter, once the reduction has begun.
        work: running reduction; None without other ranks.
    """

    entries: Sequence[_Entry]
    incomplete: int = 0
    views: Sequence[Tensor] = ()
    work: dist.Work | None = None
    layouts: list[tuple[torch.Size, Sequence[int], int]] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        # The layout of a parameter is kept if the parameter is dense.
        likes = [torch.empty_like(entry.param, device="meta") for entry in self.entries]
        offsets = accumulate((like.numel() for like in likes), initial=0)
        self.layouts = [(like.shape, like.stride(), offset) for like, offset in zip(likes, offsets, strict=False)]
        self.numel = sum(like.numel() for like in likes)


class BucketReducer:
    """Sums the gradients of one model over the ranks of ``group`` in the last backward of each step.

    Call ``begin_step``, then ``begin_last_backward`` before the last microbatch, and ``finish`` after its backward. Outside of
    a step, and in earlier microbatches, the hooks of the parameters have no effect.

    Args:
        group: process group of all ranks.
        reduce_dtype: function of (name, parameter) that returns the dtype of the reduction.
        unit_of: number of the block of each parameter, by name.

    Attributes:
        stashed_grads: gradients of earlier microbatches by id of the parameter; see ``GradSync``.
        on_reduced: function called with the parameters of each reduced bucket that have a gradient on this rank, during
            backward; while set, each block is a bucket.
        allocate: function that allocates a flat tensor.
        has_low_precision: True if some gradients have fewer bits than float32, so that sums of microbatches are stashed.
        entries: trainable parameters in the order of reduction.
        missing: parameters without a gradient from this rank's microbatches in this step, by id. After ``finish``, their
            gradients are the sums of the other ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        reduce_dtype: Callable[[str, Tensor], torch.dtype],
        unit_of: Mapping[str, int],
    ) -> None:
        self._group, self.reduce_dtype, self._unit_of = group, reduce_dtype, unit_of
        self.stashed_grads: dict[int, Tensor] = {}
        self.on_reduced: Callable[[Sequence[Tensor]], None] | None = None
        self.allocate: Callable[..., Tensor] = torch.empty
        self.missing: set[int] = set()
        self.has_low_precision = False
        self._params: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[_Bucket] = []
        self._by_unit = False
        # By parameter, in the order of reduction: its bucket, and numbers of additions to its gradient in one backward.
        self.entries: list[_Entry] = []
        self._bucket_of: list[int] = []
        self._expected: list[int] = []
        self._added: list[int] = []
        self._in_step = self._active = self._communicates = False
        # True after a backward outside of a step.
        self._has_local_grads = False
        self._num_begun = self._num_finished = 0

    def begin_step(self, params: Mapping[str, Tensor], *, communicate: bool) -> None:
        """Start a step. Mutates: hooks of the parameters, if other parameters are trainable than in the last step.

        Args:
            params: all parameters of the model by name.
            communicate: if False, gradients stay the sums of this rank.
        """
        self.reset()
        self._in_step = True
        self._communicates = communicate and self._group.size() > 1
        trainable, by_unit = [param for param in params.values() if param.requires_grad], self.on_reduced is not None
        is_unchanged = len(trainable) == len(self._params) and all(map(is_, trainable, self._params))
        if not is_unchanged or by_unit != self._by_unit:
            self._params, self._by_unit = trainable, by_unit
            self.has_low_precision = any(accumulation_dtype(param.dtype) != param.dtype for param in trainable)
            self._install({name: param for name, param in params.items() if param.requires_grad})

    def _install(self, trainable: Mapping[str, Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        entries = [
            _Entry(name=name, param=param, dtype=self.reduce_dtype(name, param), unit=self._unit_of.get(name, -1))
            for name, param in trainable.items()
        ]
        self._buckets = [_Bucket(bucket) for bucket in _divide(entries, self._by_unit)]
        self.entries = [entry for bucket in self._buckets for entry in bucket.entries]
        self._bucket_of = [number for number, bucket in enumerate(self._buckets) for _ in bucket.entries]
        self._expected = [0] * len(self.entries)
        # Python cannot free a cycle through the hook of a tensor, so the hook has a weak reference.
        reference = weakref.ref(self)
        self._hooks = [
            entry.param.register_post_accumulate_grad_hook(StepHook(_call_reducer, reference, index))
            for index, entry in enumerate(self.entries)
        ]

    def begin_last_backward(self) -> None:
        """Reduce the buckets in the next backward. No effect outside of a step."""
        if not (self._in_step and (self._communicates or self.on_reduced is not None)):
            return
        self._added = [0] * len(self.entries)
        for bucket in self._buckets:
            bucket.incomplete = len(bucket.entries)
        self._active = True

    @property
    def has_grads(self) -> bool:
        """Return True if the last backward of this step has reached a parameter."""
        return any(self._added)

    @property
    def has_local_grads(self) -> bool:
        """Return True if a backward since the last step has added to gradients, and there are other ranks."""
        return self._has_local_grads and self._group.size() > 1

    def check_no_local_grads(self, caller: str) -> None:
        """Raise if a backward since the last step has added to gradients.

        Raises:
            StepError: gradients differ between ranks.
        """
        if self.has_local_grads:
            raise StepError(
                f"{caller}: gradients must come from a step, got those of a backward outside of a step, which strategy="
                "'replicate' does not sum over ranks. Call dt.microbatch_step."
            )

    def finish(self) -> None:
        """Reduce the remaining buckets, and set ``.grad`` of all trainable parameters. No effect outside of a step.

        Collective: one all-reduce for each bucket that this backward has not reduced.
        """
        if not self._in_step:
            return
        self._active = False
        while self._num_begun < len(self._buckets):
            self._begin_next()
        while self._num_finished < len(self._buckets):
            self._finish_next()
        self._expected = list(map(max, self._expected, self._added or self._expected))

    def reset(self) -> None:
        """End a step, and discard its reductions. Reductions that have begun complete later, and nothing reads them."""
        self._in_step = self._active = self._has_local_grads = False
        self._num_begun = self._num_finished = 0
        self._added = []
        self.missing.clear()
        for bucket in self._buckets:
            bucket.views, bucket.work = (), None

    def _on_grad(self, index: int) -> None:
        self._added[index] += 1
        number = self._bucket_of[index]
        if number < self._num_begun:
            raise StepError(
                f"microbatch_step: backward added to the gradient of {self.entries[index].name!r} more often than in earlier "
                "steps, after its reduction had begun. Use checkpointing with use_reentrant=False."
            )
        if self._added[index] != self._expected[index]:
            return
        self._buckets[number].incomplete -= 1
        while self._num_begun < len(self._buckets) and not self._buckets[self._num_begun].incomplete:
            self._begin_next()
            if self.on_reduced is not None and self._num_begun > 1:
                self._finish_next()

    def _begin_next(self) -> None:
        """Begin the reduction of the next bucket. Mutates: ``.grad`` of its parameters, which is None until the end."""
        bucket = self._buckets[self._num_begun]
        self._num_begun += 1
        grads = [self._take_grad(entry.param) for entry in bucket.entries]
        if not self._communicates:
            bucket.views = grads
            return
        flat = self.allocate(bucket.numel, dtype=bucket.entries[0].dtype, device=grads[0].device)
        bucket.views = [flat.as_strided(*layout) for layout in bucket.layouts]
        for entry, grad in zip(bucket.entries, grads, strict=True):
            check_dense(entry.name, grad)
        torch._foreach_copy_(bucket.views, grads)
        bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)

    def _take_grad(self, param: Tensor) -> Tensor:
        """Remove the sum of this step's gradients from ``param``, and return the sum; zeros without a gradient."""
        grad, stashed = param.grad, self.stashed_grads.pop(id(param), None) if self.stashed_grads else None
        param.grad = None
        if stashed is not None:
            return stashed if grad is None else stashed.add_(grad)
        if grad is None:
            self.missing.add(id(param))
            return torch.zeros_like(param)
        return grad

    def _finish_next(self) -> None:
        """Wait for the next bucket, and set the gradients of its parameters."""
        bucket = self._buckets[self._num_finished]
        self._num_finished += 1
        if bucket.work is not None:
            try:
                bucket.work.wait()
            except RuntimeError as error:
                # gloo has no class for a lost connection, and no frame of torch.distributed is on the stack here.
                raise dist.DistBackendError(str(error)) from error
        for entry, view in zip(bucket.entries, bucket.views, strict=True):
            entry.param.grad = view if view.dtype == entry.param.dtype else view.to(entry.param.dtype)
        bucket.views, bucket.work = (), None
        if self.on_reduced is not None:
            self.on_reduced([entry.param for entry in bucket.entries if id(entry.param) not in self.missing])


def _call_reducer(reference: weakref.ref[BucketReducer], index: int, param: Tensor) -> None:
    reducer = reference()
    if reducer is not None and reducer._active:
        reducer._on_grad(index)
    elif reducer is not None and not reducer._in_step:
        reducer._has_local_grads = True


def _warn_of_local_grads(reference: weakref.ref[BucketReducer], optimizer: torch.optim.Optimizer, *_: object) -> None:
    reducer = reference()
    if reducer is None or not reducer.has_local_grads:
        return
    reduced = {id(entry.param) for entry in reducer.entries}
    if any(id(param) in reduced and param.grad is not None for group in optimizer.param_groups for param in group["params"]):
        warn(
            "optimizer.step: the gradients are those of a backward outside of a step, which strategy='replicate' does not sum "
            "over ranks. Call dt.microbatch_step, or sum the gradients before the update."
        )


def _divide(entries: Sequence[_Entry], by_unit: bool) -> Iterator[list[_Entry]]:
    """Divide parameters into buckets of one dtype and device, in the order in which backward usually completes gradients."""
    limit = _FIRST_BUCKET_BYTES
    buckets: dict[object, list[_Entry]] = {}
    sizes: dict[object, int] = {}
    for entry in reversed(entries):
        key = (entry.dtype, entry.param.dtype, entry.param.device, entry.unit if by_unit else 0)
        buckets.setdefault(key, []).append(entry)
        sizes[key] = sizes.get(key, 0) + entry.param.numel() * entry.dtype.itemsize
        if not by_unit and sizes[key] >= limit:
            yield buckets.pop(key)
            sizes[key], limit = 0, _BUCKET_BYTES
    yield from buckets.values()


def make_bucket_reducer(model: nn.Module, group: dist.ProcessGroup, wrap_plan: WrapPlan, precision: Precision) -> BucketReducer:
    """Make the reducer of ``model``. Ignored parameters are reduced as without ``precision``."""
    unit_of: dict[int, int] = {}
    for number, modules in enumerate(wrap_plan.units):
        for param in (param for module in modules for param in module.parameters()):
            unit_of.setdefault(id(param), number)

    def reduce_dtype(name: str, param: Tensor) -> torch.dtype:
        dtype = (Precision() if name in wrap_plan.ignored_params else precision)._policy(param.dtype).reduce_dtype
        assert dtype is not None, "Precision always sets the dtype"
        return dtype

    params, _ = parameters_by_fqn(model)
    reducer = BucketReducer(group, reduce_dtype, {name: unit_of[id(param)] for name, param in params.items()})
    # Install the hooks now, so that a backward before the first step is noticed.
    reducer.begin_step(params, communicate=False)
    reducer.reset()
    hook = register_optimizer_step_pre_hook(partial(_warn_of_local_grads, weakref.ref(reducer)))
    weakref.finalize(reducer, hook.remove)
    return reducer


def is_reducer_hook(hook: object) -> bool:
    """Return True for the hook of ``Optimizer.step`` that a reducer has registered, which looks at plain parameters only."""
    return isinstance(hook, partial) and hook.func is _warn_of_local_grads


def all_reduce_grads_(grads: Sequence[Tensor], spec: ShardSpec) -> None:
    """Sum plain gradients over all ranks that count in the loss, in at least float32.

    While replicas train separately, sum within this rank's replica.

    Mutates: ``grads``. Collective: one all-reduce per dtype; within a replica, one per axis of its mesh.
    """
    for dtype in {grad.dtype: None for grad in grads}:
        same_dtype = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same_dtype]).to(accumulation_dtype(dtype))
        if not spec.counts_in_loss:
            flat.zero_()
        for group in [None] if spec.replica_info is None else spec.replica_info.within_groups:
            dist.all_reduce(flat, group=group)
        pieces = flat.split([grad.numel() for grad in same_dtype])
        torch._foreach_copy_(same_dtype, [piece.view_as(grad) for piece, grad in zip(pieces, same_dtype, strict=True)])
