"""Hook into the forward of FSDP2's units (``UnitForward``), by private names of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.shard.fsdp2_private import groups_in_state, units_of


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
        and dataclasses. An in-place operation on a view drops the gather, so FSDP2 warns of each view. Mutates: the unit's
        first group.
        """
        group = groups_in_state(self._state)[0]
        after = group.post_forward

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            if torch.is_grad_enabled():
                for tensor in _tensors_in_objects(output):
                    tensor.register_hook(self._state._pre_backward)
                output = _replace_views(output)
            return after(module, args, output)

        group.post_forward = post_forward

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


def _replace_views(output: Any) -> Any:
    """Return ``output`` with each view replaced by an alias, unless outputs share the viewed tensor."""
    leaves, tree = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    bases = [id(tensor if tensor._base is None else tensor._base) for tensor in tensors]
    # An alias hides an in-place operation from other views.
    aliases: dict[int, Tensor] = {
        id(tensor): _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        for tensor, base in zip(tensors, bases, strict=True)
        if tensor.requires_grad and tensor._base is not None and bases.count(base) == 1
    }
    return tree_unflatten([aliases.get(id(leaf), leaf) for leaf in leaves], tree) if aliases else output


def _tensors_in_objects(output: Any) -> list[Tensor]:
    """Return the tensors with gradients in objects that FSDP2 does not look into."""
    objects = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, Tensor) and not is_dataclass(leaf)]
    return [tensor for item in objects for tensor in grad_tensors(item)]


_MAX_DEPTH = 8


def grad_tensors(value: Any, depth: int = 0) -> list[Tensor]:
    """Return the tensors with gradients in ``value``: in containers, in dataclasses and in attributes of other objects."""
    found: dict[int, Tensor] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found |= {id(leaf): leaf} if leaf.requires_grad else {}
        elif depth < _MAX_DEPTH and not isinstance(leaf, nn.Module | type):
            slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
            inside = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]
            found |= {id(tensor): tensor for item in inside for tensor in grad_tensors(item, depth + 1)}
    return list(found.values())


def unit_forwards(model: nn.Module) -> list[UnitForward]:
    """Return the units of ``model`` that own parameters, outermost first, without duplicates."""
    units = {id(unit._get_fsdp_state()): unit for unit in reversed(list(units_of(model)))}
    return [UnitForward(cast(nn.Module, unit)) for unit in reversed(units.values()) if groups_in_state(unit._get_fsdp_state())]


def run_empty(model: nn.Module) -> Tensor:
    """Run one unit without computation. Return a zero whose backward reduces what is left at the end of a backward."""
    unit = unit_forwards(model)[0]
    return unit.post_forward(unit.pre_forward(torch.zeros((), device=unit.device, requires_grad=True)))
