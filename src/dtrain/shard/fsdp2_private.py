"""Use private names of FSDP2. No other module of dtrain does.

Each function does something for which torch has no public call, and has a test: parameters without a gradient
(``tests/shard/test_grad_sync.py``), sums within a replica (``tests/transforms/weights/test_local_sgd.py``), resets after an
exception (``tests/step/test_failures.py``) or a lone forward (``tests/shard/test_gathered.py``), units that are called empty
(``tests/shard/test_skipped_units.py``), shards of rank 0 alone and memory by purpose (``tests/planning/``).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from dtrain.device import started_accelerator, use_on_current_stream
from dtrain.errors import ConfigError
from dtrain.shard.params import StepHook, check_dense, extent, has_own_attributes_only
from dtrain.shard.precision import LOW_PRECISION_DTYPES, accumulation_dtype

if TYPE_CHECKING:
    import torch.distributed.fsdp

# Outputs that view one tensor are compared in pairs.
_MAX_SIBLINGS = 16
_MAX_OBJECTS = 1000
_SEQUENCES = (list, tuple, set, deque)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, nn.Module, torch.dtype, torch.device, torch.Size)


def is_unit(module: nn.Module) -> TypeGuard[Any]:
    """Return True if ``module`` is an FSDP2 unit, without the import of FSDP2, which takes half as long as that of torch."""
    return isinstance(module, _unit_class())


def _unit_class() -> Any:
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def units_of(model: nn.Module) -> Iterator[torch.distributed.fsdp.FSDPModule]:
    """Return the modules of all FSDP2 units of ``model``, outermost first; none for a plain model."""
    unit_class = _unit_class()
    return (module for module in model.modules() if isinstance(module, unit_class))


def fsdp_param_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups without duplicates, outermost unit first. One collective gathers or reduces a group."""
    return list({id(group): group for unit in units_of(model) for group in groups_in_state(unit._get_fsdp_state())}.values())


def init_root(model: nn.Module) -> None:
    """Make ``model`` the root unit of FSDP2, so that a block may run before the model.

    No effect while parameters are on the meta device. Mutates: FSDP2's units.
    """
    if is_unit(model) and not any(p.is_meta for p in model.parameters()):
        state = model._get_fsdp_state()
        state._lazy_init()
        # Before torch 2.13, FSDP2 lists a unit of several modules several times, and would reduce the unit as often.
        state._state_ctx.all_states[:] = dict.fromkeys(state._state_ctx.all_states)


def run_modules_separately(module: nn.Module) -> None:
    """Make each module of the unit of ``module`` gather and reshard the unit in its forward. Mutates: hooks of the modules."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    # Before torch 2.13, FSDP2 expects that each forward runs all modules of a unit, and leaves the unit gathered otherwise.
    if len(state._modules) > 1 and not hasattr(state, "_force_complete_incomplete_states"):
        state._pre_forward_hook_handle.remove()
        for inner in state._modules:
            inner.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            inner.register_forward_hook(state._post_forward)


def share_attributes(model: nn.Module) -> None:
    """Give each unsharded parameter the attributes of its sharded parameter, also later ones. Mutates: FSDP2's parameters."""
    for param in (param for group in fsdp_param_groups(model) for param in group.fsdp_params):

        def init_unsharded(param: Any = param, init: Callable[[], None] = param.init_unsharded_param) -> None:
            init()
            if has_own_attributes_only(param._unsharded_param):
                param._unsharded_param.__dict__ = param.sharded_param.__dict__
            del param.init_unsharded_param

        param.init_unsharded_param = init_unsharded


def is_in_forward(unit: torch.distributed.fsdp.FSDPModule) -> bool:
    """Return True while a forward of ``unit`` runs."""
    return str(unit._get_fsdp_state()._training_state).endswith(".FORWARD")


