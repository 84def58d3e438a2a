"""The private side of FSDP2: the only module that uses names of torch which are not public.

Each use is for something that torch offers no call for, and is held in place by a test: what happens to a parameter
without a gradient (``tests/shard/test_reduction.py``), gradients that stay within one copy of the model
(``tests/algorithms/weights/test_local_sgd.py``), the way back after an exception (``tests/step/test_failures.py``),
what a forward without a backward leaves (``tests/shard/test_gathered.py``), and what memory is for (``tests/planning/``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.hooks import RemovableHandle

from dtrain.errors import ConfigError
from dtrain.shard.precision import accumulation_dtype

# Whether sums over microbatches stand beside the gradient, which torch 2.15 has made the one place for them.
_SEPARATE_GRAD_SUMS = not hasattr(FSDPParam, "unsharded_accumulated_grad")


def units_of(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of ``model`` that are FSDP2 units, outermost first; none for a plain model.

    Several modules that form one unit come one by one: each of them has the calls of FSDP2.
    """
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def fsdp_param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups, outermost unit first, each once: what is gathered and reduced by one collective."""
    return list({id(group): group for unit in units_of(model) for group in _groups_in_state(unit._get_fsdp_state())}.values())


def init_root(model: nn.Module) -> None:
    """Tell FSDP2 that ``model`` is the outermost unit, so that a block may be called on its own before the model is.

    Does nothing while parameters are on the meta device. Mutates: FSDP2's units.
    """
    if isinstance(model, FSDPModule) and not any(p.is_meta for p in model.parameters()):
        model._get_fsdp_state()._lazy_init()


def is_in_forward(unit: FSDPModule) -> bool:
    """Whether a forward of ``unit`` is running."""
    return str(unit._get_fsdp_state()._training_state).endswith(".FORWARD")


def intercept_reduction(group: Any, call: Callable[[Callable[[bool], None]], None]) -> None:
    """Have ``call(reduce)`` run in place of each reduction of ``group``. Mutates: ``group``.

    ``reduce(apart)`` reduces now. If ``apart`` is True, gradients are summed over the ranks that parameters are cut over, and
    not over the copies beside. Gradients that wait for a later microbatch are kept in at least float32, also if ``group``
    reduces them in less.
    """
    work = group.post_backward
    if _SEPARATE_GRAD_SUMS:
        for param in group.fsdp_params:  # FSDP2 would round a wider gradient to the dtype of reductions
            param.to_accumulated_grad_if_needed = partial(_upcast_accumulated_grad, param)

    def post_backward(*args: Any) -> None:
        group._reduce_dtype = compute_dtypes(group)[1]  # FSDP2 has None for that of compute, and takes that of accumulated sums
        if group.reduce_grads:
            call(reduce)
            return
        if not _was_unsharded(group):
            return  # no sample has reached the unit yet, which FSDP2 does not expect here
        work(*args)
        for param in group.fsdp_params:
            _upcast_accumulated_grad(param)

    def reduce(apart: bool) -> None:
        with _without_all_reduce(group) if apart else nullcontext():
            work()
        _upcast_partial_reduce(group)

    group.post_backward = post_backward


def add_end_of_backward_hook(model: nn.Module, call: Callable[[], None]) -> None:
    """Have ``call`` run when a backward is over, before FSDP2 reduces units that it has not reached. Mutates: FSDP2's units."""
    states: dict[int, Any] = {id(state): state for state in (unit._get_fsdp_state() for unit in units_of(model))}
    for state in states.values():  # several modules of one unit have one state

        def finish(reduce: Callable[[], None] = state._root_post_backward_final_callback) -> None:
            call()
            reduce()

        state._root_post_backward_final_callback = finish


def ensure_unsharded_once(group: Any) -> None:
    """Gather ``group`` if it never was, so that its parameters can have a gradient of zeros. Mutates: ``group``."""
    if not _was_unsharded(group):
        group.unshard()
        group.wait_for_unshard()


