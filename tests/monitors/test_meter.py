"""readings: the numbers of all sources, and no name twice."""

import re

import pytest

from dtrain.errors import ConfigError
from dtrain.monitors.meter import collect


def speed(state: object) -> dict[str, float]:
    return {"speed": 2.0, "state": state}


def broken(state: object) -> list[float]:
    return [1.0]


def test_readings_keep_the_order_of_sources():
    found = collect(7, {"loss": 1.5}, speed, {})
    assert list(found.items()) == [("loss", 1.5), ("speed", 2.0), ("state", 7)]


def test_no_source_gives_no_reading():
    assert collect(None) == {}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        pytest.param(
            [{"lr": 1.0}, speed, {"lr": 2.0}],
            "names must be unique, got 'lr' from source 3 and an earlier source. Rename",
            id="twice",
        ),
        pytest.param(
            [speed, speed], "names must be unique, got 'speed' from source 2 and an earlier source", id="a-meter-twice"
        ),
        pytest.param(
            [[1.0]], "source 1 must be or return a mapping of numbers, got list. Pass a dict, or a meter", id="a-list"
        ),
        pytest.param(
            [{}, broken], "source 2 must be or return a mapping of numbers, got list from the meter broken", id="a-meters-list"
        ),
    ],
)
def test_invalid_sources_are_refused(sources, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        collect(None, *sources)
