"""``replace_modules``: other modules in the place of some, and a report of what changed.

Classes of libraries that may be there: a model of theirs can only be given by somebody who has imported them.

Sizes as numbers or as fractions of others."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn, unwrap_module
from dtrain.state import get_spec

ModuleSelector: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]"
"""Which modules: of a class (not of its subclasses, which compute something else), of one of several, or by (name, module)."""

ReplacementPolicy: TypeAlias = "Callable[[nn.Module, str], nn.Module | None]"
"""``(module, name)`` -> what takes its place; None leaves it."""

_ALREADY_COMPILED = "is compiled already, and what would take its place is not; change the model before torch.compile"
_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SurgeryReport:
    """What ``replace_modules`` did.

    Args:
        model: the model, which is another module than before only where the root itself was replaced.
        replaced: by the clean name of the place, the class that was there and the one that is. A module that sits in several
            places comes once, under its first name.

    Formula: ``replaced[name] == (old class, new class)``

    Source: dtrain's own.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.ReLU())
        >>> replace_modules(model, {nn.ReLU: lambda module, name: nn.GELU()})
        2 modules replaced: 2 ReLU by GELU (1, 3)
    """

    model: nn.Module
    replaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        kinds = Counter(self.replaced.values())
        rows = []
        for (old, new), count in kinds.items():
            names = [name or "the root" for name, pair in self.replaced.items() if pair == (old, new)]
            shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
            rows.append(f"{count} {old} by {new} ({shown})")
        total = len(self.replaced)
        return f"{total} module{'' if total == 1 else 's'} replaced" + (f": {'; '.join(rows)}" if rows else "")


def replace_modules(
    model: nn.Module, policies: Mapping[Any, ReplacementPolicy], *, caller: str = "replace_modules", missing_ok: bool = False
) -> SurgeryReport:
    """Put other modules in the place of those that ``policies`` picks; say which.

    Modules are visited parents first. One that is replaced is not looked into, nor is what takes its place; so a policy may
    wrap a module of its own class. A module that sits in several places is replaced once, and sits in all of them afterwards.
    The new modules (but not what they keep of the old one) get the mode, and their tensors the device and the floating-point
    dtype, of what they replace; where that has no tensors, of the model.

    Formula: ``parent.child = policy(parent.child, name)``

    Args:
        model: a plain module, before ``shard_model``, ``torch.compile`` and ``checkpoint_activations``; on meta, too.
        policies: what to pick (a ``Key``) -> what makes the new module, or gives the old one another class (see ``Mixed``). The
            first that picks a module decides.
        caller: what an error begins with.
        missing_ok: it is no error that nothing is replaced.

    Mutates: ``model``; hooks of what a policy keeps or only changes stay. New Parameter objects are not in an optimizer that
        was built before; those a policy reuses stay tied.

    Raises:
        ConfigError: nothing to replace, a model that is sharded or wrapped already or has lazy modules, a module whose hooks,
            own ``forward`` or compiled code would be lost, a policy that returns something else, no policies.

    Source: the interface follows MosaicML Composer's ``module_surgery.replace_module_classes``; unlike there, what is left
        unchanged is not silent, and a class does not stand for its subclasses.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
        >>> replace_modules(model, {nn.Linear: lambda module, name: nn.Identity() if name == "1.1" else None}).replaced
        {'1.1': ('Linear', 'Identity')}
    """
    check_plain_model(model, caller)
    if not isinstance(policies, Mapping) or not policies:
        raise ConfigError(f"{caller}: policies is a mapping of module classes to functions of (module, name), got {policies!r}")
    surgery = _ModuleReplacer(model, [(_build_matcher(key, caller), policy) for key, policy in policies.items()], caller)
    after = surgery.visit(model)
    if not surgery.replaced and not missing_ok:
        looked = ", ".join(kind.__name__ for key in policies for kind in _classes_of(key))
        raise ConfigError(
            f"{caller}: nothing to replace: of {surgery.num_visited} modules in this {type(model).__name__} ({_count_classes(model)}) none is "
            f"{f'a {looked} that ' if looked else 'one that '}fits"
        )
    return SurgeryReport(model=after, replaced=surgery.replaced)


def check_plain_model(model: object, caller: str) -> None:
    """Refuse what is no plain model any more: surgery comes first.

    Raises:
        ConfigError: no module, one that is wrapped, or sharded, or has something sharded or lazy inside.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
    if unwrap_module(model) is not model:
        raise ConfigError(f"{caller}: this model is wrapped in {type(model).__name__}; change it before that")
    laid_out = any(get_spec(module).mesh is not None for module in model.modules())
    if laid_out or any(is_dtensor(param) for param in model.parameters()):
        raise ConfigError(f"{caller}: this {type(model).__name__} is sharded already; change it before shard_model")
    lazy = next((name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)), None)
    if lazy is not None:  # its module will take another class when it is first called
        raise ConfigError(f"{caller}: {lazy!r} has no shape yet; call the model on a batch before it is changed")


