import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.schedules.curves import cosine_restarts, one_cycle, warmup_stable_decay

SHAPES = ["linear", "cosine", "1-sqrt", "exponential"]


@given(
    warmup=st.integers(0, 50),
    stable=st.integers(0, 500),
    decay=st.integers(1, 500),
    shape=st.sampled_from(SHAPES),
    t=st.floats(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_warmup_stable_decay_equals_its_trunk_before_the_decay(warmup, stable, decay, shape, t):
    trunk = warmup_stable_decay(0.3, warmup=warmup)
    fork = warmup_stable_decay(0.3, warmup=warmup, decay_start=warmup + stable, decay=decay, end=0.01, shape=shape)
    assert [fork(time) for time in (-1, t * (warmup + stable), warmup + stable)] == [
        trunk(time) for time in (-1, t * (warmup + stable), warmup + stable)
    ]
    assert fork(warmup + stable + decay) == 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_falls_from_the_peak_to_the_end(shape):
    schedule = warmup_stable_decay(1.0, warmup=2, decay_start=10, decay=20, end=0.1, shape=shape)
    assert all(schedule(t) > schedule(t + 1) for t in range(10, 30))
    assert (schedule(10), schedule(30), schedule(1e9)) == (1.0, 0.1, 0.1)


def test_a_run_without_a_warmup_begins_at_the_peak():
    assert [warmup_stable_decay(0.5, warmup=0)(t) for t in (-1, 0, 7)] == [0.5, 0.5, 0.5]
    assert warmup_stable_decay(0.5, warmup=0, decay_start=0, decay=10)(5) == 0.25


REFUSED = {
    "warmup": ({"warmup": -1}, "warmup_stable_decay: warmup must be a finite number at least 0, got -1"),
    "peak": ({"peak": math.nan, "warmup": 1}, "warmup_stable_decay: end must be a finite number, got nan"),
    "no beginning": ({"warmup": 1, "decay": 5}, r"decay must be 0 without a decay_start, got decay=5\. Give"),
    "too early": (
        {"warmup": 5, "decay_start": 4, "decay": 5},
        "decay_start must be a finite number at least 5, got 4",
    ),
    "no length": ({"warmup": 5, "decay_start": 6}, r"warmup_stable_decay: decay must be a finite number above 0, got 0\. "),
    "shape": (
        {"warmup": 0, "decay_start": 6, "decay": 1, "shape": "sqrt"},
        "shape must be 'linear', 'cosine', '1-sqrt' or 'exponential', got",
    ),
    "shape of a trunk": ({"warmup": 0, "shape": "sqrt"}, "shape must be 'linear', 'cosine', '1-sqrt' or 'exponential', got"),
    "to 0": (
        {"warmup": 0, "decay_start": 6, "decay": 1, "shape": "exponential"},
        "the values of an exponential must be above 0, .* and end=0.0",
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        warmup_stable_decay(**{"peak": 1.0, **arguments})


@given(period=st.integers(1, 50), multiplier=st.sampled_from([1, 1.5, 2, 3]), cycle=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_every_cycle_decays_from_start_to_end(period, multiplier, cycle):
    begin = sum(period * multiplier**before for before in range(cycle))
    length = period * multiplier**cycle
    schedule = cosine_restarts(1.0, 0.0, period, multiplier=multiplier)
    assert schedule(begin) == pytest.approx(1.0, abs=1e-9)
    assert schedule(begin + length / 2) == pytest.approx(0.5, abs=1e-9)
    assert schedule(begin + length * (1 - 1e-6)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("multiplier", [1, 1.0001, 2])
def test_cosine_restarts_are_defined_at_every_step(multiplier):
    schedule = cosine_restarts(1.0, 0.1, 7, multiplier=multiplier)
    assert schedule(-5) == 1.0
    assert all(0.1 - 1e-12 <= schedule(t) <= 1.0 for t in (0, 0.5, 6.999999, 7, 1e6, 1e12, 1e15))


def test_one_cycle_peaks_at_the_rise_fraction():
    schedule = one_cycle(0.04, 1.0, 0.0, 100, rise=0.25)
    assert max(range(101), key=schedule) == 25
    assert (schedule(-1), schedule(100), schedule(1e9)) == (0.04, 0.0, 0.0)


def test_momentum_cycles_inversely_to_lr():
    momentum = one_cycle(0.95, 0.85, 0.95, 10, rise=0.5, shape="linear")
    assert [round(momentum(t), 4) for t in (0, 5, 10)] == [0.95, 0.85, 0.95]


REFUSED_CYCLES = {
    "restarts: period": (
        lambda: cosine_restarts(1.0, 0.0, 0),
        "cosine_restarts: every must be a finite number above 0, got 0",
    ),
    "restarts: multiplier": (
        lambda: cosine_restarts(1.0, 0.0, 5, multiplier=0.5),
        "cosine_restarts: multiplier must be a finite number at least 1, got 0.5",
    ),
    "restarts: value": (lambda: cosine_restarts(math.nan, 0.0, 5), "cosine_restarts: start must be a finite number, got nan"),
    "one_cycle: steps": (lambda: one_cycle(0.1, 1.0, 0.0, 0), "one_cycle: steps must be a finite number above 0, got 0"),
    "one_cycle: rise": (
        lambda: one_cycle(0.1, 1.0, 0.0, 5, rise=1),
        "one_cycle: rise must be a finite number above 0 and below 1, got 1",
    ),
    "one_cycle: three": (
        lambda: one_cycle(0.1, 1.0, 0.0, 5, rise=0.5, three_phase=True),
        r"one_cycle: rise must be a finite number above 0 and below 0.5, got 0\.5\. Give a fraction",
    ),
    "one_cycle: shape": (
        lambda: one_cycle(0.1, 1.0, 0.0, 5, shape="exponential"),
        "one_cycle: shape must be 'linear' or 'cosine', got 'exponential'",
    ),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED_CYCLES.values(), ids=REFUSED_CYCLES)
def test_invalid_arguments_of_cycles_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()
