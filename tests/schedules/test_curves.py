import math

import pytest

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.curves import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    multi_step,
    polynomial,
    step_decay,
    warmup,
)
from dtrain.schedules.hyperparameters import hyperparameter, with_unit


def test_linear_over_ten_steps_has_exact_tenths():
    assert [linear(1.0, 0.0, 10)(t) for t in range(11)] == pytest.approx(
        [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    )


@pytest.mark.parametrize("make", [linear, cosine])
def test_decay_keeps_its_final_value_exactly(make):
    assert make(1.0, 0.1, 7)(7) == make(1.0, 0.1, 7)(1e9) == 0.1
    assert make(1.0, 0.1, 7)(0) == make(1.0, 0.1, 7)(-1) == 1.0


def test_warmup_rises_from_zero_and_joins_without_a_jump():
    warm = warmup(cosine(1.0, 0.1, 100), 10)
    assert warm(0) == 0.0
    assert warm(5) == pytest.approx(warm(10) / 2)
    assert warm(10 - 1e-9) == pytest.approx(warm(10), rel=1e-8)
    assert warm(10) == cosine(1.0, 0.1, 100)(10)
    assert warm(100) == 0.1


def test_warmup_of_no_steps_changes_nothing():
    assert [warmup(linear(1.0, 0.0, 5), 0)(t) for t in range(6)] == [linear(1.0, 0.0, 5)(t) for t in range(6)]


@pytest.mark.parametrize("steps", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("make", [linear, cosine])
def test_decay_requires_a_length(make, steps):
    with pytest.raises(ConfigError, match=f"{make.__name__}: steps must be a finite number above 0"):
        make(1.0, 0.0, steps)


def test_warmup_refuses_a_negative_length():
    with pytest.raises(ConfigError, match="steps must be a finite number at least 0, got -1"):
        warmup(linear(1.0, 0.0, 5), -1)


@pytest.mark.parametrize("steps", [0, 5])
def test_warmup_is_defined_before_step_zero(steps):
    assert warmup(linear(1.0, 0.0, 10), steps)(-1) == (0.0 if steps else 1.0)


def test_shifted_schedule_begins_after_the_warmup():
    alone, behind = cosine(1.0, 0.1, 20), warmup(cosine(1.0, 0.1, 20), 5, shifted=True)
    assert [behind(5 + t) for t in range(25)] == [alone(t) for t in range(25)]
    assert behind(2.5) == 0.5


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential"])
def test_warmup_of_any_shape_begins_at_start_and_joins_the_schedule(shape):
    warm = warmup(linear(1.0, 0.0, 100), 20, start=0.25, shape=shape)
    assert warm(0) == 0.8 * 0.25
    assert warm(20) == linear(1.0, 0.0, 100)(20)
    assert all(warm(t) < warm(t + 1) for t in range(20))


def test_warmup_has_the_unit_of_its_schedule():
    warm = warmup(with_unit("tok", linear(1.0, 0.0, 1000)), 100)
    read = hyperparameter(warm, "x")
    assert [read(Clock(step=7, tokens=tokens)) for tokens in (50, 100, 500)] == [0.45, 0.9, 0.5]


def test_constant_has_the_same_value_everywhere():
    assert [constant(0.25)(t) for t in (-1, 0, 0.5, 1e9)] == [0.25] * 4


@pytest.mark.parametrize("value", [math.inf, math.nan, "1", None, True])
def test_constant_refuses_non_numeric_values(value):
    with pytest.raises(ConfigError, match="constant: value must be a finite number, got"):
        constant(value)


WITH_AN_END = {
    "constant": dt.schedules.constant(0.5),
    "linear": dt.schedules.linear(1.0, 0.25, 10),
    "cosine": dt.schedules.cosine(1.0, 0.1, 10),
    "polynomial": dt.schedules.polynomial(1.0, 0.0, 10, power=2),
    "exponential": dt.schedules.exponential(1.0, 0.5, 10, end=0.25),
    "step_decay": dt.schedules.step_decay(1.0, 0.5, 10, end=0.25),
    "multi_step": dt.schedules.multi_step(1.0, 0.5, [10]),
    "one_cycle": dt.schedules.one_cycle(0.1, 1.0, 0.01, 10),
    "warmup_stable_decay": dt.schedules.warmup_stable_decay(1.0, warmup=5, decay_start=10, decay=10),
    "warmup": dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 10), 5),
}
WITHOUT = {
    "exponential": dt.schedules.exponential(1.0, 0.5, 10),
    "step_decay": dt.schedules.step_decay(1.0, 0.5, 10),
    "inverse_sqrt": dt.schedules.inverse_sqrt(1.0, 10),
    "cosine_restarts": dt.schedules.cosine_restarts(1.0, 0.0, 10),
}


