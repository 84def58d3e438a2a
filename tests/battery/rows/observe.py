"""Rows of transforms that observe a step and change nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import dtrain as dt
from battery.row import Points, Row
from battery.rows.gradients import line, value
from dtrain.monitors.activations import activation_stats
from dtrain.monitors.loss_spikes import is_spike, watch_loss
from dtrain.monitors.tensor_norms import norms

SAMPLE = [[3.0, 4.0]]  # the gradient of every step


def normed() -> Points:
    """At rate 1 from (5, 12): the gradient has norm 5, the parameters 13, then (2, 8)."""
    first = line(norms(1), SAMPLE, [5.0, 12.0])[1]
    second = line(norms(2, by="layer"), SAMPLE, [5.0, 12.0], steps=2)[1]
    return [
        (value(first, "norm/grad"), 5.0),
        (value(first, "norm/param"), 13.0),
        (value(first, "norm/update"), 5.0),
        (value(first, "norm/update_ratio"), 5.0 / 13.0),
        (value(second, "norm/param"), math.sqrt(68.0)),
        (value(second, "norm/param/weight"), math.sqrt(68.0)),
    ]


def activated() -> Points:
    """A layer that returns -2, 0, 0, 6: mean 1, mean square 10, variance 9, fourth moment (81 + 1 + 1 + 625) / 4 = 177."""
    stats = ("mean", "std", "rms", "max", "absmax", "zeros", "kurtosis")
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.ones_(model[0].weight)
    loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss, [activation_stats("0", 1, stats=stats)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
    _, metrics = step(state, torch.tensor([[-2.0], [0.0], [0.0], [6.0]], dtype=torch.float64))
    measured = {stat: value(metrics, f"activation/0/{stat}") for stat in stats}
    expected = {"mean": 1.0, "std": 3.0, "rms": math.sqrt(10.0), "max": 6.0, "absmax": 6.0, "zeros": 0.5, "kurtosis": 177 / 81}
    return [(measured[stat], expected[stat]) for stat in stats]


def watched() -> Points:
    """The gradient is 1, so at rate 1 the losses of the sample 1 from the weight 3 are 3, 2, 1, 0."""
    losses: list[float] = []

    def keeping(inner: Any) -> Any:
        def kept(state: Any, metrics: Any) -> Any:
            after, metrics = inner(state, metrics)
            losses[:] = list(after.transform_states["watch_loss"]["usual"].values())
            return after, metrics

        return kept

    guard = watch_loss("warn", factor=3.0)
    assert guard.update is not None
    both = guard.update
    line(dt.Transform(name="watch_loss", init=guard.init, update=lambda inner: keeping(both(inner))), [[1.0]], [3.0], steps=4)
    return [
        (torch.tensor(losses), torch.tensor([3.0, 2.0])),
        (float(is_spike(6.1, [2.0] * 10, 3.0)), 1.0),
        (float(is_spike(5.9, [2.0] * 10, 3.0)), 0.0),
        (float(is_spike(-0.9, [-1.0] * 10, 1.5)), 0.0),
        (float(is_spike(-0.4, [-1.0] * 10, 1.5)), 1.0),
    ]


ROWS: dict[str, Row] = {
    "norms": Row(
        make=lambda: norms(1, by="layer", of=("grad", "param", "update", "moment", "cosine")),
        of=("norms",),
        points=normed,
        moves=8 * 4 * 8,
    ),
    "norms-interval": Row(make=lambda: norms("3ba", by="group"), moves=8 * 4 * 8),
    "activation_stats": Row(
        make=lambda: activation_stats("**", 1, stats=("mean", "std", "max", "zeros"), include_inputs=True),
        of=("activation_stats",),
        points=activated,
        moves=8 * 6 * (2 * 3 + 2),
    ),
    "activation_stats-image": Row(make=lambda: activation_stats("first", 2, stats=("kurtosis",)), task="image", moves=128),
    "watch_loss": Row(make=lambda: watch_loss(factor=1e3, window=10), of=("watch_loss",), points=watched),
}
