"""Rows of transforms that change gradients, or the samples on which gradients are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import dtrain as dt
from battery.row import Points, Row
from dtrain.transforms.batches.selective_backprop import selective_backprop
from dtrain.transforms.combinators import every, masked
from dtrain.transforms.gradients.clipping import adaptive_clip, centralize_gradients, clip_by_norm, clip_by_value
from dtrain.transforms.gradients.noise_scale import noise_scale
from dtrain.transforms.gradients.nonfinite import nonfinite
from dtrain.transforms.gradients.sam import sam


def line(transform: dt.Transform, samples: list[list[float]], start: list[float], steps: int = 1) -> tuple[torch.Tensor, Any]:
    """The weights after some steps at rate 1 on the loss ``w @ x``, whose gradient is the mean sample; and the last metrics."""
    return trained(transform, samples, start, lambda model, x: model(x).mean(), steps)


def bowl(transform: dt.Transform, start: list[float]) -> torch.Tensor:
    """The weights after a step at rate 1 on the loss ``|w|**2 / 2``, whose gradient is ``w``."""
    return trained(
        transform, [[0.0] * len(start)], start, lambda model, x: model.weight.square().sum() / 2 + 0 * model(x).sum()
    )[0]


def trained(
    transform: dt.Transform, samples: list[list[float]], start: list[float], mean: Any, steps: int = 1
) -> tuple[torch.Tensor, Any]:
    model = nn.Linear(len(start), 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([start]))
    step = dt.compose_step(dt.mean_loss(mean, weight=len), [transform])
    state, metrics = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0)), {}
    for _ in range(steps):
        state, metrics = step(state, torch.tensor(samples, dtype=torch.float64))
    return model.weight.detach()[0], metrics


def value(metrics: Any, name: str) -> torch.Tensor:
    return metrics[name].total / metrics[name].weight


def clipped_by_norm() -> Points:
    small, large = [[0.3, 0.4]], [[3.0, 4.0]]  # norms 0.5 and 5
    weights, metrics = line(clip_by_norm(1.0, eps=0.0), large, [0.0, 0.0])
    return [
        (weights, torch.tensor([-0.6, -0.8])),
        (value(metrics, "grad_norm"), 5.0),
        (line(clip_by_norm(1.0), small, [0.0, 0.0])[0], torch.tensor([-0.3, -0.4])),
    ]


def clipped_by_value() -> Points:
    return [
        (line(clip_by_value(1.0), [[3.0, -0.5]], [0.0, 0.0])[0], torch.tensor([-1.0, 0.5])),
        (line(clip_by_value(0.25), [[3.0, -0.5]], [0.0, 0.0])[0], torch.tensor([-0.25, 0.25])),
    ]


def clipped_adaptively() -> Points:
    return [
        # The norm of the weights is 5, that of the gradient 10: 0.5 is left of it. Then 2, below a tenth of 5 times 10.
        (line(adaptive_clip(0.1), [[6.0, 8.0]], [3.0, 4.0])[0], torch.tensor([2.7, 3.6])),
        (line(adaptive_clip(1.0), [[1.2, 1.6]], [3.0, 4.0])[0], torch.tensor([1.8, 2.4])),
        (line(adaptive_clip(0.1, eps=0.5), [[6.0, 8.0]], [0.0, 0.0])[0], torch.tensor([-0.03, -0.04])),
    ]


def centralized() -> Points:
    return [
        (line(centralize_gradients(), [[1.0, 3.0]], [0.0, 0.0])[0], torch.tensor([1.0, -1.0])),
        (line(centralize_gradients(), [[2.0, 2.0]], [5.0, 6.0])[0], torch.tensor([5.0, 6.0])),
    ]


def left_out() -> Points:
    infinite, fine = [[float("inf"), 1.0]], [[0.5, 1.0]]
    (stays, first), (moves, second) = (line(nonfinite(), samples, [1.0, 1.0]) for samples in (infinite, fine))
    return [
        (stays, torch.tensor([1.0, 1.0])),
        (value(first, "skipped"), 1.0),
        (moves, torch.tensor([0.5, 0.0])),
        (value(second, "skipped"), 0.0),
    ]


def scaled_noise() -> Points:
    # Gradients 1 of the half and 1.5 of the whole: noise 0.25 / (1/1 - 1/2) = 0.5, signal 2.25 - 0.5 / 2 = 2.
    one = line(noise_scale(), [[1.0], [2.0]], [0.0])[1]
    # (3, 0) and (2, 1) of 2 and 4 samples: noise 2 / (1/2 - 1/4) = 8, signal 5 - 8 / 4 = 3. Averages of equals stay.
    two = line(noise_scale(0.5, every=1), [[3.0, 0.0], [1.0, 2.0], [3.0, 0.0], [1.0, 2.0]], [0.0, 0.0], steps=3)[1]
    return [(value(one, "noise_scale"), 0.25), (value(two, "noise_scale"), 8.0 / 3.0)]


def sharpened() -> Points:
    # The gradient of |w|**2 / 2 is w: at w + rho w / |w| it is w (1 + rho / |w|), so a step at rate 1 ends at -rho w / |w|.
    adaptive = 2.0 * 2.0**2 * 2.0 / (2.0 * 2.0)  # rho t**2 g / |t g|, with t = w = g = 2 and rho = 2
    return [
        (bowl(sam(0.5), [3.0, 4.0]), torch.tensor([-0.3, -0.4])),
        (bowl(sam(2.0), [0.0, 0.0]), torch.tensor([0.0, 0.0])),
        (bowl(sam(2.0, adaptive=True, eta=0.0), [2.0]), torch.tensor([-adaptive])),
    ]


def selected() -> Points:
    # With keep 0.01 the exponent is 99, so the largest loss is as good as certain; with 1 all samples are kept.
    samples, losses = [[1.0], [4.0], [2.0]], lambda model, x: x[:, 0]
    return [
        (line(selective_backprop(losses, 0.01), samples, [0.0])[0], torch.tensor([-4.0])),
        (line(selective_backprop(losses, 1.0), samples, [0.0])[0], torch.tensor([-7.0 / 3.0])),
    ]


def spoiling(transform: dt.Transform, *steps: int) -> dt.Transform:
    """``transform`` in a run whose gradient is infinite in some steps."""
    assert transform.update is not None
    guard = transform.update

    def update(inner: Any) -> Any:
        guarded = guard(inner)

        def spoiled(state: Any, metrics: Any) -> Any:
            if state.step in steps:
                for param in state.params.values():
                    param.grad.mul_(float("inf"))
            return guarded(state, metrics)

        return spoiled

    return replace(transform, update=update)


def errors(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean(dim=1)


ROWS: dict[str, Row] = {
    "clip_by_norm": Row(make=lambda: clip_by_norm(0.05), of=("clip_by_norm",), points=clipped_by_norm),
    "clip_by_norm-scheduled": Row(make=lambda: clip_by_norm(dt.schedules.linear(0.5, 0.05, 6))),
    "clip_by_value": Row(make=lambda: clip_by_value(0.02), of=("clip_by_value",), points=clipped_by_value),
    "adaptive_clip": Row(make=lambda: adaptive_clip(0.01), of=("adaptive_clip",), points=clipped_adaptively),
    "adaptive_clip-image": Row(make=lambda: adaptive_clip(dt.schedules.linear(0.1, 0.01, 6)), task="image"),
    "centralize_gradients": Row(make=centralize_gradients, of=("centralize_gradients",), points=centralized),
    "centralize_gradients-image": Row(make=centralize_gradients, task="image"),
    "nonfinite": Row(make=lambda: spoiling(nonfinite(in_a_row=2), 1, 4), of=("nonfinite",), points=left_out, syncs=1),
    "noise_scale": Row(make=lambda: noise_scale(0.5, every=2), of=("noise_scale",), points=scaled_noise, undoes=True, passes=2),
    "sam": Row(make=lambda: sam(0.5), of=("sam",), points=sharpened, reruns=True, passes=2),
    "sam-adaptive": Row(make=lambda: sam(dt.schedules.linear(0.5, 2.0, 6), adaptive=True), reruns=True, passes=2),
    "sam-interval": Row(make=lambda: sam(0.5, every="2ba"), reruns=True, passes=2),
    "masked-sam": Row(make=lambda: masked(sam(0.5), "first.*"), reruns=True, passes=2),
    "selective_backprop": Row(
        make=lambda: selective_backprop(errors, 0.5, start=1, microbatch_size=2),
        of=("selective_backprop",),
        points=selected,
        per_rank=True,
        reruns=True,
        passes=2,
    ),
    "every-selective_backprop": Row(
        make=lambda: every(2, selective_backprop(errors, dt.schedules.linear(0.8, 0.3, 6))),
        per_rank=True,
        reruns=True,
        passes=2,
    ),
}
