"""Number the units of several sharded models, and compare their forwards between ranks (``StepUnits``).

The loss of one model may run others, such as the reference of DPO or a teacher. Each model has a number, so that all ranks know
a unit of any model by the same number. ``skipped_units`` uses the numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

from dtrain.dist.collectives import all_gather_numbers
from dtrain.errors import StepError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.fsdp2_forward import UnitForward, unit_forwards
from dtrain.shard.fsdp2_private import fsdp_param_groups, reshard_groups
from dtrain.shard.unit_calls import END_OF_MICROBATCH, UnitEvent

# Units of a model are numbered from the number of the model times this stride.
_STRIDE = 2**20
# The announcement of a rank that runs no unit of its own.
_FOLLOWS = -1

ExchangeFn: TypeAlias = Callable[[int, str], list[int]]
"""Function of a number and its description, which returns the number of each rank."""


def reshard_unit(model: int) -> int:
    """Return the pseudo unit that reshards a whole model."""
    return END_OF_MICROBATCH - 1 - model


def resharded_model(number: int) -> int | None:
    """Return the number of the model that a pseudo unit reshards, None for a unit."""
    return END_OF_MICROBATCH - 1 - number if number < END_OF_MICROBATCH else None


class UnitListener(Protocol):
    """Observer of the forwards of units, and of the reshards of models (``eval_mode``)."""

    def before_forward(self, number: int, inputs: Any) -> Any:
        """Return the inputs of a forward that is about to start."""

    def after_forward(self, number: int, output: Any) -> Any:
        """Return the output of a forward that ends."""

    def after_reshard(self, model: int) -> None:
        """Take notice that all units of a model were resharded."""


class ModelUnits:
    """Units of one model, outermost first, which report to one listener at a time.

    Args:
        model: model on several ranks.
        gathers: if True, all ranks of a unit must take part in its forward.
        on_all_ranks: if True, all ranks hold the model, so that the loss of another model may run it.
    """

    _num_shared: ClassVar[int] = 0
    # A loss closes over its models, so no argument leads to them.
    _shared: ClassVar[weakref.WeakSet[ModelUnits]] = weakref.WeakSet()

    def __init__(self, model: nn.Module, *, gathers: bool, on_all_ranks: bool) -> None:
        self.model = model
        self.units: list[UnitForward] = unit_forwards(model) if gathers else []
        # The observer, and the number by which the observer knows the model.
        self.listener: tuple[UnitListener, int] | None = None
        for index, unit in enumerate(self.units):
            unit.add_hooks(partial(self._before, index), partial(self._after, index))
        # Equal on all ranks; 0 for a model that no other loss may run.
        self._number = 0
        if gathers and on_all_ranks:
            ModelUnits._num_shared += 1
            self._number = ModelUnits._num_shared
            ModelUnits._shared.add(self)

    @property
    def has_others(self) -> bool:
        """True if the process has made other sharded models; equal on all ranks, also if a rank has freed them."""
        return ModelUnits._num_shared > min(self._number, 1)

    def others(self) -> dict[int, ModelUnits]:
        """Return the other sharded models by number."""
        return {units._number: units for units in ModelUnits._shared if units is not self}

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
        self._listeners: Sequence[tuple[ModelUnits, tuple[UnitListener, int] | None]] = ()

    @property
    def other_models(self) -> list[nn.Module]:
        """The models that the loss may run besides the model of the step."""
        return [units.model for number, units in self.models.items() if number]

    @property
    def device(self) -> torch.device | None:
        """Device of the units, None without a unit."""
        return next((unit.device for units in self.models.values() for unit in units.units), None)

    def listen(self, listener: UnitListener) -> None:
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
            StepError: ranks have different events; on all ranks.
        """
        assert self.exchange is not None
        codes = self.exchange(_FOLLOWS if event is None else event.encode(), self._describe(event))
        events = {rank: UnitEvent.decode(code) for rank, code in enumerate(codes) if code != _FOLLOWS}
        self._check_equal(events)
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