def intercept_reduction(group: Any, call: Callable[[Callable[[bool], None]], None]) -> None:
    """Run ``call(reduce)`` in place of each reduction of ``group``. Mutates: ``group``.

    ``reduce(within_replica)`` reduces immediately. If ``within_replica`` is True, only the shards of one replica are summed.
    Gradients that wait for a later microbatch are stored in at least float32, even if ``group`` reduces in a narrower dtype.
    """
    post_backward_of_torch = group.post_backward
    for param in group.fsdp_params:
        # Before torch 2.15, FSDP2 accumulates beside the gradient, and rounds a wider gradient to the dtype of reductions.
        if not hasattr(type(param), "unsharded_accumulated_grad"):
            param.to_accumulated_grad_if_needed = partial(_upcast_accumulated_grad, param)

    def post_backward(*args: Any) -> None:
        if group.reduce_grads:
            # FSDP2 uses None for the compute dtype, and would reduce in the dtype of the accumulated sums.
            group._reduce_dtype = compute_dtypes(group)[1]
            call(reduce)
        # FSDP2 does not expect a unit here that no sample has reached.
        elif _was_unsharded(group):
            post_backward_of_torch(*args)

    def reduce(within_replica: bool) -> None:
        with _without_all_reduce(group) if within_replica else nullcontext():
            post_backward_of_torch()
        summed = group._partial_reduce_output
        # Sums within a replica wait for the all-reduce over replicas in at least float32.
        if summed is not None and accumulation_dtype(summed.dtype) != summed.dtype:
            # FSDP2 allocates and accumulates the output in this stream.
            with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
                group._partial_reduce_output = summed.to(accumulation_dtype(summed.dtype))

    group.post_backward = post_backward


def add_end_of_backward_hook(model: nn.Module, call: Callable[[], None]) -> None:
    """Run ``call`` at the end of a backward, before FSDP2 reduces unreached units. Mutates: FSDP2's units."""
    states: Iterator[Any] = iter(dict.fromkeys(unit._get_fsdp_state() for unit in units_of(model)))
    for state in states:

        def finish(reduce: Callable[[], None] = state._root_post_backward_final_callback) -> None:
            call()
            reduce()

        state._root_post_backward_final_callback = finish


def ensure_unsharded_once(group: Any) -> None:
    """Gather ``group`` unless gathered before, so that its parameters can get a zero gradient. Mutates: ``group``."""
    if not _was_unsharded(group):
        group.unshard()
        group.wait_for_unshard()


def _was_unsharded(group: Any) -> bool:
    # A gather sets the attribute of each parameter in order.
    return hasattr(group.fsdp_params[-1], "_unsharded_param")


def set_last_backward(model: nn.Module, groups: Sequence[Any], last: bool, *, reduce: bool, reshard: bool | None) -> None:
    """Set if the next backward is the last, reduces, and reshards (None: unchanged). Mutates: the units of ``model``."""
    # Each setter of torch visits all modules of the model.
    model._get_fsdp_state()._state_ctx.is_last_backward = last  # type: ignore[operator]
    for group in groups:
        group.reduce_grads, group.all_reduce_grads = reduce, last
        group.reshard_after_backward = group.reshard_after_backward if reshard is None else reshard


def forbid_double_backward(group: Any) -> None:
    """Raise at a backward with ``create_graph=True``, because FSDP2 frees weights in between. Mutates: ``group``."""
    prepare = group.pre_backward

    def pre_backward(*args: Any) -> Any:
        # Autograd enables gradients in hooks only with create_graph=True.
        if torch.is_grad_enabled():
            raise ConfigError(
                "microbatch_step: the loss must not use create_graph=True, because FSDP2 frees weights between the two "
                "backwards. Use strategy='replicate' without offload, tp_plan and casts of parameters, or a finite difference "
                "of two losses."
            )
        return prepare(*args)

    group.pre_backward = pre_backward


def has_unreduced_grads(group: Any) -> bool:
    """Return True if ``group`` stores gradients that a later microbatch reduces."""
    return any(map(unreduced_grads, group.fsdp_params))


def unreduced_grads(param: Any) -> list[Tensor]:
    """Return the full gradients of ``param`` that wait for their reduction."""
    full = getattr(param, "_unsharded_param", None)
    grads = (param.unsharded_accumulated_grad, None if full is None else full.grad)
    return [grad for grad in grads if grad is not None]


