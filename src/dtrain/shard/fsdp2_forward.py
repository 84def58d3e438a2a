"""Hook into the forward of FSDP2's units (``UnitForward``), by private names of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

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

    def pre_forward(self, value: Tensor) -> Tensor:
        """Gather the unit as its forward does. ``value`` replaces the inputs. Collective: one all-gather."""
        return self._state._pre_forward(self.module, (value,), {})[0][0]  # type: ignore[no-any-return]

    def post_forward(self, value: Tensor) -> Tensor:
        """Reshard the unit as its forward does. ``value`` and its gradient replace the outputs and their gradient."""
        return self._state._post_forward(self.module, (), value)  # type: ignore[no-any-return]


def unit_forwards(model: nn.Module) -> list[UnitForward]:
    """Return the units of ``model`` that own parameters, outermost first, without duplicates."""
    units = {id(unit._get_fsdp_state()): unit for unit in reversed(list(units_of(model)))}
    return [UnitForward(cast(nn.Module, unit)) for unit in reversed(units.values()) if groups_in_state(unit._get_fsdp_state())]
