"""Make parameter groups by name, each parameter in exactly one group, with and without weight decay.

``muon_groups`` separates hidden matrices, for Muon, from all other parameters, for AdamW. The last functions are for the
``step`` of optimizers: they choose torch's fused, foreach or plain implementation, and call a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.arguments import check_number, explain_fields
from dtrain.dist.dtensor import tensor_mesh
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn, parameters_by_fqn
from dtrain.transforms.combinators import ParamFilter

_CALLER = "param_groups"
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


@explain_fields
@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A rule of ``param_groups`` that gives matching parameters their own options.

    Formula: ``{name: p for name, p in model.named_parameters() if select matches name}``, each with ``options``

    Args:
        name: name of the group for ``scale_lr`` and ``scale_option``.
        select: name patterns (``*`` matches text without a dot, ``**`` any text) or a predicate ``(name, param) -> bool``; None
            matches all parameters that no other rule matches.
        options: optimizer options such as ``{"lr": 1e-4}``. A ``weight_decay`` here applies to all matching parameters. Without
            one, the ``weight_decay`` of ``param_groups`` applies to parameters that decay.

    Example:
        >>> import dtrain as dt
        >>> dt.optim.ParamGroup("head", "head.**", {"lr": 0.01}).name
        'head'

    Raises:
        ConfigError: an invalid ``name`` or ``select``, or ``params`` or ``name`` among the options.

    Source: the groups of ``torch.optim.Optimizer``.
    """

    name: str
    select: ParamFilter | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"ParamGroup: name must be a non-empty string, got {self.name!r}. "
                "Pass for example ParamGroup('head', 'head.**')."
            )
        if self.select is not None:
            compile_select(self.select, {}, "ParamGroup")
        reserved = {"params", "name"} & set(self.options)
        if reserved:
            raise ConfigError(
                f"ParamGroup: options of {self.name!r} must be optimizer options, got {sorted(reserved)[0]!r}. "
                "Leave the key out."
            )


