import math

import pytest

from dtrain.report.page.scales import format_axis_duration, format_value, log_ticks, tick_labels, ticks

AXES = {
    "a share": (0, 1, "number", "0 0.2 0.4 0.6 0.8 1"),
    "a loss": (2.1, 10.8, "number", "4 6 8 10"),
    "steps": (0, 1000, "number", "0 200 400 600 800 1000"),
    "many steps": (0, 1e6, "number", "0 200k 400k 600k 800k 1M"),
    "a learning rate": (0, 3e-4, "number", "0 5e-5 1e-4 1.5e-4 2e-4 2.5e-4 3e-4"),
    "a little around much": (
        1_000_000,
        1_000_003,
        "number",
        "1M 1.0000005M 1.000001M 1.0000015M 1.000002M 1.0000025M 1.000003M",
    ),
    "below zero": (-2, 1, "number", "-2 -1.5 -1 -0.5 0 0.5 1"),
    "an hour": (0, 4000, "seconds", "0 10m 20m 30m 40m 50m 1h"),
    "days": (0, 300_000, "seconds", "0 12h 1d 1d12h 2d 2d12h 3d"),
    "milliseconds": (0, 0.01, "seconds", "0 2ms 4ms 6ms 8ms 10ms"),
    "gibibytes": (0, 3e9, "bytes", "0 0.5GiB 1GiB 1.5GiB 2GiB 2.5GiB"),
    "percent": (0, 1, "percent", "0% 20% 40% 60% 80% 100%"),
}


@pytest.mark.parametrize(("low", "high", "kind", "texts"), AXES.values(), ids=AXES.keys())
def test_ticks_are_round_and_told_apart(low, high, kind, texts):
    found = ticks(low, high, kind)
    labels = [label.replace("\u202f", "").replace(" ", "") for label in tick_labels(found, kind)]
    assert " ".join(labels) == texts
    assert all(low - 1e-9 <= tick <= high + abs(high) * 1e-9 for tick in found)


def test_an_axis_of_one_value_has_one_tick():
    assert ticks(3.0, 3.0, "number") == [3.0]


def test_a_log_axis_has_powers_of_ten_and_more_where_these_are_few():
    assert log_ticks(1e-6, 1.0) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert log_ticks(2, 11) == [2, 3, 4, 5, 7, 10]
    assert log_ticks(2, 90) == [2, 5, 10, 20, 50]
    assert log_ticks(2, 2.3) == pytest.approx([2, 2.1, 2.2, 2.3])
    assert len(log_ticks(1e-30, 1e30)) < 14


DURATIONS = {0: "0", 1e-5: "10µs", 0.0123: "12.3ms", 0.9999: "1s", 1.5: "1.5s", 59.96: "1m", 61: "1m01s", 3599.9: "1h",
             7500: "2h05m", 86399: "1d", 200_000: "2d08h", -90: "-1m30s"}  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_a_duration_has_two_units(seconds, text):
    assert format_axis_duration(seconds).replace("\u202f", "").replace(" ", "") == text


VALUES = {
    "pi": (3.14159, "number", "3.142"),
    "thousands": (12_345, "number", "12345"),
    "many": (123_456, "number", "123.5k"),
    "little": (0.00012, "number", "1.2e-4"),
    "zero": (0.0, "number", "0"),
    "no number": (math.nan, "number", "NaN"),
    "too large": (math.inf, "bytes", "+inf"),
    "too small": (-math.inf, "seconds", "-inf"),
    "bytes": (1.5e9, "bytes", "1.397\u202fGiB"),
    "share": (0.4172, "percent", "41.7\u202f%"),
}


@pytest.mark.parametrize(("number", "kind", "text"), VALUES.values(), ids=VALUES.keys())
def test_a_value_has_four_digits_and_its_unit(number, kind, text):
    assert format_value(number, kind) == text
