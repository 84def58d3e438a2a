"""``SkippedUnits``: a rank that skips a unit takes part in its collectives with zeros.

Where parameters are cut, every forward of a unit is a gather by all ranks, and every backward a gather and a reduction. A rank
whose samples do not reach a unit would leave the others waiting, or answer them with the collective of another unit.

The first step learns the order in which units run: before each unit the ranks compare its number, and raise together if they
differ. In later steps each rank compares the order by itself. A unit that the order has next and the rank does not run is
*called empty*: it is gathered and freed, nothing is computed, and a node in the autograd graph has it gathered and reduced in
backward at the place where the other ranks do so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
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
from dtrain.shard.fsdp2_private import UnitForward, unit_forwards

_END_OF_MICROBATCH = -1  # in place of a unit: the microbatch is over
_REORDER_TIMEOUT_S = 60.0  # ranks that run units in another order on purpose are at the same unit


@dataclass(slots=True)
class _UnitCall:
    """One forward of a unit.

    Args:
        unit: its number.
        grad_enabled: if True, the forward recorded a graph.
        inputs_need_grad: if True, some input requires a gradient, so the unit is reduced at its own place in backward.
        nested: the forwards of other units within it.
        outputs_need_grad: if True, some output requires a gradient, so the unit is gathered in backward.
        returns_inner_output: if True, the unit around it returned its output as it was, so both are gathered at one place in backward.
    """

    unit: int
    grad_enabled: bool
    inputs_need_grad: bool
    nested: list[_UnitCall] = field(default_factory=list)
    outputs_need_grad: bool = False
    returns_inner_output: bool = False


@dataclass(slots=True)
class _OpenForward:
    """A forward that is running, or the microbatch as a whole.

    Args:
        unit: its number.
        calls: the forwards inside it: those of the order, or those that are learned.
        position: the position of the next one.
        recorded_call: itself, while it is learned.
        inner_outputs: what the last forward inside it returned, while it is learned.
        unchecked: if True, nothing inside it is compared.
        called_empty: the units that this rank has called empty in it, with a graph.
    """

    unit: int
    calls: list[_UnitCall]
    position: int = 0
    recorded_call: _UnitCall | None = None
    inner_outputs: list[Tensor] = field(default_factory=list)
    unchecked: bool = False
    called_empty: set[int] = field(default_factory=set)

    def is_repeated(self, number: int, grad: bool) -> bool:
        """Return True for a further forward without a graph, as when tokens are generated: steps may differ in how many."""
        return not grad and any(call.unit == number and not call.grad_enabled for call in self.calls)


class SkippedUnits:
    """The order of the units of one model, and the empty calls of this rank.

    ``begin_step`` starts a step, ``begin_microbatch`` each microbatch, ``complete_forward`` ends it, and ``confirm_order`` after a step that succeeded on
    all ranks. Nothing is compared before ``begin_step`` and after ``end_step``.
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
        self._order_changed = False  # units ran in another order, on all ranks
        self._frames: list[_OpenForward] = []
        self._pending_output: Tensor | None = None  # has empty calls in its graph; the loss is to depend on it
        self._has_skipped = False  # this rank has skipped a unit in this microbatch
        for number, unit in enumerate(self._units):
            unit.add_hooks(partial(self._before_forward, number), partial(self._after_forward, number))

    def begin_step(self, plan: Hashable, *, compare: bool) -> None:
        """Start a step.

        Args:
            plan: whatever the order depends on; equal on all ranks. A new one is learned.
            compare: if True, ranks compare an order that is learned, at one small exchange a unit; else the caller sees to it.
        """
        self.end_step()
        self._plan, self._compare = plan, compare
        self._order = self._orders.get(plan)
        self._recording = self._order_changed = False
        self._running = True

    def begin_microbatch(self) -> None:
        """Start a microbatch. Does nothing outside of a step."""
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
        """End the forward of a microbatch. Call what it has skipped, and return ``loss`` with it in its graph.

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
        """Rely on the order that this step has learned, or learn again if it has changed. Every rank must, or none."""
        if self._running and self._order is not None:
            self._orders[self._plan] = self._order
        if self._order_changed:
            self._orders.pop(self._plan, None)

    def end_step(self) -> None:
        """Stop comparing; forget what is running."""
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
        rest = range(parent.position, len(parent.calls))
        place = next((at for at in rest if parent.calls[at].unit == number and parent.calls[at].grad_enabled == grad), None)
        if place is None:
            self._check_reordered(number, parent)
            self._frames.append(_OpenForward(number, [], unchecked=True))
            return inputs
        if parent.position < place:
            self._call_skipped(parent, place)
        parent.position = place + 1
        call = parent.calls[place]
        self._frames.append(_OpenForward(number, call.nested))
        lacks = (
            self._has_skipped and call.grad_enabled and call.inputs_need_grad and not _any_requires_grad(inputs)
        )  # it would come from a skipped unit
        return _attach_grad(inputs) if lacks else inputs

    def _after_forward(self, number: int, output: Any) -> Any:
        while any(frame.unit == number for frame in self._frames):
            frame = self._frames.pop()
            if frame.recorded_call is not None:
                self._record_outputs(frame, output)
            output = self._call_remaining(frame, output)
        return output

    def _record_outputs(self, frame: _OpenForward, output: Any) -> None:
        assert frame.recorded_call is not None
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        frame.recorded_call.outputs_need_grad = any(tensor.requires_grad for tensor in found)
        if frame.calls:
            frame.calls[-1].returns_inner_output = any(mine is inner for mine in found for inner in frame.inner_outputs)
        self._frames[-1].inner_outputs = found

    def _call_remaining(self, frame: _OpenForward, output: Any) -> Any:
        """Call what the order has left in ``frame``. Return ``output`` with it in the graph."""
        if self._recording or frame.position == len(frame.calls):
            return output
        leaves, tree = tree_flatten(output)
        at = _first_float_tensor(leaves)
        if at is None:
            self._call_skipped(frame, len(frame.calls))
            return output
        with self._pause_checks():
            for call in frame.calls[frame.position :]:
                leaves[at] = self._call_empty(call, leaves[at])
        return tree_unflatten(leaves, tree)

    def _call_skipped(self, frame: _OpenForward, place: int) -> None:
        """Call what the order has before ``place``; the loss will depend on it."""
        with self._pause_checks(), torch.enable_grad():  # a later unit may run without a graph
            for call in frame.calls[frame.position : place]:
                frame.called_empty |= {call.unit} if call.grad_enabled else set()
                self._pending_output = self._call_empty(
                    call, torch.zeros(()) if self._pending_output is None else self._pending_output
                )

    @contextmanager
    def _pause_checks(self) -> Iterator[None]:
        """A context in which calls are not compared with the order."""
        before, self._frames = self._frames, []
        try:
            yield
        finally:
            self._frames = before

    def _call_empty(self, call: _UnitCall, output: Tensor) -> Tensor:
        """Gather and free a unit, and those inside it. Return ``output``, whose backward gathers and reduces them first."""
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
        """Refuse a unit that this rank has called empty, unless all ranks run it now: the order has changed on all of them.

        Other units that the order does not have are let through: they are new on all ranks, or repeated without a graph.

        Collective: one exchange, if all ranks come.

        Raises:
            StepError: the others do not come; on this rank. They lose it.
        """
        if number not in frame.called_empty or not torch.is_grad_enabled() or not self._compare:
            return
        self._order_changed = True
        numbers = all_gather_with_timeout(number, timeout_s=_REORDER_TIMEOUT_S)
        if numbers is None or set(numbers) != {number}:
            raise StepError(
                f"step: this rank runs {self._describe_unit(number)} later than in the first step, and other ranks do not. Run units in "
                "the same order on all ranks."
            )

    def _compare_unit(self, number: int) -> None:
        """Compare the next unit of all ranks. Collective: one exchange, and if they differ none of the model's.

        Raises:
            StepError: they differ; on all ranks.
        """
        if not self._compare:
            return
        numbers = [int(row[0]) for row in all_gather_numbers([number], caller="microbatch_step")]
        if len(set(numbers)) == 1:
            return
        other = next(rank for rank, theirs in enumerate(numbers) if theirs != numbers[0])
        raise StepError(
            f"step: ranks run different units in the first step: rank 0 comes to {self._describe_unit(numbers[0])}, rank {other} to "
            f"{self._describe_unit(numbers[other])}. Run the same units in the same order on all ranks in the first step; later steps "
            "may skip units."
        )

    def _describe_unit(self, number: int) -> str:
        return "the end of its microbatch" if number == _END_OF_MICROBATCH else self._unit_name(number)

    def _unit_name(self, number: int) -> str:
        module = self._units[number].module
        name = next(name for name, found in modules_by_fqn(self._model) if found is module)
        return repr(name) if name else "the model itself"


class _JoinGraphs(torch.autograd.Function):
    """A copy of the first tensor; the others get a gradient of zeros once its own is there.

    Autograd runs what is ready in the reverse order of its making. So it is enough that the loss depends on an empty call: its
    backward waits for that of all units that were called after it, and comes before that of the units before it.
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
    """``values`` with the first tensor of numbers in a graph."""
    leaves, tree = tree_flatten(values)
    at = _first_float_tensor(leaves)
    if at is None:
        return values
    leaves[at] = _join_graphs(leaves[at], torch.zeros((), device=leaves[at].device, requires_grad=True))
    return tree_unflatten(leaves, tree)


def _first_float_tensor(leaves: list[Any]) -> int | None:
    """The position of the first tensor that can have a gradient."""
    return next((at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _any_requires_grad(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))
