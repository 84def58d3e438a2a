"""Tensors that a module's ``__init__`` computes, made again from the module itself.

On the meta device a computed buffer has a shape and no values, and what it was computed from is gone, but for the
attributes of the module. So its class is constructed a second time, with arguments taken from attributes of their names.
That is a guess; it is believed only if the second module has the same plain attributes as the first.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode


def rebuilt(module: nn.Module, keys: list[str], device: torch.device) -> dict[str, Tensor]:
    """Tensors of ``module`` computed by running its ``__init__`` again; empty where that cannot be trusted."""
    kind = _original_class(module)
    arguments = _constructor_arguments(kind, module)
    if arguments is None:
        return {}
    with _UninitialisedStaysMeta(), device:
        twin = kind(**arguments)
    if _plain_attributes(twin) != _plain_attributes(module):
        return {}
    values = {key: twin._parameters.get(key, twin._buffers.get(key)) for key in keys}
    return {
        key: value.detach()
        for key, value in values.items()
        if value is not None and not value.is_meta and value.shape == _shape(module, key)
    }


def _original_class(module: nn.Module) -> type[Any]:
    """The class before FSDP2 put its own in front."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _constructor_arguments(kind: type[nn.Module], module: nn.Module) -> dict[str, Any] | None:
    """The arguments that made ``module``, from attributes of the same names; None when one is not to be found."""
    if kind.__init__ is nn.Module.__init__:
        return {}
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in module.__dict__:
            return None
        arguments[name] = module.__dict__[name]
    return arguments


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a constructor stored besides tensors and modules: equal for two modules made from equal arguments."""
    plain = (bool, int, float, str, tuple, type(None), torch.dtype)
    return {k: v for k, v in module.__dict__.items() if isinstance(v, plain) and not k.startswith("_") and k != "training"}


def _shape(module: nn.Module, key: str) -> torch.Size | None:
    tensor = module._parameters.get(key, module._buffers.get(key))
    return None if tensor is None else tensor.shape


class _UninitialisedStaysMeta(TorchFunctionMode):
    """Makes functions that leave memory as it is return meta tensors.

    What nobody writes then stays on meta, which shows; and the parameters of children cost nothing while a buffer beside them
    is computed again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_UNINITIALISED = frozenset({
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
})  # fmt: skip
