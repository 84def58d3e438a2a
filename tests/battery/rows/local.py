"""Rows: ranks that train apart for a while. The battery has one copy of the model; several are in tests/algorithms/weights."""

from __future__ import annotations

import torch

import dtrain as dt
from battery.row import Points, Row
from dtrain.transforms.weights.local_sgd import diloco, local_sgd


def _along_a_line(transform: dt.Transform, steps: int) -> list[float]:
    """The weight after each step of 0.05 down, from 1."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 1.0)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [transform])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05))
    values = []
    for _ in range(steps):
        state, _ = step(state, torch.ones(4, 1, dtype=torch.float64))
        values.append(model.weight.item())
    return values


def _one_copy() -> Points:
    return list(zip(_along_a_line(local_sgd(2), 3), [0.95, 0.90, 0.85], strict=True))


def _outer_steps() -> Points:
    first = 1 - 0.7 * (0.1 + 0.9 * 0.1)
    second = first - 0.7 * (0.1 + 0.9 * (0.9 * 0.1 + 0.1))
    return list(zip(_along_a_line(diloco(2), 4), [0.95, first, first - 0.05, second], strict=True))


def _half_way() -> Points:
    return list(zip(_along_a_line(diloco(3, lr=0.5, momentum=0), 6), [0.95, 0.9, 0.925, 0.875, 0.825, 0.85], strict=True))


ROWS: dict[str, Row] = {
    "local_sgd": Row(make=lambda: local_sgd(2), of=("local_sgd",), points=_one_copy),
    "diloco": Row(make=lambda: diloco(2), of=("diloco",), points=_outer_steps),
    "diloco-scheduled": Row(make=lambda: diloco("1ep", lr=dt.schedules.linear(1.0, 0.5, 6), momentum=0.5), points=_half_way),
}
