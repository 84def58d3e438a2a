"""Compute norms of gradients, parameters, updates and optimizer moments as metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dtrain.arguments import check_choices
from dtrain.dist.dtensor import all_reduce_partial_scalars_, local_norms, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.step.normalization import unit_weight
from dtrain.step.step_clock import ends_interval
from dtrain.step.transform import BeforeDivision, Transform, UpdateFn
from dtrain.typing import Metric, Metrics, Params, index_tensor

NormKind: TypeAlias = Literal["grad", "param", "update", "moment", "cosine"]
NormLabel: TypeAlias = Literal["all", "group", "layer"] | Callable[[str], str | None]

# names of the averaged gradient in the optimizers of torch and dtrain
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_MOMENTS = (*_FIRST_MOMENTS, "exp_avg_sq")


def norms(
    every: Duration | int | str,
    *,
    of: Sequence[NormKind] = ("grad", "param", "update", "moment"),
    by: NormLabel = "all",
) -> Transform:
    """Add L2 norms to the metrics of each step that ends an interval.

    The metrics are ``norm/grad``, ``norm/param``, ``norm/update`` and ``norm/exp_avg`` (or another moment of the optimizer:
    ``exp_avg_sq``, ``momentum_buffer``) over all parameters. ``by`` adds the norms of each part, such as
    ``norm/grad/blocks.0.mlp``. With updates and parameters, ``norm/update_ratio`` is their quotient. Each global element
    counts once under any sharding. ``reduce_metrics`` returns the norm itself.

    The gradient is measured at the position in the list: ``[norms(...), clip_by_norm(1.0)]`` measures before clipping, the
    reverse order after. The gradient has no loss scale. The update is the total change by the rest of the list, 0 in a skipped
    step.

    Formula: ``norm/update = sqrt(sum((param_after - param_before)**2))``, ``norm/update_ratio = norm/update / norm/param``
    with the parameters before the update; ``norm/cosine = sum(grad * moment) / (norm(grad) * norm(moment))`` with the average
    of earlier gradients (``exp_avg`` or ``momentum_buffer``; absent in the first step)

    Args:
        every: interval between measurements; ``"100ba"`` matches a loop with ``state.crossed("100ba")``.
        of: quantities to measure: gradients, parameters, updates, optimizer moments and the ``cosine`` above.
        by: also measure each parameter ``"group"`` of the optimizer (by ``"name"``, else by index), each ``"layer"`` (module
            of a parameter), or each label returned by a function of the clean name; the label None skips the parameter.

    Mutates: nothing. In a measured step, ``"update"`` holds a copy of this rank's part of the parameters.
    Collective: in a measured step, one all-reduce per mesh axis and set of axes that parameters are sharded along.
    Host sync: none.

    Source: the Euclidean norm; the ratio of update and parameter as in You et al. 2017, arXiv:1708.03888, section 4.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss, [dt.monitors.norms(1)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(state, torch.tensor([[3.0, 4.0]]))
        >>> {
        ...     name: round(metric.total.item(), 3)
        ...     for name, metric in metrics.items()
        ...     if "/" in name
        ... }
        {'norm/grad': 5.0, 'norm/param': 2.828, 'norm/update': 2.5, 'norm/update_ratio': 0.884}

    Raises:
        ConfigError: invalid ``every``, unknown ``of`` or ``by``; in a step, ``by`` returns an invalid label.
    """
    length, kinds = Duration.parse(every), frozenset(check_choices("norms", "of", of, get_args(NormKind)))
    if not callable(by) and by not in ("all", "group", "layer"):
        raise ConfigError(
            f"norms: by must be 'all', 'group', 'layer' or a function of a parameter's name, got {by!r}. "
            "Pass by='layer', for example."
        )

    def init(state: TrainState) -> dict[str, object]:
        # Raise for a fraction of a run of unknown length.
        state.clock.reached(length)
        return {}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            if not ends_interval(state, length):
                return inner(state, metrics)
            params, table = state.params, _SquaredSums(device=state.device, label=_label_function(state, by))
            before, divisor = _measure_before_update(table, state, kinds), state._grad_divisor
            state, metrics = inner(state, metrics)
            _measure_after_update(table, state, params, before, kinds)
            totals = table.reduce()
            # The cosine does not depend on the divisor.
            if divisor is not None and "grad" in totals:
                totals["grad"] = {label: square / divisor**2 for label, square in totals["grad"].items()}
            return state, {**metrics, **_to_metrics(totals, state.device)}

        return update_fn

    return Transform(name="norms", init=init, update=BeforeDivision(update), read_only=True)


@dataclass(slots=True, eq=False)
class _SquaredSums:
    """Squared sums over tensors by kind and label, reduced together at the end in a few operations.

    ``norms`` holds the norms of this rank's shards of the tensors in ``kinds``, ``products`` the sums for ``multiplied``.
    """

    device: torch.device
    label: Callable[[str], str | None]
    kinds: list[tuple[str, list[str]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    sharded: list[Tensor] = field(default_factory=list)
    multiplied: dict[str, Tensor] = field(default_factory=dict)
    products: list[Tensor] = field(default_factory=list)

    def add_tensors(self, kind: str, tensors: Mapping[str, Tensor], of: Params | None = None) -> None:
        """Add ``tensors``, with their own sharding or as this rank's shards of ``of``."""
        if tensors:
            self.kinds.append((kind, list(tensors)))
            self.norms += local_norms(list(tensors.values()))
            self.sharded += tensors.values() if of is None else [of[name] for name in tensors]

    def reduce(self) -> dict[str, dict[str, Tensor]]:
        """Return the sum over all parameters under ``""`` and the sums by label, for each kind."""
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
        # The last row collects the parameters without a label.
        index = [*wholes, *(len(rows) if part < 0 else part for part in parts)]
        sums = flat.new_zeros(len(rows) + 1).index_add_(0, index_tensor(index, self.device), flat.repeat(2))
        sums_by_kind: dict[str, dict[str, Tensor]] = {}
        for (kind, label), value in zip(rows, sums.unbind(), strict=False):
            sums_by_kind.setdefault(kind, {})[label] = value
        return sums_by_kind


def _label_function(state: TrainState, by: NormLabel) -> Callable[[str], str | None]:
    if by == "all":
        return lambda name: None
    if by == "layer":
        return lambda name: name.rpartition(".")[0] or name
    if by == "group":
        groups = enumerate(state.optimizer.param_groups)
        group_of = {id(param): str(group.get("name", index)) for index, group in groups for param in group["params"]}
        params = state.params
        return lambda name: group_of.get(id(params[name]))
    assert callable(by)
    label_of = by

    def label_fn(name: str) -> str | None:
        label = label_of(name)
        if label is not None and (not isinstance(label, str) or not label):
            raise ConfigError(
                f"norms: by({name!r}) must return a text or None, got {label!r}. Return None to leave a parameter out."
            )
        return label

    return label_fn


def _measure_before_update(table: _SquaredSums, state: TrainState, kinds: frozenset[NormKind]) -> dict[str, Tensor]:
    """Add the sums before the update. Return copies of this rank's shards of the parameters if updates are measured."""
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
        moment = next((content[key] for key in _FIRST_MOMENTS if _is_moment(content.get(key))), None)
        if moment is not None:
            moments[name] = moment
    if moments:
        table.add_tensors("product grad", {name: grads[name] for name in moments})
        table.add_tensors("product moment", moments)
        pairs = [(to_local(grads[name]), to_local(moment)) for name, moment in moments.items()]
        table.multiplied = moments
        table.products = [(grad.double() * moment.double()).sum().to(table.device) for grad, moment in pairs]


def _measure_after_update(
    table: _SquaredSums, state: TrainState, params: Params, before: dict[str, Tensor], kinds: frozenset[NormKind]
) -> None:
    if before:
        with torch.no_grad():
            torch._foreach_sub_(list(before.values()), [to_local(params[name]) for name in before])
        table.add_tensors("update", before, params)
    for key in _MOMENTS if "moment" in kinds else ():
        moments = {name: state.optimizer.state.get(param, {}).get(key) for name, param in params.items()}
        table.add_tensors(key, {name: moment for name, moment in moments.items() if _is_moment(moment)})


def _is_moment(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _to_metrics(totals: dict[str, dict[str, Tensor]], device: torch.device) -> Metrics:
    squares = {_metric_name(kind, label): value for kind, sums in totals.items() for label, value in sums.items()}
    roots = torch.stack(list(squares.values())).sqrt().unbind() if squares else ()
    norms_by_name = {name: root for name, root in zip(squares, roots, strict=True) if not name.startswith("norm/product")}
    if "param" in totals:
        labels = totals.get("update", {})
        updates, params = ([norms_by_name[_metric_name(kind, label)] for label in labels] for kind in ("update", "param"))
        ratios = torch._foreach_div(updates, params) if updates else ()
        norms_by_name.update(zip((_metric_name("update_ratio", label) for label in labels), ratios, strict=True))
    for label, product in totals.get("product", {}).items():
        lengths = totals["product grad"][label] * totals["product moment"][label]
        norms_by_name[_metric_name("cosine", label)] = product / lengths.sqrt()
    return {name: Metric(value, unit_weight(device)) for name, value in norms_by_name.items()}


def _metric_name(kind: str, label: str) -> str:
    return f"norm/{kind}/{label}" if label else f"norm/{kind}"
