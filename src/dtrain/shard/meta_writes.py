"""Initial values that the meta device has swallowed: found by counting the writes into each parameter.

A parameter on the meta device keeps no values, but torch counts the operations that have written into it. A model whose
``__init__`` writes into a child's parameter (``nn.init.zeros_(self.out.weight)``) has counted one write more than the
child's own ``reset_parameters``. ``materialize`` compares that count with the writes that it has repeated itself. It counts on
meta also to find which tensors of its children an initialiser of a whole model writes, as ``apply`` has it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_WRITE_COUNTS_ATTRIBUTE = (
    "_dtrain_meta_writes"  # the attribute of a model that shard_model leaves the counts in, since it replaces parameters
)
_RESET_METHODS = ("reset_parameters", "_reset_parameters")  # torch's own attention and transformer have the second
_LIBRARY_RESET = re.compile(r"reset_\w+_parameters")  # of peft: reset_lora_parameters, reset_adapter_parameters
_LORA_RESET = "reset_lora_parameters"
_RANDOM_LORA_KINDS = (True, False, "gaussian")  # initial values of peft's LoRA that do not depend on the base weights


def record_write_counts(model: nn.Module) -> None:
    """Keep the number of writes into each meta parameter of ``model``. Mutates: one attribute of ``model``."""
    unwrap_module(model).__dict__[_WRITE_COUNTS_ATTRIBUTE] = _count_meta_writes(model)


def write_counts_of(model: nn.Module) -> dict[str, int]:
    """Return the number of writes into each meta parameter of ``model``, by clean name, as ``shard_model`` found it."""
    found: dict[str, int] | None = unwrap_module(model).__dict__.get(_WRITE_COUNTS_ATTRIBUTE)
    return _count_meta_writes(model) if found is None else found


def _count_meta_writes(model: nn.Module) -> dict[str, int]:
    params, _ = parameters_by_fqn(model)
    return {name: param._version for name, param in params.items() if param.is_meta and not param.is_inference()}


@dataclass(slots=True, eq=False)
class InitWriteCounts:
    """The writes into parameters that ``materialize`` has repeated.

    Args:
        at_construction: writes while the model was made, by the id of the parameter.
        by_reset: writes by ``reset_parameters`` or ``__init__`` of the module that owns a parameter.
        by_init: writes by the caller's ``by_init``.
        settled: parameters that an outer module's ``reset_parameters`` has written, or that were assigned anew.
    """

    at_construction: dict[int, int]
    by_reset: dict[int, int] = field(default_factory=dict)
    by_init: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    def is_missing_writes(self, param: Tensor) -> bool:
        """Return True if ``param`` was written more often while the model was made than since."""
        key = id(param)
        if key in self.settled:
            return False
        more, by_init = self.at_construction.get(key, 0) - self.by_reset.get(key, 0), self.by_init.get(key, 0)
        # An init that a part of the model and then the whole of it have applied has the last word all the same.
        return more > 0 and not (by_init and (more <= by_init or more % by_init == 0))

    def writes_per_init(self, param: Tensor) -> int:
        """Return how often ``param`` was written for each time that ``init`` has; 0 if ``init`` never has."""
        key = id(param)
        by_init = 0 if key in self.settled else self.by_init.get(key, 0)
        return (self.at_construction.get(key, 0) - self.by_reset.get(key, 0)) // by_init if by_init else 0

    def may_be_overwritten(self, param: Tensor) -> bool:
        """Return True if ``init`` may have written over a value that came from elsewhere."""
        key = id(param)
        return key not in self.settled and self.at_construction.get(key, 0) > self.by_reset.get(key, 0)


def reset_functions(module: nn.Module, model: nn.Module) -> list[Callable[[], None]]:
    """Return the functions that give ``module`` and modules below it their initial values.

    Those of a LoRA layer of peft take the adapter's name and its kind of initial values, which ``model.peft_config`` has.

    Raises:
        ConfigError: a kind of initial values that is computed from the base weights.
    """
    plain = [reset for key in _RESET_METHODS if callable(reset := getattr(module, key, None))]
    return [*plain, *_lora_reset_functions(module, model)]


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
                f"materialize: the adapter {adapter!r} has init_lora_weights={kind!r}, which is computed from base weights; "
                "these have no values yet. Use True, False or 'gaussian', or load adapters from a checkpoint"
            )
        yield partial(reset, adapter, kind)


def _peft_configs(model: nn.Module) -> dict[str, Any] | None:
    found = (getattr(module, "peft_config", None) for module in model.modules())
    return next((configs for configs in found if isinstance(configs, dict)), None)


def check_write_counts(model: nn.Module, repeated: InitWriteCounts) -> None:
    """Refuse parameters whose initial values nobody has repeated.

    Raises:
        ConfigError: parameters that were written by another module, by name.
    """
    params = {name: param for name, param in parameters_by_fqn(model)[0].items() if id(param) in repeated.at_construction}
    around = _library_resets(model)
    other = [name for name, param in params.items() if id(param) in around and repeated.may_be_overwritten(param)]
    lacking = [name for name, param in params.items() if repeated.is_missing_writes(param)]
    found = list(dict.fromkeys([*other, *lacking]))
    if not found:
        _warn_of_overwritten_params(model, repeated)
        return
    by = f", probably by {around[id(params[other[0]])]}" if other else ""
    raise ConfigError(
        f"materialize: {', '.join(found[:10])} ({len(found)} tensors) were written again after their own reset_parameters "
        f"while the model was made{by}; the meta device keeps no values. Write them in reset_parameters() of the module around "
        "them, or make the model off the meta device"
    )


def _warn_of_overwritten_params(model: nn.Module, repeated: InitWriteCounts) -> None:
    """Warn of single parameters that were written after the initialiser of the whole model, which has the last word now.

    They are a minority. If a part of a model has applied the initialiser before the whole did, all parameters around were
    written as often.
    """
    usual = [rate for param in model.parameters() if (rate := repeated.writes_per_init(param))]
    special: list[str] = []
    if not usual or max(usual) == (most := median_low(usual)):
        return
    for name, around in modules_by_fqn(model):
        owned = [(f"{name}.{at}.{key}".lstrip("."), p) for at, m in around.named_children() for key, p in m._parameters.items()]
        rates = [rate for param in around.parameters() if (rate := repeated.writes_per_init(param))]
        least = max(most, min(rates, default=0))
        special += [full for full, param in owned if param is not None and repeated.writes_per_init(param) > least]
    if special and get_dist_info().rank == 0:
        warnings.warn(
            f"materialize: {', '.join(special[:10])} ({len(special)} tensors) were written again while the model was made, "
            "after the initialiser of the whole model, and init has now given them the values of any other layer. Let init "
            "write their own, or write them in reset_parameters() of the module around them.",
            stacklevel=3,
        )


def find_tensors_written_below(
    module: nn.Module, init: Callable[[nn.Module], None] | None, born_meta: Mapping[int, Sequence[str]]
) -> dict[int, list[str]]:
    """Return the tensors of modules below that ``init(module)`` writes: their keys, by the id of the module that owns them.

    Only a method of a model is asked (``model._init_weights``): it is made for ``apply``, so it may be called with any module.
    It writes into stand-ins on meta, which hold no memory.

    Args:
        module: whose children ``init`` may write.
        init: as in ``materialize``.
        born_meta: the keys of the tensors that were on meta, by the id of the module that owns them.
    """
    if init is None or not isinstance(getattr(init, "__self__", None), nn.Module):
        return {}
    if not any(inner is not module and born_meta.get(id(inner)) for inner in module.modules()):
        return {}
    with _substitute_meta_tensors(module, born_meta) as twins, torch.no_grad():
        versions = [twin._version for _, _, twin in twins]
        init(module)
        found: dict[int, list[str]] = {}
        for (inner, key, twin), version in zip(twins, versions, strict=True):
            now = {**inner._parameters, **inner._buffers}[key]
            if inner is not module and (now is not twin or twin._version != version):
                found.setdefault(id(inner), []).append(key)
        return found


@contextmanager
def _substitute_meta_tensors(
    module: nn.Module, born_meta: Mapping[int, Sequence[str]]
) -> Iterator[list[tuple[nn.Module, str, Tensor]]]:
    """A context in which ``module`` and those below have stand-ins on meta for the tensors that were there."""
    before = [(inner, dict(inner._parameters), dict(inner._buffers)) for inner in module.modules()]
    twins: dict[int, nn.Parameter] = {}  # a tied tensor has one
    placed: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for inner, params, buffers in before:
            for key in born_meta.get(id(inner), ()):
                target = {**params, **buffers}[key]
                assert target is not None, "the key was listed because the tensor is there"
                plain = torch.empty(target.shape, dtype=target.dtype, device="meta")
                twin = twins.setdefault(id(target), nn.Parameter(plain, requires_grad=False))
                store: dict[str, Any] = inner._parameters if key in params else inner._buffers
                store[key] = twin
                placed.append((inner, key, twin))
        yield placed
    finally:
        for inner, params, buffers in before:
            inner._parameters.update(params)
            inner._buffers.update(buffers)


def check_init_given(model: nn.Module) -> None:
    """Refuse a model of transformers whose initial values nobody gives: the library leaves its initialiser out on meta.

    Raises:
        ConfigError: such a model.
    """
    for name, module in modules_by_fqn(model):
        bases = [base for base in type(module).__mro__ if base.__name__ == "PreTrainedModel"]
        if any(base.__module__.startswith("transformers.") for base in bases) and any(p.is_meta for p in module.parameters()):
            raise ConfigError(
                f"materialize: {type(module).__name__} is a model of transformers, which initialises nothing on meta; pass "
                f"init=model.{f'{name}.' if name else ''}_init_weights"
            )


def _library_resets(model: nn.Module) -> dict[int, str]:
    """Return the functions that reset parameters and take arguments of a library's own, by the parameters below."""
    return {
        id(param): f"{type(module).__name__}.{key}"
        for _, module in modules_by_fqn(model)
        for key in dir(type(module))
        if _LIBRARY_RESET.fullmatch(key)
        for param in module.parameters()
    }
