"""Read metric records: the last record of a step counts, repeated steps are dropped, and spikes survive downsampling."""

import math
import random

import numpy as np
import pytest

from dtrain.report.metric_table import MetricTable, downsample, make_series, points_per_series


def columns(rows, resumes=()):
    metrics = MetricTable(resumes)
    metrics.add(rows)
    values = {name: (rows[:, 0].tolist(), rows[:, 2].tolist()) for name, rows in metrics.columns().items()}
    return values, metrics


def rows(steps, value=lambda step: float(step), name="loss"):
    return [{"step": step, name: value(step)} for step in steps]


def test_columns_drop_repeated_steps():
    values, metrics = columns(rows(range(1, 9)) + rows(range(5, 11), lambda step: -step))
    assert values == {"loss": ([*range(1, 11)], [1, 2, 3, 4, -5, -6, -7, -8, -9, -10])}
    assert (metrics.went_back, metrics.repeated) == (1, 4)


def test_columns_drop_lost_steps_after_restart():
    before = [*rows(range(1, 9)), {"step": 8, "eval": 1.0}]
    assert columns(before + rows([5, 6]))[0] == {"loss": ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])}


def test_resumes_give_the_first_repeated_step():
    before = [*rows(range(10, 90, 10)), {"step": 44, "eval": 1.0}]
    assert columns(before + rows([50]))[0]["eval"] == ([44], [1.0])
    assert "eval" not in columns(before + rows([50]), resumes=[40])[0]


def test_late_metric_is_not_a_restart():
    values, metrics = columns([*rows(range(1, 9)), {"step": 4, "eval": 0.5}, {"step": 9, "loss": 9.0}])
    assert values == {"loss": ([*range(1, 10)], [*range(1, 10)]), "eval": ([4], [0.5])}
    assert metrics.went_back == 0


def test_columns_keep_the_last_record_of_a_step():
    assert columns([{"step": 1, "a": 1}, {"step": 1, "a": 2}, {"step": 1, "a": 3, "b": 4}])[0] == {
        "a": ([1], [3]),
        "b": ([1], [4]),
    }


def test_columns_join_records_with_different_names():
    every = [{"step": step, "loss": step, **({"eval": -step} if step % 3 == 0 else {})} for step in range(1, 10)]
    assert columns(every)[0] == {"loss": ([*range(1, 10)], [*range(1, 10)]), "eval": ([3, 6, 9], [-3, -6, -9])}


def test_add_counts_non_numeric_values():
    values, metrics = columns(
        [{"step": 1, "a": "x", "b": 1}, {"step": 2, "a": None, "b": "nan", "c": [1]}, {"step": 3, "b": True}]
    )
    assert values["b"][0] == [1, 2, 3]
    assert math.isnan(values["b"][1][1])
    assert metrics.non_numeric == {"a": 2, "c": 1}
    assert set(values) == {"b"}


def test_add_counts_malformed_records():
    strange = [{"a": 1}, {"step": "x"}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 10**400}, {"step": None}]
    assert columns(strange)[1].malformed == len(strange)


def test_add_limits_the_number_of_names():
    values, metrics = columns([{"step": step, "loss": step, f"layer/{step}": 1} for step in range(3000)])
    assert metrics.has_too_many_names
    assert len(values) == 2000
    assert values["loss"] == ([*range(3000)], [*range(3000)])


def test_add_cuts_long_names():
    assert [len(name) for name in columns([{"step": 1, "x" * 100_000: 1}])[0]] == [200]


@pytest.mark.parametrize("seed", range(5))
def test_columns_equal_simple_reference(seed):
    draw = random.Random(seed)
    expected, every, step = {}, [], 0
    for _ in range(200):
        step = draw.randrange(max(1, step - 20), step) if step > 1 and draw.random() < 0.05 else step + 1
        expected = {(name, other): value for (name, other), value in expected.items() if other < step}
        row = {name: draw.random() for name in ("a", "b", "c") if name == "a" or draw.random() < 0.7}
        expected |= {(name, step): value for name, value in row.items()}
        every.append({"step": step, **row})
    by_name, _ = columns(every)
    assert {(name, s): v for name, (steps, values) in by_name.items() for s, v in zip(steps, values, strict=True)} == expected


def series(values, **options):
    rows = np.array([[step, math.nan, value] for step, value in enumerate(values, start=1)])
    unknown = np.full(len(values), math.nan)
    return make_series(rows, started_at=0.0, ledger=lambda steps: (unknown[: len(steps)], unknown[: len(steps)]), **options)


def test_make_series_keeps_spikes():
    values = [0.0] * 100_000
    values[12_345], values[77_777] = 9.0, -9.0
    drawn = series(values, points=1000)
    assert len(drawn.steps) <= 1000
    assert (drawn.high, drawn.low) == (9.0, -9.0)
    points = dict(zip(drawn.steps.tolist(), drawn.values.tolist(), strict=True))
    assert (points[12_346], points[77_778]) == (9.0, -9.0)
    assert {1, 100_000} <= set(points)


def test_make_series_keeps_non_finite_values():
    drawn = series([1.0, math.nan, 3.0, math.inf, -math.inf, 2.0])
    assert list(map(str, drawn.values.tolist())) == ["1.0", "nan", "3.0", "inf", "-inf", "2.0"]
    assert (drawn.non_finite, drawn.count, drawn.last, drawn.low, drawn.high) == (3, 6, 2.0, 1.0, 3.0)


def test_make_series_limits_non_finite_values():
    drawn = series([math.nan] * 1000)
    assert (drawn.last, drawn.low, len(drawn.values), drawn.non_finite) == (None, None, 200, 1000)
    assert (drawn.steps[0], drawn.steps[-1]) == (1, 1000)


def test_make_series_keeps_large_values_whose_sum_overflows():
    assert series([1e308, 1e308]).values.tolist() == [1e308, 1e308]


@pytest.mark.parametrize(("count", "points"), [(0, 10), (1, 10), (10, 10), (11, 10), (1000, 20)])
def test_downsample_keeps_the_first_and_the_last_point(count, points):
    chosen = downsample(np.arange(count) % 7.0, points).tolist()
    assert len(chosen) <= points
    assert chosen == sorted(set(chosen))
    assert not count or (chosen[0], chosen[-1]) == (0, count - 1)


def test_points_per_series_decreases_with_the_number_of_series():
    assert [points_per_series(names) for names in (0, 1, 150, 1500, 10**6)] == [1000, 1000, 1000, 100, 20]
