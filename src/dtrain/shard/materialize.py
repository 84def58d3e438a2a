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
from dtrain.arguments import warn
from dtrain.dist.dtensor import is_dtensor, local_slice, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seeded_rng
from dtrain.errors import ConfigError
from dtrain.fqn import is_transformers_model, modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.shard.fsdp2_private import init_root
from dtrain.shard.params import ParamObjects, param_places
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
        _check_init_given(model)
    device = get_dist_info().device
    # The counts as of shard_model, if the model went through it.
    counts: dict[str, int] | None = unwrap_module(model).__dict__.get(_WRITE_COUNTS_ATTRIBUTE)
    counts = _count_meta_writes(model) if counts is None else counts
    # Children come first, as in construction, because a parent may overwrite tensors of its children.
    modules = list(reversed(list(model.named_modules())))
    meta_keys = {id(module): [key for key, tensor in _own_tensors(module).items() if tensor.is_meta] for _, module in modules}
    allocate_meta_tensors(model, device)
    pending = {
        id(_own_tensors(module)[key]): f"{name}.{key}".lstrip(".") for name, module in modules for key in meta_keys[id(module)]
    }
    params = parameters_by_fqn(model)[0]
    at_construction = {id(params[name]): count for name, count in counts.items() if name in params}
    initialization = _Initialization(init, device, meta_keys, pending, at_construction)
    for name, module in modules:
        resets = _reset_functions(module, model)
        with seeded_rng(seed, "materialize", name):
            below = initialization.find_tensors_written_below(module)
        if not meta_keys[id(module)] and not resets and not below:
            continue
        with seeded_rng(seed, "materialize", name), torch.no_grad():
            for target, full in initialization.compute(name, module, resets, below):
                to_local(target).copy_(local_slice(target, full))
                pending.pop(id(target), None)
    if pending:
        raise ConfigError(
            f"materialize: nothing initializes {', '.join(list(pending.values())[:10])} ({len(pending)} tensors). Write the "
            "tensors in reset_parameters() of the owning module, pass init=, or compute the tensors from constructor arguments "
            "stored as attributes."
        )
    initialization.check_write_counts(model)
    init_root(model)
    return model


def allocate_meta_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocate every meta tensor of ``model`` on ``device`` without values; tied parameters stay tied.

    Offloaded shards are allocated on the CPU.

    Mutates: ``model``; Parameter objects are replaced.
    """
    # Moving to another device would untie parameters.
    ties = [places for param, places in param_places(model) if param.is_meta and len(places) > 1]
    objects, offloads = ParamObjects(model), get_spec(model).compute_device is not None

    def allocate(tensor: Tensor) -> Tensor:
        storage_device = torch.device("cpu") if offloads and is_dtensor(tensor) else device
        return torch.empty_like(tensor, device=storage_device) if tensor.is_meta else tensor

    model._apply(allocate)
    for (_, owner, first), *others in ties:
        for _, module, key in others:
            module.register_parameter(key, owner._parameters[first])
    objects.carry_over_()


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that ``module`` itself owns, by key."""
    tensors: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def _check_init_given(model: nn.Module) -> None:
    """Check that a transformers model has ``init``, because the library skips its initializer on meta.

    Raises:
        ConfigError: a transformers model without ``init``.
    """
    for name, module in modules_by_fqn(model):
        if is_transformers_model(module) and any(p.is_meta for p in module.parameters()):
            raise ConfigError(
                f"materialize: {type(module).__name__} of transformers does not initialize weights on meta. Pass "
                f"init=model.{f'{name}.' if name else ''}_init_weights."
            )


def record_write_counts(model: nn.Module) -> None:
    """Store the number of writes into each meta parameter of ``model``. Mutates: one attribute of ``model``."""
    unwrap_module(model).__dict__[_WRITE_COUNTS_ATTRIBUTE] = _count_meta_writes(model)


def _count_meta_writes(model: nn.Module) -> dict[str, int]:
    params, _ = parameters_by_fqn(model)
    return {name: param._version for name, param in params.items() if param.is_meta and not param.is_inference()}


