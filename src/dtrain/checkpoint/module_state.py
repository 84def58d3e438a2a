"""Save and load what a module keeps beyond parameters and buffers: its extra state, and what it derives from them.

A module with ``get_extra_state`` is stored as ``<name>._extra_state``, as in torch's state dicts, once per rank. A module that
puts further values into its state dict is refused, because a checkpoint would lose them.

Only this module uses ``_save_to_state_dict``, ``_state_dict_hooks`` and ``_load_state_dict_post_hooks`` of torch's modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from dtrain.checkpoint import layout
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.fqn import modules_by_fqn

# As in torch's state dicts.
_EXTRA_STATE = "_extra_state"


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
                f"save_sharded: {_describe(name, module)} must have set_extra_state, because it has get_extra_state. "
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
                f"save_sharded: {_describe(_join(name, added), module)} puts {added!r} into its state dict, "
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
    persistent = {name for name in tensors if not _is_non_persistent(module, name)}
    return added[0] if added and persistent <= entries.keys() else None


def _is_non_persistent(module: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key in module.get_submodule(owner)._non_persistent_buffers_set


def _describe(name: str, module: nn.Module) -> str:
    owner = name.rpartition(".")[0]
    return f"the module {owner!r} ({type(module).__name__})" if owner else f"the model ({type(module).__name__})"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