def param_groups(
    model: nn.Module, *rules: ParamGroup, weight_decay: float = 0.01, no_decay: ParamFilter | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: every trainable parameter in exactly one named group.

    Parameters of a rule that decay form the group ``name``, and parameters without decay form ``name.no_decay``. Without rules
    the groups are ``all`` and ``all.no_decay``. torch's fused and foreach implementations need all parameters of a group on one
    mesh. A group with several placements is therefore split, with a suffix: ``all.whole``, ``all.over_dp_all``. Names are the
    same before and after ``shard_model``; build the optimizer after ``shard_model``.

    Frozen parameters (``requires_grad`` is False) are in no group. A tied parameter is listed once, under its first name. A
    pattern may match any of its names, and the parameter does not decay if one of its names belongs to an embedding.

    Formula: ``weight_decay`` of a group is 0 for parameters that match ``no_decay``, else ``weight_decay``

    Args:
        model: plain or sharded.
        rules: parameters with their own options; rules must not overlap and must cover all parameters. ``ParamGroup("rest")``
            matches all remaining parameters.
        weight_decay: weight decay of parameters that decay, >= 0.
        no_decay: parameters without decay; None selects parameters with fewer than two dims (biases, scales), and all
            parameters of norms and embeddings: modules of ``torch.nn`` and classes with ``Norm`` or ``Embedding`` in their
            names.

    Returns:
        Groups for ``torch.optim``, in the order of the rules: ``{"name", "params", "weight_decay", ...options}``.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(5, 2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
        ... )
        >>> [
        ...     (g["name"], len(g["params"]), g["weight_decay"])
        ...     for g in dt.optim.param_groups(model, weight_decay=0.1)
        ... ]
        [('all', 1, 0.1), ('all.no_decay', 4, 0.0)]
        >>> first, rest = (
        ...     dt.optim.ParamGroup("first", "0.*", {"lr": 0.5}),
        ...     dt.optim.ParamGroup("rest"),
        ... )
        >>> groups = dt.optim.param_groups(model, first, rest, weight_decay=0.1)
        >>> [(g["name"], len(g["params"]), g.get("lr")) for g in groups]
        [('first.no_decay', 1, 0.5), ('rest', 1, None), ('rest.no_decay', 3, None)]

    Raises:
        ConfigError: parameters that several rules or no rule matches, by name; a rule without a match; two rules of one name; a
            model without trainable parameters; a negative ``weight_decay``.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, for the decay; no decay of norms and biases: He et al. 2019,
        arXiv:1812.01187, section 3.1.

    Suggested values:
        GPT-3: ``weight_decay=0.1`` (Brown et al. 2020, arXiv:2005.14165, appendix B)
        ImageNet, ResNet-50: no decay of biases and norms (He et al. 2019, section 3.1)
    When not to use: all parameters have the same options and no decay: ``model.parameters()`` is enough.
    """
    check_number(_CALLER, "weight_decay", weight_decay, minimum=0)
    params, names = named_trainable_params(model)
    excluded = _default_no_decay(model, params, names) if no_decay is None else compile_select(no_decay, names, _CALLER)
    groups = []
    for rule, matched in assign_to_rules(rules or (ParamGroup("all"),), params, names):
        sets_decay = "weight_decay" in rule.options
        parts = {rule.name: matched} if sets_decay else {
            rule.name: {n: p for n, p in matched.items() if not excluded(n, p)},
            f"{rule.name}.no_decay": {n: p for n, p in matched.items() if excluded(n, p)},
        }  # fmt: skip
        for name, members in parts.items():
            decay = 0.0 if name != rule.name else weight_decay
            groups += [
                {"name": n, "params": p, "weight_decay": decay, **rule.options} for n, p in _split_by_mesh(name, members)
            ]
    return groups


def named_trainable_params(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return trainable parameters by clean name, and all names of each parameter.

    Raises:
        ConfigError: ``model`` is no module, or has no trainable parameter.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{_CALLER}: model must be a torch.nn.Module, got {type(model).__name__}. Pass the model, not its parameters."
        )
    params, aliases = parameters_by_fqn(model)
    params = {name: param for name, param in params.items() if param.requires_grad}
    if not params:
        raise ConfigError(f"{_CALLER}: the model has no trainable parameters. Set requires_grad of some parameters.")
    names = {name: [name] for name in params}
    for alias, first in aliases.items():
        if first in names:
            names[first].append(alias)
    return params, names


def assign_to_rules(
    rules: Sequence[ParamGroup], params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> list[tuple[ParamGroup, dict[str, Tensor]]]:
    """Return each rule with its parameters.

    Raises:
        ConfigError: as in ``param_groups``.
    """
    invalid = next((rule for rule in rules if not isinstance(rule, ParamGroup)), None)
    if invalid is not None:
        raise ConfigError(
            f"{_CALLER}: rules must be ParamGroup objects, got {invalid!r}. Pass for example ParamGroup('head', 'head.**')."
        )
    rule_names = [rule.name for rule in rules]
    duplicate = next((name for name in rule_names if rule_names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(f"{_CALLER}: names of rules must be unique, got {duplicate!r} twice. Rename a rule.")
    rest = [rule.name for rule in rules if rule.select is None]
    if len(rest) > 1:
        raise ConfigError(
            f"{_CALLER}: only one rule may have no select, got {rest[0]!r} and {rest[1]!r}. Add select= to a rule."
        )
    matches = {rule.name: _match_rule(rule, params, names) for rule in rules if rule.select is not None}
    matching_rules = {name: [rule for rule, matched in matches.items() if name in matched] for name in params}
    overlapping = [name for name in params if len(matching_rules[name]) > 1]
    if overlapping:
        raise ConfigError(
            f"{_CALLER}: the rules {' and '.join(matching_rules[overlapping[0]])} both match {format_names(overlapping)}. "
            "Let one rule match each parameter."
        )
    unmatched = {name: param for name, param in params.items() if not matching_rules[name]}
    if unmatched and not rest:
        raise ConfigError(
            f"{_CALLER}: no rule matches {format_names(list(unmatched))}. Add a rule without select: ParamGroup('rest')."
        )
    return [(rule, matches.get(rule.name, unmatched)) for rule in rules]


def _match_rule(rule: ParamGroup, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    assert rule.select is not None
    is_match = compile_select(rule.select, names, _CALLER)
    matched = {name: param for name, param in params.items() if is_match(name, param)}
    if not matched:
        raise ConfigError(
            f"{_CALLER}: the rule {rule.name!r} matches none of {len(params)} trainable parameters "
            f"(first: {next(iter(params))!r}). Correct the pattern."
        )
    return matched


def compile_select(select: ParamFilter, names: Mapping[str, Sequence[str]], caller: str) -> Callable[[str, Tensor], bool]:
    """Return ``select`` as a predicate. A pattern may match any name of a parameter."""
    if callable(select):
        return select
    if not isinstance(select, str | Sequence):
        raise ConfigError(
            f"{caller}: select must be name patterns or a function (name, param) -> bool, got {select!r}. "
            "Pass select='*.bias', for example."
        )
    is_match = compile_patterns([select] if isinstance(select, str) else select, caller=caller)
    return lambda name, param: any(is_match(alias) for alias in names.get(name, [name]))


def _default_no_decay(
    model: nn.Module, params: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> Callable[[str, Tensor], bool]:
    """Return the default predicate of parameters without decay."""
    excluded = {name for name, param in params.items() if param.ndim < 2}
    excluded |= set(names_in_modules(model, lambda m: is_embedding(m) or _class_name_contains(m, "Norm"), names))
    return lambda name, param: name in excluded


def names_in_modules(model: nn.Module, kind: Callable[[nn.Module], bool], names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the first names of parameters that a matching module owns, under any of their names."""
    first_names = {alias: name for name, aliases in names.items() for alias in aliases}
    for prefix, module in modules_by_fqn(model, include_duplicates=True):
        if kind(module):
            keys = (f"{prefix}.{key}" if prefix else key for key in module._parameters)
            yield from (first_names[key] for key in keys if key in first_names)


def is_embedding(module: nn.Module) -> bool:
    """Return True if a module is an embedding."""
    return _class_name_contains(module, "Embedding")


def _class_name_contains(module: nn.Module, word: str) -> bool:
    """Return True if the class of ``module``, or a base class, has ``word`` in its name."""
    return any(word in kind.__name__ for kind in type(module).__mro__)


def _split_by_mesh(name: str, members: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield a group's parameters, split by mesh if there are several meshes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for param in members.values():
        by_mesh.setdefault(tensor_mesh(param), []).append(param)
    for mesh, params in by_mesh.items():
        suffix = "whole" if mesh is None else "over_" + "_".join(mesh.mesh_dim_names or [str(mesh.ndim)])
        yield (name if len(by_mesh) == 1 else f"{name}.{suffix}"), params


def format_names(names: Sequence[str]) -> str:
    """Return the first five names as text."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def muon_groups(
    model: nn.Module,
    *,
    head: ParamFilter,
    matrices: ParamFilter | None = None,
    stacked: ParamFilter | None = None,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return groups for ``Muon``: ``matrices`` with Muon's method, ``adamw`` and ``adamw.no_decay`` with AdamW.

    Hidden matrices are trainable parameters with two dims outside of embeddings and the head. The head computes the model's
    output and must be named, because its shape does not differ from a hidden layer. A head tied to an embedding is recognized.
    Convolution filters have more dims and use AdamW.

    Formula: ``matrices = {p : p.ndim == 2} - embeddings - head``

    Args:
        model: plain or sharded; see ``param_groups``.
        head: name patterns, or a predicate ``(name, param) -> bool``, for the output layer, such as ``"lm_head.*"``; ``()`` if
            there is none.
        matrices: parameters to treat as hidden matrices; None uses the formula.
        stacked: parameters ``[experts, rows, cols]`` to treat as stacks of hidden matrices, such as ``"**.experts.*"``; they
            form the group ``stacks``. None for no stacks, because filters of convolutions may have three dims, too.
        lr: peak learning rate of the matrices.
        adamw_lr: peak learning rate of the other parameters.
        weight_decay: weight decay of both, except norms, biases and embeddings.
        options: options of ``Muon`` for the matrices. ``method="matrix"`` makes groups for another ``MatrixOptimizer``.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(5, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 5)
        ... )
        >>> groups = dt.optim.muon_groups(model, head="2.*")
        >>> [(g["name"], g["method"], [tuple(p.shape) for p in g["params"]]) for g in groups]
        [('matrices', 'muon', [(4, 2)]), ('adamw', 'adamw', [(5, 4)]), ('adamw.no_decay', 'adamw', [(5, 2), (4,), (5,)])]

    Raises:
        ConfigError: ``head`` matches nothing, ``matrices`` matches an embedding, the head or a parameter without two dims,
            ``stacked`` matches a parameter without three dims, or the model has no hidden matrix.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", section on embeddings and heads.
    """
    params, names = named_trainable_params(model)
    is_head = compile_select(head, names, "muon_groups")
    heads = {name for name, param in params.items() if is_head(name, param)}
    if not heads and not (isinstance(head, (list, tuple)) and not head):
        raise ConfigError(
            f"muon_groups: {head=} matches none of {len(params)} trainable parameters. Pass () if the model has no head."
        )
    embeddings = set(names_in_modules(model, is_embedding, names))
    reasons = {name: _reason_not_hidden(param, name in heads, name in embeddings) for name, param in params.items()}
    hidden = {name for name in params if reasons[name] is None}
    if matrices is not None:
        is_match = compile_select(matrices, names, "muon_groups")
        hidden = {name for name, param in params.items() if is_match(name, param)}
        invalid = [name for name in hidden if reasons[name] is not None]
        if invalid:
            raise ConfigError(
                f"muon_groups: matrices must match hidden matrices only, got {format_names(invalid)}, which "
                f"{reasons[invalid[0]]}. Use AdamW for other parameters."
            )
    is_stack = compile_select(() if stacked is None else stacked, names, "muon_groups")
    stacks = {name for name, param in params.items() if is_stack(name, param)}
    flat = next((name for name in stacks if params[name].ndim != 3), None)
    if (stacked is not None and not stacks) or flat is not None:
        got = f"{stacked!r}, which matches none" if flat is None else f"{flat}, which has {params[flat].ndim} dims"
        raise ConfigError(
            f"muon_groups: stacked must match parameters with three dims, got {got}. Name the matrices of experts, such "
            "as '**.experts.*'."
        )
    if not hidden and not stacks:
        raise ConfigError("muon_groups: no trainable parameter is a hidden matrix. Use torch.optim.AdamW.")
    options_of_muon = {"method": "muon", "lr": lr, "weight_decay": weight_decay, **options}
    muon = ParamGroup("matrices", lambda name, param: name in hidden, options_of_muon)
    of_stacks = ParamGroup("stacks", lambda name, param: name in stacks, {**options_of_muon, "stacked": True})
    rest = ParamGroup("adamw", None, {"method": "adamw", "lr": adamw_lr})
    rules = [*([muon] if hidden else []), *([of_stacks] if stacks else [])]
    rules += [rest] if len(hidden) + len(stacks) < len(params) else []
    return param_groups(model, *rules, weight_decay=weight_decay)


def _reason_not_hidden(param: Tensor, head: bool, embedding: bool) -> str | None:
    """Return the reason why a parameter is no hidden matrix; None for a hidden matrix."""
    if param.ndim != 2:
        return f"has {param.ndim} dims"
    return "belongs to an embedding" if embedding else "belongs to the head" if head else None


def on_same_mesh(params: Sequence[Tensor]) -> bool:
    """Return True if all parameters lie on one mesh or are plain. torch's foreach and fused implementations need this."""
    return len({tensor_mesh(param) for param in params}) <= 1


def can_fuse(params: Sequence[Tensor]) -> bool:
    """Return True if torch's fused Adam supports the parameters together."""
    return on_same_mesh(params) and all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)


def sets_implementation(group: dict[str, Any]) -> bool:
    """Return True if the group sets an implementation, or needs the plain implementation."""
    return any(group.get(form) is not None for form in ("fused", "foreach")) or bool(group.get("differentiable"))


def trainable_in_group(group: dict[str, Any]) -> list[Tensor]:
    """Return the trainable parameters of a group."""
    return [param for param in group["params"] if param.requires_grad]


def evaluate_closure(closure: Callable[[], float]) -> float:
    """Return the loss of the closure of an optimizer's ``step``, with gradients enabled."""
    with torch.enable_grad():
        return closure()