def _upcast_accumulated_grad(param: Any) -> None:
    """Store the gradient of one microbatch in at least float32, so that later microbatches are added exactly.

    FSDP2 accumulates in the dtype of reductions. In bfloat16, 1,024 gradients of 1 sum to 256. Mutates: unsharded gradients.
    """
    grad = param._unsharded_param.grad
    if grad is not None and grad.dtype in LOW_PRECISION_DTYPES:
        param.unsharded_accumulated_grad = grad.to(accumulation_dtype(grad.dtype))
        param._unsharded_param.grad = None


def wait_for_reduction(group: Any) -> None:
    """Make the current stream wait for the reduced gradients. FSDP2 waits only after the last backward."""
    if group._post_reduce_event is not None:
        group.device_handle.current_stream().wait_event(group._post_reduce_event)
    for param in group.fsdp_params:
        if param.grad_offload_event is not None:
            param.grad_offload_event.synchronize()


@contextmanager
def _without_all_reduce(group: Any) -> Iterator[None]:
    """Hide the replicated axis of the mesh from ``group`` in a context.

    FSDP2's ``set_requires_all_reduce(False)`` would store the reduced gradients for a later backward instead of in ``.grad``.
    Mutates: ``group``, while the context lasts.
    """
    mesh_info, kinds = group.mesh_info, torch.distributed.fsdp._fully_shard._fsdp_common
    if not isinstance(mesh_info, kinds.HSDPMeshInfo):
        yield
        return
    group.mesh_info = copy(mesh_info)
    # FSDP2 uses only the axes of the base class.
    group.mesh_info.__class__ = kinds.FSDPMeshInfo
    try:
        yield
    finally:
        group.mesh_info = mesh_info


def add_reduction_hook(group: Any, call: Callable[[], None]) -> RemovableHandle | None:
    """Run ``call`` after each reduction of ``group``, in the stream of the reduction; return None without parameters.

    FSDP2 runs the hooks of each shard in order, after storing the reduced gradient.
    """
    trainable = [param for param in sharded_params(group) if param.requires_grad]
    return trainable[-1].register_post_accumulate_grad_hook(StepHook(lambda _: call())) if trainable else None


def has_pending_backward(group: Any) -> bool:
    """Return True if FSDP2 expects a further backward of ``group``: one for each forward."""
    return bool(group._post_forward_indices)


def free_reduce_buffer(group: Any) -> None:
    """Free the all-reduce buffer of ``group``, which FSDP2 keeps until backward ends. Mutates: ``group``.

    Gradients are views of the buffer. The allocator does not know that the current stream, which all-reduces, reads the buffer.
    """
    state = getattr(group, "_all_reduce_state", None)
    if state is not None:
        use_on_current_stream(state.all_reduce_input)
        group._all_reduce_state = None


def zero_fill_missing_grads(group: Any) -> tuple[list[int], list[int]]:
    """Give every trainable parameter of ``group`` a gradient before the reduction: zeros where backward left None.

    FSDP2 leaves parameters without a gradient out of the reduction. If such parameters differ between ranks, FSDP2 silently
    sums gradients of different parameters.

    Returns the indices of parameters with a gradient, and of parameters without. Mutates: unsharded gradients.
    """
    trainable = [(index, param) for index, param in enumerate(group.fsdp_params) if param.sharded_param.requires_grad]
    accumulated = any(param.unsharded_accumulated_grad is not None for _, param in trainable)
    present, missing = list[int](), list[int]()
    for index, param in trainable:
        full, grads = getattr(param, "_unsharded_param", None), unreduced_grads(param)
        has_grad = bool(grads)
        for grad in grads:
            check_dense(param._param_fqn, grad)
        (present if has_grad else missing).append(index)
        if full is not None and not has_grad:
            full.grad = torch.zeros_like(full)
        if full is not None and accumulated and param.unsharded_accumulated_grad is None:
            param.to_accumulated_grad_if_needed()
    return present, missing


