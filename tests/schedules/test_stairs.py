import math

import pytest

from dtrain.errors import ConfigError
from dtrain.schedules.curves import multi_step, step_decay


def test_step_decay_changes_at_the_first_step_of_a_period():
    assert [step_decay(1.0, 0.5, 3)(t) for t in range(-1, 7)] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_growing_step_decay_stops_at_its_end_value():
    assert [step_decay(16, 2, 10, end=100)(t) for t in (0, 9, 10, 25, 30, 1e15)] == [16, 16, 32, 64, 100, 100]


def test_multi_step_changes_at_each_milestone():
    assert [multi_step(1.0, 0.5, (2, 4.5))(t) for t in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_multi_step_accepts_a_factor_above_one():
    assert multi_step(1.0, 3.0, [1, 2])(2) == 9.0


REFUSED = {
    "multi_step: one alone": (lambda: multi_step(1.0, 0.1, 30), r"multi_step: milestones must be a list, got milestones=30"),
    "step_decay: period": (
        lambda: step_decay(1.0, 0.5, -1),
        r"step_decay: period must be a finite number above 0, got -1\. Give",
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
