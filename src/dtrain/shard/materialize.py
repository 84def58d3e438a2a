"""Allocate storage and compute initial weights for a model on the meta device: ``materialize``.

Weights must not depend on the mesh. Each module is therefore initialized at full size, from random streams seeded by its
name, and every rank stores its shard. Peak memory is one module's full tensors. Any number of ranks gets the same numbers on
one device type. A tensor is initialized in this order, children before parents:

1. ``reset_parameters()`` or ``_reset_parameters()`` of the owning module, or of an ancestor. An ancestor sees all tensors of
   its descendants at full size. For LoRA adapters of peft: ``reset_lora_parameters`` of the layer;
2. the caller's ``init(module)``, a function as for ``nn.Module.apply``. A method of a model (``model._init_weights``) may
   write tensors of descendants, as under ``apply``, and sees only these at full size;
3. a second run of the module's ``__init__``, for buffers computed there (rotary tables, masks) and parameters such as
   ``torch.ones(dim)``.

A tensor that remains unwritten is an error. A parameter that construction wrote more often than these three steps is an
error, too: the meta device did not keep its initial value. A meta parameter stores no values, but torch counts in-place
operations. If ``__init__`` of a model writes into a child's parameter (``nn.init.zeros_(self.out.weight)``), the count exceeds
the count of the child's ``reset_parameters`` by one.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from dtrain import spans
from dtrain.dist.dtensor import is_dtensor, local_slice, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seeded_rng
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.shard.fsdp2_private import init_root
from dtrain.shard.params import ParamObjects
from dtrain.shard.spec import get_spec

InitFn = Callable[[nn.Module], None]
_EMPTY_FUNCTIONS = frozenset({
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
})  # fmt: skip
# shard_model replaces parameters, so it stores the counts in this attribute of the model.
_WRITE_COUNTS_ATTRIBUTE = "_dtrain_meta_writes"
# torch's attention and transformer use the second name.
_RESET_METHODS = ("reset_parameters", "_reset_parameters")
# Examples of peft are reset_lora_parameters and reset_adapter_parameters.
_LIBRARY_RESET = re.compile(r"reset_\w+_parameters")
_LORA_RESET = "reset_lora_parameters"
# Initializations of peft's LoRA that do not depend on the base weights.
_RANDOM_LORA_KINDS = (True, False, "gaussian")


@spans.timed("setup")
def materialize(model: nn.Module, *, seed: int, init: InitFn | None = None) -> nn.Module:
    """Allocate every meta tensor of ``model`` on this rank's device and compute its initial value; return the model.

    Args:
        model: plain, or from ``shard_model``. Tensors that are not on meta do not change.
        seed: seed of the initial weights, which depend only on ``seed`` and module names.
        init: function called with each module that owns meta tensors, after ``reset_parameters``. The function writes the
            module's own parameters in place, at full size. Only a method of a model (``model._init_weights``) also sees
            parameters of children, as under ``apply``.

    Mutates: ``model``; Parameter objects are replaced, so build the optimizer afterwards. The global RNG does not change.
    Collective: none.

    Example:
        with torch.device("meta"):
            model = Transformer(config)
        model = dt.shard_model(model, mesh, blocks=(Block,))
        model = dt.materialize(model, seed=0)

    Raises:
        ConfigError: tensors that nothing initializes, tensors with initial values from another module's ``__init__``, or a
            transformers model without ``init``.

    Warns: UserWarning, on rank 0: parameters that construction wrote after the model's initializer, and that ``init``
    overwrites.
    """
    if init is None:
        check_init_given(model)
    device, counts_at_construction = get_dist_info().device, write_counts_of(model)
    # Children come first, as in construction, because a parent may overwrite tensors of its children.
    modules = list(reversed(list(model.named_modules())))
    born_meta = {id(module): _own_meta_keys(module) for _, module in modules}
    allocate_meta_tensors(model, device)
    pending = {
        id(_get_tensor(module, key)): f"{name}.{key}".lstrip(".") for name, module in modules for key in born_meta[id(module)]
    }
    repeated = InitWriteCounts(
        {
            id(param): counts_at_construction[name]
            for name, param in parameters_by_fqn(model)[0].items()
            if name in counts_at_construction
        }
    )
    for name, module in modules:
        resets = reset_functions(module, model)
        with seeded_rng(seed, "materialize", name):
            below = find_tensors_written_below(module, init, born_meta)
        if not born_meta[id(module)] and not resets and not below:
            continue
        with seeded_rng(seed, "materialize", name), torch.no_grad():
            written = _initialize_module(name, module, born_meta, resets, init, below, pending, repeated, device)
            for target, full in written:
                _copy_own_shard_(target, full)
                pending.pop(id(target), None)
    if pending:
        raise ConfigError(
            f"materialize: nothing initializes {', '.join(list(pending.values())[:10])} ({len(pending)} tensors). Write the "
            "tensors in reset_parameters() of the owning module, pass init=, or compute the tensors from constructor arguments "
            "stored as attributes."
        )
    check_write_counts(model, repeated)
    init_root(model)
    return model


def allocate_meta_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocate every meta tensor of ``model`` on ``device`` without values; tied parameters stay tied.

    Offloaded shards are allocated on the CPU.

    Mutates: ``model``; Parameter objects are replaced.
    """
    ties, objects = _find_tied_params(model), ParamObjects(model)
    offloads = get_spec(model).compute_device is not None

    def allocate(tensor: Tensor) -> Tensor:
        storage_device = torch.device("cpu") if offloads and is_dtensor(tensor) else device
        return torch.empty_like(tensor, device=storage_device) if tensor.is_meta else tensor

    model._apply(allocate)
    _restore_ties(model, ties)
    objects.carry_over_()