@pytest.mark.parametrize("schedule", [*WITH_AN_END.values(), *WITHOUT.values()], ids=[*WITH_AN_END, *WITHOUT])
def test_schedules_keep_the_first_value_before_the_beginning(schedule):
    assert schedule(-0.5) == schedule(-100) == schedule(0)


@pytest.mark.parametrize("name", WITH_AN_END)
def test_schedules_keep_the_last_value_after_the_end(name):
    assert WITH_AN_END[name](20) == WITH_AN_END[name](20.5) == WITH_AN_END[name](10**6)


@pytest.mark.parametrize("name", WITHOUT)
def test_schedules_without_an_end_continue(name):
    assert WITHOUT[name](1_003) != WITHOUT[name](1_037)


def test_polynomial_of_power_one_is_a_straight_line():
    assert [polynomial(1.0, 0.0, 10, power=1)(t) for t in range(12)] == pytest.approx([max(1 - t / 10, 0) for t in range(12)])


def test_polynomial_is_defined_before_step_zero():
    assert polynomial(1.0, 0.1, 10, power=0.5)(-3) == 1.0


def test_exponential_is_continuous_within_a_period():
    assert exponential(1.0, 0.25, 10)(5) == 0.5
    assert exponential(1.0, 0.25, 10)(-5) == 1.0


def test_exponential_growth_stays_at_its_end_without_overflow():
    assert [exponential(1e-6, 10.0, 100, end=1.0)(t) for t in (600, 1e6, 1e300)] == pytest.approx([1.0] * 3, rel=1e-12)
    assert exponential(1e-6, 10.0, 100, end=1.0)(1e300) == 1.0


def test_exponential_without_an_end_underflows_to_zero():
    assert exponential(1.0, 0.5)(1e300) == 0.0


def test_gamma_one_keeps_the_value():
    assert [exponential(0.5, 1.0)(t) for t in (0, 1e9)] == [exponential(0.5, 1.0, end=0.5)(7), 0.5]


def test_inverse_sqrt_halves_when_time_quadruples():
    schedule = inverse_sqrt(1.0, 100)
    assert [schedule(100 * 4**n) for n in range(5)] == [0.5**n for n in range(5)]
    assert schedule(-1) == 1.0


def test_step_decay_changes_at_the_first_step_of_a_period():
    assert [step_decay(1.0, 0.5, 3)(t) for t in range(-1, 7)] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_growing_step_decay_stops_at_its_end_value():
    assert [step_decay(16, 2, 10, end=100)(t) for t in (0, 9, 10, 25, 30, 1e15)] == [16, 16, 32, 64, 100, 100]


