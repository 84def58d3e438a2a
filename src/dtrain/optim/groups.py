"""Parameter groups by name: which parameters share options, each in exactly one group, and which of them do not decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dtrain.combinators import Where
from dtrain.errors import ConfigError
from dtrain.names import clean_modules, clean_parameters, matcher
from dtrain.tensors import mesh_of

_WHERE = "param_groups"


@dataclass(frozen=True, slots=True)
class Group:
    """A rule of ``param_groups``: these parameters, with these options.

    Formula: ``{name: p for name, p in model.named_parameters() if where fits name}``, each with ``options``

    Args:
        name: of the group, by which ``scale_lr`` and ``scale_option`` find it.
        where: a pattern of names (``*`` is text without a dot, ``**`` any text), several, or a predicate ``(name, param) ->
            bool``; None stands for all that no other rule takes.
        options: of the optimizer, such as ``{"lr": 1e-4}``. A ``weight_decay`` is for all of these parameters; without it,
            that of ``param_groups`` is for those that decay.

    Raises:
        ConfigError: a name that is no text, a ``where`` that is none of these, or ``params`` or ``name`` among the options.

    Source: the groups of ``torch.optim.Optimizer``.

    Example:
        >>> Group("head", "head.**", {"lr": 0.01}).name
        'head'
    """

    name: str
    where: Where | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"Group: needs a name, got {self.name!r}; as in Group('head', 'head.**')")
        if self.where is not None:
            fits(self.where, {}, "Group")
        taken = {"params", "name"} & set(self.options)
        if taken:
            raise ConfigError(f"Group: {self.name!r}: options are the optimizer's, got {sorted(taken)[0]!r}; leave it out")


def param_groups(
    model: nn.Module, *rules: Group, weight_decay: float = 0.01, no_decay: Where | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: every trainable parameter in exactly one, each group with a ``name``.

    A rule's parameters that decay make the group ``name``, the others ``name.no_decay``; without rules these are ``all`` and
    ``all.no_decay``. Where a rule's parameters lie differently (whole beside cut ones, or on several meshes), which torch's
    fused and foreach forms do not take together, each kind has a group of its own, with what it lies on after its name:
    ``all.whole``, ``all.over_dp_all``. Works before and after ``shard_model``, with the same names; the optimizer itself is
    made after it.

    Frozen parameters (``requires_grad`` is False) are in no group. A tied one is there once, under its first name; it fits a
    pattern under any of its names, and does not decay if it is an embedding under one of them.

    Formula: ``weight_decay`` of a group is 0 where ``no_decay`` holds, else ``weight_decay``

    Args:
        model: plain or sharded.
        rules: which parameters have options of their own; they may not overlap, nor leave any out. ``Group("rest")`` takes
            what no other takes.
        weight_decay: of what decays, >= 0.
        no_decay: which parameters do not; None is for all with fewer than two dims (biases, scales), and those of norms and
            embeddings, by the module that owns them: ``torch.nn``'s, and any whose class has ``Norm`` or ``Embedding`` in its
            name.

    Returns:
        Groups as ``torch.optim`` takes them, in the order of the rules: ``{"name", "params", "weight_decay", ...options}``.

    Raises:
        ConfigError: parameters that two rules take, or none does, by name; a rule that fits none; two rules of one name; a
            model without trainable parameters; a ``weight_decay`` that is negative.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, for the decay; leaving out norms and biases, He et al. 2019,
        arXiv:1812.01187, section 3.1.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [(g["name"], len(g["params"]), g["weight_decay"]) for g in param_groups(model, weight_decay=0.1)]
        [('all', 1, 0.1), ('all.no_decay', 4, 0.0)]
        >>> groups = param_groups(model, Group("first", "0.*", {"lr": 0.5}), Group("rest"), weight_decay=0.1)
        >>> [(g["name"], len(g["params"]), g.get("lr")) for g in groups]
        [('first.no_decay', 1, 0.5), ('rest', 1, None), ('rest.no_decay', 3, None)]
    """
    if not isinstance(weight_decay, int | float) or not 0.0 <= weight_decay < float("inf"):
        raise ConfigError(f"{_WHERE}: needs a finite weight_decay >= 0, got {weight_decay!r}")
    params, names = trainable(model)
    spared = _spared(model, params, names) if no_decay is None else fits(no_decay, names, _WHERE)
    groups = []
    for rule, mine in assigned(rules or (Group("all"),), params, names):
        own = "weight_decay" in rule.options
        parts = {rule.name: mine} if own else {
            rule.name: {n: p for n, p in mine.items() if not spared(n, p)},
            f"{rule.name}.no_decay": {n: p for n, p in mine.items() if spared(n, p)},
        }  # fmt: skip
        for name, part in parts.items():
            decay = 0.0 if name != rule.name else weight_decay
            groups += [{"name": n, "params": p, "weight_decay": decay, **rule.options} for n, p in _by_kind(name, part)]
    return groups


