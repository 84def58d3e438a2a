"""The registry of transforms: a new one is a row in ``ROWS``, and every contract holds it from then on.

``BROKEN`` has one transform per way of breaking a contract, each with the contract that must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import dtrain as dt
from dtrain.algorithms.autocast import autocast
from dtrain.algorithms.loss_scale import loss_scale
from dtrain.combinators import between, every, masked, on_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A transform under contract.

    Args:
        make: makes it anew, as a new process would.
        of: the public functions that it is an example of.
        per_rank: it draws differently on each rank, so two ranks do not equal one.
        reruns: it runs the model more often than once a step, so dropout draws more than in a run without it.
        undoes: it takes back what the model's forwards drew and counted in a step that fails.
    """

    make: Callable[[], dt.Transform]
    of: tuple[str, ...] = ()
    per_rank: bool = False
    reruns: bool = False
    undoes: bool = False


def shrink(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**batch, "x": 0.5 * batch["x"]}


def jitter(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    noise = torch.randn(batch["x"].shape, generator=generator, dtype=batch["x"].dtype)
    return {**batch, "x": batch["x"] + 0.1 * noise}


# ---- the house patterns: what no method of the library does yet, but a user's may -------------------------------------------


def halved_loss() -> dt.Transform:
    """At the loss seam: every second step counts half."""

    def wrap(inner: Any, context: dt.StepContext) -> Any:
        factor = 1.0 if context.state.step % 2 else 0.5

        def loss(model: Any, batch: Any) -> dt.LossSum:
            found = inner(model, batch)
            return dt.LossSum(total=factor * found.total, weight=found.weight, aux=found.aux)

        return loss

    return dt.Transform(name="halved_loss", loss=wrap)


def repeated() -> dt.Transform:
    """At the grad seam: computes the gradient twice, as methods with two gradients do."""

    def wrap(inner: Any) -> Any:
        def twice(state: Any, batch: Any, **options: Any) -> Any:
            state, _ = inner(state, batch, **options)
            return inner(state, batch, **options)

        return twice

    return dt.Transform(name="repeated", grad=wrap)


def skipping() -> dt.Transform:
    """At the update seam, with a count in the slice: every third update is left out."""

    def wrap(inner: Any) -> Any:
        def maybe(state: Any, metrics: Any) -> Any:
            seen = state.slices["skipping"]["seen"] + 1
            if seen % 3 != 2:
                state, metrics = inner(state, metrics)
            return state.with_slice("skipping", {"seen": seen}), metrics

        return maybe

    return dt.Transform(name="skipping", init=lambda state: {"seen": 0}, update=wrap)


def _warm() -> dt.Schedule:
    return dt.with_warmup(dt.cosine(1.0, 0.1, 7), 2)


ROWS: dict[str, Row] = {
    "clip_by_norm": Row(make=lambda: dt.clip_by_norm(0.05), of=("clip_by_norm",)),
    "clip_by_norm-scheduled": Row(make=lambda: dt.clip_by_norm(dt.linear(0.5, 0.05, 6))),
    "ema": Row(make=lambda: dt.ema(0.9), of=("ema",)),
    "ema-scheduled": Row(make=lambda: dt.ema(dt.linear(0.5, 0.99, 6))),
    "scale_lr": Row(make=lambda: dt.scale_lr(_warm()), of=("scale_lr",)),
    "autocast": Row(make=lambda: autocast("bf16"), of=("autocast",)),
    "loss_scale": Row(make=lambda: loss_scale(1000.1, growth=1.3, interval=2), of=("loss_scale",)),
    "every-loss_scale": Row(make=lambda: every(2, loss_scale(interval=1))),
    "auto_microbatch": Row(make=lambda: dt.auto_microbatch(), of=("auto_microbatch",), undoes=True),
    "auto_microbatch-from-2": Row(make=lambda: dt.auto_microbatch(initial=2), undoes=True),
    "every-auto_microbatch": Row(make=lambda: every(2, dt.auto_microbatch(initial=3, grow=2)), reruns=True),
    "every-ema": Row(make=lambda: every(2, dt.ema(0.9)), of=("every",)),
    "every-epoch-clip": Row(make=lambda: every("1ep", dt.clip_by_norm(0.05))),
    "every-halved_loss": Row(make=lambda: every(2, halved_loss())),
    "between-scale_lr": Row(make=lambda: between(1, 5, dt.scale_lr(_warm())), of=("between",)),
    "between-samples-ema": Row(make=lambda: between("7sp", "2ep", dt.ema(0.9))),
    "masked-clip": Row(make=lambda: masked(dt.clip_by_norm(0.05), "first.*"), of=("masked",)),
    "masked-ema": Row(make=lambda: masked(dt.ema(0.9), lambda name, param: param.ndim == 2)),
    "masked-every-ema": Row(make=lambda: masked(every(2, dt.ema(0.9)), ["first.*", "last.bias"])),
    "on_batch": Row(make=lambda: on_batch(shrink, name="shrink"), of=("on_batch",)),
    "on_batch-random": Row(make=lambda: on_batch(jitter, name="jitter"), per_rank=True),
    "every-on_batch-random": Row(make=lambda: every(2, on_batch(jitter, name="jitter")), per_rank=True),
    "pattern-loss": Row(make=halved_loss),
    "pattern-grad": Row(make=repeated, reruns=True),
    "pattern-update": Row(make=skipping),
}


# ---- broken on purpose ------------------------------------------------------------------------------------------------------


def _before(name: str, act: Callable[[Any], Any], seam: str = "update") -> dt.Transform:
    """A transform that does something to the state before what it wraps, and leaves it so."""

    def wrap(inner: Any) -> Any:
        def acting(state: Any, *given: Any, **options: Any) -> Any:
            changed = act(state)
            return inner(changed if isinstance(changed, dt.TrainState) else state, *given, **options)

        return acting

    return dt.Transform(name=name, **{seam: wrap})


def memory_outside_the_slice() -> dt.Transform:
    """Counts in the process, so a new process counts from zero."""
    steps: list[int] = []

    def act(state: dt.TrainState) -> None:
        steps.append(state.step)
        for param in state.params.values():
            param.grad.mul_(1.0 / len(steps))

    return _before("memory", act)


def global_generator_in_init() -> dt.Transform:
    """Draws from the global generator when it begins, also when it never acts."""
    return dt.Transform(name="drawing", init=lambda state: {"number": torch.rand(()).item()})


def rate_changed_in_init() -> dt.Transform:
    """Changes the optimizer when it begins, also when it never acts."""

    def init(state: dt.TrainState) -> dict:
        state.optimizer.param_groups[0]["lr"] *= 0.5
        return {}

    return dt.Transform(name="rate", init=init)


def norm_of_the_shard() -> dt.Transform:
    """Clips by the norm of this rank's shard."""

    def act(state: dt.TrainState) -> None:
        for param in state.params.values():
            shard = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            shard.mul_(min(1.0, 0.05 / (shard.norm().item() + 1e-6)))

    return _before("shard_norm", act)


def mean_of_one_rank() -> dt.Transform:
    """Reports a metric that only one rank counts as if there were no other."""

    def wrap(inner: Any) -> Any:
        def counted(state: Any, metrics: Any) -> Any:
            weight = torch.ones((), dtype=torch.float64)
            return inner(state, {**metrics, "share": dt.Metric(metrics["loss"].weight, weight)})

        return counted

    return dt.Transform(name="share", update=wrap)


def leaking(name: str, act: Callable[[dt.TrainState], Any], seam: str = "update") -> Callable[[], dt.Transform]:
    return lambda: _before(name, act, seam)


def _halve_rates(state: dt.TrainState) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] *= 0.5


