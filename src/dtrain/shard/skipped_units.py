"""Take part in the collectives of units that this rank skips (``SkippedUnits``).

With sharded parameters, every forward of a unit is an all-gather by all ranks, and every backward a gather and a reduction. A
rank whose samples do not reach a unit would block the other ranks, or pair their collective with that of another unit::

    rank 0    gather A    gather B    gather C    backward of C ...
    rank 1    gather A    gather C    waits: its gather of C met rank 0's gather of B


The first step records the order of units: ranks compare the number of each unit, and raise together if numbers differ. In
later steps each rank follows the recorded order alone. A unit of the order that the rank does not run is *called empty*. An
empty call gathers and reshards the unit without computation. A node in the autograd graph gathers and reduces the unit in
backward, at the same place as on other ranks.

A rank without a microbatch calls all units empty (``forward_empty``), and runs no loss. If the order is not known yet, the
other ranks announce the start and the end of each unit.

A loss may run further sharded models, such as the reference of DPO. If ranks have different numbers of microbatches, their
units are announced and called empty as those of the model, and ``eval_mode`` reshards a model on all ranks. Each model has a
number, so that all ranks know a unit of any model by the same number (``StepUnits``).

A rank that calls a unit empty gathers the shards that it holds at that time. If another rank runs the unit inside of
``use_snapshot`` or ``use_average``, it would mix shards of the copy with shards of the trained parameters, so this is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.dist.collectives import all_gather_numbers, all_gather_with_timeout
from dtrain.errors import StepError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.fsdp2_private import (
    UnitForward,
    fsdp_param_groups,
    grad_tensors,
    is_unit,
    reshard_groups,
    sharded_params,
    unit_forwards,
)

# Ranks that all changed their order reach the same unit within this time.
_REORDER_TIMEOUT_S = 60.0
# The pseudo unit at the end of a microbatch.
END_OF_MICROBATCH = -1
# Units of a model are numbered from the number of the model times this stride.
_STRIDE = 2**20
# The announcement of a rank that runs no unit of its own.
_FOLLOWS = -1
ExchangeFn: TypeAlias = Callable[[int, str], list[int]]
"""Function of a number and its description, which returns the number of each rank."""


class UnitEvent(NamedTuple):
    """Start or end of a unit's forward, or the end of a microbatch.

    Args:
        unit: number of the unit.
        starts: if True, the forward starts.
        grad: at the start, True if a graph is recorded; at the end, True if an output requires a gradient.
        linked: at the start, True if an input requires a gradient; at the end, True if the forward returns the output of its
            last nested forward.
        replaced: at the start, True if a copy or an average is in the place of the parameters.
    """

    unit: int
    starts: bool
    grad: bool = False
    linked: bool = False
    replaced: bool = False

    def encode(self) -> int:
        return (self.unit + 1) * 16 + self.replaced * 8 + self.starts * 4 + self.grad * 2 + self.linked

    @classmethod
    def decode(cls, code: int) -> UnitEvent:
        return cls(code // 16 - 1, bool(code & 4), bool(code & 2), bool(code & 1), bool(code & 8))


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
        replaced: if True, a copy or an average was in the place of the parameters.
    """

    unit: int
    grad_enabled: bool
    inputs_need_grad: bool
    nested: list[UnitCall] = field(default_factory=list)
    outputs_need_grad: bool = False
    returns_inner_output: bool = False
    replaced: bool = False


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


