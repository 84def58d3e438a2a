import math

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.schedules.basic import constant, cosine, linear, with_warmup


def test_ten_linear_steps_from_one_use_one_down_to_a_tenth():
    assert [linear(1.0, 0.0, 10)(t) for t in range(11)] == pytest.approx(
        [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    )


def test_linear_agrees_with_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=8)
    ours = linear(1.0, 0.25, 8)
    for t in range(12):
        assert ours(t) == pytest.approx(peer.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        peer.step()


def test_cosine_agrees_with_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    ours = cosine(1.0, 0.1, 20)
    for t in range(20):
        assert ours(t) == pytest.approx(peer.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        peer.step()


@pytest.mark.parametrize("make", [linear, cosine])
def test_decay_stays_at_its_end_exactly(make):
    assert make(1.0, 0.1, 7)(7) == make(1.0, 0.1, 7)(1e9) == 0.1
    assert make(1.0, 0.1, 7)(0) == make(1.0, 0.1, 7)(-1) == 1.0


def test_warmup_rises_from_zero_and_joins_without_a_jump():
    warm = with_warmup(cosine(1.0, 0.1, 100), 10)
    assert warm(0) == 0.0
    assert warm(5) == pytest.approx(warm(10) / 2)
    assert warm(10 - 1e-9) == pytest.approx(warm(10), rel=1e-8)
    assert warm(10) == cosine(1.0, 0.1, 100)(10)
    assert warm(100) == 0.1


def test_warmup_of_no_steps_changes_nothing():
    assert [with_warmup(linear(1.0, 0.0, 5), 0)(t) for t in range(6)] == [linear(1.0, 0.0, 5)(t) for t in range(6)]


@pytest.mark.parametrize("steps", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("make", [linear, cosine])
def test_decay_needs_a_length(make, steps):
    with pytest.raises(ConfigError, match=f"{make.__name__}: steps must be a positive number"):
        make(1.0, 0.0, steps)


def test_warmup_refuses_a_negative_length():
    with pytest.raises(ConfigError, match="steps must be at least 0, got steps=-1"):
        with_warmup(linear(1.0, 0.0, 5), -1)


def test_a_constant_is_the_same_everywhere():
    assert [constant(0.25)(t) for t in (-1, 0, 0.5, 1e9)] == [0.25] * 4


@pytest.mark.parametrize("value", [math.inf, math.nan, "1", None, True])
def test_a_constant_needs_a_number(value):
    with pytest.raises(ConfigError, match="constant: value must be a finite number, got"):
        constant(value)
