"""Take part in the collectives of units that this rank skips (``SkippedUnits``).

With sharded parameters, every forward of a unit is an all-gather by all ranks, and every backward a gather and a reduction. A
rank whose samples do not reach a unit would block the other ranks, or pair their collective with that of another unit.

The first step records the order of units: ranks compare the number of each unit, and raise together if numbers differ. In
later steps each rank follows the recorded order alone. A unit of the order that the rank does not run is *called empty*. An
empty call gathers and reshards the unit without computation. A node in the autograd graph gathers and reduces the unit in
backward, at the same place as on other ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.dist.collectives import all_gather_numbers, all_gather_with_timeout
from dtrain.errors import StepError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.fsdp2_forward import UnitForward, grad_tensors, unit_forwards

# The pseudo unit at the end of a microbatch.
_END_OF_MICROBATCH = -1
# Ranks that all changed their order reach the same unit within this time.
_REORDER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _UnitCall:
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
    nested: list[_UnitCall] = field(default_factory=list)
    outputs_need_grad: bool = False
    returns_inner_output: bool = False


@dataclass(slots=True)
class _OpenForward:
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
    calls: list[_UnitCall]
    position: int = 0
    recorded_call: _UnitCall | None = None
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


class SkippedUnits:
    """Records the order of the units of one model, and makes the empty calls of this rank.

    ``begin_step`` starts a step, ``begin_microbatch`` starts and ``complete_forward`` ends the forward of a microbatch. Call
    ``confirm_order`` after a step that succeeded on all ranks. Outside of ``begin_step`` and ``end_step`` nothing is compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units: list[UnitForward] = unit_forwards(model)
        self._orders: dict[Hashable, list[_UnitCall]] = {}
        self._plan: Hashable = None
        self._compare = False
        self._order: list[_UnitCall] | None = None
        self._recording = False
        self._running = False
        self._order_changed = False
        self._frames: list[_OpenForward] = []
        # A tensor with empty calls in its graph, on which the loss must depend.
        self._pending_output: Tensor | None = None
        self._has_skipped = False
        for number, unit in enumerate(self._units):
            unit.add_hooks(partial(self._before_forward, number), partial(self._after_forward, number))

    def begin_step(self, plan: Hashable, *, compare: bool) -> None:
        """Start a step.

        Args:
            plan: the facts that determine the order; equal on all ranks. The order of a new plan is recorded.
            compare: if True, ranks compare a recorded order, with one small exchange per unit.
        """
        self.end_step()
        self._plan, self._compare = plan, compare
        self._order = self._orders.get(plan)
        self._recording = self._order_changed = False
        self._running = True

    def begin_microbatch(self) -> None:
        """Start a microbatch. No effect outside of a step."""
        if not self._running:
            return
        if self._order is None:
            self._order, self._recording = [], True
        else:
            self._recording = False
        self._pending_output = None
        self._has_skipped = False
        self._frames = [_OpenForward(_END_OF_MICROBATCH, self._order)]

    def complete_forward(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch. Call skipped units, and return ``loss`` with these units in its graph.

        Collective: gathers of skipped units; in the first step one exchange.

        Raises:
            StepError: in the first step, other ranks are about to run a unit; on all ranks.
        """
        if not self._frames:
            return loss
        if self._recording:
            self._compare_unit(_END_OF_MICROBATCH)
        while self._frames:
            loss = self._call_remaining(self._frames.pop(), loss)
        return (
            loss
            if self._pending_output is None or not self._pending_output.requires_grad
            else _join_graphs(loss, self._pending_output)
        )

    def confirm_order(self) -> None:
        """Rely on the recorded order, or record again if the order changed. All ranks must call, or none."""
        if self._running and self._order is not None:
            self._orders[self._plan] = self._order
        if self._order_changed:
            self._orders.pop(self._plan, None)

    def end_step(self) -> None:
        """Stop comparing, and discard running forwards."""
        self._running = False
        self._frames = []
        self._pending_output = None

    def _before_forward(self, number: int, inputs: Any) -> Any:
        if not self._frames:
            return inputs
        parent, grad = self._frames[-1], torch.is_grad_enabled()
        if parent.unchecked or (self._recording and parent.is_repeated(number, grad)):
            self._frames.append(_OpenForward(number, [], unchecked=True))
            return inputs
        if self._recording:
            self._compare_unit(number)
            call = _UnitCall(number, grad, _any_requires_grad(inputs))
            parent.calls.append(call)
            self._frames.append(_OpenForward(number, call.nested, recorded_call=call))
            return inputs
        index = parent.find_call(number, grad)
        if index is None:
            self._check_reordered(number, parent)
            self._frames.append(_OpenForward(number, [], unchecked=True))
            return inputs
        if parent.position < index:
            self._call_skipped(parent, index)
        parent.position = index + 1
        call = parent.calls[index]
        self._frames.append(_OpenForward(number, call.nested))
        # The gradient would have come through a skipped unit.
        needs_grad = self._has_skipped and call.grad_enabled and call.inputs_need_grad and not _any_requires_grad(inputs)
        return _attach_grad(inputs) if needs_grad else inputs

    def _after_forward(self, number: int, output: Any) -> Any:
        while number in [frame.unit for frame in self._frames]:
            frame = self._frames.pop()
            if frame.recorded_call is not None:
                self._record_outputs(frame, output)
            elif frame.position < len(frame.calls):
                output = self._call_remaining(frame, output)
        return output

    def _record_outputs(self, frame: _OpenForward, output: Any) -> None:
        assert frame.recorded_call is not None
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        frame.recorded_call.outputs_need_grad = bool(grad_tensors(output))
        if frame.calls:
            frame.calls[-1].returns_inner_output = any(
                output_tensor is inner for output_tensor in tensors for inner in frame.inner_outputs
            )
        self._frames[-1].inner_outputs = tensors

    def _call_remaining(self, frame: _OpenForward, output: Any) -> Any:
        """Call the remaining units of ``frame``. Return ``output`` with these units in its graph."""
        if self._recording or frame.position == len(frame.calls):
            return output
        leaves, tree = tree_flatten(output)
        index = _first_float_tensor(leaves)
        if index is None:
            self._call_skipped(frame, len(frame.calls))
            return output
        with self._pause_checks():
            for call in frame.calls[frame.position :]:
                leaves[index] = self._call_empty(call, leaves[index])
        return tree_unflatten(leaves, tree)

    def _call_skipped(self, frame: _OpenForward, end: int) -> None:
        """Call the units of the order before ``end``. The loss will depend on these units."""
        # The current forward may run without a graph.
        with self._pause_checks(), torch.enable_grad():
            for call in frame.calls[frame.position : end]:
                frame.called_empty |= {call.unit} if call.grad_enabled else set()
                self._pending_output = self._call_empty(
                    call, torch.zeros(()) if self._pending_output is None else self._pending_output
                )

    @contextmanager
    def _pause_checks(self) -> Iterator[None]:
        """Disable the comparison of calls in a context."""
        before, self._frames = self._frames, []
        try:
            yield
        finally:
            self._frames = before

    def _call_empty(self, call: _UnitCall, output: Tensor) -> Tensor:
        """Gather and reshard a unit and its nested units. Return ``output`` with the units in its graph."""
        self._has_skipped = True
        unit = self._units[call.unit]
        with torch.set_grad_enabled(call.grad_enabled):
            value = unit.pre_forward(
                torch.zeros((), device=unit.device, requires_grad=call.grad_enabled and call.inputs_need_grad)
            )
            if call.outputs_need_grad and not value.requires_grad:
                value = value.detach().requires_grad_()
            for inner in call.nested:
                value = self._call_empty(inner, value)
            if call.returns_inner_output:
                return unit.post_forward(_join_graphs(output, value))
            value = unit.post_forward(_join_graphs(value))
        return _join_graphs(output, value) if value.requires_grad else output

    def _check_reordered(self, number: int, frame: _OpenForward) -> None:
        """Raise for a unit that was called empty before, unless all ranks run the unit now, in a new order.

        Units outside of the recorded order pass: these units are new on all ranks, or repeated without a graph.

        Collective: one exchange, if all ranks take part.

        Raises:
            StepError: other ranks do not run the unit; on this rank. The other ranks lose this rank.
        """
        if number not in frame.called_empty or not torch.is_grad_enabled() or not self._compare:
            return
        self._order_changed = True
        numbers = all_gather_with_timeout(number, timeout_s=_REORDER_TIMEOUT_S)
        if numbers is None or set(numbers) != {number}:
            raise StepError(
                f"step: this rank runs {self._describe_unit(number)} later than in the first step, and other ranks do not. "
                "Run units in the same order on all ranks."
            )

    def _compare_unit(self, number: int) -> None:
        """Compare the next unit of all ranks. Collective: one exchange; none of the model's if ranks differ.

        Raises:
            StepError: ranks differ; on all ranks.
        """
        if not self._compare:
            return
        numbers = [int(row[0]) for row in all_gather_numbers([number], caller="microbatch_step")]
        if len(set(numbers)) == 1:
            return
        differing_rank = next(rank for rank, number_of_rank in enumerate(numbers) if number_of_rank != numbers[0])
        raise StepError(
            f"step: ranks must run the same units in the first step, got {self._describe_unit(numbers[0])} on rank 0 and "
            f"{self._describe_unit(numbers[differing_rank])} on rank {differing_rank}. Run the same units in the same order on "
            "all ranks in the first step. Later steps may skip units."
        )

    def _describe_unit(self, number: int) -> str:
        return "the end of its microbatch" if number == _END_OF_MICROBATCH else self._unit_name(number)

    def _unit_name(self, number: int) -> str:
        module = self._units[number].module
        name = next(name for name, submodule in modules_by_fqn(self._model) if submodule is module)
        return repr(name) if name else "the model itself"


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


def _join_graphs(value: Tensor, *others: Tensor) -> Tensor:
    joined: Tensor = _JoinGraphs.apply(value, *others)  # type: ignore[no-untyped-call]
    return joined


def _attach_grad(values: Any) -> Any:
    """Return ``values`` with the first floating-point tensor in a graph."""
    leaves, tree = tree_flatten(values)
    index = _first_float_tensor(leaves)
    if index is None:
        return values
    leaves[index] = _join_graphs(leaves[index], torch.zeros((), device=leaves[index].device, requires_grad=True))
    return tree_unflatten(leaves, tree)


def _first_float_tensor(leaves: list[Any]) -> int | None:
    """Return the index of the first floating-point tensor."""
    return next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _any_requires_grad(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))