def _was_unsharded(group: Any) -> bool:
    return all(hasattr(param, "_unsharded_param") for param in group.fsdp_params)


def forbid_double_backward(group: Any) -> None:
    """Have a backward with ``create_graph=True`` raise at ``group``: another would find weights freed. Mutates: ``group``."""
    prepare = group.pre_backward

    def pre_backward(*args: Any) -> Any:
        if torch.is_grad_enabled():  # autograd runs hooks in this mode only if the gradient gets a graph of its own
            raise ConfigError(
                "microbatch_step: the loss differentiates a gradient (create_graph=True), and FSDP2 frees weights between the "
                "two backwards, under every strategy ('replicate' too). Use a finite difference of two losses, or leave out "
                "shard_model"
            )
        return prepare(*args)

    group.pre_backward = pre_backward


def has_unreduced_grads(group: Any) -> bool:
    """Return True if ``group`` holds gradients that a later microbatch reduces."""
    return any(True for param in group.fsdp_params for _ in _unreduced_grads(param))


def _unreduced_grads(param: Any) -> Iterator[Tensor]:
    """The whole gradients of ``param`` that wait for their reduction."""
    full = getattr(param, "_unsharded_param", None)  # None before the first time that it is gathered
    found = (param.unsharded_accumulated_grad, None if full is None else full.grad)
    return (grad for grad in found if grad is not None)


def _upcast_accumulated_grad(param: Any) -> None:
    """Keep the gradient of one microbatch in at least float32, so that those of the next are added to it exactly.

    FSDP2 adds microbatches up in the dtype of reductions, in which 1,024 gradients of 1 make 256 if that is bfloat16.

    Mutates: gradients of FSDP2's gathered parameters.
    """
    if not _SEPARATE_GRAD_SUMS:
        param.to_accumulated_grad_if_needed()
        return
    full = getattr(param, "_unsharded_param", None)  # None before the first time that it is gathered
    if full is not None and full.grad is not None and accumulation_dtype(full.grad.dtype) != full.grad.dtype:
        param.unsharded_accumulated_grad = full.grad.to(accumulation_dtype(full.grad.dtype))
        full.grad = None


def _upcast_partial_reduce(group: Any) -> None:
    """Keep what was summed within each copy, and waits for the all-reduce over copies, in at least float32.

    Mutates: ``group``.
    """
    summed = group._partial_reduce_output
    if summed is not None and accumulation_dtype(summed.dtype) != summed.dtype:
        with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):  # in which FSDP2 made it, and goes on adding
            group._partial_reduce_output = summed.to(accumulation_dtype(summed.dtype))


def wait_for_reduction(group: Any) -> None:
    """Have the current stream wait for the reduced gradients of ``group``, which FSDP2 does after the last backward only."""
    if group._post_reduce_event is not None:
        group.device_handle.current_stream().wait_event(group._post_reduce_event)
    for param in group.fsdp_params:
        if param.grad_offload_event is not None:  # on its way to host memory
            param.grad_offload_event.synchronize()


@contextmanager
def _without_all_reduce(group: Any) -> Iterator[None]:
    """A context in which ``group`` takes its mesh for one without a replicated axis.

    FSDP2's ``set_requires_all_reduce(False)`` is no way: it keeps what it has reduced for a later backward, and off ``.grad``.
    Mutates: ``group``, while it lasts.
    """
    whole = group.mesh_info
    if not isinstance(whole, HSDPMeshInfo):
        yield
        return
    group.mesh_info = copy(whole)
    group.mesh_info.__class__ = FSDPMeshInfo  # the same axes and process groups, of which FSDP2 uses those of this class
    try:
        yield
    finally:
        group.mesh_info = whole


def add_reduction_hook(group: Any, call: Callable[[], None]) -> RemovableHandle | None:
    """Have ``call`` run each time that the gradients of ``group`` are reduced, in the stream that did it; None: never.

    FSDP2 runs the hooks of a shard itself, after it has put the reduced gradient there, one shard after the other.
    """
    trainable = [param for param in sharded_params(group) if param.requires_grad]
    return trainable[-1].register_post_accumulate_grad_hook(lambda _: call()) if trainable else None