def sharded_params(group: Any) -> list[nn.Parameter]:
    """Return the parameters of ``group`` as stored by the model and the optimizer."""
    return [param.sharded_param for param in group.fsdp_params]


def reduced_params(groups: Sequence[Any]) -> list[nn.Parameter]:
    """Return the sharded parameters of ``groups`` whose gradients FSDP2 reduces over several ranks."""
    return [param for group in groups if group.mesh_info.mesh.size() > 1 for param in sharded_params(group)]


def compute_dtypes(group: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which ``group`` computes and reduces gradients. Since torch 2.15 parameters have own policies."""
    first = group.fsdp_params[0]
    policy = getattr(group, "mp_policy", None) or first.mp_policy
    computed = policy.param_dtype or first.sharded_param.dtype
    return computed, policy.reduce_dtype or computed


def reshard_groups(groups: Sequence[Any]) -> None:
    """Reshard ``groups``, and discard the record of forwards without a backward.

    Such a forward leaves parameters unsharded, and FSDP2 reuses the stale copies even if shards changed. FSDP2 also records the
    order of units. The next backward would prefetch by this record, on one rank alone.
    Mutates: FSDP2's groups. Collective: none.
    """
    for group in groups:
        group._to_sharded()
        group._post_forward_indices.clear()
        getattr(group.comm_ctx, "post_forward_order", []).clear()


def is_idle(model: nn.Module, groups: Sequence[Any]) -> bool:
    """Return True if no unsharded parameters, no record and no interrupted forward are left."""
    running = model._get_fsdp_state()._state_ctx.iter_forward_root  # type: ignore[operator]
    return running is None and all(group.is_sharded and not group._post_forward_indices for group in groups)


def reset_iteration(model: nn.Module) -> None:
    """Discard an interrupted forward or backward: unsharded parameters and partly accumulated gradients.

    FSDP2 stores unreduced gradients beside the parameters, out of reach of ``zero_grad``, so the next step would count the
    gradients twice. No public call of torch clears them. Mutates: FSDP2's units. Collective: none.
    """
    if not is_unit(model) or model._get_fsdp_state()._is_root is None:
        return
    getattr(model, "reset_iter_state", partial(_reset_iteration_before_torch_2_13, model))()
    for param in (param for group in fsdp_param_groups(model) for param in group.fsdp_params):
        if not hasattr(type(param), "unsharded_accumulated_grad"):
            param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def _reset_iteration_before_torch_2_13(model: nn.Module) -> None:
    """Reset as ``reset_iter_state`` of torch 2.13 does, for older versions."""
    root: Any = next(units_of(model))._get_fsdp_state()
    if started_accelerator() is not None:
        # Collectives in flight must end before their buffers are freed.
        torch.accelerator.current_stream().synchronize()
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.post_forward_order.clear()
    root._comm_ctx.reduce_scatter_states, root._comm_ctx.reduce_scatter_state = [], None
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


def sharded_and_unsharded_params(group: Any) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
    """Return each parameter of ``group`` as stored, and its unsharded copy, None before the first gather."""
    return [(param.sharded_param, getattr(param, "_unsharded_param", None)) for param in group.fsdp_params]


def unsharded_params(group: Any) -> list[nn.Parameter]:
    """Return the unsharded parameters of ``group`` that were gathered at least once, with or without storage."""
    return [param._unsharded_param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]


def groups_in_state(state: Any) -> list[Any]:
    """Return the parameter groups of FSDP2's ``state`` of a unit."""
    return list(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))


@contextmanager
def averaged_gradients(group: Any) -> Iterator[None]:
    """Let the group reduce gradients to their mean over ranks in a context. Mutates: ``group``."""
    # None stands for the number of ranks. With a factor, FSDP2 divides twice if a shard has one rank.
    before, group.gradient_divide_factor = group.gradient_divide_factor, None
    try:
        yield
    finally:
        group.gradient_divide_factor = before


