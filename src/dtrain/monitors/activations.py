"""Measure statistics of module outputs (activations) and add them to the metrics of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.arguments import check_choices
from dtrain.dist.collectives import reduce_max
from dtrain.dist.dtensor import to_local
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.step.normalization import unit_weight
from dtrain.step.transform import BeforeDivision, GradStep, Transform
from dtrain.typing import Batch, LossFn, LossSum, Metric, Metrics

ActivationStat: TypeAlias = Literal["mean", "std", "rms", "max", "absmax", "zeros", "kurtosis"]
ModulePattern: TypeAlias = str | re.Pattern[str] | Sequence[str] | Callable[[str, nn.Module], bool]

_NAME = "activation_stats"
# Sums over elements from which each statistic is computed.
_SUMS: dict[str, tuple[str, ...]] = {
    "mean": ("sum",),
    "std": ("sum", "square"),
    "rms": ("square",),
    "zeros": ("zeros",),
    "kurtosis": ("sum", "square", "cube", "fourth"),
}
_MAX_STATS = ("max", "absmax")


def activation_stats(
    select: ModulePattern = "*",
    every: Duration | int | str = "100ba",
    *,
    stats: Sequence[ActivationStat] = ("mean", "std", "absmax", "zeros"),
    include_inputs: bool = False,
) -> Transform:
    """Add statistics of module outputs to the metrics of each step that ends an interval.

    The metrics are ``activation/<module>/<stat>``, over all elements of all forwards of the step, on all ranks and in all
    microbatches. If a module returns several tensors (a tuple, a mapping), the first floating-point tensor counts.

    A module that was not run gives NaN. A module inside a compiled region calls no hooks and gives NaN, too; the compiled
    module itself is measured if compiled by ``module.compile()`` or ``compile_blocks``. Recomputation by activation
    checkpointing is not counted, nor are padding forwards on a rank without samples. If a step computes several gradients
    (``sam``), the last gradient counts.

    Formula: ``std = sqrt(mean(x**2) - mean(x)**2)`` (population), ``rms = sqrt(mean(x**2))``, ``zeros`` is the fraction of
    zero elements, ``max`` the largest value, ``absmax`` the largest magnitude, ``kurtosis = mean((x - mean(x))**4) / std**4``
    (3 for a normal distribution)

    Args:
        select: modules by clean name: a pattern (``*`` any text without a dot, ``**`` any text), several patterns, a compiled
            regular expression for the full name, or a function ``(name, module) -> bool``. Only the pattern ``""`` selects the
            whole model, which is called ``model`` in metrics.
        every: interval in steps, ``100`` or ``"100ba"``; the end of another unit is known only after the forward.
        stats: statistics to compute.
        include_inputs: if True, also measure the first input of each module, as ``activation/<module>/input/<stat>``.

    Mutates: nothing; hooks exist only during the forwards of a measured step.
    Collective: in a measured step one all-reduce of float64 over all ranks, with ``max`` or ``absmax`` one more.
    Host sync: none.

    Source: the moments of a sample; Pearson 1905 for the kurtosis.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> stats = dt.monitors.activation_stats("1", every=1, stats=("mean", "zeros", "max"))
        >>> step = dt.compose_step(loss, [stats])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(state, torch.tensor([[-3.0], [4.0]]))
        >>> {name: metric.total.item() for name, metric in metrics.items() if "/" in name}
        {'activation/1/mean': 2.0, 'activation/1/zeros': 0.5, 'activation/1/max': 4.0}

    Raises:
        ConfigError: no pattern, an interval that is not in steps, or an unknown statistic; from ``Step.init`` on, a pattern
            without a matching module.
    """
    is_selected, length = _compile_pattern(select), Duration.parse(every)
    stat_names = check_choices("activation_stats", "stats", stats, get_args(ActivationStat))
    if length.unit != "ba":
        raise ConfigError(
            f"activation_stats: every must be a number of steps, got {str(every)!r}. Pass 100 or '100ba': the end of "
            "another unit is known only after the forward."
        )

    def init(state: TrainState) -> dict[str, Any]:
        _select_modules(state.model, is_selected)
        return {}

    def grad_step(inner: GradStep) -> GradStep:
        def grad_fn(
            state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
        ) -> tuple[TrainState, Metrics]:
            size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
            if (state.step + 1) % length.value:
                return inner(state, batch, loss_fn=loss_fn, **size)
            modules = _select_modules(state.model, is_selected)
            inputs = [f"{name}/input" for name in modules] if include_inputs else []
            accumulator = _StatsAccumulator(taps=[*modules, *inputs], stats=stat_names)
            measured_loss = _with_stats(loss_fn, modules, accumulator, state.device, inputs=include_inputs)
            state, metrics = inner(state, batch, loss_fn=measured_loss, **size)
            return state, accumulator.finish(metrics, state.device)

        return grad_fn

    return Transform(name=_NAME, init=init, grad_step=BeforeDivision(grad_step), read_only=True)


def _compile_pattern(pattern: ModulePattern) -> Callable[[str, nn.Module], bool]:
    if isinstance(pattern, re.Pattern):
        expression = pattern
        return lambda name, module: expression.fullmatch(name) is not None
    if callable(pattern):
        return pattern
    # The pattern "" selects the whole model.
    if not isinstance(pattern, Sequence) or (not pattern and not isinstance(pattern, str)):
        raise ConfigError(
            f"activation_stats: select must be a text, several texts, a regular expression or a function, got {pattern!r}. "
            "Pass select='blocks.*', for example."
        )
    patterns = [pattern] if isinstance(pattern, str) else pattern
    matches = compile_patterns(patterns, caller=_NAME)
    return lambda name, module: matches(name) if name else "" in patterns


def _select_modules(model: nn.Module, is_selected: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the selected modules by clean name. The whole model is called ``model``."""
    modules = dict(modules_by_fqn(model))
    selected = {name or "model": module for name, module in modules.items() if is_selected(name, module)}
    if not selected:
        some = ", ".join(repr(name) for name in list(modules)[1:4])
        raise ConfigError(
            f"activation_stats: select must match a module, got no match in {len(modules)} modules (such as {some}). "
            "Print the names with model.named_modules()."
        )
    return selected


