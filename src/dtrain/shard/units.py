"""Which modules of a plain model become units: gathered, computed with, reduced and freed as one. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.names import clean_modules, clean_parameters, matcher

Picked: TypeAlias = "type[nn.Module] | str"
Blocks: TypeAlias = "Picked | Sequence[Picked] | Callable[[str, nn.Module], bool]"
"""Classes and names (patterns) of modules, or a predicate over (name, module)."""

LeaveOut: TypeAlias = "str | Sequence[str] | Callable[[str, Tensor], bool]"
"""Names (patterns) of parameters, or a predicate over (name, parameter)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A model cut into units.

    Args:
        units: the modules of each unit, inside out, the model itself last. A unit of several modules holds tied parameters.
        left_out: parameters that stay whole on every rank, by name.
    """

    units: tuple[tuple[nn.Module, ...], ...]
    left_out: dict[str, Tensor]


def plan_layout(model: nn.Module, blocks: Blocks, leave_out: LeaveOut) -> Layout:
    """Cut ``model`` into units.

    A parameter that two units share gets a unit of its own, made of the modules that own it: it must be gathered for both.
    Scalar parameters cannot be cut, so they are left out.

    Raises:
        ConfigError: an entry of ``blocks`` or ``leave_out`` that picks nothing, a module without ``forward``, or tied
            parameters whose owners lie inside each other.
    """
    left_out = _left_out(model, leave_out)
    chosen = _chosen(model, blocks)
    joint = _tied_across(model, chosen, {id(p) for p in left_out.values()})
    in_joint = {id(module) for modules in joint for module in modules}
    single = [(module,) for module in chosen if id(module) not in in_joint]
    return Layout(units=(*_inside_out(model, [*single, *joint]), (model,)), left_out=left_out)


def _left_out(model: nn.Module, leave_out: LeaveOut) -> dict[str, Tensor]:
    params, _ = clean_parameters(model)
    if callable(leave_out):
        picked = {name: p for name, p in params.items() if leave_out(name, p)}
    else:
        patterns = [leave_out] if isinstance(leave_out, str) else list(leave_out)
        for pattern in patterns:
            if not any(map(matcher([pattern], where="shard_model: leave_out"), params)):
                raise ConfigError(f"shard_model: leave_out names {pattern!r}, but no parameter has such a name")
        fits = matcher(patterns, where="shard_model: leave_out")
        picked = {name: p for name, p in params.items() if fits(name)}
    return picked | {name: p for name, p in params.items() if p.ndim == 0}


def _chosen(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """The modules that ``blocks`` picks, without the model itself (which is always a unit)."""
    below = [(name, module) for name, module in clean_modules(model) if name]
    found: list[tuple[str, nn.Module]] = []
    if callable(blocks) and not isinstance(blocks, type):
        found = [(name, module) for name, module in below if blocks(name, module)]
        if not found:
            raise ConfigError("shard_model: blocks is a function that picks no module of this model; it gets (name, module)")
    else:
        for entry in [blocks] if isinstance(blocks, str | type) else blocks:
            fits = _entry(entry)
            matches = [(name, module) for name, module in below if fits(name, module)]
            if not matches and not fits("", model):
                raise ConfigError(f"shard_model: blocks names {_shown(entry)}, but the model has no such module")
            found += matches
    for name, module in found:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _has_forward(module):
            raise ConfigError(
                f"shard_model: blocks picks {name!r}, a {type(module).__name__} without forward; pick what is inside it"
            )
    return list({id(module): module for _, module in found}.values())


def _entry(entry: Picked) -> Callable[[str, nn.Module], bool]:
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return lambda name, module: isinstance(module, entry)
    if isinstance(entry, str):
        fits = matcher([entry], where="shard_model: blocks")
        return lambda name, module: fits(name)
    raise ConfigError(
        f"shard_model: blocks takes module classes, names, or one function of (name, module), got {entry!r}; "
        "e.g. blocks=(Block,) or blocks='layers.*'"
    )


def _shown(entry: Picked) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _tied_across(model: nn.Module, chosen: list[nn.Module], ignored: set[int]) -> list[tuple[nn.Module, ...]]:
    """Groups of modules that own a parameter together but would end up in different units."""
    home = _homes(model, chosen)
    owners: dict[int, dict[int, nn.Module]] = {}
    for _, module in clean_modules(model):
        for param in module._parameters.values():
            if param is not None and id(param) not in ignored:
                owners.setdefault(id(param), {})[id(module)] = module
    groups: list[dict[int, nn.Module]] = []
    for together in owners.values():
        if len({home[key] for key in together}) > 1:
            merged = dict(together)
            apart = [group for group in groups if group.keys().isdisjoint(together)]
            for group in groups:
                merged |= {} if group.keys().isdisjoint(together) else group
            groups = [*apart, merged]
    return [tuple(group.values()) for group in groups]


def _homes(model: nn.Module, chosen: list[nn.Module]) -> dict[int, int]:
    """For every module the unit that it would be in: the innermost chosen module around it, or the model."""
    units, home = {id(module) for module in chosen}, {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = id(module) if id(module) in units else unit
        home[id(module)] = unit
        for child in module.children():
            walk(child, unit)

    walk(model, id(model))
    return home


def _inside_out(model: nn.Module, units: list[tuple[nn.Module, ...]]) -> Iterator[tuple[nn.Module, ...]]:
    """Units inside others before those: FSDP2 gives a unit what is below it and not taken yet."""
    unit_of = {id(module): index for index, modules in enumerate(units) for module in modules}
    order: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(units)), ()))

    def walk(module: nn.Module, around: tuple[int, ...]) -> None:
        if id(module) in unit_of:
            for outer in around:
                order.add(outer, unit_of[id(module)])
            around = (*around, unit_of[id(module)])
        for child in module.children():
            walk(child, around)

    walk(model, ())
    if id(next(clean_modules(model))[1]) in unit_of:  # the model itself owns one of the tied parameters
        raise ConfigError(_NESTED)
    try:
        yield from (units[index] for index in order.static_order())
    except CycleError:
        raise ConfigError(_NESTED) from None


_NESTED = (
    "shard_model: a parameter is tied between two modules of which one contains the other, in different units; let both lie in "
    "one block, or name it in leave_out"
)
