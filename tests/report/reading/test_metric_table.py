"""Records of metrics: the last one of a step counts, and what was done again does not; a spike is never lost."""

import math
import random

import pytest

from dtrain.report.reading.metric_table import MetricTable, downsample, make_series, points_per_series


def columns(rows, resumes=()):
    metrics = MetricTable(resumes)
    metrics.add(rows)
    found = {name: (list(steps), list(values)) for name, (steps, _, values) in metrics.columns().items()}
    return found, metrics


def rows(steps, value=lambda step: float(step), name="loss"):
    return [{"step": step, name: value(step)} for step in steps]


def test_a_resumed_run_goes_on_from_where_it_went_back():
    found, metrics = columns(rows(range(1, 9)) + rows(range(5, 11), lambda step: -step))
    assert found == {"loss": ([*range(1, 11)], [1, 2, 3, 4, -5, -6, -7, -8, -9, -10])}
    assert (metrics.went_back, metrics.repeated) == (1, 4)


def test_what_is_not_reached_again_is_dropped_too():
    before = [*rows(range(1, 9)), {"step": 8, "eval": 1.0}]
    assert columns(before + rows([5, 6]))[0] == {"loss": ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])}


def test_the_ledger_says_where_it_went_back_to():
    before = [*rows(range(10, 90, 10)), {"step": 44, "eval": 1.0}]
    assert columns(before + rows([50]))[0]["eval"] == ([44], [1.0])
    assert "eval" not in columns(before + rows([50]), resumes=[40])[0]


def test_a_metric_that_comes_late_does_not_go_back():
    found, metrics = columns([*rows(range(1, 9)), {"step": 4, "eval": 0.5}, {"step": 9, "loss": 9.0}])
    assert found == {"loss": ([*range(1, 10)], [*range(1, 10)]), "eval": ([4], [0.5])}
    assert metrics.went_back == 0


def test_of_a_step_the_last_record_counts():
    assert columns([{"step": 1, "a": 1}, {"step": 1, "a": 2}, {"step": 1, "a": 3, "b": 4}])[0] == {
        "a": ([1], [3]),
        "b": ([1], [4]),
    }


def test_records_with_other_names_join_in_order():
    every = [{"step": step, "loss": step, **({"eval": -step} if step % 3 == 0 else {})} for step in range(1, 10)]
    assert columns(every)[0] == {"loss": ([*range(1, 10)], [*range(1, 10)]), "eval": ([3, 6, 9], [-3, -6, -9])}


def test_values_that_are_no_numbers_are_counted():
    found, metrics = columns(
        [{"step": 1, "a": "x", "b": 1}, {"step": 2, "a": None, "b": "nan", "c": [1]}, {"step": 3, "b": True}]
    )
    assert found["b"][0] == [1, 2, 3]
    assert math.isnan(found["b"][1][1])
    assert metrics.non_numeric == {"a": 2, "c": 1}
    assert set(found) == {"b"}


def test_objects_that_are_no_records_are_counted():
    strange = [{"a": 1}, {"step": "x"}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 10**400}, {"step": None}]
    assert columns(strange)[1].malformed == len(strange)


def test_names_that_change_all_the_time_are_kept_up_to_a_number():
    found, metrics = columns([{"step": step, "loss": step, f"layer/{step}": 1} for step in range(3000)])
    assert metrics.has_too_many_names
    assert len(found) == 1998
    assert found["loss"] == ([*range(3000)], [*range(3000)])


def test_a_gigantic_name_is_cut():
    assert [len(name) for name in columns([{"step": 1, "x" * 100_000: 1}])[0]] == [200]


@pytest.mark.parametrize("seed", range(5))
def test_columns_equal_a_plain_reading(seed):
    draw = random.Random(seed)
    expected, every, step = {}, [], 0
    for _ in range(200):
        step = draw.randrange(max(1, step - 20), step) if step > 1 and draw.random() < 0.05 else step + 1
        expected = {(name, other): value for (name, other), value in expected.items() if other < step}
        row = {name: draw.random() for name in ("a", "b", "c") if name == "a" or draw.random() < 0.7}
        expected |= {(name, step): value for name, value in row.items()}
        every.append({"step": step, **row})
    found, _ = columns(every)
    assert {(name, s): v for name, (steps, values) in found.items() for s, v in zip(steps, values, strict=True)} == expected


def series(values, **options):
    def nobody(step):
        raise LookupError

    steps = [*range(1, len(values) + 1)]
    return make_series(steps, [math.nan] * len(values), values, started_at=0.0, moment=nobody, **options)


def test_spikes_survive():
    values = [0.0] * 100_000
    values[12_345], values[77_777] = 9.0, -9.0
    found = series(values, points=1000)
    assert len(found.steps) <= 1000
    assert (found.high, found.high_step, found.low, found.low_step) == (9.0, 12_346, -9.0, 77_778)
    assert {12_346, 77_778, 1, 100_000} <= set(found.steps)


def test_values_that_are_not_finite_are_marked():
    found = series([1.0, math.nan, 3.0, math.inf, -math.inf, 2.0])
    assert (found.steps, found.values, found.bad, found.count) == ([1, 3, 6], [1.0, 3.0, 2.0], 3, 6)
    assert [(mark.step, mark.what) for mark in found.marks] == [(2, "nan"), (4, "inf"), (5, "-inf")]


def test_a_series_without_a_finite_value_has_marks_only():
    found = series([math.nan] * 1000)
    assert (found.values, found.last, found.low, len(found.marks), found.bad) == ([], None, None, 200, 1000)


def test_large_values_whose_sum_overflows_are_kept():
    assert series([1e308, 1e308]).values == [1e308, 1e308]


@pytest.mark.parametrize(("count", "points"), [(0, 10), (1, 10), (10, 10), (11, 10), (1000, 20)])
def test_points_are_at_most_so_many_with_first_and_last(count, points):
    chosen = downsample([float(at % 7) for at in range(count)], points)
    assert len(chosen) <= points
    assert chosen == sorted(set(chosen))
    assert not count or (chosen[0], chosen[-1]) == (0, count - 1)


def test_many_series_have_fewer_points():
    assert [points_per_series(names) for names in (0, 1, 150, 1500, 10**6)] == [1000, 1000, 1000, 100, 20]
