"""Several optimizers as one: ``NamedOptimizers`` has the groups and the state of its members, and steps each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.typing import Params


class NamedOptimizers(torch.optim.Optimizer):
    """Several optimizers with one list of groups and one state. ``Step.init`` makes it of a dict of optimizers.

    Each group is the member's own dict, and all members share one ``state``, so a change here is a change there. A group is
    named after its optimizer: ``matrices``, ``rest.no_decay``, or ``rest.0`` without a name of its own.

    Args:
        members: optimizers by name, at least one, whose parameters differ.

    Mutates: ``name`` of each group of the members, and their ``state``, which holds the state of all members from now on.
    """

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        self.members = dict(members)
        # The base class makes groups of its own, which are replaced below.
        super().__init__([param for group in self._member_groups() for param in group["params"]], {})
        for name, member in self.members.items():
            for index, group in enumerate(member.param_groups):
                group["name"] = _name_group(name, group.get("name", "" if len(member.param_groups) == 1 else str(index)))
        state: defaultdict[Any, Any] = defaultdict(dict)
        for member in self.members.values():
            state.update(member.state)
        self._share(self._member_groups(), state)

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.members[name]

    def _member_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members.values() for group in member.param_groups]

    def _share(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Make ``groups`` and ``state`` those of this optimizer and of its members. Mutates: the members."""
        self.param_groups, self.state = groups, state
        start = 0
        for member in self.members.values():
            end = start + len(member.param_groups)
            member.param_groups, member.state, start = groups[start:end], state, end

    def step(  # type: ignore[override]
        self, closure: None = None, *, run: Callable[[torch.optim.Optimizer], object] = lambda member: member.step()
    ) -> None:
        """Run each member, in the order of their names' appearance.

        Args:
            closure: None, as a step computes its gradients before the update.
            run: function that runs a member.

        Mutates: parameters, and the state of the members.
        """
        for member in self.members.values():
            run(member)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of the same optimizers has returned. Mutates: the members."""
        super().load_state_dict(state_dict)
        self._share(self.param_groups, self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group, except while the optimizer is made: no member would update its parameters.

        Raises:
            ConfigError: always, after ``__init__``.
        """
        if self.param_groups:
            raise ConfigError(
                "NamedOptimizers: a group must be added to one of the optimizers, got a group for all of them. Call "
                "add_param_group of the optimizer, and then step.init."
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return " and ".join(f"{name} ({type(member).__name__})" for name, member in self.members.items())


def _name_group(optimizer: str, group: str) -> str:
    """Return the name of a group behind the name of its optimizer. A second ``Step.init`` changes no name."""
    if not group or group == optimizer or group.startswith(f"{optimizer}."):
        return group or optimizer
    return f"{optimizer}.{group}"


def list_members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the members of several optimizers, or the one optimizer."""
    return tuple(optimizer.members.values()) if isinstance(optimizer, NamedOptimizers) else (optimizer,)


def format_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, or the names and classes of several."""
    return repr(optimizer) if isinstance(optimizer, NamedOptimizers) else type(optimizer).__name__


def name_optimizers(params: Params, optimizers: Mapping[str, torch.optim.Optimizer]) -> NamedOptimizers:
    """Return several optimizers as one.

    Args:
        params: the model's parameters by clean name.
        optimizers: checked optimizers by name.

    Mutates: as ``NamedOptimizers``.

    Raises:
        ConfigError: no optimizer, a name that is not a text or has a dot, or a parameter in two optimizers, by name.
    """
    if not optimizers:
        raise ConfigError("init: optimizer must hold at least one optimizer, got {}. Pass {'all': torch.optim.AdamW(...)}.")
    for name in optimizers:
        if not isinstance(name, str) or not name or not set(name).isdisjoint(".*"):
            raise ConfigError(
                f"init: names of optimizers must be texts without '.' and '*', got {name!r}. Write {{'matrices': ...}}."
            )
    holders: dict[int, list[str]] = {}
    for name, optimizer in optimizers.items():
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            holders.setdefault(id(param), []).append(name)
    names = {id(param): name for name, param in params.items()}
    shared = [(names.get(key, "a parameter of another model"), held) for key, held in holders.items() if len(held) > 1]
    if shared:
        first, held = shared[0]
        raise ConfigError(
            f"init: each parameter must be in one optimizer, got {first} in {' and '.join(map(repr, held))} "
            f"({len(shared)} such parameters). Give it to one of them."
        )
    _check_texts(optimizers)
    return NamedOptimizers(optimizers)


def _check_texts(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse two optimizers with state under one text, because members share one state."""
    counts = Counter(key for optimizer in optimizers.values() for key in optimizer.state if not isinstance(key, Tensor))
    repeated = [key for key, count in counts.items() if count > 1]
    if repeated and len({id(optimizer.state) for optimizer in optimizers.values()}) > 1:
        raise ConfigError(
            f"init: optimizers must keep state of no parameter under different texts, got {repeated[0]!r} twice. Rename a key."
        )
