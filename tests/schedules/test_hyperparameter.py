import math

import pytest

from dtrain.clock import Clock
from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.curves import linear
from dtrain.schedules.hyperparameter import hyperparameter, with_unit


def test_hyperparameter_reads_the_clock_of_the_step():
    assert [hyperparameter(linear(1.0, 0.0, 10), "x")(Clock(step=t)) for t in (0, 5)] == [1.0, 0.5]


def test_hyperparameter_returns_a_number_unchanged():
    assert [hyperparameter(3, "x")(Clock(step=t)) for t in (0, 7)] == [3, 3]


@pytest.mark.parametrize("unit", ["ba", "ep", "sp", "tok", "sec", "dur"])
def test_with_unit_reads_every_count_of_the_clock(unit):
    clock = Clock(step=1, epoch=2, samples=3, tokens=4, seconds=5.0, run=RunLength(total=8))
    read = hyperparameter(with_unit(unit, lambda t: 10.0 * t), "x")
    assert read(clock) == {"ba": 10.0, "ep": 20.0, "sp": 30.0, "tok": 40.0, "sec": 50.0, "dur": 1.25}[unit]


@pytest.mark.parametrize("value", ["x", None, True, math.nan, math.inf])
def test_hyperparameter_refuses_other_types(value):
    with pytest.raises(ConfigError, match=r"ema: decay must be a finite number or a schedule \(a function of the step\), got"):
        hyperparameter(value, "ema: decay")


def test_with_unit_refuses_unknown_units():
    with pytest.raises(ConfigError, match="with_unit: unit must be 'ep', 'ba', 'sp', 'tok', 'sec' or 'dur', got 'min'"):
        with_unit("min", linear(1.0, 0.0, 10))
    with pytest.raises(ConfigError, match=r"with_unit: schedule must be a function of a number, got 0.5"):
        with_unit("tok", 0.5)
    with pytest.raises(
        ConfigError, match=r"with_unit: the schedule must not have another unit, got 'sp' and unit='tok'\. Give one unit"
    ):
        with_unit("tok", with_unit("sp", linear(1.0, 0.0, 10)))