class _ModuleReplacer:
    """One walk through a model."""

    def __init__(
        self, model: nn.Module, policies: list[tuple[Callable[[str, nn.Module], bool], ReplacementPolicy]], caller: str
    ) -> None:
        self.replaced: dict[str, tuple[str, str]] = {}
        self._model, self._policies, self._caller = model, policies, caller
        self._names = {id(module): name for name, module in modules_by_fqn(model)}
        self._visited: dict[int, tuple[nn.Module, nn.Module]] = {}  # the old ones are kept alive, so that ids stay theirs

    @property
    def num_visited(self) -> int:
        return len(self._visited)

    def visit(self, module: nn.Module) -> nn.Module:
        """What is to stand in the place of ``module``: itself, perhaps changed inside, or its replacement."""
        if id(module) in self._visited:
            return self._visited[id(module)][1]
        self._visited[id(module)] = (module, module)
        name, before = self._names.get(id(module)), type(module)
        new = None if name is None else self._apply_policy(module, name)
        if name is None or new is None or (new is module and type(new) is before):
            for key, child in list(module._modules.items()):
                if child is not None and (after := self.visit(child)) is not child:
                    if name is None and key == "_orig_mod":  # torch.compile has bound the old one, and would go on calling it
                        raise ConfigError(f"{self._caller}: {self._names[id(child)]!r} {_ALREADY_COMPILED}")
                    module._modules[key] = after
            return module
        self.replaced[name] = (before.__name__, type(new).__name__)
        self._visited[id(module)] = (module, new)
        return new

    def _apply_policy(self, module: nn.Module, name: str) -> nn.Module | None:
        policy = next((policy for fits, policy in self._policies if fits(name, module)), None)
        new = None if policy is None else policy(module, name)
        if new is None or new is module:
            return new
        if not isinstance(new, nn.Module):
            raise ConfigError(f"{self._caller}: a policy returned {new!r} for {name or 'the root'!r}; return a module, or None")
        if module._compiled_call_impl is not None:
            raise ConfigError(f"{self._caller}: {name or 'the root'!r} {_ALREADY_COMPILED}")
        kept = {id(inner) for inner in new.modules()}
        lost = [key for key in _HOOK_ATTRIBUTES if getattr(module, key)] + [
            key for key in ("forward",) if key in module.__dict__
        ]
        if lost and id(module) not in kept:
            raise ConfigError(
                f"{self._caller}: {name or 'the root'!r} has {lost[0].strip('_').replace('_', ' ')} of its own, which would be "
                "lost; change the model before hooks, checkpoint_activations and the like"
            )
        _match_mode_device_dtype_(new, module, self._model)
        return new


def _build_matcher(key: Any, caller: str) -> Callable[[str, nn.Module], bool]:
    kinds = _classes_of(key)
    if kinds and all(issubclass(kind, nn.Module) for kind in kinds):
        return lambda name, module: type(module) in kinds
    if callable(key) and not isinstance(key, type):
        chooses: Callable[[str, nn.Module], bool] = key
        return chooses
    raise ConfigError(
        f"{caller}: a policy is for a module class, a tuple of them, or a function of (name, module), got {key!r}; "
        "e.g. {nn.Dropout: lambda module, name: nn.Identity()}"
    )


def _classes_of(key: Any) -> tuple[type[Any], ...]:
    """The classes that a key names; none of a function."""
    kinds = key if isinstance(key, tuple) else (key,)
    return kinds if all(isinstance(kind, type) for kind in kinds) else ()


def _count_classes(model: nn.Module) -> str:
    kinds = Counter(type(module).__name__ for module in model.modules())
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(6)]
    return ", ".join(shown) + (", ..." if len(kinds) > 6 else "")


def _match_mode_device_dtype_(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Mode, device and dtype of ``old`` for what is new in ``new``. Mutates: ``new``, but for what it keeps of ``old``."""
    kept = {id(module) for module in old.modules()}
    theirs = {id(tensor) for tensor in _params_and_buffers(old)}
    like = next(iter(_params_and_buffers(old)), None)
    like = like if like is not None else next(iter(_params_and_buffers(model)), None)
    floating = next(
        (tensor for tensor in chain(_params_and_buffers(old), _params_and_buffers(model)) if tensor.is_floating_point()), None
    )
    there: dict[int, nn.Parameter] = {}  # tied among the new stays tied

    def moved(tensor: Tensor) -> Tensor:
        if like is None or id(tensor) in theirs:
            return tensor
        dtype = floating.dtype if floating is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(like.device, dtype)

    with torch.no_grad():
        for module in new.modules():
            if id(module) in kept:
                continue
            module.training = old.training
            for key, param in module._parameters.items():
                if param is not None and (to := moved(param)) is not param:
                    module._parameters[key] = there.setdefault(id(param), nn.Parameter(to, requires_grad=param.requires_grad))
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else moved(buffer)


def _params_and_buffers(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def find_imported_class(module: str, name: str) -> type[nn.Module] | None:
    """The class ``name`` of ``module`` where this process has imported that, else None. Nothing is imported.

    Example:
        >>> find_imported_class("torch.nn", "Linear"), find_imported_class("a.library.that.is.not.there", "Linear")
        (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def check_non_negative_int(value: object, caller: str, name: str) -> None:
    """Refuse what is no whole number of at least 0.

    Raises:
        ConfigError: with the name of the argument.
    """
    if type(value) is not int or value < 0:
        raise ConfigError(f"{caller}: {name} must be a whole number of at least 0, got {value!r}")


def check_size_or_fraction(value: object, caller: str, name: str) -> None:
    """Refuse what is neither a whole number of at least 1 nor a fraction between 0 and 1.

    Raises:
        ConfigError: with the name of the argument.
    """
    whole = type(value) is int and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise ConfigError(
            f"{caller}: {name} must be a whole number of at least 1, or a fraction between 0 and 1, got {value!r}"
        )


def resolve_size(value: int | float, of: int) -> int:
    """``value`` itself, or as a fraction of ``of``: rounded down, at least 1.

    >>> resolve_size(64, 10), resolve_size(0.25, 10), resolve_size(0.01, 10)
    (64, 2, 1)
    """
    return value if isinstance(value, int) else max(1, int(value * of))
