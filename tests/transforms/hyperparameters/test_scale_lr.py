"""``scale_lr`` against its formula and torch's ``LambdaLR``."""

import warnings

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


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf")])
def test_scale_lr_refuses_a_factor_before_anything_changes(factor):
    with pytest.raises(ConfigError, match=r"scale_lr: factor must be (a finite number|in \[0, inf\))"):
        dt.transforms.scale_lr(factor)
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(lambda t: factor)])
    state = begin(step, lr=0.5)
    with pytest.raises(ConfigError, match=r"scale_lr: factor must be in \[0, inf\), got .* from its schedule at step 0"):
        step(state, BATCH)
    assert (weight(state), state.optimizer.param_groups[0]["lr"]) == (4.0, 0.5)


def test_scale_lr_uses_the_schedule_value_of_the_current_step():
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 10))])
    state, rates = begin(step, lr=0.5), []
    for _ in range(10):
        before = weight(state)
        state, metrics = step(state, BATCH)
        rates.append(dt.reduce_metrics(metrics)["lr"])
        assert before - weight(state) == pytest.approx(rates[-1], rel=1e-6)
    assert rates == pytest.approx([0.5 * (1 - t / 10) for t in range(10)])


def test_scale_lr_scales_each_group_from_its_own_lr():
    model = nn.Linear(1, 1)
    for param in model.parameters():
        nn.init.constant_(param, 4.0)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}])
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(lambda t: 0.5)])
    state = step.init(model, optimizer)
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert (model.weight.item(), model.bias.item()) == pytest.approx((4.0 - 2 * 0.5, 4.0 - 2 * 0.05))


def test_scale_lr_agrees_with_lambda_lr():
    peer_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    factor = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 12), 4)
    peer = torch.optim.lr_scheduler.LambdaLR(peer_optimizer, factor)
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(factor)])
    state = begin(step, lr=0.5)
    for _ in range(12):
        state, metrics = step(state, BATCH)
        assert dt.reduce_metrics(metrics)["lr"] == peer.get_last_lr()[0]
        peer_optimizer.step()
        peer.step()


def test_scale_lr_restores_each_group_lr_after_the_step():
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(0.5)])
    state, _ = step(begin(step, lr=0.5), BATCH)
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.5]


def test_scale_lr_does_not_compound_after_a_second_init():
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 10))])
    state = begin(step, lr=0.5)
    for _ in range(5):
        state, _ = step(state, BATCH)
    again, metrics = step(step.init(state.model, state.optimizer), BATCH)
    assert dt.reduce_metrics(metrics)["lr"] == 0.5
    assert again.step == 1


def test_scale_lr_scales_an_lr_changed_during_the_run():
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(0.5)])
    state, _ = step(begin(step, lr=0.5), BATCH)
    dt.step.set_lr_(state.optimizer, 0.125)
    before = weight(state)
    state, _ = step(state, BATCH)
    assert weight(state) == before - 0.125 * 0.5


def test_scale_lr_keeps_a_tensor_lr():
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(0.5)])
    model = nn.Linear(1, 1, bias=False)
    rate = torch.tensor(0.5)
    state, metrics = step(step.init(model, torch.optim.Adam(model.parameters(), lr=rate, capturable=False)), BATCH)
    assert state.optimizer.param_groups[0]["lr"] is rate
    assert (rate.item(), dt.reduce_metrics(metrics)["lr"]) == (0.5, 0.25)


def test_scale_lr_accepts_a_number_or_a_schedule():
    with pytest.raises(ConfigError, match=r"scale_lr: factor must be a finite number or a schedule .*, got True"):
        dt.transforms.scale_lr(True)


@pytest.mark.parametrize(
    ("schedule", "warned"),
    [
        (dt.schedules.linear(1.0, 0.0, 4), [5]),  # over at 4, and the second step without a rate warns
        (dt.schedules.cosine(1.0, 0.1, 4), []),
        (dt.schedules.with_unit("sp", dt.schedules.linear(1.0, 0.0, 8)), [5]),
        (lambda t: float(t > 2), []),  # not begun yet
        (lambda t: float(t % 2), []),
        (0.0, []),
    ],
)
def test_scale_lr_warns_when_the_schedule_reaches_zero_early(schedule, warned):
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr(schedule)])
    state, told = begin(step), []
    for number in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = step(state, BATCH)
        told += [
            number for warning in caught if "scale_lr: the rate of every group is 0 from this step on" in str(warning.message)
        ]
    assert told == warned
