"""Replace modules of a model by policies (``replace_modules``), and change the class of a module in place (``swap_class``).

``swap_class`` keeps the parameters, hooks and names of the module. A ``Mixin`` precedes the module's own class: ``Blur`` and
``nn.Conv2d`` form ``BlurConv2d``, whose ``forward`` calls the ``forward`` of ``nn.Conv2d``. The module is still an
``nn.Conv2d`` (or a user's block, which ``shard_model(blocks=(Block,))`` finds), and several edits combine. A complete class
such as ``LowPrecisionLayerNorm`` is set in the same way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn, unwrap_module
from dtrain.shard.spec import get_spec

ModuleSelector: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]"
"""Selects modules by class (without subclasses, which may compute something else), by classes, or by (name, module)."""

ReplacementPolicy: TypeAlias = "Callable[[nn.Module, str], nn.Module | None]"
"""A function ``(module, name)`` that returns the replacement, or None to leave the module unchanged."""

_ALREADY_COMPILED = "is compiled already, and its replacement would not be compiled. Edit the model before torch.compile."
_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SurgeryReport:
    """The result of ``replace_modules``.

    Args:
        model: the edited model; a different module only if the root was replaced.
        replaced: clean name -> (old class, new class). A module with several names is listed once, under its first name.

    Formula: ``replaced[name] == (old class, new class)``

    Example:
        >>> import dtrain as dt
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.ReLU())
        >>> dt.surgery.replace_modules(model, {nn.ReLU: lambda module, name: nn.GELU()})
        2 modules replaced: 2 ReLU by GELU (1, 3)

    Source: dtrain.
    """

    model: nn.Module
    replaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        kinds = Counter(self.replaced.values())
        rows = []
        for (old, new), count in kinds.items():
            names = [name or "the root" for name, pair in self.replaced.items() if pair == (old, new)]
            listed = ", ".join(names[:3]) + (", ..." if count > 3 else "")
            rows.append(f"{count} {old} by {new} ({listed})")
        total = len(self.replaced)
        return f"{total} module{'' if total == 1 else 's'} replaced" + (f": {'; '.join(rows)}" if rows else "")


def replace_modules(model: nn.Module, policies: Mapping[Any, ReplacementPolicy], *, missing_ok: bool = False) -> SurgeryReport:
    """Replace the modules that ``policies`` selects; return a report.

    Parents are visited before children. A replaced module and its replacement are not searched, so a policy may wrap a module
    of its own class. A module with several names is replaced once, at all names. New modules get the mode of the old module,
    and new tensors get its device and floating-point dtype. If the old module has no tensors, the model's device and dtype are
    used. Modules that the replacement reuses do not change.

    Formula: ``parent.child = policy(parent.child, name)``

    Args:
        model: plain module before ``shard_model``, ``torch.compile`` and ``checkpoint_activations``; on meta, too.
        policies: selector -> function that returns the new module, or changes the class of the old module (see ``Mixin``). The
            first matching selector decides. Selectors are a class, a tuple of classes or a function of (name, module).
        missing_ok: if True, do not raise if nothing is replaced.

    Mutates: ``model``; hooks of reused and changed modules stay. Build optimizers afterwards, because new Parameter objects are
        in no existing optimizer. Reused parameters stay tied.

    Example:
        >>> import dtrain as dt
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
        >>> report = dt.surgery.replace_modules(
        ...     model,
        ...     {nn.Linear: lambda module, name: nn.Identity() if name == "1.1" else None},
        ... )
        >>> report.replaced
        {'1.1': ('Linear', 'Identity')}

    Raises:
        ConfigError: nothing to replace, no policies, a policy that returns another type, a sharded, wrapped or lazy model, or a
            module whose hooks, own ``forward`` or compiled code would be lost.

    Source: the interface follows MosaicML Composer's ``module_surgery.replace_module_classes``. Unlike there, a policy without
        a match raises, and a class does not select its subclasses.
    """
    return apply_policies(model, policies, caller="replace_modules", missing_ok=missing_ok)


def apply_policies(
    model: nn.Module, policies: Mapping[Any, ReplacementPolicy], *, caller: str, missing_ok: bool = False
) -> SurgeryReport:
    """Replace modules as ``replace_modules`` does. Errors begin with ``caller``."""
    check_plain_model(model, caller)
    if not isinstance(policies, Mapping) or not policies:
        raise ConfigError(
            f"{caller}: policies must be a mapping of module classes to functions of (module, name), got {policies!r}. "
            "Pass {nn.Linear: function}, for example."
        )
    surgery = _ModuleReplacer(model, [(_build_matcher(key, caller), policy) for key, policy in policies.items()], caller)
    new_model = surgery.visit(model)
    if not surgery.replaced and not missing_ok:
        searched = ", ".join(kind.__name__ for key in policies for kind in _classes_of(key))
        raise ConfigError(
            f"{caller}: nothing to replace: none of the {surgery.num_visited} modules of the {type(model).__name__} "
            f"({_count_classes(model)}) matches{f' ({searched})' if searched else ''}. Select other modules."
        )
    return SurgeryReport(model=new_model, replaced=surgery.replaced)


def check_plain_model(model: object, caller: str) -> None:
    """Check that ``model`` is plain, because surgery comes before wrapping and sharding.

    Raises:
        ConfigError: ``model`` is no module, is wrapped or sharded, or has a sharded or lazy submodule.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}. Pass the model, not its parameters."
        )
    if unwrap_module(model) is not model:
        raise ConfigError(f"{caller}: model must not be wrapped in {type(model).__name__}. Edit the model before wrapping.")
    is_sharded = any(get_spec(module).mesh is not None for module in model.modules())
    if is_sharded or any(is_dtensor(param) for param in model.parameters()):
        raise ConfigError(f"{caller}: the {type(model).__name__} is sharded already. Edit the model before shard_model.")
    lazy = next((name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)), None)
    # A lazy module changes its class at its first call.
    if lazy is not None:
        raise ConfigError(f"{caller}: {lazy!r} has no shape yet. Call the model on a batch before the edit.")


