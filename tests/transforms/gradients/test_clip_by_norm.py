"""Clipping by the global norm against its formula, by hand."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from falling import BATCH, LOSS, weight


def begin(step: dt.step.Step, lr: float = 0.5) -> dt.TrainState:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    return step.init(model, torch.optim.SGD(model.parameters(), lr=lr))


def test_clipping_bounds_the_gradient_and_reports_the_original_norm():
    step = dt.compose_step(LOSS, [dt.transforms.clip_by_norm(0.25, eps=0.0)])
    state, metrics = step(begin(step), BATCH)
    assert weight(state) == 4.0 - 0.5 * 0.25
    assert dt.reduce_metrics(metrics)["grad_norm"] == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_norm_metric_without_gradients_is_on_the_device():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).cuda()
    model[0].requires_grad_(False)
    step = dt.compose_step(LOSS, [dt.transforms.masked(dt.transforms.clip_by_norm(1.0), "0.*")])
    state = step.init(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    _, metrics = step(state, BATCH)
    assert dt.reduce_metrics(metrics)["grad_norm"] == 0.0


def test_max_norm_schedule_is_read_at_the_current_step():
    step = dt.compose_step(LOSS, [dt.transforms.clip_by_norm(lambda t: (0.5, 0.25)[int(t)], eps=0.0)])
    state, _ = step(begin(step), BATCH)
    assert weight(state) == 4.0 - 0.5 * 0.5
    state, _ = step(state, BATCH)
    assert weight(state) == 4.0 - 0.5 * 0.5 - 0.5 * 0.25


def test_clipping_refuses_an_invalid_scheduled_max_norm():
    step = dt.compose_step(LOSS, [dt.transforms.clip_by_norm(lambda t: -1.0)])
    with pytest.raises(ConfigError, match=r"max_norm must be in \(0, inf\], got -1\.0 from its schedule at step 0"):
        step(begin(step), BATCH)


def test_clipping_refuses_an_invalid_max_norm():
    with pytest.raises(ConfigError, match=r"clip_by_norm: max_norm must be in \(0, inf\], got 0\."):
        dt.transforms.clip_by_norm(0)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "1e-6", None])
def test_clipping_refuses_an_invalid_eps(eps):
    with pytest.raises(ConfigError, match="clip_by_norm: eps must be a finite number at least 0, got"):
        dt.transforms.clip_by_norm(1.0, eps=eps)


def test_max_norm_accepts_a_number_or_a_schedule():
    with pytest.raises(ConfigError, match=r"clip_by_norm: max_norm must be a finite number or a schedule .*, got '1'"):
        dt.transforms.clip_by_norm("1")