def _own_meta_keys(module: nn.Module) -> list[str]:
    """Return the keys of meta tensors that ``module`` itself owns."""
    stores = (*module._parameters.items(), *module._buffers.items())
    return [key for key, tensor in stores if tensor is not None and tensor.is_meta]


def _get_tensor(module: nn.Module, key: str) -> Tensor:
    stores: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    tensor = stores[key]
    assert tensor is not None, "the key was listed because the tensor exists"
    return tensor


def _find_tied_params(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the locations of each tied Parameter. Moving to another device would untie the parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                places.setdefault(id(param), []).append((module, key))
    return [shared for shared in places.values() if len(shared) > 1]


def _restore_ties(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    for (owner, first), *locations in ties:
        for module, key in locations:
            module.register_parameter(key, owner._parameters[first])


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
    """Return the tensors that this module initializes (own and descendants'), with their full-size values.

    ``by_init`` maps descendants to the keys of tensors that ``init(module)`` writes.
    """
    own_keys = born_meta[id(module)]
    below = [(m, born_meta[id(m)]) for m in module.modules()] if resets else []
    if not own_keys and not by_init and not any(keys for _, keys in below):
        return []
    written: dict[int, tuple[Tensor, Tensor]] = {}
    full_size = partial(_nan_filled_tensor, device=device)
    if resets:
        with substitute_tensors(below, listed=full_size, other=_copy) as full_tensors:
            for reset in resets:
                reset()
        written |= _collect_writes(name, full_tensors)
        _count_writes(full_tensors, written, repeated.by_reset, repeated)
    if init is not None and (own_keys or by_init):
        reached = [(inner, by_init[id(inner)]) for inner in module.modules() if id(inner) in by_init]
        with substitute_tensors([(module, own_keys), *reached], listed=full_size, other=_copy) as full_tensors:
            for entry in full_tensors:
                # As with apply, init may build on the values of the reset.
                if id(entry.target) in written:
                    entry.tensor.copy_(written[id(entry.target)][1])
                    entry.version = entry.tensor._version
            init(module)
        written |= _collect_writes(name, full_tensors)
        _count_writes(full_tensors, written, repeated.by_init, repeated)
    unwritten = [
        key for key in own_keys if id(_get_tensor(module, key)) in pending and id(_get_tensor(module, key)) not in written
    ]
    for key, full in (recompute_buffers(module, unwritten, device) if unwritten else {}).items():
        target = _get_tensor(module, key)
        written[id(target)] = target, full
        repeated.by_reset[id(target)] = full._version
    return list(written.values())


def _count_writes(
    full_tensors: Iterable[Substitute], written: Mapping[int, object], counts: dict[int, int], repeated: InitWriteCounts
) -> None:
    """Record how often an initializer wrote each tensor. Mutates: ``counts``, ``repeated``."""
    for entry in full_tensors:
        key = id(entry.target)
        if key not in written:
            continue
        if entry.is_below or entry.replaced:
            repeated.settled.add(key)
        else:
            counts[key] = counts.get(key, 0) + entry.tensor._version - entry.version


def _collect_writes(name: str, full_tensors: Iterable[Substitute]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the tensors that an initializer wrote, by target id.

    Raises:
        ConfigError: the initializer wrote only a part of a child's tensor, or scaled a tensor without a value.
    """
    writes = {}
    for entry in full_tensors:
        if _is_fully_written(entry):
            writes[id(entry.target)] = (entry.target, entry.tensor.detach())
        elif entry.tensor._version > entry.version and entry.is_below:
            tensor = f"{type(entry.module).__name__}.{entry.key}"
            raise ConfigError(
                f"materialize: the initializer of {name or 'the root'} writes only a part of {tensor}. Write the whole "
                "tensor, or initialize the tensor in the child's reset_parameters."
            )
    return writes


def _is_fully_written(entry: Substitute) -> bool:
    full = entry.tensor
    if full.is_floating_point() or full.is_complex():
        return not bool(full.isnan().any())
    return full.numel() == 0 or full._version > entry.version


def _nan_filled_tensor(like: Tensor, device: torch.device) -> Tensor:
    """Return a full-size tensor that shows unwritten elements: filled with NaN if the dtype has NaN."""
    full = torch.empty(like.shape, dtype=like.dtype, device=device)
    return full.fill_(float("nan")) if full.is_floating_point() or full.is_complex() else full


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copy_own_shard_(target: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of ``full`` into ``target``."""
    to_local(target).copy_(local_slice(target, full))


def recompute_buffers(module: nn.Module, keys: list[str], device: torch.device) -> dict[str, Tensor]:
    """Recompute tensors of ``module`` by a second run of its ``__init__``; return {} if the result is not reliable.

    A computed buffer on the meta device has no values. The class is constructed again with arguments from attributes of the
    same names. The result is used only if the second module has the same plain attributes.
    """
    kind = _original_class(module)
    arguments = _constructor_arguments(kind, module)
    if arguments is None:
        return {}
    with _EmptyOnMeta(), device:
        second = kind(**arguments)
    if _plain_attributes(second) != _plain_attributes(module):
        return {}
    values = {key: second._parameters.get(key, second._buffers.get(key)) for key in keys}
    return {
        key: value.detach()
        for key, value in values.items()
        if value is not None and not value.is_meta and value.shape == _shape_of(module, key)
    }


def _original_class(module: nn.Module) -> type[Any]:
    """Return the class without FSDP2's base class."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _constructor_arguments(kind: type[nn.Module], module: nn.Module) -> dict[str, Any] | None:
    """Return the constructor arguments from attributes of the same names; None if an argument is missing."""
    if kind.__init__ is nn.Module.__init__:
        return {}
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in module.__dict__:
            return None
        arguments[name] = module.__dict__[name]
    return arguments


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that a constructor stored, which are equal for equal arguments."""
    plain_types = (bool, int, float, str, tuple, type(None), torch.dtype)
    return {
        k: v for k, v in module.__dict__.items() if isinstance(v, plain_types) and not k.startswith("_") and k != "training"
    }


def _shape_of(module: nn.Module, key: str) -> torch.Size | None:
    tensor = module._parameters.get(key, module._buffers.get(key))
    return None if tensor is None else tensor.shape


class _EmptyOnMeta(TorchFunctionMode):
    """Makes functions that return uninitialized memory return meta tensors, so that unwritten tensors are recognized."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY_FUNCTIONS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def record_write_counts(model: nn.Module) -> None:
    """Store the number of writes into each meta parameter of ``model``. Mutates: one attribute of ``model``."""
    unwrap_module(model).__dict__[_WRITE_COUNTS_ATTRIBUTE] = _count_meta_writes(model)


def write_counts_of(model: nn.Module) -> dict[str, int]:
    """Return the number of writes into each meta parameter of ``model`` by clean name, as of ``shard_model``."""
    counts: dict[str, int] | None = unwrap_module(model).__dict__.get(_WRITE_COUNTS_ATTRIBUTE)
    return _count_meta_writes(model) if counts is None else counts


def _count_meta_writes(model: nn.Module) -> dict[str, int]:
    params, _ = parameters_by_fqn(model)
    return {name: param._version for name, param in params.items() if param.is_meta and not param.is_inference()}


@dataclass(slots=True, eq=False)
class InitWriteCounts:
    """The writes into parameters that ``materialize`` repeated.

    Args:
        at_construction: writes during construction, by id of the parameter.
        by_reset: writes by ``reset_parameters`` or ``__init__`` of the owning module.
        by_init: writes by the caller's ``init``.
        settled: parameters that an ancestor's ``reset_parameters`` wrote, or that were assigned.
    """

    at_construction: dict[int, int]
    by_reset: dict[int, int] = field(default_factory=dict)
    by_init: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    def is_missing_writes(self, param: Tensor) -> bool:
        """Return True if construction wrote ``param`` more often than ``materialize``."""
        key = id(param)
        if key in self.settled:
            return False
        more, by_init = self.at_construction.get(key, 0) - self.by_reset.get(key, 0), self.by_init.get(key, 0)
        # ``init`` still has the last word if a part of the model and then the whole model applied the function.
        return more > 0 and not (by_init and (more <= by_init or more % by_init == 0))

    def writes_per_init(self, param: Tensor) -> int:
        """Return the writes into ``param`` per write of ``init``; 0 if ``init`` did not write."""
        key = id(param)
        by_init = 0 if key in self.settled else self.by_init.get(key, 0)
        return (self.at_construction.get(key, 0) - self.by_reset.get(key, 0)) // by_init if by_init else 0

    def may_be_overwritten(self, param: Tensor) -> bool:
        """Return True if ``init`` may have overwritten a value from elsewhere."""
        key = id(param)
        return key not in self.settled and self.at_construction.get(key, 0) > self.by_reset.get(key, 0)


def reset_functions(module: nn.Module, model: nn.Module) -> list[Callable[[], None]]:
    """Return the functions that initialize ``module`` and its descendants.

    Functions of peft's LoRA layers take the adapter name and the initialization of ``model.peft_config``.

    Raises:
        ConfigError: an initialization that is computed from the base weights.
    """
    resets = [reset for key in _RESET_METHODS if callable(reset := getattr(module, key, None))]
    return [*resets, *_lora_reset_functions(module, model)]


def _lora_reset_functions(module: nn.Module, model: nn.Module) -> Iterator[Callable[[], None]]:
    reset, configs = getattr(module, _LORA_RESET, None), _peft_configs(model)
    if reset is None or configs is None:
        return
    stores = [module._modules.get(key) for key in ("lora_A", "lora_embedding_A")]
    adapters = {name for store in stores if store is not None for name in (*store._modules, *store._parameters)}
    for adapter in sorted(adapters & set(configs)):
        kind = getattr(configs[adapter], "init_lora_weights", True)
        if kind not in _RANDOM_LORA_KINDS:
            raise ConfigError(
                f"materialize: init_lora_weights of the adapter {adapter!r} must be True, False or 'gaussian', got {kind!r}. "
                "The base weights have no values yet. Change init_lora_weights, or load adapters from a checkpoint."
            )
        yield partial(reset, adapter, kind)


def _peft_configs(model: nn.Module) -> dict[str, Any] | None:
    configs_of_modules = (getattr(module, "peft_config", None) for module in model.modules())
    return next((configs for configs in configs_of_modules if isinstance(configs, dict)), None)


def check_write_counts(model: nn.Module, repeated: InitWriteCounts) -> None:
    """Check that ``materialize`` repeated all writes of construction.

    Raises:
        ConfigError: another module wrote parameters during construction, by name.
    """
    params = {name: param for name, param in parameters_by_fqn(model)[0].items() if id(param) in repeated.at_construction}
    owners = _library_resets(model)
    overwritten = [name for name, param in params.items() if id(param) in owners and repeated.may_be_overwritten(param)]
    missing = [name for name, param in params.items() if repeated.is_missing_writes(param)]
    wrong = list(dict.fromkeys([*overwritten, *missing]))
    if not wrong:
        _warn_of_overwritten_params(model, repeated)
        return
    culprit = f", probably by {owners[id(params[overwritten[0]])]}" if overwritten else ""
    raise ConfigError(
        f"materialize: {', '.join(wrong[:10])} ({len(wrong)} tensors) were written again after their reset_parameters "
        f"during construction{culprit}. The meta device keeps no values. Write the tensors in reset_parameters() of the parent "
        "module, or construct the model off the meta device."
    )


def _warn_of_overwritten_params(model: nn.Module, repeated: InitWriteCounts) -> None:
    """Warn of single parameters that construction wrote after the model's initializer, which now overwrites the values.

    Only a minority counts. If a part of a model applied the initializer before the whole model did, all parameters of the part
    have the same count.
    """
    usual = [rate for param in model.parameters() if (rate := repeated.writes_per_init(param))]
    overwritten: list[str] = []
    if not usual or max(usual) == (most := median_low(usual)):
        return
    for name, parent in modules_by_fqn(model):
        owned = [
            (f"{name}.{child_name}.{key}".lstrip("."), p)
            for child_name, child in parent.named_children()
            for key, p in child._parameters.items()
        ]
        rates = [rate for param in parent.parameters() if (rate := repeated.writes_per_init(param))]
        least = max(most, min(rates, default=0))
        overwritten += [full for full, param in owned if param is not None and repeated.writes_per_init(param) > least]
    if overwritten and get_dist_info().rank == 0:
        warnings.warn(
            f"materialize: {', '.join(overwritten[:10])} ({len(overwritten)} tensors) were written again during construction, "
            "after the initializer of the whole model, and init overwrote the values. Write the special values in init, or in "
            "reset_parameters() of the parent module.",
            stacklevel=3,
        )


def find_tensors_written_below(
    module: nn.Module, init: Callable[[nn.Module], None] | None, born_meta: Mapping[int, Sequence[str]]
) -> dict[int, list[str]]:
    """Return the keys of descendants' tensors that ``init(module)`` writes, by id of the owning module.

    Only a method of a model (``model._init_weights``) is tried, because the method is made for ``apply`` and accepts any
    module. The method writes into substitutes on meta without storage.

    Args:
        module: module whose descendants ``init`` may write.
        init: as in ``materialize``.
        born_meta: keys of tensors that were on meta, by id of the owning module.
    """
    if init is None or not isinstance(getattr(init, "__self__", None), nn.Module):
        return {}
    if not any(inner is not module and born_meta.get(id(inner)) for inner in module.modules()):
        return {}

    def empty(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    places = [(inner, born_meta.get(id(inner), ())) for inner in module.modules()]
    with substitute_tensors(places, listed=empty, other=empty) as substitutes, torch.no_grad():
        init(module)
    written: dict[int, list[str]] = {}
    for entry in substitutes:
        if entry.is_below and (entry.replaced or entry.tensor._version != entry.version):
            written.setdefault(id(entry.module), []).append(entry.key)
    return written


@dataclass(slots=True, eq=False)
class Substitute:
    """A tensor in place of the tensor ``target`` while an initializer runs.

    Args:
        module: module that owns the tensor.
        key: key in the module.
        target: replaced tensor.
        tensor: substitute; after the initializer, the tensor that the initializer has assigned, if any.
        version: version of the substitute before the initializer.
        is_below: if True, ``module`` is a descendant of the module whose initializer runs.
        replaced: if True, the initializer has assigned a new tensor.
    """

    module: nn.Module
    key: str
    target: Tensor
    tensor: Tensor
    version: int
    is_below: bool
    replaced: bool = False


@contextmanager
def substitute_tensors(
    places: Sequence[tuple[nn.Module, Collection[str]]],
    *,
    listed: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
) -> Iterator[list[Substitute]]:
    """Substitute tensors of modules in a context, so that an initializer writes into the substitutes.

    Args:
        places: modules, first the module whose initializer runs, and the keys of their listed tensors.
        listed: function that makes the substitute of a listed tensor.
        other: function that makes the substitute of another tensor of these modules, which absorbs writes.

    Yields:
        The substitutes of the listed tensors. A tied tensor has one substitute in several places.
    """
    substitutes: list[Substitute] = []
    before = [(module, dict(module._parameters), dict(module._buffers)) for module, _ in places]
    tensors: dict[int, Tensor] = {}
    try:
        for (module, params, buffers), (_, keys) in zip(before, places, strict=True):
            for key, target in {**params, **buffers}.items():
                if target is None:
                    continue
                if id(target) not in tensors:
                    tensor = listed(target) if key in keys else other(target)
                    tensors[id(target)] = nn.Parameter(tensor, requires_grad=False) if key in params else tensor
                tensor = tensors[id(target)]
                store: dict[str, Any] = module._parameters if key in params else module._buffers
                store[key] = tensor
                if key in keys:
                    substitutes.append(Substitute(module, key, target, tensor, tensor._version, module is not places[0][0]))
        yield substitutes
        for entry in substitutes:
            current = {**entry.module._parameters, **entry.module._buffers}[entry.key]
            assert current is not None, "an initializer removes no tensor"
            entry.tensor, entry.replaced = current, current is not entry.tensor
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


def check_init_given(model: nn.Module) -> None:
    """Check that a transformers model has ``init``, because the library skips its initializer on meta.

    Raises:
        ConfigError: a transformers model without ``init``.
    """
    for name, module in modules_by_fqn(model):
        bases = [base for base in type(module).__mro__ if base.__name__ == "PreTrainedModel"]
        if any(base.__module__.startswith("transformers.") for base in bases) and any(p.is_meta for p in module.parameters()):
            raise ConfigError(
                f"materialize: {type(module).__name__} of transformers does not initialize weights on meta. Pass "
                f"init=model.{f'{name}.' if name else ''}_init_weights."
            )


def _library_resets(model: nn.Module) -> dict[int, str]:
    """Return the reset methods of other libraries with arguments, by id of the descendants' parameters."""
    return {
        id(param): f"{type(module).__name__}.{key}"
        for _, module in modules_by_fqn(model)
        for key in dir(type(module))
        if _LIBRARY_RESET.fullmatch(key)
        for param in module.parameters()
    }
