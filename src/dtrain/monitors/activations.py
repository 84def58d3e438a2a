"""Statistics of what modules return, as metrics of the steps after which the loop logs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.reduce import reduce_max
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.state import TrainState
from dtrain.transform import GradStep, Transform
from dtrain.typing import Batch, LossFn, LossSum, Metric, Metrics, unit_weight

ActivationStat: TypeAlias = Literal["mean", "std", "rms", "max", "absmax", "zeros", "kurtosis"]
ModulePattern: TypeAlias = str | re.Pattern[str] | Sequence[str] | Callable[[str, nn.Module], bool]

_NAME = "activation_stats"
# Sums over elements that a statistic is made of.
_SUMS: dict[str, tuple[str, ...]] = {
    "mean": ("sum",),
    "std": ("sum", "square"),
    "rms": ("square",),
    "zeros": ("zeros",),
    "kurtosis": ("sum", "square", "cube", "fourth"),
}
_MAX_STATS = ("max", "absmax")


def activation_stats(
    pattern: ModulePattern = "*",
    interval: Duration | int | str = "100ba",
    *,
    stats: Sequence[ActivationStat] = ("mean", "std", "absmax", "zeros"),
    include_inputs: bool = False,
) -> Transform:
    """Add statistics of what modules return to the metrics of each step that ends an interval; nothing to the others.

    The metrics are ``activation/<module>/<stat>`` over all elements of the step's forwards, on all ranks and in all
    microbatches, as if there were one of each. Of a module that returns several tensors (a tuple, a mapping) the first one of
    floats counts. A module that was not run gives NaN; so does one inside of what is compiled, which calls no hooks (that very
    module does, if it was compiled by ``module.compile()`` or ``compile_blocks``). What activation checkpointing computes again
    in backward is not counted again, nor is what a rank without samples runs to keep up with the others. Where a step computes
    several gradients (``sam``), the last one counts.

    Formula: ``std = sqrt(mean(x**2) - mean(x)**2)`` (of the whole population), ``rms = sqrt(mean(x**2))``, ``zeros`` is the
    share of elements that are 0, ``max`` the largest and ``absmax`` the largest magnitude,
    ``kurtosis = mean((x - mean(x))**4) / std**4`` (3 for a normal distribution)

    Args:
        pattern: modules by clean name: a pattern (``*`` any text without a dot, ``**`` any text), several, a compiled regular
            expression that fits all of the name, or a function ``(name, module) -> bool``. The whole model has the name
            ``""``, which only that very pattern fits, and is called ``model`` in metrics.
        interval: in steps, ``100`` or ``"100ba"``; where other units end is known only after the forward.
        stats: which.
        include_inputs: also of what modules are given first, as ``activation/<module>/input/<stat>``.

    Mutates: nothing; hooks are there while a measured step's forwards run.
    Collective: in a measured step one all-reduce of float64 over all ranks, with ``max`` or ``absmax`` one more.
    Host sync: none.

    Raises:
        ConfigError: no pattern, an interval that is not in steps, an unknown statistic; from ``Step.init`` on, a pattern that
            fits no module.

    Source: the moments of a sample; Pearson 1905 for the kurtosis.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [activation_stats("1", interval=1, stats=("mean", "zeros", "max"))])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, metrics = step(state, torch.tensor([[-3.0], [4.0]]))
        >>> {name: metric.total.item() for name, metric in metrics.items() if "/" in name}
        {'activation/1/mean': 2.0, 'activation/1/zeros': 0.5, 'activation/1/max': 4.0}
    """
    fits, each, wanted = _compile_pattern(pattern), Duration.parse(interval), _check_stats(stats)
    if each.unit != "ba":
        raise ConfigError(
            f"activation_stats: interval is in steps, as in '100ba', got {str(interval)!r}; whether a step ends another unit "
            "is known only after its forward"
        )

    def init(state: TrainState) -> dict[str, Any]:
        _select_modules(state.model, fits)
        return {}

    def grad_step(inner: GradStep) -> GradStep:
        def measured(
            state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
        ) -> tuple[TrainState, Metrics]:
            size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
            if (state.step + 1) % each.value:
                return inner(state, batch, loss_fn=loss_fn, **size)
            modules = _select_modules(state.model, fits)
            taps = [f"{name}/input" for name in modules] if include_inputs else []
            book = _StatsAccumulator(taps=[*modules, *taps], stats=wanted)
            state, metrics = inner(
                state, batch, loss_fn=_with_stats(loss_fn, modules, book, state.device, inputs=include_inputs), **size
            )
            return state, book.finish(metrics, state.device)

        return measured

    return Transform(name=_NAME, init=init, grad_step=grad_step, read_only=True)


def _check_stats(stats: Sequence[ActivationStat]) -> tuple[ActivationStat, ...]:
    known = get_args(ActivationStat)
    if isinstance(stats, str) or not stats or any(stat not in known for stat in stats):
        raise ConfigError(f"activation_stats: stats lists some of {', '.join(known)}, got {stats!r}")
    return tuple(stats)


def _compile_pattern(pattern: ModulePattern) -> Callable[[str, nn.Module], bool]:
    if isinstance(pattern, re.Pattern):
        expression = pattern
        return lambda name, module: expression.fullmatch(name) is not None
    if callable(pattern):
        return pattern
    if not isinstance(pattern, Sequence) or (not pattern and not isinstance(pattern, str)):  # "" is the whole model
        raise ConfigError(f"activation_stats: pattern is a text, several, a regular expression or a function, got {pattern!r}")
    patterns = [pattern] if isinstance(pattern, str) else pattern
    fits = compile_patterns(patterns, caller=_NAME)
    return lambda name, module: fits(name) if name else "" in patterns


def _select_modules(model: nn.Module, fits: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    """The modules that are meant, by clean name; the whole model is called ``model``."""
    modules = dict(modules_by_fqn(model))
    found = {name or "model": module for name, module in modules.items() if fits(name, module)}
    if not found:
        some = ", ".join(repr(name) for name in list(modules)[1:4])
        raise ConfigError(f"activation_stats: the pattern fits none of {len(modules)} modules (such as {some})")
    return found


def _with_stats(
    loss_fn: LossFn, modules: Mapping[str, nn.Module], book: _StatsAccumulator, device: torch.device, *, inputs: bool
) -> LossFn:
    """``loss_fn`` with the sums of its forward as further sums of the loss: the step adds up those that count.

    So microbatches of weight zero are left out, and tries that ran out of memory; and backward runs without the hooks.
    """

    def loss(model: nn.Module, batch: Batch) -> LossSum:
        seen: dict[str, _ForwardStats] = {}
        with _forward_hooks(modules, lambda name, value: book.add(seen, name, value), inputs=inputs):
            found = loss_fn(model, batch)
        if not isinstance(found, LossSum):
            return found
        return replace(found, aux={**found.aux, **book.to_aux(seen, device)})

    return loss


@contextmanager
def _forward_hooks(modules: Mapping[str, nn.Module], see: Callable[[str, Any], None], *, inputs: bool) -> Iterator[None]:
    def told(name: str, given: Any, result: Any) -> None:
        see(name, result)
        if inputs:
            see(f"{name}/input", given)

    with ExitStack() as undo:
        for name, module in modules.items():
            _attach_hook(module, partial(told, name), undo)
        yield


def _attach_hook(module: nn.Module, told: Callable[[Any, Any], None], undo: ExitStack) -> None:
    """Have ``told(given, result)`` called after each call of ``module``, until ``undo`` is closed."""
    compiled = module._compiled_call_impl
    if compiled is not None:  # its hooks would be compiled, too: so what is compiled is wrapped instead

        def call(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            told((args, kwargs), result)
            return result

        undo.callback(setattr, module, "_compiled_call_impl", compiled)
        module._compiled_call_impl = call
        return

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not torch.compiler.is_compiling():
            told((args, kwargs), result)

    undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ForwardStats:
    """Of one forward and tap: the sums, then the largest values, and of how many elements they are."""

    numbers: list[Tensor]
    count: int


@dataclass(slots=True, eq=False)
class _StatsAccumulator:
    """The sums of one computation of gradients; ``largest`` of each forward, by tap and statistic: float64 ``[taps, stats]``.

    A forward that did not count may have been in ``largest``: of this rank's own samples, so it makes no difference, or of a
    sample that stands in where a rank has none, which is told by this rank's counts of 0.
    """

    taps: list[str]
    stats: tuple[ActivationStat, ...]
    largest: list[Tensor] = field(default_factory=list)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Which sums are needed; the count is with each of them, so there is at least one."""
        return tuple(dict.fromkeys(part for stat in self.stats for part in _SUMS.get(stat, ()))) or ("sum",)

    @property
    def max_stats(self) -> tuple[ActivationStat, ...]:
        """Which largest values are needed."""
        return tuple(stat for stat in self.stats if stat in _MAX_STATS)

    @torch.no_grad()
    def add(self, seen: dict[str, _ForwardStats], tap: str, value: Any) -> None:
        """Add a tensor to what a forward has ``seen``. Mutates: ``seen``."""
        found = _first_float_tensor(value)
        x = None if found is None else to_local(found).detach()
        if x is None or not x.numel():
            return
        x = x.float() if x.itemsize == 1 else x  # torch computes nothing in eight bits
        mine, asked = [_sum_of(name, x) for name in self.sum_names], self.max_stats
        if asked:
            least, most = torch.aminmax(x)
            mine += [most if stat == "max" else torch.maximum(most, -least) for stat in asked]
        before = seen.get(tap)
        if before is not None:
            ways = [torch.add] * len(self.sum_names) + [torch.maximum] * len(asked)
            mine = [way(one, other) for way, one, other in zip(ways, before.numbers, mine, strict=True)]
        seen[tap] = _ForwardStats(numbers=mine, count=x.numel() + (before.count if before is not None else 0))

    @torch.no_grad()
    def to_aux(
        self, seen: Mapping[str, _ForwardStats], device: torch.device
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """The sums of a forward, with their counts as weights; of modules that were not run, zero. Mutates: ``largest``."""
        nothing: list[Tensor] = []
        if len(seen) < len(self.taps):
            zero, least = (torch.full((), value, dtype=torch.float64, device=device) for value in (0.0, -math.inf))
            nothing = [zero] * len(self.sum_names) + [least] * len(self.max_stats)
        rows = [number for tap in self.taps for number in (seen[tap].numbers if tap in seen else nothing)]
        table = torch.stack([row.to(device, torch.float64) for row in rows]).view(len(self.taps), -1)
        sums, largest = table.split([len(self.sum_names), len(self.max_stats)], dim=1)
        self.largest.append(largest)
        counts = [float(seen[tap].count) if tap in seen else 0.0 for tap in self.taps for _ in self.sum_names]
        names = [_sum_metric_name(tap, name) for tap in self.taps for name in self.sum_names]
        return dict(zip(names, zip(sums.reshape(-1).unbind(), counts, strict=True), strict=True))

    def finish(self, metrics: Metrics, device: torch.device) -> Metrics:
        """``metrics`` with the statistics in the place of this rank's sums. Collective: one or two all-reduces."""
        rest = dict(metrics)
        raw = [rest.pop(_sum_metric_name(tap, name)) for tap in self.taps for name in self.sum_names]
        flat = torch.stack([metric.weight for metric in raw] + [metric.total for metric in raw])
        counted = flat[: len(raw) : len(self.sum_names)] > 0  # by tap, on this rank
        if get_dist_info().world_size > 1:
            with report_missing_ranks(_NAME):
                dist.all_reduce(flat)
        counts, totals = flat.view(2, len(self.taps), len(self.sum_names)).unbind()
        means = dict(zip(self.sum_names, (totals / counts).unbind(1), strict=True))  # NaN where nothing was counted
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
        least = torch.full((len(self.taps), len(self.max_stats)), -math.inf, dtype=torch.float64, device=counted.device)
        mine = torch.stack([least, *self.largest]).amax(dim=0)
        whole = reduce_max(torch.where(counted[:, None], mine, least))
        return dict(zip(self.max_stats, torch.where(known[:, None], whole, math.nan).unbind(1), strict=True))


def _first_float_tensor(value: Any) -> Tensor | None:
    """The first tensor of floats in what a module returns, in order; None when there is none."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for each in inside if (found := _first_float_tensor(each)) is not None), None)


def _sum_of(name: str, x: Tensor) -> Tensor:
    """One of the sums over all elements of ``x``, in float64."""
    if name == "square":
        norm: Tensor = torch.linalg.vector_norm(x, 2, dtype=torch.float64)
        return norm.square()
    if name == "sum":
        return x.sum(dtype=torch.float64)
    if name == "zeros":
        return x.numel() - torch.count_nonzero(x)
    return x.double().pow(3 if name == "cube" else 4).sum()


def _compute_stat(stat: ActivationStat, means: Mapping[str, Tensor]) -> Tensor:
    """Of the means of powers."""
    if stat == "mean":
        return means["sum"]
    if stat == "zeros":
        return means["zeros"]
    if stat == "rms":
        return means["square"].sqrt()
    mean = means["sum"]
    variance = (means["square"] - mean.square()).clamp(min=0)  # rounding may leave less
    if stat == "std":
        return variance.sqrt()
    fourth = means["fourth"] - 4 * mean * means["cube"] + 6 * mean.square() * means["square"] - 3 * mean.pow(4)
    return fourth / variance.square()


def _sum_metric_name(tap: str, name: str) -> str:
    return f"{_NAME}: {tap}: {name}"