def trainable(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Parameters that get gradients, by clean name, and all the names that each of them has.

    Raises:
        ConfigError: no model, or none of its parameters does.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{_WHERE}: needs a model (an nn.Module), got {type(model).__name__}")
    params, aliases = clean_parameters(model)
    params = {name: param for name, param in params.items() if param.requires_grad}
    if not params:
        raise ConfigError(f"{_WHERE}: the model has no trainable parameters; requires_grad is False for all, or there are none")
    names = {name: [name] for name in params}
    for alias, first in aliases.items():
        if first in names:
            names[first].append(alias)
    return params, names


def assigned(
    rules: Sequence[Group], params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> list[tuple[Group, dict[str, Tensor]]]:
    """Each rule with what it takes.

    Raises:
        ConfigError: as ``param_groups`` says.
    """
    strange = next((rule for rule in rules if not isinstance(rule, Group)), None)
    if strange is not None:
        raise ConfigError(f"{_WHERE}: rules are of the class Group, got {strange!r}; as in Group('head', 'head.**')")
    called = [rule.name for rule in rules]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{_WHERE}: two rules are called {twice!r}; give each a name of its own")
    rest = [rule.name for rule in rules if rule.where is None]
    if len(rest) > 1:
        raise ConfigError(f"{_WHERE}: {rest[0]!r} and {rest[1]!r} both take what no other takes; give one of them a where")
    found = {rule.name: _taken(rule, params, names) for rule in rules if rule.where is not None}
    takers = {name: [rule for rule, taken in found.items() if name in taken] for name in params}
    both = [name for name in params if len(takers[name]) > 1]
    if both:
        raise ConfigError(f"{_WHERE}: {' and '.join(takers[both[0]])} both take {listed(both)}; each belongs in one rule")
    left = {name: param for name, param in params.items() if not takers[name]}
    if left and not rest:
        raise ConfigError(f"{_WHERE}: no rule takes {listed(list(left))}; add one without where for them: Group('rest')")
    return [(rule, found.get(rule.name, left)) for rule in rules]


def _taken(rule: Group, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    assert rule.where is not None
    chosen = fits(rule.where, names, _WHERE)
    found = {name: param for name, param in params.items() if chosen(name, param)}
    if not found:
        raise ConfigError(
            f"{_WHERE}: the rule {rule.name!r} fits none of {len(params)} trainable parameters (first: {next(iter(params))!r})"
        )
    return found


def fits(where: Where, names: Mapping[str, Sequence[str]], who: str) -> Callable[[str, Tensor], bool]:
    """``where`` as a predicate; a pattern may fit any of a parameter's names."""
    if callable(where):
        return where
    if not isinstance(where, str | Sequence):
        raise ConfigError(f"{who}: where is a pattern of names, several, or a function (name, param) -> bool, got {where!r}")
    fit = matcher([where] if isinstance(where, str) else where, where=who)
    return lambda name, param: any(fit(each) for each in names.get(name, [name]))


def _spared(
    model: nn.Module, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> Callable[[str, Tensor], bool]:
    """Which parameters do not decay unless something else is said."""
    found = {name for name, param in params.items() if param.ndim < 2}
    found |= set(of_modules(model, lambda m: is_embedding(m) or _called(m, "Norm"), names))
    return lambda name, param: name in found


def of_modules(model: nn.Module, kind: Callable[[nn.Module], bool], names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """First names of parameters that a module of a kind owns, under any of their names."""
    first = {each: name for name, several in names.items() for each in several}
    for prefix, module in clean_modules(model, every_name=True):
        if kind(module):
            keys = (f"{prefix}.{key}" if prefix else key for key in module._parameters)
            yield from (first[key] for key in keys if key in first)


def is_embedding(module: nn.Module) -> bool:
    """Whether a module looks rows up."""
    return _called(module, "Embedding")


def _called(module: nn.Module, word: str) -> bool:
    """Whether the class of ``module``, or one that it is made from, has ``word`` in its name."""
    return any(word in kind.__name__ for kind in type(module).__mro__)


def _by_kind(name: str, part: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """The parameters of a group, split by the mesh that they lie on if there are several."""
    kinds: dict[Any, list[Tensor]] = {}
    for param in part.values():
        kinds.setdefault(mesh_of(param), []).append(param)
    for mesh, params in kinds.items():
        where = "whole" if mesh is None else "over_" + "_".join(mesh.mesh_dim_names or [str(mesh.ndim)])
        yield (name if len(kinds) == 1 else f"{name}.{where}"), params


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
