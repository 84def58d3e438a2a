"""Collect, compare and set the state of model and optimizer, beyond parameters and buffers.

A module with ``get_extra_state`` is stored as ``<name>._extra_state``, as in torch's state dicts, once per rank. A module that
puts further values into its state dict is refused, because a checkpoint would lose them. The optimizer is stored by the names
of parameters.

Only this module uses ``_save_to_state_dict``, ``_state_dict_hooks`` and ``_load_state_dict_post_hooks`` of torch's modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from dtrain.arguments import format_count
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.mismatch import MismatchRow, other_row, unexpected_row
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.fqn import modules_by_fqn
from dtrain.state import TrainState
from dtrain.step.optimizer_state import check_storable, stored_options

# As in torch's state dicts.
_EXTRA_STATE = "_extra_state"
ADDED_OPTIONS = "added_options"
"""Key, in the stored hyperparameters of a group, of the names that the optimizer has added since the beginning of the run."""
FIRST_OPTIONS = "first_options"
"""Key, in the stored hyperparameters of a group, of the plain values that the optimizer was built with."""
_RESERVED = frozenset({"params", ADDED_OPTIONS, FIRST_OPTIONS})
# Hyperparameters that a schedule adds to a group on its first use, after the optimizer of a resumed run was built.
_ADDED_BY_SCHEDULES = frozenset({"initial_lr"})


def extra_state_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with ``get_extra_state``, by the name of the extra state in a state dict."""
    return {
        _join(name, _EXTRA_STATE): module
        for name, module in modules_by_fqn(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_state_names(structures: Mapping[str, Any]) -> list[str]:
    """Return the names of the stored extra states of modules from the decoded sections of a state."""
    if "modules" not in structures:
        return []
    location = f"{layout.INDEX}: modules"
    names = layout.read_object(structures["modules"], location, ("names", "equal"))["names"]
    if type(names) is not list or not all(type(name) is str for name in names):
        raise CorruptCheckpointError(f"{location}: names must be a list of strings, got {layout.describe_value(names)}")
    return names


def get_extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module that has one, by name.

    Raises:
        ConfigError: a module that cannot load its extra state again.
    """
    modules = extra_state_modules(model)
    for name, module in modules.items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise ConfigError(
                f"save_sharded: {_name_module(name, module)} must have set_extra_state, because it has get_extra_state. "
                "Define set_extra_state(state)."
            )
    return {name: module.get_extra_state() for name, module in modules.items()}


def set_extra_states(model: nn.Module, states: Mapping[str, Any], *, caller: str) -> Callable[[], None]:
    """Load the extra states of modules by name, and return a function that undoes this.

    If a module refuses its state, the earlier modules get theirs back.

    Mutates: the modules.
    Collective: one exchange of JSON on the control group.
    """
    modules = extra_state_modules(model)
    previous: dict[str, Any] = {}

    def undo() -> None:
        for name, content in previous.items():
            modules[name].set_extra_state(content)

    try:
        with raise_on_all_ranks(f"{caller}: set_extra_state"):
            for name, content in states.items():
                # The module may return its own objects, which the call changes.
                before = copy.deepcopy(modules[name].get_extra_state())
                modules[name].set_extra_state(content)
                previous[name] = before
    except Exception:
        undo()
        raise
    return undo


def finish_load(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the extra states once more, and call the hooks that torch calls after a load: both may read the loaded weights.

    Mutates: the modules.
    """
    modules = extra_state_modules(model)
    for name, content in states.items():
        modules[name].set_extra_state(content)
    for _, module in modules_by_fqn(model):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys([], []))


def check_state_dicts(model: nn.Module) -> None:
    """Refuse a module whose state dict holds more than its parameters, buffers and extra state.

    A state dict that renames, replaces or leaves out entries is no problem: a checkpoint stores the tensors by their own names.

    Raises:
        ConfigError: the module, and the entry that a checkpoint would lose.
    """
    for name, module in modules_by_fqn(model):
        kind = type(module)
        is_plain = kind.state_dict is nn.Module.state_dict and kind._save_to_state_dict is nn.Module._save_to_state_dict
        if is_plain and not module._state_dict_hooks:
            continue
        added = _added_entry(module)
        if added is not None:
            raise ConfigError(
                f"save_sharded: {_name_module(_join(name, added), module)} puts {added!r} into its state dict, "
                "which is no parameter or buffer. Register a buffer, or return the value from get_extra_state."
            )


def _added_entry(module: nn.Module) -> str | None:
    """Return an entry of the module's state dict that is in no parameter, buffer or extra state; None without one."""
    try:
        entries = module.state_dict(keep_vars=True)
    except TypeError:
        entries = module.state_dict()
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    ids = {id(tensor) for tensor in tensors.values()}
    added = [
        name
        for name, value in entries.items()
        if name not in tensors and name.rpartition(".")[2] != _EXTRA_STATE and id(value) not in ids
    ]
    # With entries left out, the new ones replace them, for example in the format of another library.
    owners = {name: name.rpartition(".")[::2] for name in tensors}
    persistent = {
        name for name, (owner, key) in owners.items() if key not in module.get_submodule(owner)._non_persistent_buffers_set
    }
    return added[0] if added and persistent <= entries.keys() else None


def _name_module(name: str, module: nn.Module) -> str:
    owner = name.rpartition(".")[0]
    return f"the module {owner!r} ({type(module).__name__})" if owner else f"the model ({type(module).__name__})"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def optimizer_section(state: TrainState) -> dict[str, Any]:
    """Return the stored tree of the optimizer: its state by parameter name, its state of no parameter, and its groups."""
    check_storable(state)
    names = {id(param): name for name, param in state.params.items()}
    # An optimizer may keep state that belongs to no parameter under a text.
    by_key: dict[Any, Any] = state.optimizer.state
    by_name = {names[id(param)]: content for param, content in by_key.items() if not isinstance(param, str)}
    return {
        "state": {name: dict(by_name[name]) for name in state.params if name in by_name},
        "global": {key: content for key, content in by_key.items() if isinstance(key, str)},
        "groups": optimizer_groups(state),
    }


def optimizer_groups(state: TrainState) -> list[dict[str, Any]]:
    """Return the optimizer's hyperparameters by group, with the names of the group's parameters under ``params``."""
    names = {id(param): name for name, param in state.params.items()}
    at_the_beginning = state._run_context.group_options
    groups = []
    for number, group in enumerate(state.optimizer.param_groups):
        options = stored_options(group)
        first_options = at_the_beginning[number] if number < len(at_the_beginning) else options
        added = sorted(options.keys() - first_options)
        options["params"] = [names[id(param)] for param in group["params"]]
        options[FIRST_OPTIONS] = _plain_options(first_options)
        groups.append({**options, ADDED_OPTIONS: added} if added else options)
    return groups


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are numbers, texts, None, or tuples of numbers. A tensor may have changed since."""
    plain = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in stored_options(options).items()
        if all(type(item) in plain for item in (value if type(value) is tuple else (value,)))
    }


def describe_replaced_options(state: TrainState, stored: dict[str, Any] | None) -> str:
    """Return a text with the options that a load replaces although the script has changed them; "" without any.

    Args:
        state: state that is loaded.
        stored: section of the optimizer; None if it is not loaded.

    An option that only the training has changed, as a rate by a schedule, was built with equal values in both runs.
    """
    stored_groups: list[dict[str, Any]] = [] if stored is None else stored["groups"]
    replaced, advice = [], ""
    for number, (group, saved) in enumerate(zip(state._run_context.group_options, stored_groups, strict=False)):
        first: Any = saved.get(FIRST_OPTIONS)
        for key, here in _plain_options(group).items() if type(first) is dict else ():
            if key in first and key not in _ADDED_BY_SCHEDULES and here not in (first[key], saved.get(key)):
                where = f" of group {number}" if len(stored_groups) > 1 else ""
                replaced.append(f"{key}{where} {here!r} -> {saved.get(key)!r}")
                advice = advice or f"state.optimizer.param_groups[{number}][{key!r}] = {here!r}"
    if not replaced:
        return ""
    return f"options of the checkpoint replace those here: {', '.join(replaced)}; to keep one, set it after the load: {advice}"


def compare_optimizer(stored: dict[str, Any], state: TrainState, skipped: Collection[str]) -> Iterator[MismatchRow]:
    """Return rows for the state of unknown parameters, for groups with other parameters, and for unknown hyperparameters.

    Args:
        stored: section of the optimizer.
        state: the state to load into.
        skipped: names in the model that are not compared.

    Raises:
        CorruptCheckpointError: a value of another type.
    """
    read_dict(stored["global"], "optimizer/global")
    for name, content in read_dict(stored["state"], "optimizer/state").items():
        read_dict(content, f"optimizer/state/{name}")
        if name not in state.params and name not in skipped:
            yield unexpected_row(tree_json.join_key("optimizer/state", name), "state")
    stored_groups, groups = stored["groups"], optimizer_groups(state)
    if type(stored_groups) is not list or len(stored_groups) != len(groups):
        count = len(stored_groups) if type(stored_groups) is list else 0
        yield other_row("optimizer/groups", format_count(count, "group"), format_count(len(groups), "group"))
        return
    for number, (saved, group) in enumerate(zip(stored_groups, groups, strict=True)):
        location = f"optimizer/groups/{number}"
        read_dict(saved, location)
        names, names_here = _param_names(saved.get("params"), skipped), _param_names(group["params"], skipped)
        if names != names_here:
            first = next((a or b for a, b in zip_longest(names, names_here) if a != b), "?")
            yield other_row(f"{location}/params", f"{len(names)} (first difference: {first})", f"{len(names_here)}")
        added = saved.get(ADDED_OPTIONS)
        options = {*group, *_ADDED_BY_SCHEDULES, *_RESERVED, *(added if type(added) is list else ())}
        for key in saved:
            if key not in options:
                yield unexpected_row(f"{location}/{key}", "a hyperparameter")


def _param_names(names: Any, skipped: Collection[str]) -> list[Any]:
    return [name for name in names if type(name) is not str or name not in skipped] if type(names) is list else []


def read_dict(value: Any, location: str) -> dict[str, Any]:
    """Return a value of the index as a dict.

    Raises:
        CorruptCheckpointError: a value of another type.
    """
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{layout.INDEX}: {location}: must be a dict, got {layout.describe_value(value)}")
    return value


def clear_optimizer_(state: TrainState, skipped: Collection[str]) -> None:
    """Clear the optimizer's state, except for the parameters ``skipped``.

    Mutates: ``state.optimizer``.
    """
    current, params = state.optimizer.state, state.params
    skipped_state = {params[name]: current[params[name]] for name in skipped if name in params and params[name] in current}
    current.clear()
    current.update(skipped_state)


def set_optimizer_(state: TrainState, saved: dict[str, Any]) -> None:
    """Assign the saved state of the optimizer. ``Optimizer.load_state_dict`` would cast the state to the parameter's dtype.

    Mutates: ``state.optimizer``.
    """
    for name, content in saved["state"].items():
        state.optimizer.state[state.params[name]] = content
    by_text: dict[Any, Any] = state.optimizer.state
    by_text.update(saved["global"])
    for group, values in zip(state.optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key not in _RESERVED})
