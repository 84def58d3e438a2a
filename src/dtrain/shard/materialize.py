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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import spans
from dtrain.dist.init import current
from dtrain.dist.rng import rng_state, seed_all, set_rng_state
from dtrain.errors import ConfigError
from dtrain.names import clean_parameters
from dtrain.shard.fsdp2 import mark_root
from dtrain.shard.meta_writes import (
    Repeated,
    check_init_given,
    check_repeated,
    noted_writes,
    resets_of,
    written_below,
)
from dtrain.shard.rebuild import rebuilt
from dtrain.state import spec_of
from dtrain.tensors import extent, is_distributed, local

InitFn = Callable[[nn.Module], None]


@spans.counted("setup")
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
    device, made = current().device, noted_writes(model)
    # Children first, as construction has it: a parent may overwrite what its children drew.
    modules = list(reversed(list(model.named_modules())))
    born_meta = {id(module): _own_meta(module) for _, module in modules}
    give_storage(model, device)
    pending = {id(_get(module, key)): f"{name}.{key}".lstrip(".") for name, module in modules for key in born_meta[id(module)]}
    repeated = Repeated({id(param): made[name] for name, param in clean_parameters(model)[0].items() if name in made})
    for name, module in modules:
        resets = resets_of(module, model)
        with _own_streams(seed, name):
            below = written_below(module, init, born_meta)
        if not born_meta[id(module)] and not resets and not below:
            continue
        with _own_streams(seed, name), torch.no_grad():
            written = _initialised(name, module, born_meta, resets, init, below, pending, repeated, device)
            for target, full in written:
                _keep_slice(target, full)
                pending.pop(id(target), None)
    if pending:
        raise ConfigError(
            f"materialize: nothing initialises {', '.join(list(pending.values())[:10])} ({len(pending)} tensors); give the "
            "owning module a reset_parameters() that writes them, or pass init=, or make them from constructor arguments kept "
            "as attributes"
        )
    check_repeated(model, repeated)
    mark_root(model)
    return model


def give_storage(model: nn.Module, device: torch.device) -> None:
    """Give every meta tensor of ``model`` storage on ``device``, with no value in it; tied parameters stay tied.

    Shards that ``shard_model`` was told to offload get theirs on the CPU.

    Mutates: ``model``; Parameter objects are replaced.
    """
    ties = _tied_names(model)
    offloads = spec_of(model).computes_on is not None

    def stored(tensor: Tensor) -> Tensor:
        where = torch.device("cpu") if offloads and is_distributed(tensor) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    model._apply(stored)
    _tie_again(model, ties)


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
def _own_streams(seed: int, name: str) -> Iterator[None]:
    """Random streams of the module's own; the global ones continue afterwards as if nothing had been drawn."""
    before = rng_state()
    seed_all(seed, "materialize", name)
    try:
        yield
    finally:
        set_rng_state(before)


def _initialised(
    name: str,
    module: nn.Module,
    born_meta: dict[int, list[str]],
    resets: Sequence[Callable[[], None]],
    init: InitFn | None,
    by_init: Mapping[int, list[str]],
    pending: Mapping[int, str],
    repeated: Repeated,
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
        with _holding(module, below, device) as held:
            for reset in resets:
                reset()
        written |= _writes(name, held)
        _count(held, written, repeated.reset, repeated)
    if init is not None and (own or by_init):
        reached = [(inner, by_init[id(inner)]) for inner in module.modules() if id(inner) in by_init]
        with _holding(module, [(module, own), *reached], device) as held:
            for each in held:
                if id(each.target) in written:  # as with apply, it may build on what the reset has left
                    each.full.copy_(written[id(each.target)][1])
                    each.version = each.full._version
            init(module)
        written |= _writes(name, held)
        _count(held, written, repeated.init, repeated)
    left = [key for key in own if id(_get(module, key)) in pending and id(_get(module, key)) not in written]
    for key, full in (rebuilt(module, left, device) if left else {}).items():
        target = _get(module, key)
        written[id(target)] = target, full
        repeated.reset[id(target)] = full._version
    return list(written.values())


def _count(held: Iterable[_Held], written: Mapping[int, object], counts: dict[int, int], repeated: Repeated) -> None:
    """Note how often an initialiser has written each tensor. Mutates: ``counts``, ``repeated``."""
    for each in held:
        key = id(each.target)
        if key not in written:
            continue
        if each.below or each.replaced:
            repeated.settled.add(key)
        else:
            counts[key] = counts.get(key, 0) + each.full._version - each.version


@dataclass(slots=True, eq=False)
class _Held:
    """A full-size stand-in for one of a module's tensors."""

    module: nn.Module
    key: str
    target: Tensor
    full: Tensor
    version: int
    below: bool
    replaced: bool = False


@contextmanager
def _holding(top: nn.Module, places: Sequence[tuple[nn.Module, list[str]]], device: torch.device) -> Iterator[list[_Held]]:
    """Plain full-size tensors in place of the named ones of ``top`` and of modules below it, for an initialiser of ``top``.

    Tensors of these modules that were never on meta are replaced by copies, which take what is written to them. Those of
    other modules are not touched.
    """
    held: list[_Held] = []
    before = [(module, dict(module._parameters), dict(module._buffers)) for module, _ in places]
    stand_ins: dict[int, Tensor] = {}  # a tied tensor has one
    try:
        for module, keys in places:
            for key, target in {**module._parameters, **module._buffers}.items():
                if target is None:
                    continue
                full = stand_ins.get(id(target))
                if full is None:
                    full = _sentinel(target, device) if key in keys else target.detach().clone()
                    full = nn.Parameter(full, requires_grad=False) if key in module._parameters else full
                    stand_ins[id(target)] = full
                _put(module, key, full)
                if key in keys:
                    held.append(_Held(module, key, target, full, full._version, module is not top))
        yield held
        for each in held:
            now = _get(each.module, each.key)  # it may have been assigned anew instead of written
            each.full, each.replaced = now, now is not each.full
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


def _put(module: nn.Module, key: str, tensor: Tensor) -> None:
    store: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    store[key] = tensor


def _writes(name: str, held: Iterable[_Held]) -> dict[int, tuple[Tensor, Tensor]]:
    """What an initialiser has written, by the tensor that it is for.

    Raises:
        ConfigError: it has changed only a part of a child's tensor, or scaled it: the value was not there to be changed.
    """
    found = {}
    for each in held:
        if _complete(each):
            found[id(each.target)] = (each.target, each.full.detach())
        elif each.full._version > each.version and each.below:
            tensor = f"{type(each.module).__name__}.{each.key}"
            raise ConfigError(
                f"materialize: the initialiser of {name or 'the root'} changes {tensor} below it without "
                "writing all of it; let it write the whole tensor, or let the child's own reset_parameters do it"
            )
    return found


def _complete(held: _Held) -> bool:
    full = held.full
    if full.is_floating_point() or full.is_complex():
        return not bool(full.isnan().any())
    return full.numel() == 0 or full._version > held.version


def _sentinel(like: Tensor, device: torch.device) -> Tensor:
    """A full-size tensor in which a place that nobody writes can be told: NaN where the dtype has it."""
    plain = torch.empty(like.shape, dtype=like.dtype, device=device)
    return plain.fill_(float("nan")) if plain.is_floating_point() or plain.is_complex() else plain


def _keep_slice(target: Tensor, full: Tensor) -> None:
    """Copy this rank's box of ``full`` into ``target``."""
    box = extent(target)
    piece = full
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        piece = piece.narrow(dim, start, size)
    local(target).copy_(piece)