def _with_stats(
    loss_fn: LossFn, modules: Mapping[str, nn.Module], accumulator: _StatsAccumulator, device: torch.device, *, inputs: bool
) -> LossFn:
    """Add the sums of the forward to the auxiliary sums of ``loss_fn``.

    The step accumulates auxiliary sums only for microbatches that count. Microbatches of weight zero and attempts that ran out
    of memory are left out. Backward runs without hooks.
    """

    def measured_loss(model: nn.Module, batch: Batch) -> LossSum:
        stats: dict[str, _ForwardStats] = {}

        def record(name: str, arguments: Any, result: Any) -> None:
            accumulator.add(stats, name, result)
            if inputs:
                accumulator.add(stats, f"{name}/input", arguments)

        with ExitStack() as undo:
            for name, module in modules.items():
                _attach_hook(module, partial(record, name), undo)
            loss = loss_fn(model, batch)
        if not isinstance(loss, LossSum):
            return loss
        return replace(loss, aux={**loss.aux, **accumulator.to_aux(stats, device)})

    return measured_loss


def _attach_hook(module: nn.Module, callback: Callable[[Any, Any], None], undo: ExitStack) -> None:
    """Call ``callback(arguments, result)`` after each call of ``module``, until ``undo`` is closed."""
    compiled = module._compiled_call_impl
    # Hooks of a compiled module would be compiled, too, so the compiled call is wrapped instead.
    if compiled is not None:

        def call(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            callback((args, kwargs), result)
            return result

        undo.callback(setattr, module, "_compiled_call_impl", compiled)
        module._compiled_call_impl = call
        return

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not torch.compiler.is_compiling():
            callback((args, kwargs), result)

    undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ForwardStats:
    """Statistics of one forward and module: the sums, then the largest values, and the number of elements."""

    numbers: list[Tensor]
    count: int


@dataclass(slots=True, eq=False)
class _StatsAccumulator:
    """Sums of one gradient computation, and the ``largest`` values of each forward: float64 ``[taps, stats]``.

    ``largest`` may include a forward that does not count. A forward on samples of this rank does not change the result. A
    padding forward is excluded because the counts of this rank are 0.
    """

    taps: list[str]
    stats: tuple[ActivationStat, ...]
    largest: list[Tensor] = field(default_factory=list)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the required sums, at least one, because each sum carries the count."""
        return tuple(dict.fromkeys(part for stat in self.stats for part in _SUMS.get(stat, ()))) or ("sum",)

    @property
    def max_stats(self) -> tuple[ActivationStat, ...]:
        """Names of the required largest values."""
        return tuple(stat for stat in self.stats if stat in _MAX_STATS)

    @torch.no_grad()
    def add(self, seen: dict[str, _ForwardStats], tap: str, value: Any) -> None:
        """Add the statistics of a tensor to ``seen``. Mutates: ``seen``."""
        tensor = _first_float_tensor(value)
        x = None if tensor is None else to_local(tensor).detach()
        if x is None or not x.numel():
            return
        # torch has no reductions for 8-bit floats.
        x = x.float() if x.itemsize == 1 else x
        numbers, max_stats = [_sum_of(name, x) for name in self.sum_names], self.max_stats
        if max_stats:
            smallest, largest = torch.aminmax(x)
            numbers += [largest if stat == "max" else torch.maximum(largest, -smallest) for stat in max_stats]
        before = seen.get(tap)
        if before is not None:
            combine = [torch.add] * len(self.sum_names) + [torch.maximum] * len(max_stats)
            numbers = [fn(first, second) for fn, first, second in zip(combine, before.numbers, numbers, strict=True)]
        seen[tap] = _ForwardStats(numbers=numbers, count=x.numel() + (before.count if before is not None else 0))

    @torch.no_grad()
    def to_aux(
        self, seen: Mapping[str, _ForwardStats], device: torch.device
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Return the sums of a forward with their counts as weights; zero for skipped modules. Mutates: ``largest``."""
        missing: list[Tensor] = []
        if len(seen) < len(self.taps):
            zero, smallest = (torch.full((), value, dtype=torch.float64, device=device) for value in (0.0, -math.inf))
            missing = [zero] * len(self.sum_names) + [smallest] * len(self.max_stats)
        rows = [number for tap in self.taps for number in (seen[tap].numbers if tap in seen else missing)]
        table = torch.stack([row.to(device, torch.float64) for row in rows]).view(len(self.taps), -1)
        sums, largest = table.split([len(self.sum_names), len(self.max_stats)], dim=1)
        self.largest.append(largest)
        counts = [float(seen[tap].count) if tap in seen else 0.0 for tap in self.taps for _ in self.sum_names]
        names = [_sum_metric_name(tap, name) for tap in self.taps for name in self.sum_names]
        return dict(zip(names, zip(sums.reshape(-1).unbind(), counts, strict=True), strict=True))

    def finish(self, metrics: Metrics, device: torch.device) -> Metrics:
        """Replace the sums of this rank in ``metrics`` by the statistics. Collective: one or two all-reduces."""
        rest = dict(metrics)
        raw = [rest.pop(_sum_metric_name(tap, name)) for tap in self.taps for name in self.sum_names]
        flat = torch.stack([metric.weight for metric in raw] + [metric.total for metric in raw])
        # One flag per tap: True if this rank counted elements.
        counted = flat[: len(raw) : len(self.sum_names)] > 0
        if get_dist_info().world_size > 1:
            with report_missing_ranks(_NAME):
                dist.all_reduce(flat)
        counts, totals = flat.view(2, len(self.taps), len(self.sum_names)).unbind()
        # The mean is NaN for a tap without elements.
        means = dict(zip(self.sum_names, (totals / counts).unbind(1), strict=True))
        largest = self._reduce_largest(counted, counts[:, 0] > 0)
        for stat in self.stats:
            values = (largest[stat] if stat in _MAX_STATS else _compute_stat(stat, means)).unbind()
            rest.update(
                {
                    f"activation/{tap}/{stat}": Metric(value, unit_weight(device))
                    for tap, value in zip(self.taps, values, strict=True)
                }
            )
        return rest

    def _reduce_largest(self, counted: Tensor, known: Tensor) -> dict[str, Tensor]:
        if not self.max_stats:
            return {}
        smallest = torch.full((len(self.taps), len(self.max_stats)), -math.inf, dtype=torch.float64, device=counted.device)
        local = torch.stack([smallest, *self.largest]).amax(dim=0)
        largest = reduce_max(torch.where(counted[:, None], local, smallest))
        return dict(zip(self.max_stats, torch.where(known[:, None], largest, math.nan).unbind(1), strict=True))


def _first_float_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in a module's result, in order; None if there is none."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((tensor for each in values if (tensor := _first_float_tensor(each)) is not None), None)


def _sum_of(name: str, x: Tensor) -> Tensor:
    """Compute one sum over all elements of ``x`` in float64."""
    if name == "square":
        norm: Tensor = torch.linalg.vector_norm(x, 2, dtype=torch.float64)
        return norm.square()
    if name == "sum":
        return x.sum(dtype=torch.float64)
    if name == "zeros":
        return x.numel() - torch.count_nonzero(x)
    return x.double().pow(3 if name == "cube" else 4).sum()


def _compute_stat(stat: ActivationStat, means: Mapping[str, Tensor]) -> Tensor:
    """Compute a statistic from the means of powers."""
    if stat == "mean":
        return means["sum"]
    if stat == "zeros":
        return means["zeros"]
    if stat == "rms":
        return means["square"].sqrt()
    mean = means["sum"]
    # Rounding may give a negative difference.
    variance = (means["square"] - mean.square()).clamp(min=0)
    if stat == "std":
        return variance.sqrt()
    fourth = means["fourth"] - 4 * mean * means["cube"] + 6 * mean.square() * means["square"] - 3 * mean.pow(4)
    return fourth / variance.square()


def _sum_metric_name(tap: str, name: str) -> str:
    return f"{_NAME}: {tap}: {name}"
