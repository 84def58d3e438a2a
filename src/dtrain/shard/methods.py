"""Methods other than ``forward`` that compute with parameters: declared by name, they gather and free them as it does."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from dtrain.errors import ConfigError
from dtrain.names import clean_modules
from dtrain.shard.fsdp2 import in_forward
from dtrain.shard.units import Layout


def check_methods(model: nn.Module, methods: Sequence[str], layout: Layout) -> None:
    """Refuse methods that are not there, or whose module is no unit.

    Raises:
        ConfigError: so.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not all(isinstance(path, str) for path in methods):
        example = methods if isinstance(methods, str) else "encode"
        raise ConfigError(f"shard_model: methods is a sequence of names, got {methods!r}; e.g. methods=({example!r},)")
    units = {id(module) for modules in layout.units for module in modules}
    for path in methods:
        owner, name = _owner(model, path)
        if not callable(getattr(owner, name, None)):
            raise ConfigError(f"shard_model: methods names {path!r}, but {type(owner).__name__} has no method {name!r}")
        if id(owner) not in units:
            block = path.rpartition(".")[0]
            raise ConfigError(
                f"shard_model: methods names {path!r}, but {block!r} is no unit of its own; add {block!r} to blocks"
            )


def declare_methods(model: nn.Module, methods: Sequence[str]) -> None:
    """Gather parameters around these methods. Mutates: the modules that own them (one attribute each)."""
    for path in methods:
        owner, name = _owner(model, path)
        assert isinstance(owner, FSDPModule)
        plain = getattr(owner, name)
        register_fsdp_forward_method(owner, name)
        setattr(owner, name, MethodType(_outside_forward(plain, getattr(owner, name)), owner))


def _outside_forward(plain: Any, gathering: Any) -> Any:
    """``gathering``, but ``plain`` within a forward of the module, which would otherwise lose its parameters in the middle."""

    def method(owner: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return (plain if in_forward(owner) else gathering)(*args, **kwargs)

    return method


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, name = path.rpartition(".")
    if not prefix:
        return model, name
    found = dict(clean_modules(model, every_name=True)).get(prefix)
    if found is None:
        raise ConfigError(f"shard_model: methods names {path!r}, but the model has no module {prefix!r}")
    return found, name