def has_pending_backward(group: Any) -> bool:
    """Whether, as far as FSDP2 knows, a further backward of ``group`` follows: one for each forward that it ran."""
    return bool(group._post_forward_indices)


def free_reduce_buffer(group: Any) -> None:
    """Drop the buffer that ``group`` has all-reduced, of which its gradients are views: FSDP2 keeps it until backward ends.

    The allocator does not know that the stream of the all-reduce, which is to be the current one, reads it. Mutates: ``group``.
    """
    held = getattr(group, "_all_reduce_state", None)
    if held is not None:
        if held.all_reduce_input.is_cuda:
            held.all_reduce_input.record_stream(torch.cuda.current_stream(held.all_reduce_input.device))
        group._all_reduce_state = None


def zero_fill_missing_grads(group: Any) -> tuple[list[int], list[int]]:
    """Give every trainable parameter of ``group`` a gradient before it is reduced: zeros where backward left none.

    FSDP2 leaves parameters without a gradient out of the reduction. If those differ between ranks, it would add up gradients of
    different parameters, without an error.

    Returns the positions in the group of those that had a gradient, and of those that had none. Mutates: gathered gradients.
    """
    trainable = [(at, param) for at, param in enumerate(group.fsdp_params) if param.sharded_param.requires_grad]
    accumulated = any(param.unsharded_accumulated_grad is not None for _, param in trainable)
    present: list[int] = []
    missing: list[int] = []
    for at, param in trainable:
        full = getattr(param, "_unsharded_param", None)  # None before the first time that it is gathered
        lacks = next(_unreduced_grads(param), None) is None
        (missing if lacks else present).append(at)
        if lacks and full is not None:
            full.grad = torch.zeros_like(full)
        if accumulated and full is not None and param.unsharded_accumulated_grad is None:
            _upcast_accumulated_grad(param)  # the gradients of one reduction have one dtype
    return present, missing


def sharded_params(group: Any) -> list[nn.Parameter]:
    """The parameters of ``group`` as the model and the optimizer hold them."""
    return [param.sharded_param for param in group.fsdp_params]