class UnitForward:
    """Hooks into the forward of one FSDP2 unit, given by its first module, and forwards without computation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: Any = module._get_fsdp_state()  # type: ignore[operator]
        self.group: Any = groups_in_state(self._state)[0]
        self.device: torch.device = self._state._device

    def wrap(
        self,
        *,
        enter: Callable[[Any], Any] | None = None,
        gathered: Callable[[bool], None] | None = None,
        leave: Callable[[Any], Any] = lambda output: output,
        left: Callable[[], None] | None = None,
    ) -> None:
        """Wrap each forward. A later wrapper surrounds the earlier ones.

        Args:
            enter: function of the inputs before the gather, which returns the inputs. It is not called in recomputed forwards
                (activation checkpointing), and not for further modules of the unit, which run inside its forward.
            gathered: function that runs after the gather, with True where ``enter`` is called.
            leave: function of the outputs before the reshard, which returns the outputs.
            left: function that runs after the reshard.

        Mutates: the unit's first group.
        """
        group = self.group
        before, after = group.pre_forward, group.post_forward
        in_forward = type(group._training_state).FORWARD

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            begins = group._training_state is not in_forward
            if begins and enter is not None:
                args, kwargs = enter((args, kwargs))
            result = before(module, args, kwargs)
            if gathered is not None:
                gathered(begins)
            return result

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            output = after(module, args, leave(output))
            if left is not None:
                left()
            return output

        group.pre_forward, group.post_forward = pre_forward, post_forward

    def prepare_outputs(self) -> None:
        """Make the gather before backward reliable for outputs in plain objects, and for views that are changed in place.

        FSDP2 gathers a unit again when a gradient reaches an output. FSDP2 does not look into objects other than containers
        and dataclasses. An in-place operation on a view drops the gather, so FSDP2 warns of each view. An object may also hold
        tensors of earlier units, such as a cache; their gradients need no gather. Mutates: the unit's first group.
        """
        # Autograd numbers the nodes of a graph in the order of their creation.
        began = 0

        def gathered(begins: bool) -> None:
            nonlocal began
            if begins:
                began = torch.autograd._get_sequence_nr()

        def leave(output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            objects = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, Tensor) and not is_dataclass(leaf)]
            for tensor in grad_tensors(objects) if objects else ():
                if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= began:
                    tensor.register_hook(self._state._pre_backward)
            return _replace_views(output)

        self.wrap(gathered=gathered, leave=leave)

    def pre_forward(self, value: Tensor) -> Tensor:
        """Gather the unit as its forward does. ``value`` replaces the inputs. Collective: one all-gather."""
        return self._state._pre_forward(self.module, (value,), {})[0][0]  # type: ignore[no-any-return]

    def post_forward(self, value: Tensor) -> Tensor:
        """Reshard the unit as its forward does. ``value`` and its gradient replace the outputs and their gradient."""
        return self._state._post_forward(self.module, (), value)  # type: ignore[no-any-return]


class _Alias(torch.autograd.Function):
    """Return the same memory as a tensor that is no view, and that keeps the version counter of the original."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def replace_views_of_empty_units(model: nn.Module) -> None:
    """Do as ``prepare_outputs`` for views of units that own no parameters, such as a root. Mutates: FSDP2's units."""
    states: Iterator[Any] = iter(dict.fromkeys(unit._get_fsdp_state() for unit in units_of(model)))
    for state in (state for state in states if not groups_in_state(state)):

        def register(output: Any, register: Callable[[Any], Any] = state._register_pre_backward_hook) -> Any:
            return register(_replace_views(output) if torch.is_grad_enabled() else output)

        state._register_pre_backward_hook = register


def _replace_views(output: Any) -> Any:
    """Return ``output`` with each view replaced by an alias, unless its memory overlaps with that of another output."""
    leaves, tree = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    siblings: dict[int, list[Tensor]] = {}
    for tensor in dict.fromkeys(tensors):
        siblings.setdefault(id(tensor if tensor._base is None else tensor._base), []).append(tensor)
    # An alias hides an in-place operation from other views.
    aliases: dict[int, Tensor] = {
        id(tensor): _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        for same in siblings.values()
        if len(same) <= _MAX_SIBLINGS
        for tensor in same
        if tensor.requires_grad
        and tensor._base is not None
        and not any(_may_overlap(tensor, other) for other in same if other is not tensor)
    }
    return tree_unflatten([aliases.get(id(leaf), leaf) for leaf in leaves], tree) if aliases else output


