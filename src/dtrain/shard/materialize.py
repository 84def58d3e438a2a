"""``materialize``: real storage and initial weights for a model that was made on the meta device.

Weights must not depend on the mesh. So each module is initialised on its own, at full size, from random streams seeded by
its name, and every rank keeps its slice: one module's full tensors are the peak of memory, and 1, 2 or 512 ranks get the
same numbers (on one device type).

What initialises a tensor, in this order, children before parents:

1. ``reset_parameters()`` of the module that owns it (or ``_reset_parameters``), or of a module further up: such a module sees
   all tensors below it at full size while its own runs. Adapters of peft's LoRA: ``reset_lora_parameters`` of their layer;
2. the caller's ``init(module)``, the kind of function that is given to ``nn.Module.apply``. A method of a model
   (``model._init_weights``) may write tensors below a module, as under ``apply``: it sees those at full size, and no others;
3. the module's own ``__init__``, run again, for what neither has written: buffers computed there (rotary tables, masks)
   and parameters such as ``torch.ones(dim)``. Its arguments are taken from attributes of the same names, and the result
   is only believed if the new module's plain attributes equal the old one's.

A tensor that is still unwritten then is an error, by name. So is a parameter that the model wrote more often while it was
made than these three do: its initial value is another one, which the meta device has not kept (see ``meta_writes``).

Tensors that a module's ``__init__`` computes, made again from the module itself.

On the meta device a computed buffer has a shape and no values, and what it was computed from is gone, but for the
attributes of the module. So its class is constructed a second time, with arguments taken from attributes of their names.
That is a guess; it is believed only if the second module has the same plain attributes as the first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import rng_state, seed_all, set_rng_state
from dtrain.dtensor import is_dtensor, shard_box, to_local
from dtrain.errors import ConfigError
from dtrain.fqn import parameters_by_fqn
from dtrain.shard.fsdp2_private import init_root
from dtrain.shard.meta_writes import (
    InitWriteCounts,
    check_init_given,
    check_write_counts,
    find_tensors_written_below,
    reset_functions,
    write_counts_of,
)
from dtrain.state import get_spec

InitFn = Callable[[nn.Module], None]


@spans.timed("setup")
def materialize(model: nn.Module, *, seed: int, init: InitFn | None = None) -> nn.Module:
    """Give every meta tensor of ``model`` storage on this rank's device and its initial value; return the model.

    Args:
        model: plain, or from ``shard_model``. Tensors that are not on meta are left alone.
        seed: initial weights depend on it, on the names of modules, and on nothing else.
        init: called with each module that owns meta tensors, after its ``reset_parameters``; it writes the module's own
            parameters in place, at full size. It does not see those of its children, unless it is a method of a model
            (``model._init_weights``): such a method may write them, as under ``apply``.

    Mutates: ``model``; Parameter objects are replaced, so build the optimizer afterwards. The global RNG is left as it was.
    Collective: none.

    Raises:
        ConfigError: tensors that nothing initialised, or whose initial values came from another module's ``__init__``, by name;
            a model of transformers without ``init``.

    Warns: UserWarning, on rank 0: single parameters that the model has written after its initialiser, which ``init`` repeats.
    """
    if init is None:
        check_init_given(model)
    device, made = get_dist_info().device, write_counts_of(model)
    # Children first, as construction has it: a parent may overwrite what its children drew.
    modules = list(reversed(list(model.named_modules())))
    born_meta = {id(module): _own_meta_keys(module) for _, module in modules}
    allocate_meta_tensors(model, device)
    pending = {
        id(_get_tensor(module, key)): f"{name}.{key}".lstrip(".") for name, module in modules for key in born_meta[id(module)]
    }
    repeated = InitWriteCounts({id(param): made[name] for name, param in parameters_by_fqn(model)[0].items() if name in made})
    for name, module in modules:
        resets = reset_functions(module, model)
        with _module_rng(seed, name):
            below = find_tensors_written_below(module, init, born_meta)
        if not born_meta[id(module)] and not resets and not below:
            continue
        with _module_rng(seed, name), torch.no_grad():
            written = _initialize_module(name, module, born_meta, resets, init, below, pending, repeated, device)
            for target, full in written:
                _copy_own_shard_(target, full)
                pending.pop(id(target), None)
    if pending:
        raise ConfigError(
            f"materialize: nothing initialises {', '.join(list(pending.values())[:10])} ({len(pending)} tensors); give the "
            "owning module a reset_parameters() that writes them, or pass init=, or make them from constructor arguments kept "
            "as attributes"
        )
    check_write_counts(model, repeated)
    init_root(model)
    return model


def allocate_meta_tensors(model: nn.Module, device: torch.device) -> None:
    """Give every meta tensor of ``model`` storage on ``device``, with no value in it; tied parameters stay tied.

    Shards that ``shard_model`` was told to offload get theirs on the CPU.

    Mutates: ``model``; Parameter objects are replaced.
    """
    ties = _find_tied_params(model)
    offloads = get_spec(model).compute_device is not None

    def stored(tensor: Tensor) -> Tensor:
        where = torch.device("cpu") if offloads and is_dtensor(tensor) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    model._apply(stored)
    _restore_ties(model, ties)


def _own_meta_keys(module: nn.Module) -> list[str]:
    """Names of the tensors that ``module`` itself owns and that are on the meta device."""
    stores = (*module._parameters.items(), *module._buffers.items())
    return [key for key, tensor in stores if tensor is not None and tensor.is_meta]


def _get_tensor(module: nn.Module, key: str) -> Tensor:
    stores: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    tensor = stores[key]
    assert tensor is not None, "the key was listed because the tensor is there"
    return tensor


def _find_tied_params(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places that share one Parameter: moving to another device would make each its own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                places.setdefault(id(param), []).append((module, key))
    return [shared for shared in places.values() if len(shared) > 1]


def _restore_ties(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    for (owner, first), *others in ties:
        for module, key in others:
            module.register_parameter(key, owner._parameters[first])


@contextmanager
def _module_rng(seed: int, name: str) -> Iterator[None]:
    """Random streams of the module's own; the global ones continue afterwards as if nothing had been drawn."""
    before = rng_state()
    seed_all(seed, "materialize", name)
    try:
        yield
    finally:
        set_rng_state(before)