class SkippedUnits:
    """Records the order of the units of one model, and makes the empty calls of this rank.

    ``begin_step`` starts a step, ``begin_microbatch`` starts and ``complete_forward`` ends the forward of a microbatch. Call
    ``confirm_order`` after a step that succeeded on all ranks. Outside of ``begin_step`` and ``end_step`` nothing is compared.
    """

    def __init__(self, own: ModelUnits) -> None:
        self._own = own
        self._units = StepUnits({0: own})
        self._orders: dict[Hashable, list[UnitCall]] = {}
        self._plan: Hashable = None
        self._uneven = False
        # Plans whose order lacks the repeated forwards without a graph, because their number may differ between steps.
        self._repeating: set[Hashable] = set()
        self._has_repeats = False
        self._order: list[UnitCall] | None = None
        self._recording = False
        self._running = False
        self._order_changed = False
        self._frames: list[OpenForward] = []
        # A tensor with empty calls in its graph, on which the loss must depend.
        self._pending_output: Tensor | None = None
        self._has_skipped = False

    def knows_order(self, plan: Hashable) -> bool:
        """Return True if the whole order of ``plan`` is recorded; equal on all ranks."""
        return plan in self._orders and plan not in self._repeating

    def begin_step(self, plan: Hashable, *, compare: bool, exchange: ExchangeFn | None = None, uneven: bool = False) -> None:
        """Start a step.

        Args:
            plan: the facts that determine the order; equal on all ranks. The order of a new plan is recorded. None keeps no
                order after the step.
            compare: if True, ranks compare a recorded order, with one small exchange per unit.
            exchange: function that returns a number of each rank; needed on all ranks while the order is not known, if a rank
                has no microbatch.
            uneven: if True, some rank has fewer microbatches and calls the units of the others empty.
        """
        self.end_step()
        others = self._own.others() if uneven and exchange is not None else {}
        self._units = StepUnits({0: self._own, **others}, compare=compare, exchange=exchange)
        self._units.listen(self)
        self._plan, self._uneven = plan, uneven
        self._order = self._orders.get(plan) if exchange is None else None
        self._recording = self._order_changed = self._has_repeats = False
        self._running = True

    def begin_microbatch(self) -> None:
        """Start a microbatch. No effect outside of a step."""
        if not self._running:
            return
        self._recording = self._order is None
        self._order = [] if self._order is None else self._order
        self._pending_output = None
        self._has_skipped = False
        self._frames = [OpenForward(END_OF_MICROBATCH, self._order)]

    def complete_forward(self, loss: Tensor) -> Tensor:
        """End the forward of a microbatch. Call skipped units, and return ``loss`` with these units in its graph.

        Collective: gathers of skipped units; in the first step one exchange.

        Raises:
            StepError: in the first step, other ranks are about to run a unit; on all ranks.
        """
        if not self._frames:
            return loss
        if self._recording:
            self._units.compare_event(UnitEvent(END_OF_MICROBATCH, False), is_recorded=True)
        while self._frames:
            loss = self._call_remaining(self._frames.pop(), loss)
        pending = self._pending_output
        return join_graphs(loss, pending) if pending is not None and pending.requires_grad else loss

    def forward_empty(self) -> Tensor:
        """Call all units of a microbatch that this rank does not have. Return a zero with the units in its graph.

        Collective: gathers of all units; while the order is not known, also the exchanges of ``begin_step``.

        Raises:
            StepError: while the order is not known, the other ranks run different units; on all ranks.
        """
        zero = torch.zeros((), device=self._units.device)
        if not self._recording:
            return self.complete_forward(zero)
        loss = self._follow(zero)
        self._frames = []
        return loss

    def confirm_order(self) -> None:
        """Rely on the recorded order, or record again if the order changed. All ranks must call, or none."""
        # An order with repeated forwards, or of several models, holds for this step alone.
        lasts = not (self._units.exchange and (self._has_repeats or self._own.has_others))
        if self._running and self._order is not None and self._plan is not None and lasts:
            self._orders[self._plan] = self._order
            if self._has_repeats:
                self._repeating.add(self._plan)
        if self._order_changed:
            self._orders.pop(self._plan, None)

    def end_step(self) -> None:
        """Stop comparing, and discard running forwards."""
        self._running = False
        self._frames = []
        self._pending_output = None
        self._units.release()

    def other_models(self) -> list[nn.Module]:
        """Return the further models that the loss of this step may run."""
        return self._units.other_models

    def after_reshard(self, model: int) -> None:
        """Record that the loss has resharded a model, or find the call in the order."""
        if not self._frames or self._frames[-1].unchecked:
            return
        parent, number = self._frames[-1], reshard_unit(model)
        if self._recording:
            # A second reshard has no effect.
            if not parent.calls or parent.calls[-1].unit != number:
                parent.calls.append(UnitCall(number, False, False))
                if self._units.exchange is not None:
                    self._units.announce(UnitEvent(number, True))
        # Skipped calls before the reshard are made before the next unit.
        elif parent.position < len(parent.calls) and parent.calls[parent.position].unit == number:
            parent.position += 1

    def before_forward(self, number: int, inputs: Any) -> Any:
        if not self._frames:
            return inputs
        parent, grad, replaced = self._frames[-1], torch.is_grad_enabled(), self._units.models[number // _STRIDE].is_replaced
        if self._recording:
            event = UnitEvent(number, True, grad, any_requires_grad(inputs), replaced)
            self._units.compare_event(event, is_recorded=self._open_recorded(event))
            return inputs
        if self._uneven and replaced:
            raise self._units.replaced_error(number)
        if parent.unchecked:
            self._frames.append(OpenForward(number, [], unchecked=True))
            return inputs
        following = enumerate(parent.calls[parent.position :], parent.position)
        index = next((i for i, call in following if call.unit == number and call.grad_enabled == grad), None)
        if index is None:
            if self._uneven:
                raise StepError(
                    f"step: this rank runs {self._units.name(number)} more often than before, and a rank without a further "
                    "microbatch cannot know. Give all ranks equal numbers of microbatches, or run it equally often."
                )
            self._check_reordered(number, parent)
            self._frames.append(OpenForward(number, [], unchecked=True))
            return inputs
        if parent.position < index:
            self._call_skipped(parent, index)
        parent.position = index + 1
        call = parent.calls[index]
        self._frames.append(OpenForward(number, call.nested))
        # The gradient would have come through a skipped unit.
        needs_grad = self._has_skipped and call.grad_enabled and call.inputs_need_grad and not any_requires_grad(inputs)
        if not needs_grad:
            return inputs

        def attach_grad(value: Tensor) -> Tensor:
            return join_graphs(value, torch.zeros((), device=value.device, requires_grad=True))

        changed = change_first_float(inputs, attach_grad)
        return inputs if changed is None else changed

    def _open_recorded(self, event: UnitEvent) -> bool:
        """Open a forward, and record it unless it repeats one without a graph. Return True if it is recorded."""
        parent = self._frames[-1]
        self._has_repeats |= parent.is_repeated(event.unit, event.grad)
        within_step = self._units.exchange is not None or self._plan is None
        if not within_step and (parent.unchecked or parent.is_repeated(event.unit, event.grad)):
            self._frames.append(OpenForward(event.unit, [], unchecked=True))
            return False
        call = UnitCall(event.unit, event.grad, event.linked, replaced=event.replaced)
        parent.calls.append(call)
        self._frames.append(OpenForward(event.unit, call.nested, recorded_call=call))
        return True

    def after_forward(self, number: int, output: Any) -> Any:
        while number in [frame.unit for frame in self._frames]:
            frame = self._frames.pop()
            if frame.recorded_call is not None:
                self._record_outputs(frame, output)
            if self._recording:
                needs_grad = frame.recorded_call is not None and frame.recorded_call.outputs_need_grad
                returned = bool(frame.calls) and frame.calls[-1].returns_inner_output
                self._units.compare_event(UnitEvent(frame.unit, False, needs_grad, returned), is_recorded=False)
            else:
                output = self._call_remaining(frame, output)
        return output

    def _record_outputs(self, frame: OpenForward, output: Any) -> None:
        assert frame.recorded_call is not None
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        frame.recorded_call.outputs_need_grad = bool(grad_tensors(output))
        if frame.calls:
            frame.calls[-1].returns_inner_output = any(tensor is inner for tensor in tensors for inner in frame.inner_outputs)
        self._frames[-1].inner_outputs = tensors

    def _call_remaining(self, frame: OpenForward, output: Any) -> Any:
        """Call the remaining units of ``frame``. Return ``output`` with these units in its graph."""
        if self._recording or frame.position == len(frame.calls):
            return output

        def call_empty(value: Tensor) -> Tensor:
            with self._pause_checks():
                for call in frame.calls[frame.position :]:
                    value = self._call_empty(call, value)
            return value

        changed = change_first_float(output, call_empty)
        if changed is None:
            self._call_skipped(frame, len(frame.calls))
        return output if changed is None else changed

    def _call_skipped(self, frame: OpenForward, end: int) -> None:
        """Call the units of the order before ``end``. The loss will depend on these units."""
        # The current forward may run without a graph.
        with self._pause_checks(), torch.enable_grad():
            for call in frame.calls[frame.position : end]:
                frame.called_empty |= {call.unit} if call.grad_enabled else set()
                pending = torch.zeros((), device="cpu") if self._pending_output is None else self._pending_output
                self._pending_output = self._call_empty(call, pending)

    @contextmanager
    def _pause_checks(self) -> Iterator[None]:
        """Disable the comparison of calls in a context."""
        before, self._frames = self._frames, []
        try:
            yield
        finally:
            self._frames = before

    def _call_empty(self, call: UnitCall, output: Tensor) -> Tensor:
        """Gather and reshard a unit and its nested units. Return ``output`` with the units in its graph."""
        model = resharded_model(call.unit)
        if model is not None:
            self._units.models[model].reshard()
            return output
        if call.replaced != self._units.models[call.unit // _STRIDE].is_replaced:
            raise self._units.replaced_error(call.unit)
        self._has_skipped = True
        unit = self._units.unit(call.unit)
        with torch.set_grad_enabled(call.grad_enabled):
            needs_grad = call.grad_enabled and call.inputs_need_grad
            value = unit.pre_forward(torch.zeros((), device=unit.device, requires_grad=needs_grad))
            if call.outputs_need_grad and not value.requires_grad:
                value = value.detach().requires_grad_()
            for inner in call.nested:
                value = self._call_empty(inner, value)
            return leave_empty(unit, output, value, returned=call.returns_inner_output)

    def _follow(self, zero: Tensor) -> Tensor:
        """Call the units that other ranks announce, and record their order. Return ``zero`` with the units in its graph."""
        # For each open forward, the tensor that its nested forwards are joined to, and the grad mode.
        values = [(zero, True)]
        # The last ended forward. The next event tells how it ends: with the enclosing forward, or alone.
        ended: tuple[UnitForward, Tensor, bool] | None = None
        while True:
            event = self._units.announce(None)
            if ended is not None:
                unit, value, grad = ended
                outer, mode = values.pop()
                with self._pause_checks(), torch.set_grad_enabled(grad):
                    values.append((leave_empty(unit, outer, value, returned=event.linked and not event.starts), mode))
                ended = None
            if event.unit == END_OF_MICROBATCH:
                return values[0][0]
            model = resharded_model(event.unit)
            if model is not None:
                self._frames[-1].calls.append(UnitCall(event.unit, False, False))
                self._units.models[model].reshard()
                continue
            unit = self._units.unit(event.unit)
            if event.starts:
                self._open_recorded(event)
                with self._pause_checks(), torch.set_grad_enabled(event.grad):
                    value = torch.zeros((), device=unit.device, requires_grad=event.grad and event.linked)
                    values.append((unit.pre_forward(value), event.grad))
                continue
            frame, (value, grad) = self._frames.pop(), values.pop()
            if event.grad and not value.requires_grad:
                value = value.detach().requires_grad_()
            if frame.recorded_call is not None:
                frame.recorded_call.outputs_need_grad = event.grad
            if frame.calls:
                frame.calls[-1].returns_inner_output = event.linked
            ended = unit, value, grad

    def _check_reordered(self, number: int, frame: OpenForward) -> None:
        """Raise for a unit that was called empty before, unless all ranks run the unit now, in a new order.

        Units outside of the recorded order pass: these units are new on all ranks, or repeated without a graph.

        Collective: one exchange, if all ranks take part.

        Raises:
            StepError: other ranks do not run the unit; on this rank. The other ranks lose this rank.
        """
        if number not in frame.called_empty or not torch.is_grad_enabled() or not self._units.compare:
            return
        self._order_changed = True
        numbers = all_gather_with_timeout(number, timeout_s=_REORDER_TIMEOUT_S)
        if numbers is None or set(numbers) != {number}:
            raise StepError(
                f"step: this rank runs {self._units.name(number)} later than in the first step, and other ranks do not. "
                "Run units in the same order on all ranks."
            )


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


def change_first_float(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``values`` with the first floating-point tensor changed, None without such a tensor."""
    leaves, tree = tree_flatten(values)
    index = next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if index is None:
        return None
    leaves[index] = change(leaves[index])
    return tree_unflatten(leaves, tree)


def any_requires_grad(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(values))


def reshard_unit(model: int) -> int:
    """Return the pseudo unit that reshards a whole model."""
    return END_OF_MICROBATCH - 1 - model


def resharded_model(number: int) -> int | None:
    """Return the number of the model that a pseudo unit reshards, None for a unit."""
    return END_OF_MICROBATCH - 1 - number if number < END_OF_MICROBATCH else None


class ModelUnits:
    """Units of one model, outermost first, which report to one listener at a time.

    Args:
        model: model on several ranks.
        gathers: if True, all ranks of a unit must take part in its forward.
        on_all_ranks: if True, all ranks hold the model, so that the loss of another model may run it.
    """

    _num_shared: ClassVar[int] = 0
    # A loss closes over its models, so no argument leads to them.
    _sharded: ClassVar[weakref.WeakSet[ModelUnits]] = weakref.WeakSet()

    def __init__(self, model: nn.Module, *, gathers: bool, on_all_ranks: bool) -> None:
        self.model = model
        self.units: list[UnitForward] = unit_forwards(model) if gathers else []
        # The observer, and the number by which the observer knows the model.
        self.listener: tuple[SkippedUnits, int] | None = None
        # True if a copy or an average is in the place of the parameters.
        self.is_replaced = False
        for index, unit in enumerate(self.units):
            unit.wrap(enter=partial(self._before, index), leave=partial(self._after, index))
        # Equal on all ranks; 0 for a model that no other loss may run.
        self._number = 0
        if gathers and on_all_ranks:
            ModelUnits._num_shared += 1
            self._number = ModelUnits._num_shared
        if is_unit(model):
            ModelUnits._sharded.add(self)

    @property
    def has_others(self) -> bool:
        """True if the process has made other sharded models; equal on all ranks, also if a rank has freed them."""
        return ModelUnits._num_shared > min(self._number, 1)

    def others(self) -> dict[int, ModelUnits]:
        """Return the other models by number that all ranks hold, and whose units all ranks must gather."""
        return {units._number: units for units in ModelUnits._sharded if units._number and units is not self}

    @classmethod
    @contextmanager
    def mark_replaced(cls, module: nn.Module) -> Iterator[None]:
        """Mark the models with a unit in ``module`` in a context, in which a copy is in the place of the parameters."""
        modules = set(module.modules())
        marked = [units for units in cls._sharded if any(unit.module in modules for unit in units.units)]
        before = [units.is_replaced for units in marked]
        try:
            for units in marked:
                units.is_replaced = True
            yield
        finally:
            for units, value in zip(marked, before, strict=True):
                units.is_replaced = value

    @classmethod
    def unit_with_shards(cls, param: Tensor) -> UnitForward | None:
        """Return the unit of any model that stores ``param`` in shards, None for another parameter."""
        units = (unit for model in cls._sharded for unit in unit_forwards(model.model))
        return next((unit for unit in units if any(param is shard for shard in sharded_params(unit.group))), None)

    def other_sharded_models(self) -> list[nn.Module]:
        """Return the other models of this process that have units of FSDP2."""
        return [units.model for units in ModelUnits._sharded if units is not self]

    def reshard(self) -> None:
        """Reshard all units, without a report. Mutates: FSDP2's units."""
        reshard_groups(fsdp_param_groups(self.model))

    def on_reshard(self) -> None:
        """Report that all units were resharded."""
        if self.listener is not None:
            listener, number = self.listener
            listener.after_reshard(number)

    def name(self, index: int) -> str:
        """Return the quoted name of a unit."""
        module = self.units[index].module
        name = next(name for name, submodule in modules_by_fqn(self.model) if submodule is module)
        return repr(name) if name else "the model itself"

    def _before(self, index: int, inputs: Any) -> Any:
        if self.listener is None:
            return inputs
        listener, number = self.listener
        return listener.before_forward(number * _STRIDE + index, inputs)

    def _after(self, index: int, output: Any) -> Any:
        if self.listener is None:
            return output
        listener, number = self.listener
        return listener.after_forward(number * _STRIDE + index, output)


class StepUnits:
    """Units of the models of one step, whose events ranks compare.

    Args:
        models: models by number; number 0 is the model of the step.
        compare: if True, ranks compare recorded forwards, if there is no ``exchange``.
        exchange: function that returns a number of each rank, while ranks without a microbatch follow the others.
    """

    def __init__(self, models: Mapping[int, ModelUnits], *, compare: bool = False, exchange: ExchangeFn | None = None) -> None:
        self.models, self.compare, self.exchange = models, compare, exchange
        self._listeners: Sequence[tuple[ModelUnits, tuple[SkippedUnits, int] | None]] = ()

    @property
    def other_models(self) -> list[nn.Module]:
        """The models that the loss may run besides the model of the step."""
        return [units.model for number, units in self.models.items() if number]

    @property
    def device(self) -> torch.device | None:
        """Device of the units, None without a unit."""
        return next((unit.device for units in self.models.values() for unit in units.units), None)

    def listen(self, listener: SkippedUnits) -> None:
        """Report forwards to ``listener`` until ``release``. Mutates: the models."""
        self._listeners = [(units, units.listener) for units in self.models.values()]
        for number, units in self.models.items():
            units.listener = listener, number

    def release(self) -> None:
        """Report to the earlier listeners again, and keep the model of the step alone. Mutates: the models."""
        for units, listener in self._listeners:
            units.listener = listener
        self._listeners = ()
        self.models = {0: self.models[0]}

    def announce(self, event: UnitEvent | None) -> UnitEvent:
        """Announce this rank's next event, None on a rank without a microbatch; return that of the other ranks.

        Collective: one exchange.

        Raises:
            StepError: ranks have different events, or a rank has no microbatch and the others run the unit with a copy of the
                parameters; on all ranks.
        """
        assert self.exchange is not None
        codes = self.exchange(_FOLLOWS if event is None else event.encode(), self._describe(event))
        events = {rank: UnitEvent.decode(code) for rank, code in enumerate(codes) if code != _FOLLOWS}
        self._check_equal(events)
        if len(events) < len(codes) and any([event.replaced for event in events.values()]):  # noqa: C419
            raise self.replaced_error(next(iter(events.values())).unit)
        return next(iter(events.values()))

    def compare_event(self, event: UnitEvent, *, is_recorded: bool) -> None:
        """Compare the next unit of all ranks. Collective: one exchange; none of the model's if ranks differ.

        A rank without a microbatch needs to know all events, the others only the starts of recorded forwards.

        Raises:
            StepError: ranks differ; on all ranks.
        """
        if self.exchange is not None:
            self.announce(event)
        elif self.compare and is_recorded:
            rows = all_gather_numbers([event.encode()], caller="microbatch_step")
            self._check_equal(dict(enumerate(UnitEvent.decode(int(row[0])) for row in rows)))

    def _check_equal(self, events: Mapping[int, UnitEvent]) -> None:
        first, *others = events
        other = next((rank for rank in others if events[rank][:2] != events[first][:2]), None)
        if other is not None:
            raise StepError(
                f"step: ranks must run the same units in the first step, got {self._describe(events[first])} on rank {first} "
                f"and {self._describe(events[other])} on rank {other}. Call a unit that a rank does not need on zero rows, "
                "too, or leave it out of blocks. Later steps may skip units."
            )

    def replaced_error(self, number: int) -> StepError:
        """Make the error for a unit that a rank skips, and that others run with a copy in the place of the parameters."""
        return StepError(
            f"step: all ranks must run {self.name(number)} inside of use_snapshot or use_average, but a rank skips it or has "
            "no microbatch left, so it would gather shards of the trained parameters. Compute the reference before the step as "
            "a column of the batch, give all ranks equal numbers of microbatches, or use a second sharded model."
        )

    def _describe(self, event: UnitEvent | None) -> str:
        if event is None:
            return "no forward, because it has no microbatch"
        if event.unit == END_OF_MICROBATCH:
            return "the end of its microbatch"
        if resharded_model(event.unit) is not None:
            return "eval_mode"
        return self.name(event.unit) if event.starts else f"the end of {self.name(event.unit)}"

    def unit(self, number: int) -> UnitForward:
        """Return a unit by its number."""
        model, index = divmod(number, _STRIDE)
        return self.models[model].units[index]

    def name(self, number: int) -> str:
        """Return the quoted name of a unit."""
        model, index = divmod(number, _STRIDE)
        return self.models[model].name(index) + (" of another model" if model else "")
