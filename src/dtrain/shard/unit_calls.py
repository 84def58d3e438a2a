"""Record the forwards of units, and join units that a rank calls empty to its autograd graph; see ``skipped_units``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.shard.fsdp2_forward import UnitForward

# The pseudo unit at the end of a microbatch.
END_OF_MICROBATCH = -1


class UnitEvent(NamedTuple):
    """Start or end of a unit's forward, or the end of a microbatch.

    Args:
        unit: number of the unit.
        starts: if True, the forward starts.
        grad: at the start, True if a graph is recorded; at the end, True if an output requires a gradient.
        linked: at the start, True if an input requires a gradient; at the end, True if the forward returns the output of its
            last nested forward.
    """

    unit: int
    starts: bool
    grad: bool = False
    linked: bool = False

    def encode(self) -> int:
        return (self.unit + 1) * 8 + self.starts * 4 + self.grad * 2 + self.linked

    @classmethod
    def decode(cls, code: int) -> UnitEvent:
        return cls(code // 8 - 1, bool(code & 4), bool(code & 2), bool(code & 1))


@dataclass(slots=True)
class UnitCall:
    """One forward of a unit.

    Args:
        unit: number of the unit.
        grad_enabled: if True, the forward recorded a graph.
        inputs_need_grad: if True, an input requires a gradient, so the unit is reduced at its own place in backward.
        nested: forwards of other units within this forward.
        outputs_need_grad: if True, an output requires a gradient, so the unit is gathered in backward.
        returns_inner_output: if True, the enclosing unit returned this output unchanged, so backward gathers both units
            together.
    """

    unit: int
    grad_enabled: bool
    inputs_need_grad: bool
    nested: list[UnitCall] = field(default_factory=list)
    outputs_need_grad: bool = False
    returns_inner_output: bool = False


@dataclass(slots=True)
class OpenForward:
    """A running forward, or the microbatch as a whole.

    Args:
        unit: number of the unit.
        calls: nested forwards, from the recorded order or recorded now.
        position: index of the next call.
        recorded_call: the call of this forward during recording.
        inner_outputs: outputs of the last nested forward during recording.
        unchecked: if True, nested forwards are not compared.
        called_empty: units that this rank called empty within this forward, with a graph.
    """

    unit: int
    calls: list[UnitCall]
    position: int = 0
    recorded_call: UnitCall | None = None
    inner_outputs: Sequence[Tensor] = ()
    unchecked: bool = False
    called_empty: frozenset[int] = frozenset()

    def is_repeated(self, number: int, grad: bool) -> bool:
        """Return True for a repeated forward without a graph (generation), whose count may differ between steps."""
        return not grad and any(call.unit == number and not call.grad_enabled for call in self.calls)

    def find_call(self, number: int, grad: bool) -> int | None:
        """Return the index of the next call of a unit."""
        for index in range(self.position, len(self.calls)):
            call = self.calls[index]
            if call.unit == number and call.grad_enabled == grad:
                return index
        return None


class _JoinGraphs(torch.autograd.Function):
    """Copy the first tensor. In backward, the other tensors get zero gradients after the gradient of the first tensor.

    Autograd runs ready nodes in reverse order of creation. A loss that depends on an empty call therefore runs the backward of
    the call after the backward of all later units, and before the backward of all earlier units.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)


def leave_empty(unit: UnitForward, output: Tensor, value: Tensor, *, returned: bool) -> Tensor:
    """Reshard a unit that was called empty, with ``value`` as its output. Return ``output`` with the unit in its graph."""
    if returned:
        return unit.post_forward(join_graphs(output, value))
    value = unit.post_forward(join_graphs(value))
    return join_graphs(output, value) if value.requires_grad else output


def join_graphs(value: Tensor, *others: Tensor) -> Tensor:
    joined: Tensor = _JoinGraphs.apply(value, *others)  # type: ignore[no-untyped-call]
    return joined


def attach_grad(values: Any) -> Any:
    """Return ``values`` with the first floating-point tensor in a graph."""
    leaves, tree = tree_flatten(values)
    index = first_float_tensor(leaves)
    if index is None:
        return values
    leaves[index] = join_graphs(leaves[index], torch.zeros((), device=leaves[index].device, requires_grad=True))
    return tree_unflatten(leaves, tree)


def first_float_tensor(leaves: list[Any]) -> int | None:
    """Return the index of the first floating-point tensor."""
    return next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def any_requires_grad(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))
