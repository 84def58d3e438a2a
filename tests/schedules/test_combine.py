import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.curves import clip, constant, cosine, linear, multiply, sequential, time_scale, to_lambda_lr, warmup
from dtrain.schedules.hyperparameters import UnitSchedule, hyperparameter, with_unit

VALUES = st.floats(0, 10)


@given(values=st.lists(VALUES, min_size=2, max_size=6), lengths=st.lists(st.integers(1, 30), min_size=6, max_size=6))
def test_sequential_joins_matching_schedules_without_a_jump(values, lengths):
    parts = [linear(begin, end, length) for begin, end, length in zip(values, values[1:], lengths, strict=False)]
    boundaries = [sum(lengths[: number + 1]) for number in range(len(parts) - 1)]
    joined = sequential(parts, boundaries)
    for boundary, value in zip(boundaries, values[1:], strict=False):
        assert joined(boundary) == pytest.approx(value)
        assert joined(boundary - 1e-9) == pytest.approx(value, abs=1e-6)


def test_sequential_of_one_schedule_equals_the_schedule():
    assert [sequential([linear(1.0, 0.0, 5)], [])(t) for t in range(7)] == [linear(1.0, 0.0, 5)(t) for t in range(7)]


def test_time_scale_stretches_the_warmup():
    whole, half = warmup(cosine(1.0, 0.0, 100), 10), time_scale(warmup(cosine(1.0, 0.0, 100), 10), 0.5)
    assert [half(t) for t in range(60)] == [whole(2 * t) for t in range(60)]


def test_clip_keeps_values_within_the_limits():
    assert [clip(linear(1.0, 0.0, 10), low=0.25)(t) for t in (0, 5, 9)] == [1.0, 0.5, 0.25]
    assert [clip(linear(1.0, 0.0, 10), high=0.75)(t) for t in (0, 5, 10)] == [0.75, 0.5, 0.0]


MADE = {
    "join": lambda schedule: sequential([schedule, schedule], [500]),
    "scale": lambda schedule: multiply(schedule, 2.0),
    "stretch": lambda schedule: time_scale(schedule, 2.0),
    "clamp": lambda schedule: clip(schedule, low=0.0),
    "warmup": lambda schedule: warmup(schedule, 10),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_combined_schedules_keep_the_unit(make):
    made = make(with_unit("tok", linear(1.0, 0.0, 1000)))
    assert isinstance(made, UnitSchedule)
    plain = make(linear(1.0, 0.0, 1000))
    assert not isinstance(plain, UnitSchedule)
    assert hyperparameter(made, "x")(Clock(step=3, tokens=400)) == plain(400)


REFUSED = {
    "sequential: one schedule": (
        lambda: sequential(linear(1.0, 0.0, 5), []),
        "sequential: schedules must be a list, got schedules=<function",
    ),
    "sequential: one boundary": (
        lambda: sequential([constant(1.0), constant(2.0)], 5),
        r"sequential: boundaries must be a list, got boundaries=5",
    ),
    "sequential: none": (
        lambda: sequential([], []),
        "sequential: boundaries must be one fewer than schedules, got 0 boundaries and 0 schedules",
    ),
    "sequential: number": (
        lambda: sequential([constant(1.0)] * 2, [1, 2]),
        "boundaries must be one fewer than schedules, got 2 boundaries and 2 schedules",
    ),
    "sequential: order": (
        lambda: sequential([constant(1.0)] * 3, [2, 1]),
        r"sequential: boundaries must be increasing numbers of at least 0, got \[2, 1\]",
    ),
    "sequential: no schedule": (
        lambda: sequential([constant(1.0), 0.5], [2]),
        r"sequential: schedule must be a function of a number, got 0\.5\. For a number use dt\.schedules\.constant",
    ),
    "sequential: units": (
        lambda: sequential([constant(1.0), with_unit("tok", constant(1.0))], [2]),
        r"sequential: schedules must have one unit, got ba and tok\. Give each schedule that unit",
    ),
    "multiply: factor": (lambda: multiply(constant(1.0), math.inf), "multiply: factor must be a finite number, got inf"),
    "time_scale: ratio": (
        lambda: time_scale(constant(1.0), 0),
        r"time_scale: ratio must be a finite number above 0, got 0\. Give the new duration divided",
    ),
    "clip: none": (
        lambda: clip(constant(1.0)),
        "clip: low must be at most high, got low=-inf and high=inf",
    ),
    "clip: order": (lambda: clip(constant(1.0), low=2, high=1), "clip: low must be at most high, got low=2 and high=1"),
    "clip: text": (lambda: clip(constant(1.0), low="0"), "clip: low must be a finite number, got '0'"),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def optimizer_of(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def run(scheduler, optimizer, steps):
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def test_lambda_lr_gives_each_step_its_own_lr():
    schedule, optimizer = warmup(cosine(1.0, 0.1, 30), 5), optimizer_of(0.5)
    assert run(to_lambda_lr(schedule, optimizer), optimizer, 40) == [[0.5 * schedule(t)] for t in range(40)]


def test_groups_keep_their_lr_and_may_have_separate_schedules():
    optimizer = optimizer_of(1.0, 0.1)
    rates = run(to_lambda_lr([linear(1.0, 0.0, 4), constant(0.5)], optimizer), optimizer, 4)
    assert rates == [[1.0, 0.05], [0.75, 0.05], [0.5, 0.05], [0.25, 0.05]]


@pytest.mark.parametrize("schedule", [linear(1.0, 0.0, 10), with_unit("ba", linear(1.0, 0.0, 10))], ids=["plain", "of steps"])
def test_lambda_lr_resumes_from_its_state(schedule):
    optimizer = optimizer_of(1.0)
    scheduler = to_lambda_lr(schedule, optimizer)
    run(scheduler, optimizer, 3)
    saved, other = scheduler.state_dict(), optimizer_of(1.0)
    other.load_state_dict(optimizer.state_dict())
    resumed = to_lambda_lr(schedule, other)
    resumed.load_state_dict(saved)
    other.load_state_dict(optimizer.state_dict())
    assert run(resumed, other, 3) == run(scheduler, optimizer, 3) == [[0.7], [0.6], [0.5]]


def test_to_lambda_lr_refuses_schedules_not_counted_in_steps():
    with pytest.raises(
        ConfigError,
        match=r"to_lambda_lr: schedule must be a function of steps, got a schedule of tok\. Use dt\.transforms\.scale_lr",
    ):
        to_lambda_lr(with_unit("tok", constant(1.0)), optimizer_of(1.0))


def test_to_lambda_lr_requires_one_schedule_per_group():
    with pytest.raises(ConfigError, match="to_lambda_lr: schedule must have one entry per parameter group, got 1 for 2"):
        to_lambda_lr([constant(1.0)], optimizer_of(1.0, 1.0))
    with pytest.raises(ConfigError, match="to_lambda_lr: schedule must be a function of a number"):
        to_lambda_lr([0.5], optimizer_of(1.0))