def test_multi_step_changes_at_each_milestone():
    assert [multi_step(1.0, 0.5, (2, 4.5))(t) for t in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_multi_step_accepts_a_factor_above_one():
    assert multi_step(1.0, 3.0, [1, 2])(2) == 9.0


REFUSED = {
    "warmup: steps": (lambda: warmup(constant(1.0), math.inf), "warmup: steps must be a finite number at least 0, got inf"),
    "warmup: start": (
        lambda: warmup(constant(1.0), 5, start=-1),
        r"start must be a finite number at least 0, got -1\. Give a fraction",
    ),
    "warmup: shape": (
        lambda: warmup(constant(1.0), 5, shape="1-sqrt"),
        "warmup: shape must be 'linear', 'cosine' or 'exponential', got '1-sqrt'",
    ),
    "warmup: from 0": (
        lambda: warmup(constant(1.0), 5, shape="exponential"),
        "values of an exponential must be above 0, got start=0",
    ),
    "warmup: no schedule": (
        lambda: warmup(0.5, 5),
        r"warmup: schedule must be a function of a number, got 0\.5\. For a number use dt\.schedules\.constant",
    ),
    "linear: value": (lambda: linear(math.nan, 0.0, 5), "linear: start must be a finite number, got nan"),
    "cosine: value": (lambda: cosine(1.0, "0", 5), "cosine: end must be a finite number, got '0'"),
    "polynomial: steps": (
        lambda: polynomial(1.0, 0.0, 0, power=1),
        r"polynomial: steps must be a finite number above 0, got 0\. ",
    ),
    "polynomial: power": (
        lambda: polynomial(1.0, 0.0, 5, power=-1),
        "polynomial: power must be a finite number above 0, got -1",
    ),
    "polynomial: value": (lambda: polynomial(math.inf, 0.0, 5, power=1), "polynomial: start must be a finite number, got inf"),
    "exponential: period": (
        lambda: exponential(1.0, 0.5, 0),
        r"exponential: every must be a finite number above 0, got 0\. ",
    ),
    "exponential: gamma": (
        lambda: exponential(1.0, 0),
        r"exponential: gamma must be a finite number above 0, got 0\. The values",
    ),
    "exponential: start": (lambda: exponential(0.0, 0.5), r"exponential: start must be a finite number above 0, got 0\.0\. "),
    "exponential: growth": (
        lambda: exponential(1.0, 2.0),
        r"exponential: a growth must have an end, got gamma=2\.0\. Give end=",
    ),
    "exponential: end above": (
        lambda: exponential(1.0, 0.5, end=2.0),
        "gamma must lead from start to end, got gamma=0.5, start=1.0 and end=2.0",
    ),
    "exponential: end below": (
        lambda: exponential(1.0, 2.0, end=0.5),
        "gamma must lead from start to end, got gamma=2.0, start=1.0 and end=0.5",
    ),
    "exponential: end beside": (
        lambda: exponential(1.0, 1.0, end=0.5),
        "gamma must lead from start to end, got gamma=1.0, start=1.0 and end=0.5",
    ),
    "exponential: end below 0": (
        lambda: exponential(1.0, 0.5, end=-1.0),
        r"gamma must lead from start to end, got gamma=0\.5, start=1\.0 and end=-1\.0\. Give another end",
    ),
    "exponential: no end": (lambda: exponential(1.0, 0.5, end=math.nan), "exponential: end must be a finite number, got nan"),
    "inverse_sqrt: hold": (lambda: inverse_sqrt(1.0, 0), r"inverse_sqrt: hold must be a finite number above 0, got 0\. "),
    "inverse_sqrt: start": (lambda: inverse_sqrt(None, 5), "inverse_sqrt: start must be a finite number, got None"),
    "multi_step: one alone": (lambda: multi_step(1.0, 0.1, 30), r"multi_step: milestones must be a list, got milestones=30"),
    "step_decay: period": (
        lambda: step_decay(1.0, 0.5, -1),
        r"step_decay: every must be a finite number above 0, got -1\. Give",
    ),
    "step_decay: growth": (lambda: step_decay(1.0, 2, 5), "step_decay: a growth must have an end, got gamma=2"),
    "multi_step: none": (lambda: multi_step(1.0, 0.5, []), r"multi_step: milestones must not be empty, got none\. "),
    "multi_step: equal": (
        lambda: multi_step(1.0, 0.5, [3, 3]),
        r"multi_step: milestones must be increasing numbers of at least 0, got \[3, 3\]",
    ),
    "multi_step: order": (lambda: multi_step(1.0, 0.5, [4, 3]), r"increasing numbers of at least 0, got \[4, 3\]"),
    "multi_step: negative": (lambda: multi_step(1.0, 0.5, [-1, 3]), r"increasing numbers of at least 0, got \[-1, 3\]"),
    "multi_step: text": (lambda: multi_step(1.0, 0.5, ["3ep"]), r"increasing numbers of at least 0, got \['3ep'\]"),
    "multi_step: gamma": (lambda: multi_step(1.0, math.inf, [3]), "multi_step: gamma must be a finite number, got inf"),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()