def compute_dtypes(group: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which ``group`` computes and reduces its gradients."""
    first = group.fsdp_params[0]
    policy = getattr(group, "mp_policy", None) or first.mp_policy  # since torch 2.15 each parameter has its own
    computed = policy.param_dtype or first.sharded_param.dtype
    return computed, policy.reduce_dtype or computed


def reshard_groups(groups: Sequence[Any]) -> None:
    """Put ``groups`` back to their shards, and forget the forwards that no backward has followed yet.

    Such a forward leaves parameters gathered, and FSDP2 computes with those copies again, also when the shards have changed
    since. It leaves a record of what ran, too, and the next backward gathers ahead by it: a rank would gather alone.

    Mutates: FSDP2's groups. Collective: none.
    """
    for group in groups:
        group._to_sharded()
        group._post_forward_indices.clear()
        getattr(group.comm_ctx, "post_forward_order", []).clear()


def is_idle(model: nn.Module, groups: Sequence[Any]) -> bool:
    """Whether nothing is left of a forward: no gathered parameters, no record, no forward that an exception has ended."""
    assert isinstance(model, FSDPModule)
    running = model._get_fsdp_state()._state_ctx.iter_forward_root
    return running is None and all(group.is_sharded and not group._post_forward_indices for group in groups)


def reset_iteration(model: nn.Module) -> None:
    """Forget a forward or backward that an exception has ended: gathered parameters and half-accumulated gradients.

    FSDP2 keeps the gradients of microbatches that were not reduced yet beside the parameters, where ``zero_grad`` does not
    see them: they would be counted twice by the next step. No public call of torch clears them.

    Mutates: FSDP2's units. Nothing for a plain model. Collective: none.
    """
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return  # a plain model, or one whose first forward has not begun
    if hasattr(model, "reset_iter_state"):  # torch 2.13 and newer
        model.reset_iter_state()
    else:
        _reset_iteration_before_torch_2_13(model)
    for param in (param for group in fsdp_param_groups(model) for param in group.fsdp_params):
        if _SEPARATE_GRAD_SUMS:
            param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def _reset_iteration_before_torch_2_13(model: nn.Module) -> None:
    """What ``reset_iter_state`` of torch 2.13 does, for older ones."""
    root: Any = next(units_of(model))._get_fsdp_state()
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # what is still on its way must land before its buffers are dropped
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.post_forward_order.clear()
    for name, empty in (("reduce_scatter_states", []), ("reduce_scatter_state", None)):  # the one or the other, by version
        if hasattr(root._comm_ctx, name):
            setattr(root._comm_ctx, name, empty)
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._training_state = idle
        getattr(state, "_modules_to_run_forward", set()).clear()
    for group in fsdp_param_groups(model):
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def wrap_collectives(group: Any, during: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have what ``group`` allocates for itself happen inside ``during(what)``, of which ``what`` is one of two words.

    ``"gathered"`` is for whole parameters, ``"communication"`` for what is sent and received. Mutates: ``group``.
    """

    def within(work: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with during(what):
                return work(*args)

        return call

    for name, what in (("unshard", "communication"), ("wait_for_unshard", "gathered"), ("post_backward", "communication")):
        setattr(group, name, within(getattr(group, name), what))


def unsharded_params(group: Any) -> list[nn.Parameter]:
    """The full-size parameters of ``group``, with memory or without, that were gathered at least once."""
    return [param._unsharded_param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]


def iter_grads(group: Any) -> Iterator[Tensor]:
    """The gradients that ``group`` holds now: whole ones that wait for their reduction, and those of the shards."""
    for param in group.fsdp_params:
        yield from _unreduced_grads(param)
        if param.sharded_param.grad is not None:
            yield param.sharded_param.grad


class UnitForward:
    """The forwards of one FSDP2 unit: seen from outside, or made without any computation.

    Args:
        module: the first module of the unit.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: Any = module._get_fsdp_state()  # type: ignore[operator]
        self.device: torch.device = self._state._device  # of forward and backward

    def add_hooks(self, enter: Callable[[Any], Any], leave: Callable[[Any], Any]) -> None:
        """Pass the inputs of each forward through ``enter`` before its gather, and its outputs through ``leave``.

        A forward that is repeated in backward (activation checkpointing) is not seen. Mutates: the unit's first group.
        """
        group = _groups_in_state(self._state)[0]
        before, after = group.pre_forward, group.post_forward

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not str(group._training_state).endswith(".FORWARD"):  # else a further module of the unit
                args, kwargs = enter((args, kwargs))
            return before(module, args, kwargs)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            return after(module, args, leave(output))

        group.pre_forward, group.post_forward = pre_forward, post_forward

    def pre_forward(self, value: Tensor) -> Tensor:
        """Gather the unit as its forward does; ``value`` stands for the inputs. Collective: one all-gather."""
        return self._state._pre_forward(self.module, (value,), {})[0][0]  # type: ignore[no-any-return]

    def post_forward(self, value: Tensor) -> Tensor:
        """Free the unit as its forward does; ``value`` stands for the outputs, and its gradient for theirs."""
        return self._state._post_forward(self.module, (), value)  # type: ignore[no-any-return]


def unit_forwards(model: nn.Module) -> list[UnitForward]:
    """The units of ``model`` that hold parameters, outermost first, each once."""
    found = {id(unit._get_fsdp_state()): unit for unit in reversed(list(units_of(model)))}
    return [UnitForward(cast(nn.Module, unit)) for unit in reversed(found.values()) if _groups_in_state(unit._get_fsdp_state())]


def _groups_in_state(state: Any) -> list[Any]:
    return list(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))
