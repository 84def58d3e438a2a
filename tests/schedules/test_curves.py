import math

import pytest

from dtrain.clock import Clock
from dtrain.errors import ConfigError
from dtrain.schedules.curves import constant, cosine, linear
from dtrain.schedules.hyperparameter import hyperparameter, with_unit
from dtrain.schedules.phases import warmup


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
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


def test_constant_has_the_same_value_everywhere():
    assert [constant(0.25)(t) for t in (-1, 0, 0.5, 1e9)] == [0.25] * 4


@pytest.mark.parametrize("value", [math.inf, math.nan, "1", None, True])
def test_constant_refuses_non_numeric_values(value):
    with pytest.raises(ConfigError, match="constant: value must be a finite number, got"):
        constant(value)