def _reset_functions(module: nn.Module, model: nn.Module) -> list[Callable[[], None]]:
    """Return the functions that initialize ``module`` and its descendants.

    Functions of peft's LoRA layers take the adapter name and the initialization of ``model.peft_config``.

    Raises:
        ConfigError: an initialization that is computed from the base weights.
    """
    resets: list[Callable[[], None]] = [reset for key in _RESET_METHODS if callable(reset := getattr(module, key, None))]
    lora_reset = getattr(module, _LORA_RESET, None)
    if lora_reset is None:
        return resets
    configs_of_modules = (getattr(inner, "peft_config", None) for inner in model.modules())
    configs: dict[str, Any] = next((configs for configs in configs_of_modules if isinstance(configs, dict)), {})
    stores = [module._modules.get(key) for key in ("lora_A", "lora_embedding_A")]
    adapters = {name for store in stores if store is not None for name in (*store._modules, *store._parameters)}
    for adapter in sorted(adapters & set(configs)):
        kind = getattr(configs[adapter], "init_lora_weights", True)
        if kind not in _RANDOM_LORA_KINDS:
            raise ConfigError(
                f"materialize: init_lora_weights of the adapter {adapter!r} must be True, False or 'gaussian', got {kind!r}. "
                "The base weights have no values yet. Change init_lora_weights, or load adapters from a checkpoint."
            )
        resets.append(partial(lora_reset, adapter, kind))
    return resets


