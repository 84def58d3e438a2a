"""Detect initial values that are lost on the meta device, by counting the writes into each parameter.

A meta parameter stores no values, but torch counts in-place operations. If ``__init__`` of a model writes into a child's
parameter (``nn.init.zeros_(self.out.weight)``), the count exceeds the count of the child's ``reset_parameters`` by one.
``materialize`` compares the count with its own writes. The same counting shows which tensors of descendants a model's
initializer writes, as under ``apply``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn, parameters_by_fqn, unwrap_module

# shard_model replaces parameters, so it stores the counts in this attribute of the model.
_WRITE_COUNTS_ATTRIBUTE = "_dtrain_meta_writes"
# torch's attention and transformer use the second name.
_RESET_METHODS = ("reset_parameters", "_reset_parameters")
# Examples of peft are reset_lora_parameters and reset_adapter_parameters.
_LIBRARY_RESET = re.compile(r"reset_\w+_parameters")
_LORA_RESET = "reset_lora_parameters"
# Initializations of peft's LoRA that do not depend on the base weights.
_RANDOM_LORA_KINDS = (True, False, "gaussian")


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
