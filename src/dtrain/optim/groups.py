"""Parameter groups by name: which parameters share options, each in exactly one group, and which of them do not decay.

Which parameters of a model are hidden matrices, for Muon, and which are left to AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dtrain.combinators import ParamFilter
from dtrain.dtensor import tensor_mesh
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn, parameters_by_fqn

_CALLER = "param_groups"


@dataclass(frozen=True, slots=True)
class ParamGroup:
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
    where: ParamFilter | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"Group: needs a name, got {self.name!r}; as in Group('head', 'head.**')")
        if self.where is not None:
            compile_where(self.where, {}, "Group")
        taken = {"params", "name"} & set(self.options)
        if taken:
            raise ConfigError(f"Group: {self.name!r}: options are the optimizer's, got {sorted(taken)[0]!r}; leave it out")


def param_groups(
    model: nn.Module, *rules: ParamGroup, weight_decay: float = 0.01, no_decay: ParamFilter | None = None
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
        raise ConfigError(f"{_CALLER}: needs a finite weight_decay >= 0, got {weight_decay!r}")
    params, names = named_trainable_params(model)
    spared = _default_no_decay(model, params, names) if no_decay is None else compile_where(no_decay, names, _CALLER)
    groups = []
    for rule, mine in assign_to_rules(rules or (ParamGroup("all"),), params, names):
        own = "weight_decay" in rule.options
        parts = {rule.name: mine} if own else {
            rule.name: {n: p for n, p in mine.items() if not spared(n, p)},
            f"{rule.name}.no_decay": {n: p for n, p in mine.items() if spared(n, p)},
        }  # fmt: skip
        for name, part in parts.items():
            decay = 0.0 if name != rule.name else weight_decay
            groups += [{"name": n, "params": p, "weight_decay": decay, **rule.options} for n, p in _split_by_mesh(name, part)]
    return groups


def named_trainable_params(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Parameters that get gradients, by clean name, and all the names that each of them has.

    Raises:
        ConfigError: no model, or none of its parameters does.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{_CALLER}: needs a model (an nn.Module), got {type(model).__name__}")
    params, aliases = parameters_by_fqn(model)
    params = {name: param for name, param in params.items() if param.requires_grad}
    if not params:
        raise ConfigError(
            f"{_CALLER}: the model has no trainable parameters; requires_grad is False for all, or there are none"
        )
    names = {name: [name] for name in params}
    for alias, first in aliases.items():
        if first in names:
            names[first].append(alias)
    return params, names


def assign_to_rules(
    rules: Sequence[ParamGroup], params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> list[tuple[ParamGroup, dict[str, Tensor]]]:
    """Each rule with what it takes.

    Raises:
        ConfigError: as ``param_groups`` says.
    """
    strange = next((rule for rule in rules if not isinstance(rule, ParamGroup)), None)
    if strange is not None:
        raise ConfigError(f"{_CALLER}: rules are of the class Group, got {strange!r}; as in Group('head', 'head.**')")
    called = [rule.name for rule in rules]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{_CALLER}: two rules are called {twice!r}; give each a name of its own")
    rest = [rule.name for rule in rules if rule.where is None]
    if len(rest) > 1:
        raise ConfigError(f"{_CALLER}: {rest[0]!r} and {rest[1]!r} both take what no other takes; give one of them a where")
    found = {rule.name: _match_rule(rule, params, names) for rule in rules if rule.where is not None}
    takers = {name: [rule for rule, taken in found.items() if name in taken] for name in params}
    both = [name for name in params if len(takers[name]) > 1]
    if both:
        raise ConfigError(
            f"{_CALLER}: {' and '.join(takers[both[0]])} both take {format_names(both)}; each belongs in one rule"
        )
    left = {name: param for name, param in params.items() if not takers[name]}
    if left and not rest:
        raise ConfigError(f"{_CALLER}: no rule takes {format_names(list(left))}; add one without where for them: Group('rest')")
    return [(rule, found.get(rule.name, left)) for rule in rules]


def _match_rule(rule: ParamGroup, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    assert rule.where is not None
    chosen = compile_where(rule.where, names, _CALLER)
    found = {name: param for name, param in params.items() if chosen(name, param)}
    if not found:
        raise ConfigError(
            f"{_CALLER}: the rule {rule.name!r} fits none of {len(params)} trainable parameters (first: {next(iter(params))!r})"
        )
    return found


def compile_where(where: ParamFilter, names: Mapping[str, Sequence[str]], caller: str) -> Callable[[str, Tensor], bool]:
    """``where`` as a predicate; a pattern may fit any of a parameter's names."""
    if callable(where):
        return where
    if not isinstance(where, str | Sequence):
        raise ConfigError(f"{caller}: where is a pattern of names, several, or a function (name, param) -> bool, got {where!r}")
    fit = compile_patterns([where] if isinstance(where, str) else where, caller=caller)
    return lambda name, param: any(fit(each) for each in names.get(name, [name]))


