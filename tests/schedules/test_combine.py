import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.clock import Clock
from dtrain.errors import ConfigError
from dtrain.schedules.combine import clip, multiply, sequential, time_scale
from dtrain.schedules.curves import constant, cosine, linear, warmup
from dtrain.schedules.hyperparameter import UnitSchedule, hyperparameter, with_unit

VALUES = st.floats(0, 10)


@given(values=st.lists(VALUES, min_size=2, max_size=6), lengths=st.lists(st.integers(1, 30), min_size=6, max_size=6))
def test_schedules_that_end_where_the_next_begins_are_joined_without_a_jump(values, lengths):
    parts = [linear(begin, end, length) for begin, end, length in zip(values, values[1:], lengths, strict=False)]
    boundaries = [sum(lengths[: number + 1]) for number in range(len(parts) - 1)]
    joined = sequential(parts, boundaries)
    for boundary, value in zip(boundaries, values[1:], strict=False):
        assert joined(boundary) == pytest.approx(value)
        assert joined(boundary - 1e-9) == pytest.approx(value, abs=1e-6)


def test_one_schedule_joined_is_itself():
    assert [sequential([linear(1.0, 0.0, 5)], [])(t) for t in range(7)] == [linear(1.0, 0.0, 5)(t) for t in range(7)]


def test_stretch_scales_the_warmup_too():
    whole, half = warmup(cosine(1.0, 0.0, 100), 10), time_scale(warmup(cosine(1.0, 0.0, 100), 10), 0.5)
    assert [half(t) for t in range(60)] == [whole(2 * t) for t in range(60)]


def test_clamp_keeps_what_is_within():
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
def test_what_is_made_of_a_schedule_of_tokens_is_of_tokens(make):
    made = make(with_unit("tok", linear(1.0, 0.0, 1000)))
    assert isinstance(made, UnitSchedule)
    plain = make(linear(1.0, 0.0, 1000))
    assert not isinstance(plain, UnitSchedule)
    assert hyperparameter(made, "x")(Clock(step=3, tokens=400)) == plain(400)


REFUSED = {
    "join: one schedule": (
        lambda: sequential(linear(1.0, 0.0, 5), []),
        "join: schedules must be a list, got schedules=<function",
    ),
    "join: one boundary": (
        lambda: sequential([constant(1.0), constant(2.0)], 5),
        r"join: boundaries must be a list, got boundaries=5",
    ),
    "join: none": (lambda: sequential([], []), "join: needs one boundary less than schedules, got 0 and 0"),
    "join: number": (
        lambda: sequential([constant(1.0)] * 2, [1, 2]),
        "needs one boundary less than schedules, got 2 and 2; at each",
    ),
    "join: order": (
        lambda: sequential([constant(1.0)] * 3, [2, 1]),
        r"join: boundaries must be .* that increase, got \[2, 1\]",
    ),
    "join: no schedule": (
        lambda: sequential([constant(1.0), 0.5], [2]),
        r"join: needs a schedule \(a function .*, got 0.5; constant",
    ),
    "join: units": (
        lambda: sequential([constant(1.0), with_unit("tok", constant(1.0))], [2]),
        r"join: schedules are measured in ba and tok; give each of them with_unit",
    ),
    "scale: factor": (lambda: multiply(constant(1.0), math.inf), "scale: factor must be a finite number, got inf"),
    "stretch: ratio": (
        lambda: time_scale(constant(1.0), 0),
        "stretch: ratio must be a positive number, got ratio=0; it is how many",
    ),
    "clamp: none": (
        lambda: clip(constant(1.0)),
        "clamp: needs low <= high, and at least one of them, got low=-inf and high=inf",
    ),
    "clamp: order": (lambda: clip(constant(1.0), low=2, high=1), "clamp: needs low <= high, .*, got low=2 and high=1"),
    "clamp: text": (lambda: clip(constant(1.0), low="0"), "clamp: low must be a finite number, got '0'"),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_schedule_is_refused(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()