def _may_overlap(first: Tensor, second: Tensor) -> bool:
    """Return False if two views of one tensor have no element in common."""
    if type(first) is not Tensor or type(second) is not Tensor:
        return True
    if not first.numel() or not second.numel():
        return False
    if first.stride() != second.stride():
        (_, start, end), (_, other_start, other_end) = extent(first), extent(second)
        return start < other_end and other_start < end
    # Positions of the first elements along the dimensions of both views.
    offset, other_offset, limit = int(first.storage_offset()), int(second.storage_offset()), 0
    apart = False
    for stride, size, other_size in sorted(zip(first.stride(), first.shape, second.shape, strict=True), reverse=True):
        if not stride:
            return True
        (position, offset), (other_position, other_offset) = divmod(offset, stride), divmod(other_offset, stride)
        if limit and max(position + size, other_position + other_size) * stride > limit:
            # A row ends in the next row, so positions say nothing.
            return True
        apart |= position + size <= other_position or other_position + other_size <= position
        limit = stride
    return not apart and offset == other_offset


def grad_tensors(value: Any) -> list[Tensor]:
    """Return the tensors with gradients in ``value``: in containers, in dataclasses and in attributes of other objects.

    The nearest 1,000 objects and containers are visited, each once.
    """
    tensors: dict[int, Tensor] = {}
    # No object leaves the list, so no id is used twice.
    pending = tree_leaves(value)
    visited: set[int] = set()
    for item in pending:
        if isinstance(item, Tensor):
            tensors |= {id(item): item} if item.requires_grad else {}
        elif not isinstance(item, _ATOMS) and id(item) not in visited and len(visited) < _MAX_OBJECTS:
            visited.add(id(item))
            pending.extend(item.values() if isinstance(item, Mapping) else item if isinstance(item, _SEQUENCES) else ())
            pending.extend(getattr(item, "__dict__", {}).values())
            for slots in (kind.__dict__.get("__slots__", ()) for kind in type(item).__mro__):
                pending.extend(getattr(item, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    return list(tensors.values())


def unit_forwards(model: nn.Module) -> list[UnitForward]:
    """Return the units of ``model`` that own parameters, outermost first, without duplicates."""
    units = {id(unit._get_fsdp_state()): unit for unit in reversed(list(units_of(model)))}
    return [UnitForward(cast(nn.Module, unit)) for unit in reversed(units.values()) if groups_in_state(unit._get_fsdp_state())]


def run_empty(model: nn.Module) -> Tensor:
    """Run one unit without computation. Return a zero whose backward reduces what is left at the end of a backward."""
    unit = unit_forwards(model)[0]
    return unit.post_forward(unit.pre_forward(torch.zeros((), device=unit.device, requires_grad=True)))


@contextmanager
def only_first_shards() -> Iterator[None]:
    """Let FSDP2 make the first shard of each parameter only, which is all that rank 0 keeps. Mutates: a function of torch."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = lambda tensor, num_chunks, dim: [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


def wrap_collectives(group: Any, during: Callable[[str], AbstractContextManager[None]]) -> None:
    """Run the allocations of ``group`` inside ``during("gathered")`` or ``during("communication")``. Mutates: ``group``."""

    def wrap(method: Callable[..., Any], purpose: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with during(purpose):
                return method(*args)

        return call

    for name, purpose in (("unshard", "communication"), ("wait_for_unshard", "gathered"), ("post_backward", "communication")):
        setattr(group, name, wrap(getattr(group, name), purpose))


def iter_grads(group: Any) -> Iterator[Tensor]:
    """Yield the gradients that ``group`` stores now: unreduced full gradients, and gradients of shards."""
    for param in group.fsdp_params:
        yield from unreduced_grads(param)
        if param.sharded_param.grad is not None:
            yield param.sharded_param.grad
