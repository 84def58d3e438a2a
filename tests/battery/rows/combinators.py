"""Rows of combinators, which choose when and where a transform acts, and of house patterns, which a user may write."""

from __future__ import annotations

from typing import Any

import torch

import dtrain as dt
from battery.row import Row
from dtrain.transforms.combinators import between, every, masked, named, on_batch


def shrink(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**batch, "x": 0.5 * batch["x"]}


def jitter(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    noise = torch.randn(batch["x"].shape, generator=generator, dtype=batch["x"].dtype)
    return {**batch, "x": batch["x"] + 0.1 * noise}


def halved_loss() -> dt.Transform:
    """At the loss seam: every second step counts half."""

    def wrap(inner: Any, context: dt.step.StepContext) -> Any:
        factor = 1.0 if context.state.step % 2 else 0.5

        def loss(model: Any, batch: Any) -> dt.LossSum:
            whole = inner(model, batch)
            return dt.LossSum(total=factor * whole.total, weight=whole.weight, aux=whole.aux)

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
            seen = state.transform_states["skipping"]["seen"] + 1
            if seen % 3 != 2:
                state, metrics = inner(state, metrics)
            return state.with_transform_state("skipping", {"seen": seen}), metrics

        return maybe

    return dt.Transform(name="skipping", init=lambda state: {"seen": 0}, update=wrap)


ROWS: dict[str, Row] = {
    "every-loss_scale": Row(make=lambda: every(2, dt.transforms.loss_scale(grow_every=1)), syncs=1),
    "every-auto_microbatch": Row(
        make=lambda: every(2, dt.auto_microbatch(initial_size=3, grow_every=2)), reruns=True, passes=3
    ),
    "every-ema": Row(make=lambda: every(2, dt.transforms.ema(0.9)), of=("every",)),
    "every-epoch-clip": Row(make=lambda: every("1ep", dt.transforms.clip_by_norm(0.05))),
    "every-halved_loss": Row(make=lambda: every(2, halved_loss())),
    "between-scale_lr": Row(
        make=lambda: between(1, 5, dt.transforms.scale_lr(dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 7), 2))),
        of=("between",),
    ),
    "between-samples-ema": Row(make=lambda: between("7sp", "2ep", dt.transforms.ema(0.9))),
    "masked-clip": Row(make=lambda: masked(dt.transforms.clip_by_norm(0.05), "first.*"), of=("masked",)),
    "masked-ema": Row(make=lambda: masked(dt.transforms.ema(0.9), lambda name, param: param.ndim == 2)),
    "masked-every-ema": Row(make=lambda: masked(every(2, dt.transforms.ema(0.9)), ["first.*", "last.bias"])),
    "named-ema": Row(make=lambda: named("slow", dt.transforms.ema(0.9)), of=("named",)),
    "every-named-masked-ema": Row(make=lambda: every(2, named("slow", masked(dt.transforms.ema(0.9), "first.*")))),
    "on_batch": Row(make=lambda: on_batch(shrink, name="shrink"), of=("on_batch",)),
    "on_batch-random": Row(make=lambda: on_batch(jitter, name="jitter"), per_rank=True),
    "every-on_batch-random": Row(make=lambda: every(2, on_batch(jitter, name="jitter")), per_rank=True),
    "pattern-loss": Row(make=halved_loss),
    "pattern-grad": Row(make=repeated, reruns=True, passes=2),
    "pattern-update": Row(make=skipping),
}
