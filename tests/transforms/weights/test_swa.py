"""Stochastic weight averaging against torch's, in one process, and by hand."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.schedules.durations import RunLength
from dtrain.transforms.weights.averaging import ema, swa, update_swa_, use_average
from falling import BATCH, average, begin, take, weight


def test_average_matches_torch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    peer = AveragedModel(model)
    loss = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
    step = dt.compose_step(loss, [swa(start=3, end=9, every=2, load_average=False)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(1, 12):
        state, _ = step(state, torch.randn(4, 3))
        if number in (3, 4, 6, 8):  # the start, and the boundaries of two steps from there to the end
            peer.update_parameters(model)
    assert state.transform_states["swa"]["averaged"] == peer.n_averaged.item() == 4
    for name, param in peer.module.named_parameters():
        average = state.transform_states["swa"]["params"][name]
        assert average.sub(param.detach()).norm() <= 1e-6 * average.norm()  # it divides first: rounding in float32


@pytest.mark.parametrize(("strategy", "theirs"), [("linear", "linear"), ("cosine", "cos")])
def test_lr_annealing_matches_torch(strategy, theirs):
    peer_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    peer = SWALR(peer_optimizer, swa_lr=0.05, anneal_epochs=4, anneal_strategy=theirs)
    step, state = begin(swa(start=2, end=20, every=1, lr=0.05, anneal=4, shape=strategy), lr=0.5)
    rates = []
    for _ in range(9):
        state, metrics = step(state, BATCH)
        rates.append(dt.reduce_metrics(metrics)["lr"])
        assert [group["lr"] for group in state.optimizer.param_groups] == [0.5]
    expected = []
    for _ in range(7):
        expected.append(peer_optimizer.param_groups[0]["lr"])
        peer_optimizer.step()
        peer.step()
    assert rates[:2] == [0.5, 0.5]
    assert rates[2:] == pytest.approx(expected)


def test_lr_annealing_starts_from_the_outer_schedule_value():
    transforms = [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 10)), swa(start=4, end=9, every=1, lr=0.1, anneal=2)]
    step, state = begin(*transforms, lr=1.0)
    rates = []
    for _ in range(7):
        state, metrics = step(state, BATCH)
        rates.append(dt.reduce_metrics(metrics)["lr"])
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5 * 0.5 + 0.5 * 0.1, 0.1])


def test_lr_annealing_takes_ten_intervals_by_default():
    step, state = begin(swa(start=0, end=30, every=2, lr=0.1), lr=0.5)
    state = take(step, state, 5)
    _, metrics = step(state, BATCH)
    assert dt.reduce_metrics(metrics)["lr"] == pytest.approx(0.75 * 0.5 + 0.25 * 0.1)


def test_lr_schedule_is_called_only_after_annealing():
    step, state = begin(swa(start=2, end=30, every=1, lr=lambda t: {3: 0.25, 4: 0.125}[t], anneal=1), lr=0.5)
    state = take(step, state, 3)
    before = weight(state)
    state = take(step, state, 2)
    assert before - weight(state) == 0.25 + 0.125


def test_lr_is_restored_after_an_exception():
    def broken(*given: object) -> None:
        raise RuntimeError("inside")

    step, state = begin(swa(start=0, end=9, every=1, lr=0.1, anneal=1))
    state = take(step, state)
    inner = partial(step.transforms[0].update(broken), state)
    with pytest.raises(RuntimeError, match="inside"):
        inner({})
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.5]


def test_parameters_equal_the_average_after_the_end():
    step, state = begin(swa(start=1, end=3, every=1))
    state = take(step, state, 2)
    assert weight(state) == 3.0
    state = take(step, state)
    assert (weight(state), average(state, "swa")) == (3.0, 3.0)  # (3.5 + 3 + 2.5) / 3
    state = take(step, state, 2)
    assert (weight(state), state.transform_states["swa"]["averaged"]) == (3.0, 3)


def test_start_at_zero_excludes_the_initial_weights():
    step, state = begin(swa(start=0, end=9, every=2, load_average=False))
    with (
        pytest.raises(ConfigError, match="use_average: the average 'swa' has not started at step 1"),
        use_average(take(step, state), "swa"),
    ):
        pass
    step, state = begin(swa(start=0, end=9, every=2, load_average=False))
    assert average(take(step, state, 4), "swa") == (3.0 + 2.0) / 2


def test_default_start_and_end_are_rounded_to_epochs():
    """Defaults for 4 epochs of 3 steps: from step 9 (0.7 * 12 = 8.4) to step 12 (0.97 * 12 = 11.64)."""
    step, state = begin(swa(), lr=0.25, run_length=RunLength(total="4ep", steps_per_epoch=3))
    state = take(step, state, 11, epoch=3)
    assert (weight(state), average(state, "swa")) == (4.0 - 11 * 0.25, 4.0 - 9 * 0.25)
    state = take(step, state, 1, epoch=3)
    assert weight(state) == 4.0 - (9 + 12) / 2 * 0.25


def test_end_may_equal_the_run_length():
    step, state = begin(swa(start="0.5dur", end="1dur", every=1), run_length=RunLength(total=4))
    assert weight(take(step, state, 4)) == (3.0 + 2.5 + 2.0) / 3


@pytest.mark.parametrize(("around", "weights"), [(True, (4.0 + 3.5 + 3.0) / 3), (False, (3.5 + 3.0) / 2)])
def test_first_averaged_weights_wait_for_an_unskipped_step(around, weights):
    """A loss scale skips the step that begins the average; the average is inside or outside of the loss scale."""
    transforms = [swa(start=1, end=9, every=1, load_average=False), dt.transforms.loss_scale(2.0)]
    step, state = begin(*(transforms if around else transforms[::-1]))
    state, _ = step(state, BATCH * math.inf)
    assert average(take(step, state, 2), "swa") == weights


def test_skipped_start_step_off_the_interval_is_averaged_later():
    step, state = begin(dt.transforms.loss_scale(2.0), swa(start=2, end=9, every=10, load_average=False))
    for factor in (1.0, math.inf, 1.0, 1.0):
        state, _ = step(state, BATCH * factor)
    assert (average(state, "swa"), state.transform_states["swa"]["averaged"]) == (3.0, 1)


def test_first_averaged_weights_overwrite_the_buffer():
    average = {"w": torch.tensor([math.nan])}
    update_swa_(average, {"w": torch.tensor([2.0])}, 0)
    assert average["w"].item() == 2.0
    update_swa_(average, {"w": torch.tensor([5.0])}, 1)
    assert average["w"].item() == 3.5


def test_ema_and_swa_averages_are_kept_together():
    step, state = begin(ema(0.5), swa(start=1, end=9, every=1))
    state = take(step, state, 2)
    assert (average(state, "ema"), average(state, "swa")) == (0.5 * 3.75 + 0.5 * 3.0, 3.25)
    with use_average(state, "swa"):
        assert weight(state) == 3.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: swa(start=5, end=5), "swa: start must be before end, got start='5ba', end='5ba'"),
        (lambda: swa(start="0.8dur", end="0.7dur"), r"swa: start must be before end, got start='0\.8dur', end='0\.7dur'"),
        (lambda: swa(lr=-1.0), r"swa: lr must be in \[0, inf\), got -1\.0\."),
        (lambda: swa(lr="0.1"), "swa: lr must be a finite number or a schedule .*, got '0.1'"),
        (lambda: swa(anneal=3), r"swa: anneal must be None without lr, got 3\. Give lr= as well"),
        (lambda: swa(shape="cos"), "swa: shape must be 'linear' or 'cosine', got 'cos'"),
    ],
    ids=["empty", "backwards", "negative rate", "text", "anneal alone", "strategy"],
)
def test_swa_refuses_invalid_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_invalid_scheduled_lr_is_refused_before_any_change():
    step, state = begin(swa(start=0, end=9, lr=lambda t: -t, anneal=1, every=1))
    state = take(step, state)
    with pytest.raises(ConfigError, match=r"swa: lr must be in \[0, inf\), got -1"):
        step(state, BATCH)
    assert weight(state) == 3.5


@pytest.mark.parametrize("options", [{}, {"start": 1, "end": 5, "lr": 0.1, "anneal": "1ep"}], ids=["share", "anneal"])
def test_init_refuses_durations_that_need_an_unknown_run_length(options):
    with pytest.raises(ConfigError, match=r"duration: 1ep in steps needs steps_per_epoch|clock: 0.7dur is a share of the run"):
        begin(swa(**options))
