"""Tests of sawtooth.py of docs/own.md, which test_own.py writes beside it."""

import pytest
import torch
from sawtooth import sawtooth
from torch import nn

import dtrain as dt


def test_it_falls_and_begins_again():
    schedule = sawtooth(0.5, 4)
    assert [schedule(step) for step in range(6)] == [1.0, 0.875, 0.75, 0.625, 1.0, 0.875]


def test_it_is_the_rate_of_the_step_about_to_run():
    model = nn.Linear(1, 1)
    loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss, [dt.transforms.scale_lr(sawtooth(0.5, 4))])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=2.0))
    rates = []
    for _ in range(5):
        state, metrics = step(state, torch.ones(1, 1))
        rates.append(dt.reduce_metrics(metrics)["lr"])
    assert rates == [2.0, 1.75, 1.5, 1.25, 2.0]


def test_a_period_that_cannot_be_is_refused():
    with pytest.raises(dt.errors.ConfigError, match="needs period >= 1, got 0"):
        sawtooth(0.5, 0)