class _ModuleReplacer:
    """One traversal of a model."""

    def __init__(
        self, model: nn.Module, policies: list[tuple[Callable[[str, nn.Module], bool], ReplacementPolicy]], caller: str
    ) -> None:
        self.replaced: dict[str, tuple[str, str]] = {}
        self._model, self._policies, self._caller = model, policies, caller
        self._names = {id(module): name for name, module in modules_by_fqn(model)}
        # Old modules stay alive, so that their ids are not reused.
        self._visited: dict[int, tuple[nn.Module, nn.Module]] = {}

    @property
    def num_visited(self) -> int:
        return len(self._visited)

    def visit(self, module: nn.Module) -> nn.Module:
        """Return ``module``, perhaps edited inside, or its replacement."""
        if id(module) in self._visited:
            return self._visited[id(module)][1]
        self._visited[id(module)] = (module, module)
        name, old_class = self._names.get(id(module)), type(module)
        new = None if name is None else self._apply_policy(module, name)
        if name is None or new is None or (new is module and type(new) is old_class):
            for key, child in list(module._modules.items()):
                if child is not None and (new_child := self.visit(child)) is not child:
                    # torch.compile has bound the old module and would continue to call it.
                    if name is None and key == "_orig_mod":
                        raise ConfigError(f"{self._caller}: {self._names[id(child)]!r} {_ALREADY_COMPILED}")
                    module._modules[key] = new_child
            return module
        self.replaced[name] = (old_class.__name__, type(new).__name__)
        self._visited[id(module)] = (module, new)
        return new

    def _apply_policy(self, module: nn.Module, name: str) -> nn.Module | None:
        policy = next((policy for is_match, policy in self._policies if is_match(name, module)), None)
        new = None if policy is None else policy(module, name)
        if new is None or new is module:
            return new
        if not isinstance(new, nn.Module):
            raise ConfigError(
                f"{self._caller}: a policy must return a module or None, got {new!r} for {name or 'the root'!r}. "
                "Return None to keep the module."
            )
        if module._compiled_call_impl is not None:
            raise ConfigError(f"{self._caller}: {name or 'the root'!r} {_ALREADY_COMPILED}")
        reused = {id(inner) for inner in new.modules()}
        lost_attributes = [key for key in _HOOK_ATTRIBUTES if getattr(module, key)] + [
            key for key in ("forward",) if key in module.__dict__
        ]
        if lost_attributes and id(module) not in reused:
            raise ConfigError(
                f"{self._caller}: the replacement of {name or 'the root'!r} would lose "
                f"{lost_attributes[0].strip('_').replace('_', ' ')}. Edit the model before adding hooks, and before "
                "checkpoint_activations."
            )
        _match_mode_device_dtype_(new, module, self._model)
        return new


