"""The registry of edits of models: a new edit is a row in ``rows/``, and every contract tests it from then on.

``BROKEN`` has one edit per way of breaking a contract, each with the contract that must find it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from battery.rows import surgery_text, surgery_vision
from battery.surgery_row import SurgeryRow
from dtrain.errors import ConfigError
from dtrain.surgery.replace import Mixin, add_mixin

ROWS: dict[str, SurgeryRow] = {**surgery_vision.ROWS, **surgery_text.ROWS}


# ---- broken on purpose ------------------------------------------------------------------------------------------------------


class Odd(Mixin):
    """A class mixed into a linear layer, which adds a side effect to its forward."""

    how = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.how == "sync" and out.sum() > 0:
            out = out * 1.0
        if self.how == "memory":
            self._times = getattr(self, "_times", 0) + 1
            out = out * (1.0 + 1.0 / self._times)
        if self.how == "rank":
            out = out * (1.0 + len(x))
        return out


def _odd(how: str) -> Callable[[nn.Module], nn.Module]:
    def edit(model: nn.Module) -> nn.Module:
        add_mixin(model.last, Odd)
        model.last.how = how
        return model

    return edit


def _nothing(model: nn.Module) -> nn.Module:
    return model


def _strict(edit: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """The same class with the properties that the other contracts need, so that a row breaks only its own contract."""

    def refusing(model: nn.Module) -> nn.Module:
        if not hasattr(model, "last") or any(hasattr(p, "device_mesh") for p in model.parameters()):
            raise ConfigError("edit: not this one")
        return edit(model)

    return refusing


def _drawn(model: nn.Module) -> nn.Module:
    """Begins with weights that no seed says."""
    with torch.no_grad():
        model.last.weight.mul_(random.SystemRandom().random())
    return model


def _in_training_mode(model: nn.Module) -> nn.Module:
    model.last = nn.Linear(4, 2).to(model.last.weight)
    return model


def _values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.last.weight.mul_(2.0)
    return model


def _buffer_without_a_value(model: nn.Module) -> nn.Module:
    model.last.register_buffer("table", torch.arange(4.0, device=model.last.weight.device), persistent=False)
    return model


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)


def _row(edit: Callable[[nn.Module], nn.Module], *, strict: bool = True, **fields: Any) -> SurgeryRow:
    edit = _strict(edit) if strict else edit
    return replace(SurgeryRow(make=Small, edit=edit, changes={}, inputs=((3,), None), blocks=nn.Linear), **fields)


BROKEN: dict[str, tuple[str, SurgeryRow]] = {
    "does not replace": ("report", _row(_nothing, changes={"last": "OddLinear"})),
    "replaces more": ("report", _row(_odd("nothing"), changes={})),
    "finds nothing and is silent": ("nothing fits", _row(_nothing, strict=False)),
    "takes sharded models": ("sharded", _row(_nothing, strict=False)),
    "mean of one rank": ("ranks", _row(_odd("rank"))),
    "memory that no checkpoint has": ("fewer", _row(_odd("memory"))),
    "memory in the process": ("resume", _row(_odd("memory"))),
    "weights without a seed": ("resume", _row(_drawn)),
    "reads a value": ("syncs", _row(_odd("sync"))),
    "training mode": ("kept", _row(_in_training_mode)),
    "other values": ("kept", _row(_values)),
    "table on meta": ("meta", _row(_buffer_without_a_value)),
    "other results": ("initial", _row(_odd("rank"), initial=True)),
}


def row(name: str) -> SurgeryRow:
    """A row, sound or broken: ranks find it by name."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]
