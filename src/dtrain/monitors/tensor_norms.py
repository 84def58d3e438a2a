"""Norms of gradients, parameters, updates and moments, as metrics of the steps after which the loop logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dtrain.dtensor import all_reduce_partial_scalars_, local_norms, to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metric, Metrics, Params, index_tensor, unit_weight

NormKind: TypeAlias = Literal["grad", "param", "update", "moment", "cosine"]
NormLabel: TypeAlias = Literal["all", "group", "layer"] | Callable[[str], str | None]

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # what optimizers of torch, and ours, call their average of gradients
_MOMENTS = (*_FIRST_MOMENTS, "exp_avg_sq")


def norms(
    interval: Duration | int | str,
    *,
    of: Sequence[NormKind] = ("grad", "param", "update", "moment"),
    by: NormLabel = "all",
) -> Transform:
    """Add L2 norms to the metrics of each step that ends an interval, after which the loop logs; nothing to the others.

    The metrics are ``norm/grad``, ``norm/param``, ``norm/update`` and ``norm/exp_avg`` (or what the optimizer's state is
    called: also ``exp_avg_sq`` and ``momentum_buffer``) over all parameters together, and with ``by`` the same for each part,
    as in ``norm/grad/blocks.0.mlp``. With both updates and parameters there is their quotient, ``norm/update_ratio``. Each
    global element counts once, however parameters are cut; ``reduce_metrics`` gives the number itself.

    It sees the gradient that reaches its place in the list: of ``[norms(...), clip_by_norm(1.0)]`` the one before clipping, in
    the other order the one after. It is without a loss scale in any case. The update is what the rest of the list makes of the
    parameters, so 0 in a step that is left out by what is listed later.

    Formula: ``norm/update = sqrt(sum((param_after - param_before)**2))``, ``norm/update_ratio = norm/update / norm/param``
    with the parameters before the update; ``norm/cosine = sum(grad * moment) / (norm(grad) * norm(moment))`` with the average
    of gradients before this one came in (``exp_avg`` or ``momentum_buffer``; so not in the first step)

    Args:
        interval: the step that ends each is measured: ``"100ba"`` fits a loop that asks ``state.crossed("100ba")``.
        of: what is measured: gradients, parameters, updates, the optimizer's moments, and the ``cosine`` above.
        by: also for each parameter ``"group"`` of the optimizer (by its ``"name"``, else its number), for each ``"layer"`` (the
            module that a parameter belongs to), or for each label that a function of the clean name returns, None for none.

    Mutates: nothing. In a step that is measured, ``"update"`` holds a copy of this rank's part of the parameters.
    Collective: in a step that is measured, one all-reduce per mesh axis and set of axes that parameters are cut along.
    Host sync: none.

    Raises:
        ConfigError: no interval, an unknown ``of`` or ``by``; in a step, ``by`` returns something else.

    Source: the Euclidean norm; the ratio of update and parameter as in You et al. 2017, arXiv:1708.03888, section 4.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [norms(1)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(state, torch.tensor([[3.0, 4.0]]))
        >>> {name: round(metric.total.item(), 3) for name, metric in metrics.items() if "/" in name}
        {'norm/grad': 5.0, 'norm/param': 2.828, 'norm/update': 2.5, 'norm/update_ratio': 0.884}
    """
    each, kinds = Duration.parse(interval), _check_kinds(of)
    if not callable(by) and by not in ("all", "group", "layer"):
        raise ConfigError(f"norms: by is 'all', 'group', 'layer' or a function of a parameter's name, got {by!r}")

    def init(state: TrainState) -> dict[str, object]:
        state.clock.reached(each)  # refuses a share of a run whose length is not known
        return {}

    def update(inner: UpdateFn) -> UpdateFn:
        def measured(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            if not ends_interval(state, each):
                return inner(state, metrics)
            params, table = state.params, _SquaredSums(device=state.device, label=_label_function(state, by))
            kept = _measure_before_update(table, state, kinds)
            state, metrics = inner(state, metrics)
            _measure_after_update(table, state, params, kept, kinds)
            return state, {**metrics, **_to_metrics(table.reduce(), state.device)}

        return measured

    return Transform(name="norms", init=init, update=update, read_only=True)


def _check_kinds(of: Sequence[NormKind]) -> frozenset[NormKind]:
    known = get_args(NormKind)
    if isinstance(of, str) or not of or any(kind not in known for kind in of):
        raise ConfigError(f"norms: of lists some of {', '.join(known)}, got {of!r}")
    return frozenset(of)


@dataclass(slots=True, eq=False)
class _SquaredSums:
    """Sums over tensors, by what they are of and by label; added up only at the end, all together, in a few operations.

    ``norms`` are of this rank's parts of the tensors that ``kinds`` names, ``products`` sums of those in ``multiplied``.
    """

    device: torch.device
    label: Callable[[str], str | None]
    kinds: list[tuple[str, list[str]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    sharded: list[Tensor] = field(default_factory=list)
    multiplied: dict[str, Tensor] = field(default_factory=dict)
    products: list[Tensor] = field(default_factory=list)

    def add_tensors(self, kind: str, tensors: Mapping[str, Tensor], of: Params | None = None) -> None:
        """Those of ``tensors``, which are cut as they are, or are this rank's parts of ``of``."""
        if tensors:
            self.kinds.append((kind, list(tensors)))
            self.norms += local_norms(list(tensors.values()))
            self.sharded += tensors.values() if of is None else [of[name] for name in tensors]

    def reduce(self) -> dict[str, dict[str, Tensor]]:
        """By kind, the sum over all parameters under ``""``, and those of the labels."""
        if not self.norms:
            return {}
        flat = torch.stack([n if n.device == self.device else n.to(self.device) for n in self.norms]).double().square()
        flat = torch.cat([flat, torch.stack(self.products)]) if self.products else flat
        all_reduce_partial_scalars_(flat, [*self.sharded, *self.multiplied.values()])
        kinds = [*self.kinds, ("product", list(self.multiplied))] if self.products else self.kinds
        labels = {name: self.label(name) for _, names in kinds for name in names}
        rows: dict[tuple[str, str], int] = {}
        wholes = [rows.setdefault((kind, ""), len(rows)) for kind, names in kinds for _ in names]
        of_labels = [(kind, labels[name]) for kind, names in kinds for name in names]
        parts = [rows.setdefault((kind, label), len(rows)) if label is not None else -1 for kind, label in of_labels]
        index = [*wholes, *(len(rows) if part < 0 else part for part in parts)]  # the last row is of those without a label
        sums = flat.new_zeros(len(rows) + 1).index_add_(0, index_tensor(index, self.device), flat.repeat(2))
        found: dict[str, dict[str, Tensor]] = {}
        for (kind, label), value in zip(rows, sums.unbind(), strict=False):
            found.setdefault(kind, {})[label] = value
        return found


def _label_function(state: TrainState, by: NormLabel) -> Callable[[str], str | None]:
    if by == "all":
        return lambda name: None
    if by == "layer":
        return lambda name: name.rpartition(".")[0] or name
    if by == "group":
        groups = enumerate(state.optimizer.param_groups)
        of = {id(param): str(group.get("name", at)) for at, group in groups for param in group["params"]}
        params = state.params
        return lambda name: of.get(id(params[name]))
    assert callable(by)
    given = by

    def label(name: str) -> str | None:
        found = given(name)
        if found is not None and (not isinstance(found, str) or not found):
            raise ConfigError(f"norms: by({name!r}) must return a text, or None, got {found!r}")
        return found

    return label


def _measure_before_update(table: _SquaredSums, state: TrainState, kinds: frozenset[NormKind]) -> dict[str, Tensor]:
    """Sum what the update will change. Returns copies of this rank's parts of the parameters, where updates are asked for."""
    grads = {name: param.grad for name, param in state.params.items() if param.grad is not None}
    if "grad" in kinds:
        table.add_tensors("grad", grads)
    if "param" in kinds:
        table.add_tensors("param", state.params)
    if "cosine" in kinds:
        _add_products(table, state, grads)
    if "update" not in kinds:
        return {}
    return {name: to_local(param).detach().clone() for name, param in state.params.items() if name in grads}


def _add_products(table: _SquaredSums, state: TrainState, grads: Mapping[str, Tensor]) -> None:
    moments = {}
    for name in grads:
        content = state.optimizer.state.get(state.params[name], {})
        found = next((content[key] for key in _FIRST_MOMENTS if _is_moment(content.get(key))), None)
        if found is not None:
            moments[name] = found
    if moments:
        table.add_tensors("product grad", {name: grads[name] for name in moments})
        table.add_tensors("product moment", moments)
        both = [(to_local(grads[name]), to_local(moment)) for name, moment in moments.items()]
        table.multiplied = moments
        table.products = [(grad.double() * moment.double()).sum().to(table.device) for grad, moment in both]


def _measure_after_update(
    table: _SquaredSums, state: TrainState, params: Params, kept: dict[str, Tensor], kinds: frozenset[NormKind]
) -> None:
    if kept:
        with torch.no_grad():
            torch._foreach_sub_(list(kept.values()), [to_local(params[name]) for name in kept])
        table.add_tensors("update", kept, params)
    for key in _MOMENTS if "moment" in kinds else ():
        found = {name: state.optimizer.state.get(param, {}).get(key) for name, param in params.items()}
        table.add_tensors(key, {name: moment for name, moment in found.items() if _is_moment(moment)})


def _is_moment(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _to_metrics(totals: dict[str, dict[str, Tensor]], device: torch.device) -> Metrics:
    squares = {_metric_name(kind, label): value for kind, sums in totals.items() for label, value in sums.items()}
    roots = torch.stack(list(squares.values())).sqrt().unbind() if squares else ()
    found = {name: root for name, root in zip(squares, roots, strict=True) if not name.startswith("norm/product")}
    if "param" in totals:
        labels = totals.get("update", {})
        updates, params = ([found[_metric_name(kind, label)] for label in labels] for kind in ("update", "param"))
        ratios = torch._foreach_div(updates, params) if updates else ()
        found.update(zip((_metric_name("update_ratio", label) for label in labels), ratios, strict=True))
    for label, product in totals.get("product", {}).items():
        lengths = totals["product grad"][label] * totals["product moment"][label]
        found[_metric_name("cosine", label)] = product / lengths.sqrt()
    return {name: Metric(value, unit_weight(device)) for name, value in found.items()}


def _metric_name(kind: str, label: str) -> str:
    return f"norm/{kind}/{label}" if label else f"norm/{kind}"