def _build_matcher(key: Any, caller: str) -> Callable[[str, nn.Module], bool]:
    kinds = _classes_of(key)
    if kinds and all(issubclass(kind, nn.Module) for kind in kinds):
        return lambda name, module: type(module) in kinds
    if callable(key) and not isinstance(key, type):
        predicate: Callable[[str, nn.Module], bool] = key
        return predicate
    raise ConfigError(
        f"{caller}: keys of policies must be module classes, tuples of classes or functions of (name, module), got {key!r}. "
        "Pass for example {nn.Dropout: lambda module, name: nn.Identity()}."
    )


def _classes_of(key: Any) -> tuple[type[Any], ...]:
    """Return the classes of a selector; () for a function."""
    kinds = key if isinstance(key, tuple) else (key,)
    return kinds if all(isinstance(kind, type) for kind in kinds) else ()


def _count_classes(model: nn.Module) -> str:
    kinds = Counter(type(module).__name__ for module in model.modules())
    listed = [f"{count} {kind}" for kind, count in kinds.most_common(6)]
    return ", ".join(listed) + (", ..." if len(kinds) > 6 else "")


def _match_mode_device_dtype_(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Set mode, device and dtype of new modules as in ``old``. Mutates: ``new``, except modules reused from ``old``."""
    reused_modules = {id(module) for module in old.modules()}
    reused_tensors = {id(tensor) for tensor in _params_and_buffers(old)}
    tensors = [*_params_and_buffers(old), *_params_and_buffers(model)]
    like = next(iter(tensors), None)
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    # Tied new parameters stay tied.
    tied: dict[int, nn.Parameter] = {}

    def convert(tensor: Tensor) -> Tensor:
        if like is None or id(tensor) in reused_tensors:
            return tensor
        dtype = floating.dtype if floating is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(like.device, dtype)

    with torch.no_grad():
        for module in new.modules():
            if id(module) in reused_modules:
                continue
            module.training = old.training
            for key, param in module._parameters.items():
                if param is not None and (converted := convert(param)) is not param:
                    new_param = nn.Parameter(converted, requires_grad=param.requires_grad)
                    module._parameters[key] = tied.setdefault(id(param), new_param)
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else convert(buffer)


def _params_and_buffers(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def find_imported_class(module: str, name: str) -> type[nn.Module] | None:
    """Return the class ``name`` of ``module`` if this process imported the module, else None. Nothing is imported.

    A model of a library can only come from a process that imported the library.

    >>> (
    ...     find_imported_class("torch.nn", "Linear"),
    ...     find_imported_class("a.library.that.is.not.there", "Linear"),
    ... )
    (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    value = getattr(sys.modules.get(module), name, None)
    return value if isinstance(value, type) and issubclass(value, nn.Module) else None


def check_size_or_fraction(value: object, caller: str, name: str) -> None:
    """Check that ``value`` is an integer >= 1 or a fraction between 0 and 1.

    Raises:
        ConfigError: with the name of the argument.
    """
    is_size = type(value) is int and value >= 1
    if not is_size and not (isinstance(value, float) and 0 < value < 1):
        raise ConfigError(
            f"{caller}: {name} must be an integer >= 1 or a fraction between 0 and 1, got {value!r}. Pass 0.25, for example."
        )


def resolve_size(value: int | float, of: int) -> int:
    """Return ``value``, or a fraction of ``of`` rounded down, at least 1.

    >>> resolve_size(64, 10), resolve_size(0.25, 10), resolve_size(0.01, 10)
    (64, 2, 1)
    """
    return value if isinstance(value, int) else max(1, int(value * of))


class Mixin(nn.Module):
    """Base class of mixins. A mixin stores its settings in attributes that begin with ``_``, which no constructor takes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A combined class cannot be imported by name, so copies and pickles store its base class and mixins.
        base, *mixins = _split_combined_class(type(self))
        return _new_instance, (base, mixins), self.__getstate__()  # type: ignore[no-untyped-call]


AnyMixin = TypeVar("AnyMixin", bound=Mixin)


def add_mixin(module: nn.Module, mixin: type[AnyMixin]) -> AnyMixin | None:
    """Put ``mixin`` in front of the class of ``module``, and return the module; None if the module has the mixin already.

    Mutates: ``module.__class__``.
    """
    if isinstance(module, mixin):
        return None
    pair: Any = (mixin, type(module))
    swap_class(module, _combined_class(*pair))
    assert isinstance(module, mixin)
    return module


def mix_in(
    model: nn.Module,
    mixin: type[AnyMixin],
    is_selected: Callable[[str, nn.Module], bool],
    set_up: Callable[[AnyMixin, str], None] = lambda module, name: None,
    *,
    caller: str,
) -> nn.Module:
    """Add ``mixin`` to the selected modules that do not have it, call ``set_up(module, name)`` with each; return the model.

    Mutates: the selected modules.

    Raises:
        ConfigError: as ``apply_policies``.
    """

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        mixed = add_mixin(module, mixin)
        if mixed is not None:
            set_up(mixed, name)
        return mixed

    return apply_policies(model, {is_selected: policy}, caller=caller).model


def swap_class(module: nn.Module, kind: Any) -> nn.Module:
    """Set the class of ``module`` to ``kind``, a subclass of its class that stores nothing in ``__init__``; return the module.

    Mutates: ``module.__class__``.

    Raises:
        ConfigError: the module has its own ``forward``, which would hide the ``forward`` of the class.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> linear = nn.Linear(1, 1, bias=False)
        >>> (
        ...     bool(swap_class(linear, Doubled)(torch.ones(1)) == 2 * linear.weight),
        ...     list(linear.state_dict()),
        ... )
        (True, ['weight'])
    """
    if "forward" in module.__dict__:
        raise ConfigError(
            f"surgery: a {type(module).__name__} has its own forward, which would hide the forward of the new class. Edit the "
            "model before checkpoint_activations and before replacing forward."
        )
    module.__class__ = kind
    return module


# One class per pair, so that class comparisons and the compiler see the same class.
@cache
def _combined_class(mixin: Any, base: Any) -> Any:
    name = f"{mixin.__name__}{base.__name__}"
    return type(name, (mixin, base), {"__module__": mixin.__module__, "__doc__": mixin.__doc__, "_dtrain_combined": True})


def _split_combined_class(kind: type[nn.Module]) -> list[type[nn.Module]]:
    """Return the base class and then the mixins in the order of addition."""
    if "_dtrain_combined" not in vars(kind):
        return [kind]
    mixin, base = kind.__bases__
    return [*_split_combined_class(base), mixin]


def _new_instance(base: type[nn.Module], mixins: list[type[Mixin]]) -> nn.Module:
    """Return an empty module of the combined class."""
    for mixin in mixins:
        pair: Any = (mixin, base)
        base = _combined_class(*pair)
    return base.__new__(base)