def _perturb(state: dt.TrainState) -> None:
    with torch.no_grad():
        for param in state.params.values():
            param.add_(0.01)


def _hook(state: dt.TrainState) -> None:
    next(iter(state.params.values())).register_post_accumulate_grad_hook(lambda param: None)


def _hook_from_a_loss() -> dt.Transform:
    def wrap(inner: Any, context: dt.StepContext) -> Any:
        context.state.model.register_forward_hook(lambda module, given, result: None)
        return inner

    return dt.Transform(name="loss_hook", loss=wrap)


def _count_in_place() -> dt.Transform:
    def act(state: dt.TrainState) -> None:
        state.slices["in_place"]["seen"] += 1

    return replace(_before("in_place", act), init=lambda state: {"seen": 0})


def unspent() -> dt.Transform:
    """Lets the state that was stepped pass for the newest one."""

    def wrap(inner: Any) -> Any:
        def reviving(state: Any, metrics: Any) -> Any:
            after, metrics = inner(state, metrics)
            state.shared.generation = state.generation - 1
            return replace(after, generation=state.generation - 1), metrics

        return reviving

    return dt.Transform(name="unspent", update=wrap)


def _slice(name: str, make: Callable[[dt.TrainState], Any]) -> Callable[[], dt.Transform]:
    return lambda: dt.Transform(name=name, init=make)


BROKEN: dict[str, tuple[str, Row]] = {
    "memory outside the slice": ("resume", Row(make=memory_outside_the_slice)),
    "global generator in init": ("never active", Row(make=global_generator_in_init)),
    "rate changed in init": ("never active", Row(make=rate_changed_in_init)),
    "norm of the shard": ("ranks", Row(make=norm_of_the_shard)),
    "mean of one rank": ("ranks", Row(make=mean_of_one_rank)),
    "slice with an object": ("slices", Row(make=_slice("object", lambda state: {"device": state.device}))),
    "slice with a list": (
        "slices",
        Row(make=_slice("list", lambda state: {"all": [p.clone() for p in state.params.values()]})),
    ),
    "slice keyed by number": ("slices", Row(make=_slice("number", lambda state: {0: 1.0}))),
    "slice keyed by place": (
        "slices",
        Row(make=_slice("place", lambda state: {str(at): p.detach().clone() for at, p in enumerate(state.params.values())})),
    ),
    "slice that is a parameter": ("slices", Row(make=_slice("alias", lambda state: {"params": dict(state.params)}))),
    "rate left changed": ("exception", Row(make=leaking("rate", _halve_rates))),
    "parameters left changed": ("exception", Row(make=leaking("perturb", _perturb, "grad"))),
    "hook left behind": ("exception", Row(make=leaking("hook", _hook, "grad"))),
    "hook left by a loss": ("exception", Row(make=_hook_from_a_loss)),
    "mode left changed": ("exception", Row(make=leaking("mode", lambda state: state.model.eval() and None, "grad"))),
    "random numbers used up": ("exception", Row(make=leaking("draw", lambda state: torch.rand(()) and None))),
    "slice changed in place": ("exception", Row(make=_count_in_place)),
    "spent state revived": ("spent", Row(make=unspent)),
}


def row(name: str) -> Row:
    """A row, sound or broken: ranks find it by name."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]


def make(name: str) -> dt.Transform:
    """The transform of a row, anew."""
    return row(name).make()
