"""A run with known values: one weight, begun at 4, whose gradient is 1; and the marks of its ends of epochs."""

import torch
from torch import nn

import dtrain as dt
from origins import fresh, of_epochs

LOSS = dt.mean_loss(lambda model, batch: model(batch).sum() / len(batch), weight=len)
BATCH = torch.ones(2, 1)


def begin(*transforms: dt.Transform, lr: float = 0.5, **options: object) -> tuple[dt.step.Step, dt.TrainState]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def take(step: dt.step.Step, state: dt.TrainState, steps: int = 1, *, epoch: int = 0) -> dt.TrainState:
    """Return ``state`` so many steps later; ``epoch`` is the number of steps in an epoch."""
    for _ in range(steps):
        state, _ = step(state, of_epochs(BATCH, state.step, epoch) if epoch else fresh(BATCH))
    return state


def weight(state: dt.TrainState) -> float:
    return state.model.weight.item()


def average(state: dt.TrainState, name: str) -> float:
    return state.transform_states[name]["params"]["weight"].item()
