"""``materialize``: real storage and initial weights for a model that was made on the meta device.

Weights must not depend on the mesh. So each module that owns tensors is initialised on its own, at full size, from a
random stream seeded by its name, and every rank keeps its slice: one module's full tensors are the peak of memory, and
1, 2 or 512 ranks get the same numbers (on one device type).

What initialises a tensor, in this order:

1. ``reset_parameters()`` of the module that owns it (or ``_reset_parameters``), where there is one;
2. the caller's ``init(module)``, the kind of function that is given to ``nn.Module.apply``;
3. the module's own ``__init__``, run again, for what neither has written: buffers computed there (rotary tables, masks)
   and parameters such as ``torch.ones(dim)``. Its arguments are taken from attributes of the same names, and the result
   is only believed if the new module's plain attributes equal the old one's.

A tensor that is still unwritten then is an error, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from dtrain.dist.init import current
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.tensors import empty_like_at, extent, local

InitFn = Callable[[nn.Module], None]


def materialize(model: nn.Module, *, seed: int, init: InitFn | None = None) -> nn.Module:
    """Give every meta tensor of ``model`` storage on this rank's device and its initial value; return the model.

    Args:
        model: plain, or from ``shard_model``. Tensors that are not on meta are left alone.
        seed: initial weights depend on it, on the names of modules, and on nothing else.
        init: called with each module that owns meta tensors, after its ``reset_parameters``; it writes the module's own
            parameters in place, at full size, and must not touch those of its children.

    Mutates: ``model``; Parameter objects are replaced, so build the optimizer afterwards. The global RNG is left as it was.
    Collective: none.

    Raises:
        ConfigError: tensors that nothing initialised, by name.
    """
    device = current().device
    # Children first, as nn.Module.apply has it: a parent may overwrite what its children drew.
    modules = reversed(list(model.named_modules()))
    owners = [(name, module, own) for name, module in modules if (own := _own_meta(module))]
    ties = _tied_names(model)
    model._apply(lambda t: empty_like_at(t, device) if t.is_meta else t)
    _tie_again(model, ties)
    uncovered: list[str] = []
    done: set[int] = set()
    for name, module, own in owners:
        fresh = [key for key in own if id(_get(module, key)) not in done]
        done.update(id(_get(module, key)) for key in fresh)
        with _own_stream(device, seed, name):
            full, missing = _initialised(module, own, init, device)
        with torch.no_grad():
            for key in fresh:
                _keep_slice(_get(module, key), full[key])
        uncovered += [f"{name}.{key}" if name else key for key in missing if key in fresh]
    if uncovered:
        raise ConfigError(
            f"materialize: nothing initialises {', '.join(uncovered[:10])} ({len(uncovered)} tensors); give the owning module "
            "a reset_parameters() that writes them, or pass init=, or make them from constructor arguments kept as attributes"
        )
    return model


def _own_meta(module: nn.Module) -> list[str]:
    """Names of the tensors that ``module`` itself owns and that are on the meta device."""
    stores = (*module._parameters.items(), *module._buffers.items())
    return [key for key, tensor in stores if tensor is not None and tensor.is_meta]


def _get(module: nn.Module, key: str) -> Tensor:
    stores: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    tensor = stores[key]
    assert tensor is not None, "the key was listed because the tensor is there"
    return tensor


def _tied_names(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places that share one Parameter: moving to another device would make each its own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                places.setdefault(id(param), []).append((module, key))
    return [shared for shared in places.values() if len(shared) > 1]


def _tie_again(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    for (owner, first), *others in ties:
        for module, key in others:
            module.register_parameter(key, owner._parameters[first])


@contextmanager
def _own_stream(device: torch.device, seed: int, name: str) -> Iterator[None]:
    """A random stream of the module's own; the global one continues afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, "materialize", name))
        yield


def _initialised(
    module: nn.Module, own: list[str], init: InitFn | None, device: torch.device
) -> tuple[dict[str, Tensor], list[str]]:
    """Full-size initial values of the module's own tensors, and the names of those that nothing wrote."""
    full = {key: _sentinel(_get(module, key), device) for key in own}
    with _holding(module, full), torch.no_grad():
        versions = {key: tensor._version for key, tensor in full.items()}
        for name in ("reset_parameters", "_reset_parameters"):  # torch's attention has the second
            if callable(reset := getattr(module, name, None)):
                reset()
        if init is not None:
            init(module)
        # A buffer may have been assigned anew instead of written in place.
        full = {key: _get(module, key).detach() for key in own}
        missing = [key for key in own if not _written(full[key], versions[key])]
    if missing:
        rebuilt = _rebuilt(module, missing, device)
        full |= rebuilt
        missing = [key for key in missing if key not in rebuilt]
    return full, missing


def _sentinel(like: Tensor, device: torch.device) -> Tensor:
    """A full-size tensor in which a place that nobody writes can be told: NaN where the dtype has it."""
    plain = torch.empty(like.shape, dtype=like.dtype, device=device)
    return plain.fill_(float("nan")) if plain.is_floating_point() or plain.is_complex() else plain


def _written(tensor: Tensor, version: int) -> bool:
    if tensor.numel() == 0:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return tensor._version > version


@contextmanager
def _holding(module: nn.Module, full: dict[str, Tensor]) -> Iterator[None]:
    """The module with plain full-size tensors in place of its own, so that any initialiser works on it.

    Tensors that were never on meta are replaced by copies, which take what an initialiser writes to the whole module.
    """
    params, buffers = dict(module._parameters), dict(module._buffers)
    try:
        for key, param in params.items():
            if param is not None:
                held = full.get(key, param.detach().clone())
                module._parameters[key] = full[key] = nn.Parameter(held, requires_grad=False)
        for key, buffer in buffers.items():
            if buffer is not None:
                module._buffers[key] = full.get(key, buffer.clone())
        yield
    finally:
        module._parameters.update(params)
        module._buffers.update(buffers)


def _rebuilt(module: nn.Module, keys: list[str], device: torch.device) -> dict[str, Tensor]:
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
        if value is not None and not value.is_meta and value.shape == _get(module, key).shape
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


class _UninitialisedStaysMeta(TorchFunctionMode):
    """Makes ``torch.empty`` return meta tensors: children's parameters cost nothing while a buffer beside them is rebuilt."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _keep_slice(target: Tensor, full: Tensor) -> None:
    """Copy this rank's box of ``full`` into ``target``."""
    box = extent(target)
    piece = full
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        piece = piece.narrow(dim, start, size)
    local(target).copy_(piece)