def _default_no_decay(
    model: nn.Module, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> Callable[[str, Tensor], bool]:
    """Which parameters do not decay unless something else is said."""
    found = {name for name, param in params.items() if param.ndim < 2}
    found |= set(names_in_modules(model, lambda m: is_embedding(m) or _class_name_contains(m, "Norm"), names))
    return lambda name, param: name in found


def names_in_modules(model: nn.Module, kind: Callable[[nn.Module], bool], names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """First names of parameters that a module of a kind owns, under any of their names."""
    first = {each: name for name, several in names.items() for each in several}
    for prefix, module in modules_by_fqn(model, include_duplicates=True):
        if kind(module):
            keys = (f"{prefix}.{key}" if prefix else key for key in module._parameters)
            yield from (first[key] for key in keys if key in first)


def is_embedding(module: nn.Module) -> bool:
    """Whether a module looks rows up."""
    return _class_name_contains(module, "Embedding")


def _class_name_contains(module: nn.Module, word: str) -> bool:
    """Whether the class of ``module``, or one that it is made from, has ``word`` in its name."""
    return any(word in kind.__name__ for kind in type(module).__mro__)


def _split_by_mesh(name: str, part: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """The parameters of a group, split by the mesh that they lie on if there are several."""
    kinds: dict[Any, list[Tensor]] = {}
    for param in part.values():
        kinds.setdefault(tensor_mesh(param), []).append(param)
    for mesh, params in kinds.items():
        where = "whole" if mesh is None else "over_" + "_".join(mesh.mesh_dim_names or [str(mesh.ndim)])
        yield (name if len(kinds) == 1 else f"{name}.{where}"), params


def format_names(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def muon_groups(
    model: nn.Module,
    *,
    head: ParamFilter,
    matrices: ParamFilter | None = None,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    **options: Any,
) -> list[dict[str, Any]]:
    """Groups for ``Muon``: ``matrices`` with its own method, and the rest, ``adamw`` and ``adamw.no_decay``, with AdamW's.

    Hidden matrices are the trainable parameters with two dims that belong neither to an embedding nor to the head. The head,
    which makes the model's output, cannot be told from a hidden layer, so it has to be named; a head that is tied to an
    embedding is one. Filters of convolutions, with more dims, are left to AdamW.

    Formula: ``matrices = {p : p.ndim == 2} - embeddings - head``

    Args:
        model: plain or sharded; see ``param_groups``, which makes the groups.
        head: a pattern of names, several, or a predicate ``(name, param) -> bool``: what makes the output, such as
            ``"lm_head.*"``; ``()`` if there is none.
        matrices: which parameters are hidden matrices, where those of the formula are not meant.
        lr: of the matrices, the peak.
        adamw_lr: of the rest.
        weight_decay: of both, but for norms, biases and embeddings.
        options: of ``Muon`` for the matrices.

    Raises:
        ConfigError: ``head`` fits nothing, ``matrices`` fits an embedding, the head, or what is no matrix; a model without
        hidden matrices.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", section on embeddings and heads.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 5))
        >>> [(g["name"], g["method"], [tuple(p.shape) for p in g["params"]]) for g in muon_groups(model, head="2.*")]
        [('matrices', 'muon', [(4, 2)]), ('adamw', 'adamw', [(5, 4)]), ('adamw.no_decay', 'adamw', [(5, 2), (4,), (5,)])]
    """
    params, names = named_trainable_params(model)
    is_head = compile_where(head, names, "muon_groups")
    heads = {name for name, param in params.items() if is_head(name, param)}
    if not heads and not (isinstance(head, (list, tuple)) and not head):
        raise ConfigError(f"muon_groups: {head=} fits none of {len(params)} trainable parameters; pass () if there is none")
    embeddings = set(names_in_modules(model, is_embedding, names))
    barred = {name: _reason_not_hidden(param, name in heads, name in embeddings) for name, param in params.items()}
    hidden = {name for name in params if barred[name] is None}
    if matrices is not None:
        chosen = compile_where(matrices, names, "muon_groups")
        hidden = {name for name, param in params.items() if chosen(name, param)}
        wrong = [name for name in hidden if barred[name] is not None]
        if wrong:
            raise ConfigError(
                f"muon_groups: matrices fits {format_names(wrong)}, which {barred[wrong[0]]}; Muon is for hidden "
                "matrices; leave it to AdamW"
            )
    if not hidden:
        raise ConfigError("muon_groups: no trainable parameter is a hidden matrix; torch.optim.AdamW is enough")
    own = {"method": "muon", "lr": lr, "weight_decay": weight_decay, **options}
    muon = ParamGroup("matrices", lambda name, param: name in hidden, own)
    rest = ParamGroup("adamw", None, {"method": "adamw", "lr": adamw_lr})
    return param_groups(model, muon, *([rest] if len(hidden) < len(params) else []), weight_decay=weight_decay)


def _reason_not_hidden(param: Tensor, head: bool, embedding: bool) -> str | None:
    """Why a parameter is no hidden matrix."""
    if param.ndim != 2:
        return f"has {param.ndim} dims"
    return "belongs to an embedding" if embedding else "belongs to the head" if head else None
