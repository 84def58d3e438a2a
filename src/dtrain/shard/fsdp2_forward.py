"""Hook into the forward of FSDP2's units (``UnitForward``), by private names of FSDP2."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.shard.fsdp2_private import groups_in_state, units_of
from dtrain.shard.param_objects import extent


class UnitForward:
    """Hooks into the forward of one FSDP2 unit, given by its first module, and forwards without computation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: Any = module._get_fsdp_state()  # type: ignore[operator]
        self.device: torch.device = self._state._device

    def add_hooks(self, enter: Callable[[Any], Any], leave: Callable[[Any], Any]) -> None:
        """Pass the inputs of each forward through ``enter`` before its gather, and its outputs through ``leave``.

        Recomputed forwards (activation checkpointing) are ignored. Mutates: the unit's first group.
        """
        group = groups_in_state(self._state)[0]
        before, after = group.pre_forward, group.post_forward
        in_forward = type(group._training_state).FORWARD

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Further modules of the unit run inside its forward.
            if group._training_state is not in_forward:
                args, kwargs = enter((args, kwargs))
            return before(module, args, kwargs)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            return after(module, args, leave(output))

        group.pre_forward, group.post_forward = pre_forward, post_forward

    def watch(self, after_gather: Callable[[Any], None], before_reshard: Callable[[], None]) -> None:
        """Run ``after_gather(group)`` before, and ``before_reshard()`` after the computation of each forward.

        Mutates: the unit's first group.
        """
        group = groups_in_state(self._state)[0]
        before, after = group.pre_forward, group.post_forward

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            result = before(module, args, kwargs)
            after_gather(group)
            return result

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            before_reshard()
            return after(module, args, output)

        group.pre_forward, group.post_forward = pre_forward, post_forward

    def prepare_outputs(self) -> None:
        """Make the gather before backward reliable for outputs in plain objects, and for views that are changed in place.

        FSDP2 gathers a unit again when a gradient reaches an output. FSDP2 does not look into objects other than containers
        and dataclasses. An in-place operation on a view drops the gather, so FSDP2 warns of each view. An object may also hold
        tensors of earlier units, such as a cache; their gradients need no gather. Mutates: the unit's first group.
        """
        group = groups_in_state(self._state)[0]
        before, after = group.pre_forward, group.post_forward
        in_forward = type(group._training_state).FORWARD
        # Autograd numbers the nodes of a graph in the order of their creation.
        began = 0

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal began
            is_inside = group._training_state is in_forward
            result = before(module, args, kwargs)
            if not is_inside:
                began = torch.autograd._get_sequence_nr()
            return result

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            if torch.is_grad_enabled():
                for tensor in _tensors_in_objects(output, began):
                    tensor.register_hook(self._state._pre_backward)
                output = _replace_views(output)
            return after(module, args, output)

        group.pre_forward, group.post_forward = pre_forward, post_forward

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


# Outputs that view one tensor are compared in pairs.
_MAX_SIBLINGS = 16


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
        (at, offset), (other_at, other_offset) = divmod(offset, stride), divmod(other_offset, stride)
        if limit and max(at + size, other_at + other_size) * stride > limit:
            # A row ends in the next row, so positions say nothing.
            return True
        apart |= at + size <= other_at or other_at + other_size <= at
        limit = stride
    return not apart and offset == other_offset


def _tensors_in_objects(output: Any, after: int) -> list[Tensor]:
    """Return the tensors with gradients in objects that FSDP2 does not look into, if computed later than node ``after``."""
    objects = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, Tensor) and not is_dataclass(leaf)]
    found = grad_tensors(objects) if objects else []
    return [tensor for tensor in found if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= after]


_MAX_OBJECTS = 1000
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, nn.Module, torch.dtype, torch.device, torch.Size)


def grad_tensors(value: Any) -> list[Tensor]:
    """Return the tensors with gradients in ``value``: in containers, in dataclasses and in attributes of other objects.

    The nearest 1,000 objects and containers are visited, each once.
    """
    found: dict[int, Tensor] = {}
    # No object leaves the list, so no id is used twice.
    pending = tree_leaves(value)
    visited: set[int] = set()
    for item in pending:
        if isinstance(item, Tensor):
            found |= {id(item): item} if item.requires_grad else {}
        elif not isinstance(item, _ATOMS) and id(item) not in visited and len(visited) < _MAX_OBJECTS:
            visited.add(id(item))
            pending.extend(_parts(item))
    return list(found.values())


def _parts(item: Any) -> list[Any]:
    """Return the elements and the attributes of an object."""
    elements = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple | set | deque) else ()
    slots = [name for kind in type(item).__mro__ for name in _slots_of(kind)]
    return [*elements, *getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def unit_forwards(model: nn.Module) -> list[UnitForward]:
    """Return the units of ``model`` that own parameters, outermost first, without duplicates."""
    units = {id(unit._get_fsdp_state()): unit for unit in reversed(list(units_of(model)))}
    return [UnitForward(cast(nn.Module, unit)) for unit in reversed(units.values()) if groups_in_state(unit._get_fsdp_state())]


def run_empty(model: nn.Module) -> Tensor:
    """Run one unit without computation. Return a zero whose backward reduces what is left at the end of a backward."""
    unit = unit_forwards(model)[0]
    return unit.post_forward(unit.pre_forward(torch.zeros((), device=unit.device, requires_grad=True)))
