"""Plan which modules of a plain model become FSDP2 units. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, is_of_peft, modules_by_fqn, parameters_by_fqn
from dtrain.shard.params import param_places

BlockSelector: TypeAlias = "type[nn.Module] | str"
Blocks: TypeAlias = "BlockSelector | Sequence[BlockSelector] | Callable[[str, nn.Module], bool]"
"""Module classes and name patterns, or a predicate over (name, module)."""

IgnoredParams: TypeAlias = "str | Sequence[str] | Callable[[str, Tensor], bool]"
"""Parameter name patterns, or a predicate over (name, parameter)."""

# Containers have no forward. A subclass may define one.
_CONTAINER_CLASSES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrapPlan:
    """FSDP2 units of a model.

    Args:
        units: modules of each unit, innermost unit first, the model last; a unit of several modules holds tied parameters.
        ignored_params: parameters that every rank keeps unsharded, by name.
        forward_methods: further methods that compute with parameters: owning module and name.
    """

    units: tuple[tuple[nn.Module, ...], ...]
    ignored_params: dict[str, Tensor]
    forward_methods: tuple[tuple[nn.Module, str], ...] = ()


def plan_wrapping(
    model: nn.Module,
    blocks: Blocks,
    ignored_params: IgnoredParams,
    *,
    separate_units: Iterable[nn.Module] = (),
    forward_methods: Sequence[str] = (),
) -> WrapPlan:
    """Divide ``model`` into units. Modules in ``separate_units`` are always units.

    A parameter that is tied across units gets a unit of all modules that own the parameter, because every owner needs the
    gather. Scalars and empty parameters cannot be sharded and are ignored.

    Raises:
        ConfigError: an entry of ``blocks`` or ``ignored_params`` without a match, a module without ``forward``, a parameter
            that the root ties to a parameter of a block, a unit with trainable parameters of several dtypes, or an entry of
            ``forward_methods`` that does not exist or whose module is no unit.
    """
    ignored = _select_ignored_params(model, ignored_params)
    selected = list({id(module): module for module in (*select_blocks(model, blocks), *separate_units)}.values())
    ignored_ids = {id(p) for p in ignored.values()}
    single, joint = _join_tied_modules(model, selected, ignored_ids)
    units = [*((module,) for module in single), *joint]
    _check_dtypes(model, units, ignored_ids)
    ordered = (*_order_innermost_first(model, units), (model,))
    methods = tuple(_resolve_forward_methods(model, forward_methods, ordered))
    return WrapPlan(units=ordered, ignored_params=ignored, forward_methods=methods)


def _select_ignored_params(model: nn.Module, ignored_params: IgnoredParams) -> dict[str, Tensor]:
    params, _ = parameters_by_fqn(model)
    if callable(ignored_params):
        selected = {name: p for name, p in params.items() if ignored_params(name, p)}
    else:
        if not isinstance(ignored_params, Iterable):
            raise ConfigError(
                f"shard_model: ignored_params must be names or a function of (name, parameter), got {ignored_params!r}. "
                "Pass ignored_params='*.bias', for example."
            )
        patterns = [ignored_params] if isinstance(ignored_params, str) else list(ignored_params)
        for pattern in patterns:
            if not any(map(compile_patterns([pattern], caller="shard_model: ignored_params"), params)):
                raise ConfigError(
                    f"shard_model: ignored_params names {pattern!r}, but no parameter matches. "
                    "Print the names with model.named_parameters()."
                )
        matches = compile_patterns(patterns, caller="shard_model: ignored_params")
        selected = {name: p for name, p in params.items() if matches(name)}
    return selected | {name: p for name, p in params.items() if p.ndim == 0 or p.numel() == 0}


def select_blocks(model: nn.Module, blocks: Blocks, *, caller: str = "shard_model") -> list[nn.Module]:
    """Return the modules that ``blocks`` selects, without duplicates and without the model itself.

    Raises:
        ConfigError: an entry without a match, or a module without ``forward``. The message begins with ``caller``.
    """
    submodules = [(name, module) for name, module in modules_by_fqn(model) if name]
    selected: list[tuple[str, nn.Module]] = []
    if callable(blocks) and not isinstance(blocks, type):
        selected = [(name, module) for name, module in submodules if blocks(name, module)]
        if not selected:
            raise ConfigError(f"{caller}: blocks is a function that selects no module of this model. Select by (name, module).")
    else:
        for entry in blocks if isinstance(blocks, Iterable) and not isinstance(blocks, str | type) else [blocks]:
            is_match = _block_matcher(entry, caller)
            matches = [(name, module) for name, module in submodules if is_match(name, module)]
            if not matches and not is_match("", model):
                label = entry.__name__ if isinstance(entry, type) else repr(entry)
                raise ConfigError(
                    f"{caller}: blocks names {label}, but the model has no such module. "
                    "Print the names with model.named_modules()."
                )
            selected += matches
    for name, module in selected:
        has_forward = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
        if isinstance(module, _CONTAINER_CLASSES) and not has_forward:
            raise ConfigError(
                f"{caller}: blocks selects {name!r}, a {type(module).__name__} without forward. Select its submodules."
            )
    return list({id(module): module for _, module in selected}.values())


def select_some_blocks(model: nn.Module, blocks: Blocks, *, caller: str) -> list[nn.Module]:
    """Return the modules as ``select_blocks`` does.

    Raises:
        ConfigError: as ``select_blocks``, or ``blocks`` selects no module, or only the model itself.
    """
    selected = select_blocks(model, blocks, caller=caller)
    if not selected:
        raise ConfigError(f"{caller}: {blocks=} selects no module inside the model. Pass for example blocks=(Block,).")
    return selected


def _block_matcher(entry: BlockSelector, caller: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return lambda name, module: isinstance(module, entry)
    if isinstance(entry, str):
        is_match = compile_patterns([entry], caller=f"{caller}: blocks")
        return lambda name, module: is_match(name)
    got = f"a {type(entry).__name__}" if isinstance(entry, nn.Module) else repr(entry)
    raise ConfigError(
        f"{caller}: blocks must be module classes, names or a function of (name, module), got {got}. "
        "Pass for example blocks=(Block,) or blocks='layers.*'."
    )


def _join_tied_modules(
    model: nn.Module, selected: list[nn.Module], ignored_ids: set[int]
) -> tuple[list[nn.Module], list[tuple[nn.Module, ...]]]:
    """Return single-module units, and units that join the owners of a parameter tied across units.

    A joined unit may split the owners of another parameter, for example of a head with a tied weight and a bias of the parent.
    The search therefore repeats until no tied parameter spans two units. The outer of two nested modules represents both.
    """
    places = [locations for param, locations in param_places(model) if id(param) not in ignored_ids]
    owners = [list({id(module): module for _, module, _ in locations}.values()) for locations in places]
    single, joint = list(selected), list[tuple[nn.Module, ...]]()
    while True:
        home = _unit_of_each_module(model, [*((module,) for module in single), *joint])
        split_owners = next(
            (modules_of_param for modules_of_param in owners if len({home[id(module)] for module in modules_of_param}) > 1),
            None,
        )
        if split_owners is None:
            return single, joint
        touched = {home[id(module)] for module in split_owners}
        joined = [*split_owners, *(module for group in joint if id(group[0]) in touched for module in group)]
        nested = {id(inner) for module in joined for inner in module.modules() if inner is not module}
        outer = tuple({id(module): module for module in joined if id(module) not in nested}.values())
        within = {id(inner) for module in outer for inner in module.modules()}
        joint = [*(group for group in joint if id(group[0]) not in touched), outer]
        # A nested block with an owner would keep the parameter out of the joint unit.
        single = [unit for unit in single if id(unit) not in within or not any(module in joined for module in unit.modules())]


def _unit_of_each_module(model: nn.Module, units: list[tuple[nn.Module, ...]]) -> dict[int, int]:
    """Map each module to its unit: the first module of the innermost enclosing unit, or the model."""
    unit_of, home = {id(module): id(modules[0]) for modules in units for module in modules}, {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = unit_of.get(id(module), unit)
        home[id(module)] = unit
        for child in module.children():
            walk(child, unit)

    walk(model, id(model))
    return home


def _check_dtypes(model: nn.Module, units: list[tuple[nn.Module, ...]], ignored_ids: set[int]) -> None:
    """Raise ``ConfigError`` for a unit with trainable parameters of several dtypes, which one collective cannot reduce."""
    home = _unit_of_each_module(model, units)
    dtypes_of_unit: dict[int, dict[torch.dtype, str]] = {}
    for param, places in param_places(model):
        if param.requires_grad and id(param) not in ignored_ids:
            for name, module, _ in places:
                description = f"{name} {str(param.dtype).removeprefix('torch.')}"
                dtypes_of_unit.setdefault(home[id(module)], {}).setdefault(param.dtype, description)
    for unit, dtypes in dtypes_of_unit.items():
        if len(dtypes) > 1:
            name = next((repr(name) for name, module in modules_by_fqn(model) if name and id(module) == unit), "of the model")
            raise ConfigError(
                f"shard_model: the unit {name} has trainable parameters of several dtypes ({', '.join(dtypes.values())}). "
                "Convert the parameters, put each dtype in a separate unit (blocks=), or ignore parameters (ignored_params=)."
            )


def _order_innermost_first(model: nn.Module, units: list[tuple[nn.Module, ...]]) -> Iterator[tuple[nn.Module, ...]]:
    """Yield inner units before outer units, because FSDP2 gives a unit all parameters below that no unit owns yet."""
    unit_of = {id(module): index for index, modules in enumerate(units) for module in modules}
    order: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(units)), ()))

    def walk(module: nn.Module, enclosing: tuple[int, ...]) -> None:
        if id(module) in unit_of:
            for outer in enclosing:
                order.add(outer, unit_of[id(module)])
            enclosing = (*enclosing, unit_of[id(module)])
        for child in module.children():
            walk(child, enclosing)

    walk(model, ())
    if id(next(modules_by_fqn(model))[1]) in unit_of:
        raise ConfigError(
            "shard_model: the root module owns a parameter that is tied to a parameter of a block. Move the parameter into a "
            "submodule, or name it in ignored_params."
        )
    yield from (units[index] for index in order.static_order())


def _resolve_forward_methods(
    model: nn.Module, paths: Sequence[str], units: Iterable[Sequence[nn.Module]]
) -> Iterator[tuple[nn.Module, str]]:
    """Yield owner and name of each method. Raise ``ConfigError`` unless the method exists and its owner is a unit."""
    if isinstance(paths, str) or not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
        example = paths if isinstance(paths, str) else "encode"
        raise ConfigError(
            f"shard_model: forward_methods must be a sequence of names, got {paths!r}. "
            f"Pass for example forward_methods=({example!r},)."
        )
    modules = dict(modules_by_fqn(model, include_duplicates=True))
    unit_ids = {id(module) for unit in units for module in unit}
    for path in paths:
        block, _, name = path.rpartition(".")
        owner = modules.get(block) if block else model
        if owner is None:
            problem = f"the model has no module {block!r}."
        elif not callable(getattr(owner, name, None)):
            problem = f"{type(owner).__name__} has no method {name!r}."
        elif id(owner) not in unit_ids:
            problem = f"{block!r} is not a unit. Add {block!r} to blocks."
        else:
            yield owner, name
            continue
        raise ConfigError(f"shard_model: forward_methods names {path!r}, but {problem}")
    # This method of peft calls the base model, and not the forward of the root.
    if "generate" not in paths and is_of_peft(model, "PeftModel") and callable(getattr(model, "generate", None)):
        yield model, "generate"
