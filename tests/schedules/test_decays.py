import math

import pytest

from dtrain.errors import ConfigError
from dtrain.schedules.curves import exponential, inverse_sqrt, polynomial


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


REFUSED = {
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
        r"exponential: period must be a finite number above 0, got 0\. ",
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
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()