def _initialize_module(
    name: str,
    module: nn.Module,
    born_meta: dict[int, list[str]],
    resets: Sequence[Callable[[], None]],
    init: InitFn | None,
    by_init: Mapping[int, list[str]],
    pending: Mapping[int, str],
    repeated: InitWriteCounts,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Tensors that this module initialises, with their full-size values: its own, and those below that its functions write.

    ``by_init`` are the keys of the tensors below that ``init(module)`` writes.
    """
    own = born_meta[id(module)]
    below = [(m, born_meta[id(m)]) for m in module.modules()] if resets else []
    if not own and not by_init and not any(keys for _, keys in below):
        return []
    written: dict[int, tuple[Tensor, Tensor]] = {}
    if resets:
        with _substitute_full_tensors(module, below, device) as held:
            for reset in resets:
                reset()
        written |= _collect_writes(name, held)
        _count_writes(held, written, repeated.by_reset, repeated)
    if init is not None and (own or by_init):
        reached = [(inner, by_init[id(inner)]) for inner in module.modules() if id(inner) in by_init]
        with _substitute_full_tensors(module, [(module, own), *reached], device) as held:
            for each in held:
                if id(each.target) in written:  # as with apply, it may build on what the reset has left
                    each.full.copy_(written[id(each.target)][1])
                    each.version = each.full._version
            init(module)
        written |= _collect_writes(name, held)
        _count_writes(held, written, repeated.by_init, repeated)
    left = [key for key in own if id(_get_tensor(module, key)) in pending and id(_get_tensor(module, key)) not in written]
    for key, full in (recompute_buffers(module, left, device) if left else {}).items():
        target = _get_tensor(module, key)
        written[id(target)] = target, full
        repeated.by_reset[id(target)] = full._version
    return list(written.values())


def _count_writes(
    held: Iterable[_FullTensor], written: Mapping[int, object], counts: dict[int, int], repeated: InitWriteCounts
) -> None:
    """Note how often an initialiser has written each tensor. Mutates: ``counts``, ``repeated``."""
    for each in held:
        key = id(each.target)
        if key not in written:
            continue
        if each.is_below or each.replaced:
            repeated.settled.add(key)
        else:
            counts[key] = counts.get(key, 0) + each.full._version - each.version


@dataclass(slots=True, eq=False)
class _FullTensor:
    """A full-size stand-in for one of a module's tensors."""

    module: nn.Module
    key: str
    target: Tensor
    full: Tensor
    version: int
    is_below: bool
    replaced: bool = False


@contextmanager
def _substitute_full_tensors(
    top: nn.Module, places: Sequence[tuple[nn.Module, list[str]]], device: torch.device
) -> Iterator[list[_FullTensor]]:
    """Plain full-size tensors in place of the named ones of ``top`` and of modules below it, for an initialiser of ``top``.

    Tensors of these modules that were never on meta are replaced by copies, which take what is written to them. Those of
    other modules are not touched.
    """
    held: list[_FullTensor] = []
    before = [(module, dict(module._parameters), dict(module._buffers)) for module, _ in places]
    stand_ins: dict[int, Tensor] = {}  # a tied tensor has one
    try:
        for module, keys in places:
            for key, target in {**module._parameters, **module._buffers}.items():
                if target is None:
                    continue
                full = stand_ins.get(id(target))
                if full is None:
                    full = _nan_filled_tensor(target, device) if key in keys else target.detach().clone()
                    full = nn.Parameter(full, requires_grad=False) if key in module._parameters else full
                    stand_ins[id(target)] = full
                _set_tensor(module, key, full)
                if key in keys:
                    held.append(_FullTensor(module, key, target, full, full._version, module is not top))
        yield held
        for each in held:
            now = _get_tensor(each.module, each.key)  # it may have been assigned anew instead of written
            each.full, each.replaced = now, now is not each.full
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


def _set_tensor(module: nn.Module, key: str, tensor: Tensor) -> None:
    store: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    store[key] = tensor


def _collect_writes(name: str, held: Iterable[_FullTensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """What an initialiser has written, by the tensor that it is for.

    Raises:
        ConfigError: it has changed only a part of a child's tensor, or scaled it: the value was not there to be changed.
    """
    found = {}
    for each in held:
        if _is_fully_written(each):
            found[id(each.target)] = (each.target, each.full.detach())
        elif each.full._version > each.version and each.is_below:
            tensor = f"{type(each.module).__name__}.{each.key}"
            raise ConfigError(
                f"materialize: the initialiser of {name or 'the root'} changes {tensor} below it without "
                "writing all of it; let it write the whole tensor, or let the child's own reset_parameters do it"
            )
    return found


def _is_fully_written(held: _FullTensor) -> bool:
    full = held.full
    if full.is_floating_point() or full.is_complex():
        return not bool(full.isnan().any())
    return full.numel() == 0 or full._version > held.version


def _nan_filled_tensor(like: Tensor, device: torch.device) -> Tensor:
    """A full-size tensor in which a place that nobody writes can be told: NaN where the dtype has it."""
    plain = torch.empty(like.shape, dtype=like.dtype, device=device)
    return plain.fill_(float("nan")) if plain.is_floating_point() or plain.is_complex() else plain


def _copy_own_shard_(target: Tensor, full: Tensor) -> None:
    """Copy this rank's box of ``full`` into ``target``."""
    box = shard_box(target)
    piece = full
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        piece = piece.narrow(dim, start, size)
    to_local(target).copy_(piece)


def recompute_buffers(module: nn.Module, keys: list[str], device: torch.device) -> dict[str, Tensor]:
    """Tensors of ``module`` computed by running its ``__init__`` again; empty where that cannot be trusted."""
    kind = _original_class(module)
    arguments = _constructor_arguments(kind, module)
    if arguments is None:
        return {}
    with _EmptyOnMeta(), device:
        twin = kind(**arguments)
    if _plain_attributes(twin) != _plain_attributes(module):
        return {}
    values = {key: twin._parameters.get(key, twin._buffers.get(key)) for key in keys}
    return {
        key: value.detach()
        for key, value in values.items()
        if value is not None and not value.is_meta and value.shape == _shape_of(module, key)
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


def _shape_of(module: nn.Module, key: str) -> torch.Size | None:
    tensor = module._parameters.get(key, module._buffers.get(key))
    return None if tensor is None else tensor.shape


class _EmptyOnMeta(TorchFunctionMode):
    """Makes functions that leave memory as it is return meta tensors.

    What nobody writes then stays on meta, which shows; and the parameters of children cost nothing while a buffer beside them
    is computed again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY_FUNCTIONS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_EMPTY_FUNCTIONS = frozenset({
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
})  # fmt: skip
