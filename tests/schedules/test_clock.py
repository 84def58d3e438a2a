import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.schedules.durations import Duration, RunLength


def ticked(clock: Clock = Clock(), *, end_of_epoch: bool = False, **changes) -> Clock:  # noqa: B008  # frozen
    place = EpochPosition(clock.epoch + 1, 0) if end_of_epoch else EpochPosition(clock.epoch, clock.step_in_epoch + 1)
    return clock.tick(**{"samples": 10, "tokens": 100, "seconds": 0.5, "position": place, **changes})


def test_tick_updates_counts_and_the_epoch():
    clock = ticked(ticked(), end_of_epoch=True)
    assert (clock.step, clock.epoch, clock.step_in_epoch) == (2, 1, 0)
    assert (clock.samples, clock.tokens, clock.seconds) == (20, 200, 1.0)
    assert ticked(clock).step_in_epoch == 1
    assert clock._previous == Clock(step=1, step_in_epoch=1, samples=10, tokens=100, seconds=0.5)
    assert ticked(clock)._previous._previous is None, "a clock does not hold its whole history"


@pytest.mark.parametrize("interval", ["25sp", "3ba", "250tok", "1sec", "1ep"])
def test_crossed_is_true_once_per_boundary_for_any_tick_size(interval):
    clock, crossings, every = Clock(), 0, Duration.parse(interval)
    field = {"sp": "samples", "ba": "step", "tok": "tokens", "sec": "seconds", "ep": "epoch"}[every.unit]
    for step in range(40):
        clock = ticked(clock, samples=7 + step % 5, end_of_epoch=step % 9 == 8)
        boundary = getattr(clock, field) // every.value > getattr(clock._previous, field) // every.value
        assert clock.crossed(interval) == boundary
        crossings += clock.crossed(interval)
    assert crossings == getattr(clock, field) // every.value


def test_crossed_is_false_before_the_first_tick():
    assert not Clock(step=100).crossed("100ba")


@settings(max_examples=200, deadline=None)
@given(
    unit=st.sampled_from(["ba", "sp", "tok", "sec"]),
    value=st.integers(1, 50),
    ticks=st.lists(st.integers(1, 60), min_size=1, max_size=30),
)
def test_crossed_is_true_exactly_when_a_tick_passes_a_boundary(unit, value, ticks):
    """Any unit, any size of batch: a tick is a crossing exactly when a multiple of the interval lies in it."""
    clock, passed = Clock(), 0
    for size in ticks:
        clock = clock.tick(samples=size, tokens=3 * size, seconds=float(size))
        before, now = passed, {"ba": clock.step, "sp": clock.samples, "tok": clock.tokens, "sec": clock.seconds}[unit]
        inside = any(before < multiple * value <= now for multiple in range(int(now // value) + 2))
        assert clock.crossed(f"{value}{unit}") == inside
        passed = now


@pytest.mark.costly
@settings(max_examples=100, deadline=None)
@given(steps=st.integers(1, 400), hundredths=st.integers(1, 100))
def test_run_fractions_are_crossed_at_the_exact_step(steps, hundredths):
    """A tenth of 1,000 steps is step 100, and not one beside it because 0.1 is no binary number."""
    clock, crossed = Clock(run_length=RunLength(total=steps)), []
    for _ in range(steps):
        clock = clock.tick(samples=1, tokens=0, seconds=0.1)
        if clock.crossed(f"{hundredths / 100}dur"):
            crossed.append(clock.step)
    share = Fraction(hundredths, 100) * steps
    assert crossed == sorted({math.ceil(share * n) for n in range(1, steps * 100) if share * n <= steps})


def test_epoch_run_fraction_includes_steps_of_the_current_epoch():
    clock, crossed = Clock(run_length=RunLength(total="2ep", steps_per_epoch=5)), []
    for step in range(10):
        clock = ticked(clock, end_of_epoch=step % 5 == 4)
        if clock.crossed("0.25dur"):
            crossed.append(clock.step)
    assert crossed == [3, 5, 8, 10]


def test_run_fraction_of_whole_epochs_needs_no_step_count():
    clock, crossed = Clock(run_length=RunLength(total="4ep")), []
    for step in range(12):
        clock = ticked(clock, end_of_epoch=step % 3 == 2)
        if clock.crossed("0.5dur"):
            crossed.append(clock.step)
    assert crossed == [6, 12]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (None, r"clock: 0.1dur is a share of the run, whose length is not known. .*step.init\(model, optimizer, run_length="),
        (RunLength(steps_per_epoch=5), "whose length is not known"),
        (
            RunLength(total="3ep"),
            r"0.1dur of a run of 3ep may end inside of an epoch, .*RunLength\(total='3ep', steps_per_epoch",
        ),
    ],
)
def test_run_fraction_of_unknown_length_is_refused(run, message):
    clock = ticked(Clock(run_length=run))
    with pytest.raises(ConfigError, match=message):
        clock.crossed("0.1dur")


@pytest.mark.parametrize("point", ["0ba", "0dur", "3ba", "30sp", "300tok", "1sec", "0.5dur"])
def test_reached_stays_true_after_the_point(point):
    clock = Clock(run_length=RunLength(total=6))
    reached = []
    for _ in range(5):
        reached.append(clock.reached(point))
        clock = ticked(clock)
    expected = {"0ba": 0, "0dur": 0, "3ba": 3, "30sp": 3, "300tok": 3, "1sec": 2, "0.5dur": 3}[point]
    assert reached == [step >= expected for step in range(5)]


def test_count_returns_the_value_of_each_unit():
    clock = Clock(step=1, epoch=2, samples=3, tokens=4, seconds=5.0, run_length=RunLength(total=4))
    assert [clock.count(unit) for unit in ("ba", "ep", "sp", "tok", "sec", "dur")] == [1, 2, 3, 4, 5.0, 0.25]
    with pytest.raises(ConfigError, match="clock: unit must be one of ep, ba, sp, tok, sec or dur, got 'min'"):
        clock.count("min")
