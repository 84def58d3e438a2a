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

from dtrain.dist.collectives import all_gather_numbers, gather_within
from dtrain.errors import StepError
from dtrain.names import clean_modules
from dtrain.shard.fsdp2 import UnitCalls, unit_calls

_END = -1  # in place of a unit: the microbatch is over
_SWAPPED_S = 60.0  # ranks that run units in another order on purpose are at the same unit


@dataclass(slots=True)
class _Call:
    """One forward of a unit.

    Args:
        unit: its number.
        grad: if True, the forward recorded a graph.
        inputs: if True, some input requires a gradient, so the unit is reduced at its own place in backward.
        inside: the forwards of other units within it.
        outputs: if True, some output requires a gradient, so the unit is gathered in backward.
        returned: if True, the unit around it returned its output as it was, so both are gathered at one place in backward.
    """

    unit: int
    grad: bool
    inputs: bool
    inside: list[_Call] = field(default_factory=list)
    outputs: bool = False
    returned: bool = False


@dataclass(slots=True)
class _Open:
    """A forward that is running, or the microbatch as a whole.

    Args:
        unit: its number.
        calls: the forwards inside it: those of the order, or those that are learned.
        at: the position of the next one.
        learned: itself, while it is learned.
        results: what the last forward inside it returned, while it is learned.
        free: if True, nothing inside it is compared.
        empty: the units that this rank has called empty in it, with a graph.
    """

    unit: int
    calls: list[_Call]
    at: int = 0
    learned: _Call | None = None
    results: list[Tensor] = field(default_factory=list)
    free: bool = False
    empty: set[int] = field(default_factory=set)

    def is_repeated(self, number: int, grad: bool) -> bool:
        """Return True for a further forward without a graph, as when tokens are generated: steps may differ in how many."""
        return not grad and any(call.unit == number and not call.grad for call in self.calls)


