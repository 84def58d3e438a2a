"""Which modules of a plain model become units: gathered, computed with, reduced and freed as one. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn, parameters_by_fqn

BlockSelector: TypeAlias = "type[nn.Module] | str"
Blocks: TypeAlias = "BlockSelector | Sequence[BlockSelector] | Callable[[str, nn.Module], bool]"
"""Classes and names (patterns) of modules, or a predicate over (name, module)."""

IgnoredParams: TypeAlias = "str | Sequence[str] | Callable[[str, Tensor], bool]"
"""Names (patterns) of parameters, or a predicate over (name, parameter)."""

_CONTAINER_CLASSES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # nothing calls them, unless a subclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrapPlan:
    """A model cut into units.

    Args:
        units: the modules of each unit, inside out, the model itself last. A unit of several modules holds tied parameters.
        ignored_params: parameters that stay whole on every rank, by name.
    """

    units: tuple[tuple[nn.Module, ...], ...]
    ignored_params: dict[str, Tensor]


def plan_wrapping(
    model: nn.Module, blocks: Blocks, ignored_params: IgnoredParams, *, separate_units: Iterable[nn.Module] = ()
) -> WrapPlan:
    """Cut ``model`` into units; the modules ``separate_units`` are units whatever ``blocks`` says.

    A parameter that two units share gets a unit of its own, made of the modules that own it: it must be gathered for both.
    Parameters that cannot be cut, scalars and those without elements, are left out.

    Raises:
        ConfigError: an entry of ``blocks`` or ``ignored_params`` that picks nothing, a module without ``forward``, a parameter that
            the model itself ties to one inside a block, or a unit with trainable parameters of several dtypes.
    """
    left_out = _select_ignored_params(model, ignored_params)
    chosen = list({id(module): module for module in (*select_blocks(model, blocks), *separate_units)}.values())
    ignored = {id(p) for p in left_out.values()}
    single, joint = _join_tied_modules(model, chosen, ignored)
    units = [*((module,) for module in single), *joint]
    _check_dtypes(model, units, ignored)
    return WrapPlan(units=(*_order_innermost_first(model, units), (model,)), ignored_params=left_out)


def _select_ignored_params(model: nn.Module, ignored_params: IgnoredParams) -> dict[str, Tensor]:
    params, _ = parameters_by_fqn(model)
    if callable(ignored_params):
        picked = {name: p for name, p in params.items() if ignored_params(name, p)}
    else:
        if not isinstance(ignored_params, Iterable):
            raise ConfigError(
                f"shard_model: leave_out takes names, or one function of (name, parameter), got {ignored_params!r}"
            )
        patterns = [ignored_params] if isinstance(ignored_params, str) else list(ignored_params)
        for pattern in patterns:
            if not any(map(compile_patterns([pattern], caller="shard_model: leave_out"), params)):
                raise ConfigError(f"shard_model: leave_out names {pattern!r}, but no parameter has such a name")
        fits = compile_patterns(patterns, caller="shard_model: leave_out")
        picked = {name: p for name, p in params.items() if fits(name)}
    return picked | {name: p for name, p in params.items() if p.ndim == 0 or p.numel() == 0}


def select_blocks(model: nn.Module, blocks: Blocks, *, caller: str = "shard_model") -> list[nn.Module]:
    """The modules that ``blocks`` picks, each once, without the model itself (which is always a unit).

    Raises:
        ConfigError: an entry that picks nothing, or a module without ``forward``; it begins with ``caller``.
    """
    below = [(name, module) for name, module in modules_by_fqn(model) if name]
    found: list[tuple[str, nn.Module]] = []
    if callable(blocks) and not isinstance(blocks, type):
        found = [(name, module) for name, module in below if blocks(name, module)]
        if not found:
            raise ConfigError(f"{caller}: blocks is a function that picks no module of this model; it gets (name, module)")
    else:
        for entry in blocks if isinstance(blocks, Iterable) and not isinstance(blocks, str | type) else [blocks]:
            fits = _block_matcher(entry, caller)
            matches = [(name, module) for name, module in below if fits(name, module)]
            if not matches and not fits("", model):
                raise ConfigError(f"{caller}: blocks names {_format_entry(entry)}, but the model has no such module")
            found += matches
    for name, module in found:
        if isinstance(module, _CONTAINER_CLASSES) and not _has_forward(module):
            raise ConfigError(
                f"{caller}: blocks picks {name!r}, a {type(module).__name__} without forward; pick what is inside it"
            )
    return list({id(module): module for _, module in found}.values())


def _block_matcher(entry: BlockSelector, caller: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return lambda name, module: isinstance(module, entry)
    if isinstance(entry, str):
        fits = compile_patterns([entry], caller=f"{caller}: blocks")
        return lambda name, module: fits(name)
    got = f"a {type(entry).__name__}" if isinstance(entry, nn.Module) else repr(entry)
    raise ConfigError(
        f"{caller}: blocks takes module classes, names, or one function of (name, module), got {got}; "
        "e.g. blocks=(Block,) or blocks='layers.*'"
    )


def _format_entry(entry: BlockSelector) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _join_tied_modules(
    model: nn.Module, chosen: list[nn.Module], ignored_ids: set[int]
) -> tuple[list[nn.Module], list[tuple[nn.Module, ...]]]:
    """Units of one module, and units of several that own a parameter together but would end up apart.

    Joining modules may pull a further one along, as with a head whose weight is tied to the embedding and whose bias belongs
    to the module around it: so this goes on until nothing is apart. Of modules inside each other the outer one stands for both.
    """
    owners = _owners_of_tied_params(model, ignored_ids)
    single, joint = list(chosen), list[tuple[nn.Module, ...]]()
    while True:
        home = _unit_of_each_module(model, [*((module,) for module in single), *joint])
        apart = next((found for found in owners if len({home[id(module)] for module in found}) > 1), None)
        if apart is None:
            return single, joint
        touched = {home[id(module)] for module in apart}
        together = [*apart, *(module for group in joint if id(group[0]) in touched for module in group)]
        outer = _outermost_modules(together)
        within = {id(inner) for module in outer for inner in module.modules()}
        joint = [*(group for group in joint if id(group[0]) not in touched), outer]
        # A block inside the joint unit that holds one of the owners would keep it from its parameter.
        single = [unit for unit in single if id(unit) not in within or not any(module in together for module in unit.modules())]


def _owners_of_tied_params(model: nn.Module, ignored_ids: set[int]) -> list[list[nn.Module]]:
    """The modules that own each parameter that has several owners."""
    found: dict[int, dict[int, nn.Module]] = {}
    for _, module in modules_by_fqn(model):
        for param in module._parameters.values():
            if param is not None and id(param) not in ignored_ids:
                found.setdefault(id(param), {})[id(module)] = module
    return [list(modules.values()) for modules in found.values() if len(modules) > 1]


def _outermost_modules(modules: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Those that lie inside none of the others, each once."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return tuple({id(module): module for module in modules if id(module) not in inside}.values())


def _unit_of_each_module(model: nn.Module, units: list[tuple[nn.Module, ...]]) -> dict[int, int]:
    """For every module the unit that it would be in, by its first module: the innermost one around it, or the model."""
    unit_of, home = {id(module): id(modules[0]) for modules in units for module in modules}, {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = unit_of.get(id(module), unit)
        home[id(module)] = unit
        for child in module.children():
            walk(child, unit)

    walk(model, id(model))
    return home


def _check_dtypes(model: nn.Module, units: list[tuple[nn.Module, ...]], ignored_ids: set[int]) -> None:
    """Refuse a unit whose gradients could not be reduced together."""
    home = _unit_of_each_module(model, units)
    found: dict[int, dict[torch.dtype, str]] = {}
    for name, module in modules_by_fqn(model):
        for key, param in module._parameters.items():
            if param is not None and param.requires_grad and id(param) not in ignored_ids:
                shown = f"{name}.{key}".lstrip(".") + f" {str(param.dtype).removeprefix('torch.')}"
                found.setdefault(home[id(module)], {}).setdefault(param.dtype, shown)
    for unit, dtypes in found.items():
        if len(dtypes) > 1:
            name = next((repr(name) for name, module in modules_by_fqn(model) if name and id(module) == unit), "of the model")
            raise ConfigError(
                f"shard_model: the unit {name} has trainable parameters of several dtypes ({', '.join(dtypes.values())}); "
                "convert them, give those of one dtype a unit of their own (blocks=), or leave them out (leave_out=)"
            )


def _order_innermost_first(model: nn.Module, units: list[tuple[nn.Module, ...]]) -> Iterator[tuple[nn.Module, ...]]:
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
    if id(next(modules_by_fqn(model))[1]) in unit_of:
        raise ConfigError(
            "shard_model: the model itself owns a parameter that is tied to one inside a block; move it into a module of its "
            "own, or name it in leave_out"
        )
    yield from (units[index] for index in order.static_order())
