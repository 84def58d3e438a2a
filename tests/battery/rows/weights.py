"""Rows of transforms that change weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

import dtrain as dt
from battery.row import Points, Row
from dtrain.step.compose import compose_step
from dtrain.transforms.combinators import every, masked
from dtrain.transforms.weights.averaging import ema, swa
from dtrain.transforms.weights.balance_experts import balance_experts, move_bias_
from dtrain.transforms.weights.freeze import freeze, freeze_layers

FALLING = dt.mean_loss(lambda model, x: model(x).sum() / len(x), weight=len)  # on ones, every gradient is 1


def states(transform: dt.Transform, steps: int, *, layers: int = 1, lr: float = 0.5) -> Iterator[dt.TrainState]:
    """Each state of a run on linear layers that begin at 4. The weight of a single one falls by ``lr`` a step."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(layers)))
    for param in model.parameters():
        torch.nn.init.constant_(param, 4.0)
    step = compose_step(FALLING, [transform])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=lr))
    yield state
    for _ in range(steps):
        state, _ = step(state, torch.ones(2, 1))
        yield state


def last(transform: dt.Transform, steps: int) -> dt.TrainState:
    """The end of a run in which the weight goes 4, 3.5, 3, ..."""
    return list(states(transform, steps))[-1]


def average(state: dt.TrainState, name: str) -> float:
    return state.transform_states[name]["params"]["0.weight"].item()


def ema_points() -> Points:
    return [
        (average(last(ema(0.75), 2), "ema"), 0.75 * (0.75 * 4.0 + 0.25 * 3.5) + 0.25 * 3.0),
        (average(last(ema(half_life=2, every=2), 2), "ema"), 0.5 * 4.0 + 0.5 * 3.0),
        (average(last(ema(0.75, start=2), 3), "ema"), 0.75 * 3.0 + 0.25 * 2.5),
    ]


def swa_points() -> Points:
    beside = last(swa(start=1, end=4, every=2, load_average=False), 6)
    inside = last(swa(start=1, end=3, every=1), 5)
    annealed = last(swa(start=2, end=9, every=1, lr=0.1, anneal=4), 4)
    return [
        (average(beside, "swa"), (3.5 + 3.0 + 2.0) / 3),  # after step 1, the start, and steps 2 and 4
        (inside.params["0.weight"].item(), (3.5 + 3.0 + 2.5) / 3),
        # The fourth step is the first with another rate: a quarter of the way from 0.5 to 0.1.
        (annealed.params["0.weight"].item(), 4.0 - 3 * 0.5 - (0.75 * 0.5 + 0.25 * 0.1)),
    ]


def freeze_points() -> Points:
    params = last(freeze("*.weight", start=1), 4).params
    return [(params["0.weight"].item(), 4.0 - 0.5), (params["0.bias"].item(), 4.0 - 4 * 0.5)]


def freeze_layers_points() -> Points:
    """Freeze floor(t / 4 * 2) of three layers: the first from t = 2 on, two from t = 4 on, never the last."""
    run = states(freeze_layers(start=0, end=4), 6, layers=3, lr=1e-4)
    biases = [[layer.bias.item() for layer in state.model] for state in run]
    moved = [[a != b for a, b in zip(*pair, strict=True)] for pair in pairwise(biases)]
    return list(zip(moved, 2 * [[True] * 3] + 2 * [[False, True, True]] + 2 * [[False, False, True]], strict=True))


def balance_points() -> Points:
    """Eight equal rows choose expert 2 of 4 until its bias has fallen far enough."""
    model = torch.nn.Sequential(dt.experts.Router(2, 4, top_k=1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.1, 0.0], [0.0, 0.0]]))
    loss = dt.mean_loss(lambda model, x: model(x).gates.mean() + 0 * model[0].weight.sum(), weight=len)
    step = compose_step(loss, [balance_experts(0.25)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    shares, biases = [], []
    for _ in range(2):
        state, _ = step(state, torch.ones(8, 2))
        shares.append(model[0].share.tolist())
        biases.append(model[0].bias.tolist())
    bias = torch.zeros(3)
    move_bias_(bias, torch.tensor([4, 3, 2]), 0.5)
    return [
        (shares[0], [0.0, 0.0, 1.0, 0.0]),
        (biases[0], [0.25, 0.25, -0.25, 0.25]),
        (biases[1][2], 0.0),  # another expert had all rows
        (bias, [-0.5, 0.0, 0.5]),
    ]


ROWS: dict[str, Row] = {
    "balance_experts": Row(
        make=lambda: balance_experts(0.01),
        of=("balance_experts",),
        points=balance_points,
        task="experts",
        reruns=True,
    ),
    "ema": Row(make=lambda: ema(0.9), of=("ema",), points=ema_points),
    "ema-scheduled": Row(make=lambda: ema(dt.schedules.linear(0.5, 0.99, 6))),
    "ema-half-life": Row(make=lambda: ema(half_life="4ba", start=2, every="2ba")),
    "swa": Row(make=lambda: swa(start=2, end=5, every=2, lr=0.02, anneal=2), of=("swa",), points=swa_points),
    "swa-beside": Row(make=lambda: swa(start="1ep", end="2ep", load_average=False, lr=0.02, shape="cosine")),
    "masked-swa": Row(make=lambda: masked(swa(start=1, end=5, every=1), "first.*")),
    "every-swa": Row(make=lambda: every(2, swa(start=1, end=5, every=1, load_average=False, lr=0.02, anneal=3))),
    "freeze": Row(make=lambda: freeze(["*.bias", "first.weight"], start="1ep"), of=("freeze",), points=freeze_points),
    "freeze_layers": Row(make=lambda: freeze_layers(start=1, end=5), of=("freeze_layers",), points=freeze_layers_points),
    "every-freeze": Row(make=lambda: every(2, freeze("last.*"))),
}