class SkippedUnits:
    """The order of the units of one model, and the empty calls of this rank.

    ``begin`` starts a step, ``microbatch`` each microbatch, ``complete`` ends it, and ``keep`` after a step that succeeded on
    all ranks. Nothing is compared before ``begin`` and after ``end``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units: list[UnitCalls] = unit_calls(model)
        self._orders: dict[Hashable, list[_Call]] = {}
        self._plan: Hashable = None
        self._compare = False
        self._learned: list[_Call] | None = None
        self._learning = False
        self._running = False
        self._changed = False  # units ran in another order, on all ranks
        self._open: list[_Open] = []
        self._waiting: Tensor | None = None  # has empty calls in its graph; the loss is to depend on it
        self._skips = False  # this rank has skipped a unit in this microbatch
        for number, unit in enumerate(self._units):
            unit.watch(partial(self._enter, number), partial(self._leave, number))

    def begin(self, plan: Hashable, *, compare: bool) -> None:
        """Start a step.

        Args:
            plan: whatever the order depends on; equal on all ranks. A new one is learned.
            compare: if True, ranks compare an order that is learned, at one small exchange a unit; else the caller sees to it.
        """
        self.end()
        self._plan, self._compare = plan, compare
        self._learned = self._orders.get(plan)
        self._learning = self._changed = False
        self._running = True

    def microbatch(self) -> None:
        """Start a microbatch. Does nothing outside of a step."""
        if not self._running:
            return
        if self._learned is None:
            self._learned, self._learning = [], True
        else:
            self._learning = False
        self._waiting = None
        self._skips = False
        self._open = [_Open(_END, self._learned)]

    def complete(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch. Call what it has skipped, and return ``loss`` with it in its graph.

        Collective: gathers of skipped units; in the first step one exchange.

        Raises:
            StepError: in the first step, other ranks are about to run a unit; on all ranks.
        """
        if not self._open:
            return loss
        if self._learning:
            self._agree(_END)
        while self._open:
            loss = self._call_rest(self._open.pop(), loss)
        return loss if self._waiting is None or not self._waiting.requires_grad else _joined(loss, self._waiting)

    def keep(self) -> None:
        """Rely on the order that this step has learned, or learn again if it has changed. Every rank must, or none."""
        if self._running and self._learned is not None:
            self._orders[self._plan] = self._learned
        if self._changed:
            self._orders.pop(self._plan, None)

    def end(self) -> None:
        """Stop comparing; forget what is running."""
        self._running = False
        self._open = []
        self._waiting = None

    def _enter(self, number: int, inputs: Any) -> Any:
        if not self._open:
            return inputs
        parent, grad = self._open[-1], torch.is_grad_enabled()
        if parent.free or (self._learning and parent.is_repeated(number, grad)):
            self._open.append(_Open(number, [], free=True))
            return inputs
        if self._learning:
            self._agree(number)
            call = _Call(number, grad, _has_gradient(inputs))
            parent.calls.append(call)
            self._open.append(_Open(number, call.inside, learned=call))
            return inputs
        rest = range(parent.at, len(parent.calls))
        place = next((at for at in rest if parent.calls[at].unit == number and parent.calls[at].grad == grad), None)
        if place is None:
            self._agree_on_swapped(number, parent)
            self._open.append(_Open(number, [], free=True))
            return inputs
        if parent.at < place:
            self._call_before(parent, place)
        parent.at = place + 1
        call = parent.calls[place]
        self._open.append(_Open(number, call.inside))
        lacks = self._skips and call.grad and call.inputs and not _has_gradient(inputs)  # it would come from a skipped unit
        return _with_gradient(inputs) if lacks else inputs

    def _leave(self, number: int, output: Any) -> Any:
        while any(frame.unit == number for frame in self._open):
            frame = self._open.pop()
            if frame.learned is not None:
                self._learn_outputs(frame, output)
            output = self._call_rest(frame, output)
        return output

    def _learn_outputs(self, frame: _Open, output: Any) -> None:
        assert frame.learned is not None
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        frame.learned.outputs = any(tensor.requires_grad for tensor in found)
        if frame.calls:
            frame.calls[-1].returned = any(mine is inner for mine in found for inner in frame.results)
        self._open[-1].results = found

    def _call_rest(self, frame: _Open, output: Any) -> Any:
        """Call what the order has left in ``frame``. Return ``output`` with it in the graph."""
        if self._learning or frame.at == len(frame.calls):
            return output
        leaves, tree = tree_flatten(output)
        at = _first_number(leaves)
        if at is None:
            self._call_before(frame, len(frame.calls))
            return output
        with self._aside():
            for call in frame.calls[frame.at :]:
                leaves[at] = self._call_empty(call, leaves[at])
        return tree_unflatten(leaves, tree)

    def _call_before(self, frame: _Open, place: int) -> None:
        """Call what the order has before ``place``; the loss will depend on it."""
        with self._aside(), torch.enable_grad():  # a later unit may run without a graph
            for call in frame.calls[frame.at : place]:
                frame.empty |= {call.unit} if call.grad else set()
                self._waiting = self._call_empty(call, torch.zeros(()) if self._waiting is None else self._waiting)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context in which calls are not compared with the order."""
        before, self._open = self._open, []
        try:
            yield
        finally:
            self._open = before

    def _call_empty(self, call: _Call, output: Tensor) -> Tensor:
        """Gather and free a unit, and those inside it. Return ``output``, whose backward gathers and reduces them first."""
        self._skips = True
        unit = self._units[call.unit]
        with torch.set_grad_enabled(call.grad):
            value = unit.begin(torch.zeros((), device=unit.device, requires_grad=call.grad and call.inputs))
            if call.outputs and not value.requires_grad:
                value = value.detach().requires_grad_()
            for inner in call.inside:
                value = self._call_empty(inner, value)
            if call.returned:
                return unit.end(_joined(output, value))
            value = unit.end(_joined(value))
        return _joined(output, value) if value.requires_grad else output

    def _agree_on_swapped(self, number: int, frame: _Open) -> None:
        """Refuse a unit that this rank has called empty, unless all ranks run it now: the order has changed on all of them.

        Other units that the order does not have are let through: they are new on all ranks, or repeated without a graph.

        Collective: one exchange, if all ranks come.

        Raises:
            StepError: the others do not come; on this rank. They lose it.
        """
        if number not in frame.empty or not torch.is_grad_enabled() or not self._compare:
            return
        self._changed = True
        numbers = gather_within(number, seconds=_SWAPPED_S)
        if numbers is None or set(numbers) != {number}:
            raise StepError(
                f"step: this rank runs {self._said(number)} later than in the first step, and other ranks do not. Run units in "
                "the same order on all ranks."
            )

    def _agree(self, number: int) -> None:
        """Compare the next unit of all ranks. Collective: one exchange, and if they differ none of the model's.

        Raises:
            StepError: they differ; on all ranks.
        """
        if not self._compare:
            return
        numbers = [int(row[0]) for row in all_gather_numbers([number], where="microbatch_step")]
        if len(set(numbers)) == 1:
            return
        other = next(rank for rank, theirs in enumerate(numbers) if theirs != numbers[0])
        raise StepError(
            f"step: ranks run different units in the first step: rank 0 comes to {self._said(numbers[0])}, rank {other} to "
            f"{self._said(numbers[other])}. Run the same units in the same order on all ranks in the first step; later steps "
            "may skip units."
        )

    def _said(self, number: int) -> str:
        return "the end of its microbatch" if number == _END else self._name(number)

    def _name(self, number: int) -> str:
        module = self._units[number].module
        name = next(name for name, found in clean_modules(self._model) if found is module)
        return repr(name) if name else "the model itself"


class _Join(torch.autograd.Function):
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


def _joined(value: Tensor, *others: Tensor) -> Tensor:
    joined: Tensor = _Join.apply(value, *others)  # type: ignore[no-untyped-call]
    return joined


def _with_gradient(values: Any) -> Any:
    """``values`` with the first tensor of numbers in a graph."""
    leaves, tree = tree_flatten(values)
    at = _first_number(leaves)
    if at is None:
        return values
    leaves[at] = _joined(leaves[at], torch.zeros((), device=leaves[at].device, requires_grad=True))
    return tree_unflatten(leaves, tree)


def _first_number(leaves: list[Any]) -> int | None:
    """The position of the first tensor that can have a gradient."""
    return next((at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _has_gradient(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))
