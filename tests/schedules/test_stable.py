import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.schedules.phases import warmup_stable_decay

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
    assert [fork(at) for at in (-1, t * (warmup + stable), warmup + stable)] == [
        trunk(at) for at in (-1, t * (warmup + stable), warmup + stable)
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
