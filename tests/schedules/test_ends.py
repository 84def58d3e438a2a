"""Schedules before their beginning and behind their end."""

import pytest

import dtrain as dt

WITH_AN_END = {
    "constant": dt.schedules.constant(0.5),
    "linear": dt.schedules.linear(1.0, 0.25, 10),
    "cosine": dt.schedules.cosine(1.0, 0.1, 10),
    "polynomial": dt.schedules.polynomial(1.0, 0.0, 10, power=2),
    "exponential": dt.schedules.exponential(1.0, 0.5, 10, end=0.25),
    "step_decay": dt.schedules.step_decay(1.0, 0.5, 10, end=0.25),
    "multi_step": dt.schedules.multi_step(1.0, 0.5, [10]),
    "one_cycle": dt.schedules.one_cycle(0.1, 1.0, 0.01, 10),
    "warmup_stable_decay": dt.schedules.warmup_stable_decay(1.0, warmup=5, decay_start=10, decay=10),
    "warmup": dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 10), 5),
}
WITHOUT = {
    "exponential": dt.schedules.exponential(1.0, 0.5, 10),
    "step_decay": dt.schedules.step_decay(1.0, 0.5, 10),
    "inverse_sqrt": dt.schedules.inverse_sqrt(1.0, 10),
    "cosine_restarts": dt.schedules.cosine_restarts(1.0, 0.0, 10),
}


@pytest.mark.parametrize("schedule", [*WITH_AN_END.values(), *WITHOUT.values()], ids=[*WITH_AN_END, *WITHOUT])
def test_schedules_keep_the_first_value_before_the_beginning(schedule):
    assert schedule(-0.5) == schedule(-100) == schedule(0)


@pytest.mark.parametrize("name", WITH_AN_END)
def test_schedules_keep_the_last_value_after_the_end(name):
    assert WITH_AN_END[name](20) == WITH_AN_END[name](20.5) == WITH_AN_END[name](10**6)


@pytest.mark.parametrize("name", WITHOUT)
def test_schedules_without_an_end_continue(name):
    assert WITHOUT[name](1_003) != WITHOUT[name](1_037)
