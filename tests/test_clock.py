import pytest

from dtrain.clock import Clock, Duration
from dtrain.errors import ConfigError


def ticked(clock: Clock = Clock(), **changes) -> Clock:  # noqa: B008  # frozen
    return clock.tick(**{"samples": 10, "tokens": 100, "seconds": 0.5, "end_of_epoch": False, **changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (7, Duration(7, "ba")),
        ("7ba", Duration(7, "ba")),
        ("3ep", Duration(3, "ep")),
        ("5_000sp", Duration(5000, "sp")),
        ("1e9tok", Duration(10**9, "tok")),
        ("90sec", Duration(90, "sec")),
        (Duration(2, "ep"), Duration(2, "ep")),
    ],
)
def test_duration_parses(text, expected):
    assert Duration.parse(text) == expected
    assert Duration.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 fortnights", "unknown unit 'fortnights'; use one of ep, ba, sp, tok, sec"),
        ("1.5ep", "needs a whole number of ep, got '1.5ep'"),
        ("0ba", "at least 1, got 0 ba"),
        (0, "at least 1, got 0 ba"),
        (-3, "at least 1, got -3 ba"),
        (True, "got True ba"),
        ("ep", "cannot read 'ep'"),
        ("", "cannot read ''"),
        (None, "cannot read None"),
        ("3ep2ba", "cannot read '3ep2ba'"),
    ],
)
def test_duration_refuses(text, message):
    with pytest.raises(ConfigError, match=message):
        Duration.parse(text)


def test_tick_counts_and_an_epoch_ends():
    clock = ticked(ticked(), end_of_epoch=True)
    assert (clock.step, clock.epoch, clock.step_in_epoch) == (2, 1, 0)
    assert (clock.samples, clock.tokens, clock.seconds) == (20, 200, 1.0)
    assert ticked(clock).step_in_epoch == 1
    assert clock.before == Clock(step=1, step_in_epoch=1, samples=10, tokens=100, seconds=0.5)
    assert ticked(clock).before.before is None, "a clock does not hold its whole history"


@pytest.mark.parametrize("interval", ["25sp", "3ba", "250tok", "1sec", "1ep"])
def test_crossed_is_true_once_per_boundary_whatever_the_tick(interval):
    clock, crossings, every = Clock(), 0, Duration.parse(interval)
    field = {"sp": "samples", "ba": "step", "tok": "tokens", "sec": "seconds", "ep": "epoch"}[every.unit]
    for step in range(40):
        clock = ticked(clock, samples=7 + step % 5, end_of_epoch=step % 9 == 8)
        boundary = getattr(clock, field) // every.value > getattr(clock.before, field) // every.value
        assert clock.crossed(interval) == boundary
        crossings += clock.crossed(interval)
    assert crossings == getattr(clock, field) // every.value


def test_nothing_is_crossed_before_the_first_tick():
    assert not Clock(step=100).crossed("100ba")