@dataclass(slots=True, eq=False)
class _Initialization:
    """Computes the initial values of the tensors of a model, and counts the writes into parameters that it repeats.

    Args:
        init: as in ``materialize``.
        device: device of the full tensors.
        meta_keys: keys of tensors that were on meta, by id of the owning module.
        pending: names of tensors without values, by id.
        at_construction: writes during construction, by id of the parameter.
        by_reset: writes by ``reset_parameters`` or ``__init__`` of the owning module.
        by_init: writes by ``init``.
        settled: parameters that an ancestor's ``reset_parameters`` wrote, or that were assigned.
    """

    init: InitFn | None
    device: torch.device
    meta_keys: Mapping[int, list[str]]
    pending: Mapping[int, str]
    at_construction: Mapping[int, int]
    by_reset: dict[int, int] = field(default_factory=dict)
    by_init: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    def compute(
        self, name: str, module: nn.Module, resets: Sequence[Callable[[], None]], below: Mapping[int, list[str]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that this module initializes (own and descendants'), with their full-size values.

        ``below`` maps descendants to the keys of tensors that ``init(module)`` writes.
        """
        own_keys, written = self.meta_keys[id(module)], dict[int, tuple[Tensor, Tensor]]()
        seen_by_reset = [(inner, self.meta_keys[id(inner)]) for inner in module.modules()] if resets else []
        if any(keys for _, keys in seen_by_reset):
            self._run(name, seen_by_reset, resets, self.by_reset, written)
        if self.init is not None and (own_keys or below):
            reached = [(inner, below[id(inner)]) for inner in module.modules() if id(inner) in below]
            self._run(name, [(module, own_keys), *reached], [partial(self.init, module)], self.by_init, written)
        own = _own_tensors(module)
        unwritten = [key for key in own_keys if id(own[key]) in self.pending and id(own[key]) not in written]
        for key, full in (_recompute_buffers(module, unwritten, self.device) if unwritten else {}).items():
            written[id(own[key])] = own[key], full
            self.by_reset[id(own[key])] = full._version
        return list(written.values())

    def _run(
        self,
        name: str,
        places: Sequence[tuple[nn.Module, Collection[str]]],
        initializers: Iterable[Callable[[], None]],
        counts: dict[int, int],
        written: dict[int, tuple[Tensor, Tensor]],
    ) -> None:
        """Run initializers on full-size tensors. Mutates: ``written``, by id of the target; ``counts``.

        Raises:
            ConfigError: the initializer wrote only a part of a child's tensor, or scaled a tensor without a value.
        """

        def nan_filled(like: Tensor) -> Tensor:
            # NaN shows unwritten elements, if the dtype has NaN.
            full = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            return full.fill_(float("nan")) if full.is_floating_point() or full.is_complex() else full

        with _substitute_tensors(places, listed=nan_filled, other=lambda tensor: tensor.detach().clone()) as substitutes:
            for entry in substitutes:
                # As with apply, init may build on the values of the reset.
                if id(entry.target) in written:
                    entry.tensor.copy_(written[id(entry.target)][1])
                    entry.version = entry.tensor._version
            for initialize in initializers:
                initialize()
        for entry in substitutes:
            full, key, writes = entry.tensor, id(entry.target), entry.tensor._version - entry.version
            has_nan = full.is_floating_point() or full.is_complex()
            if not bool(full.isnan().any()) if has_nan else full.numel() == 0 or writes > 0:
                written[key] = entry.target, full.detach()
            elif writes > 0 and entry.is_below:
                tensor = f"{type(entry.module).__name__}.{entry.key}"
                raise ConfigError(
                    f"materialize: the initializer of {name or 'the root'} writes only a part of {tensor}. Write the whole "
                    "tensor, or initialize the tensor in the child's reset_parameters."
                )
        for entry in substitutes:
            key = id(entry.target)
            if key in written and (entry.is_below or entry.replaced):
                self.settled.add(key)
            elif key in written:
                counts[key] = counts.get(key, 0) + entry.tensor._version - entry.version

    def find_tensors_written_below(self, module: nn.Module) -> dict[int, list[str]]:
        """Return the keys of descendants' tensors that ``init(module)`` writes, by id of the owning module.

        Only a method of a model (``model._init_weights``) is tried, because the method is made for ``apply`` and accepts any
        module. The method writes into substitutes on meta without storage.
        """
        if self.init is None or not isinstance(getattr(self.init, "__self__", None), nn.Module):
            return {}
        places = [(inner, self.meta_keys.get(id(inner), ())) for inner in module.modules()]
        if not any(keys for _, keys in places[1:]):
            return {}

        def empty(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, device="meta")

        with _substitute_tensors(places, listed=empty, other=empty) as substitutes, torch.no_grad():
            self.init(module)
        written: dict[int, list[str]] = {}
        for entry in substitutes:
            if entry.is_below and (entry.replaced or entry.tensor._version != entry.version):
                written.setdefault(id(entry.module), []).append(entry.key)
        return written

    def check_write_counts(self, model: nn.Module) -> None:
        """Check that all writes of construction were repeated.

        Raises:
            ConfigError: another module wrote parameters during construction, by name.
        """
        params = {name: param for name, param in parameters_by_fqn(model)[0].items() if id(param) in self.at_construction}
        # Reset methods of other libraries with arguments, by id of the descendants' parameters.
        library_resets = {
            id(param): f"{type(module).__name__}.{key}"
            for _, module in modules_by_fqn(model)
            for key in dir(type(module))
            if _LIBRARY_RESET.fullmatch(key)
            for param in module.parameters()
        }
        missing = [name for name, param in params.items() if self._is_missing_writes(param)]
        by_library = [name for name, param in params.items() if id(param) in library_resets and self._more_writes(param) > 0]
        wrong = list(dict.fromkeys([*by_library, *missing]))
        if not wrong:
            self._warn_of_overwritten_params(model)
            return
        culprit = f", probably by {library_resets[id(params[by_library[0]])]}" if by_library else ""
        raise ConfigError(
            f"materialize: {', '.join(wrong[:10])} ({len(wrong)} tensors) were written again after their reset_parameters "
            f"during construction{culprit}. The meta device keeps no values. Write the tensors in reset_parameters() of the "
            "parent module, or construct the model off the meta device."
        )

    def _more_writes(self, param: Tensor) -> int:
        """Return by how many writes construction exceeded the resets."""
        key = id(param)
        return 0 if key in self.settled else self.at_construction.get(key, 0) - self.by_reset.get(key, 0)

    def _is_missing_writes(self, param: Tensor) -> bool:
        more, by_init = self._more_writes(param), self.by_init.get(id(param), 0)
        # ``init`` still has the last word if a part of the model and then the whole model applied the function.
        return more > 0 and not (by_init and (more <= by_init or more % by_init == 0))

    def _writes_per_init(self, param: Tensor) -> int:
        """Return the writes into ``param`` per write of ``init``; 0 if ``init`` did not write."""
        by_init = self.by_init.get(id(param), 0)
        return self._more_writes(param) // by_init if by_init else 0

    def _warn_of_overwritten_params(self, model: nn.Module) -> None:
        """Warn of single parameters that construction wrote after the model's initializer, which now overwrites the values.

        Only a minority counts. If a part of a model applied the initializer before the whole model did, all parameters of the
        part have the same count.
        """
        usual = [rate for param in model.parameters() if (rate := self._writes_per_init(param))]
        overwritten: list[str] = []
        if not usual or max(usual) == (most := median_low(usual)):
            return
        for name, parent in modules_by_fqn(model):
            owned = [
                (f"{name}.{child_name}.{key}".lstrip("."), p)
                for child_name, child in parent.named_children()
                for key, p in child._parameters.items()
            ]
            rates = [rate for param in parent.parameters() if (rate := self._writes_per_init(param))]
            least = max(most, min(rates, default=0))
            overwritten += [full for full, param in owned if param is not None and self._writes_per_init(param) > least]
        if overwritten and get_dist_info().rank == 0:
            warn(
                f"materialize: {', '.join(overwritten[:10])} ({len(overwritten)} tensors) were written again during "
                "construction, after the initializer of the whole model, and init overwrote the values. Write the special "
                "values in init, or in reset_parameters() of the parent module."
            )


@dataclass(slots=True, eq=False)
class _Substitute:
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
def _substitute_tensors(
    places: Sequence[tuple[nn.Module, Collection[str]]],
    *,
    listed: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
) -> Iterator[list[_Substitute]]:
    """Substitute tensors of modules in a context, so that an initializer writes into the substitutes.

    Args:
        places: modules, first the module whose initializer runs, and the keys of their listed tensors.
        listed: function that makes the substitute of a listed tensor.
        other: function that makes the substitute of another tensor of these modules, which absorbs writes.

    Yields:
        The substitutes of the listed tensors. A tied tensor has one substitute in several places.
    """
    substitutes: list[_Substitute] = []
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
                    substitutes.append(_Substitute(module, key, target, tensor, tensor._version, module is not places[0][0]))
        yield substitutes
        for entry in substitutes:
            current = {**entry.module._parameters, **entry.module._buffers}[entry.key]
            assert current is not None, "an initializer removes no tensor"
            entry.tensor, entry.replaced = current, current is not entry.tensor
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


def _recompute_buffers(module: nn.Module, keys: list[str], device: torch.device) -> dict[str, Tensor]:
    """Recompute tensors of ``module`` by a second run of its ``__init__``; return {} if the result is not reliable.

    A computed buffer on the meta device has no values. The class is constructed again with arguments from attributes of the
    same names. The result is used only if the second module has the same plain attributes.
    """
    # The class without FSDP2's base class.
    kind: type[Any] = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    arguments: dict[str, Any] = {}
    parameters = {} if kind.__init__ is nn.Module.__init__ else inspect.signature(kind.__init__).parameters
    for name, parameter in list(parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in module.__dict__:
            return {}
        arguments[name] = module.__dict__[name]
    with _EmptyOnMeta(), device:
        second = kind(**arguments)
    if _plain_attributes(second) != _plain_attributes(module):
        return {}
    tensors, own = _own_tensors(second), _own_tensors(module)
    computed = {key: tensors[key] for key in keys if key in tensors and tensors[key].shape == own[key].shape}
    return {key: tensor.detach() for key, tensor in computed.items() if not tensor.is_meta}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that a constructor stored, which are equal for equal arguments."""
    plain_types = (bool, int, float, str, tuple, type(None), torch.dtype)
    return {
        k: v for k, v in module.__dict__.items() if isinstance(v, plain_types) and not k.startswith("_") and k != "training"
    }


class _EmptyOnMeta(TorchFunctionMode):
    """Makes functions that return uninitialized memory return meta tensors, so that unwritten tensors are recognized."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY_FUNCTIONS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
