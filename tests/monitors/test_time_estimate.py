"""eta: estimates of made-up histories, by hand; a meter that learns from spans and forgets with the run."""

import time

import pytest

from dtrain import spans
from dtrain.errors import ConfigError
from dtrain.monitors.meters import Interruption, ProgressSample, estimate_seconds_left, eta, run_progress
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from moments import Run, fake_spans


def looks(*pairs: tuple[float, float]) -> list[ProgressSample]:
    return [ProgressSample(progress=progress, seconds=seconds) for progress, seconds in pairs]


def interruption(*seen: tuple[float, float]) -> Interruption:
    made = Interruption(first=seen[0][0], last=seen[0][0])
    for progress, seconds in seen:
        made.add(progress, seconds)
    return made


@pytest.mark.parametrize(
    ("history", "interruptions", "expected"),
    [
        pytest.param([], {}, None, id="nothing-seen"),
        pytest.param(looks((10, 5.0)), {}, None, id="one-look"),
        pytest.param(looks((10, 5.0), (10, 6.0)), {}, None, id="no-progress"),
        pytest.param(looks((100, 5.0)), {}, 0.0, id="over"),
        pytest.param(looks((120, 5.0)), {}, 0.0, id="further-than-asked"),
        # 80 to go at 10 in 5 s
        pytest.param(looks((10, 5.0), (20, 10.0)), {}, 40.0, id="pace"),
        # 60 to go; the first ten took 1000 s, which is in the older half
        pytest.param(looks((10, 0.0), (20, 1000.0), (30, 1005.0), (40, 1010.0)), {}, 30.0, id="slow-at-the-start"),
        # the newer half is from 20 on: 20 in 30 s
        pytest.param(looks((0, 0.0), (10, 5.0), (20, 10.0), (30, 30.0), (40, 40.0)), {}, 90.0, id="slower-of-late"),
        # 80 to go in 40 s, and evaluations at 40, 60, 80, 100 of 3 s
        pytest.param(looks((10, 5.0), (20, 10.0)), {"evaluate": interruption((20, 3.0))}, 52.0, id="evaluated-once"),
        # seen at 10, 30 and 50: at 70 and 90 again, for (2 + 3 + 4) / 3 s; and 45 to go in 45 s
        pytest.param(
            looks((54, 0.0), (55, 1.0)), {"evaluate": interruption((10, 2.0), (30, 3.0), (50, 4.0))}, 51.0, id="every-twenty"
        ),
        pytest.param(
            looks((54, 0.0), (55, 1.0)),
            {"evaluate": interruption((50, 5.0)), "save": interruption((10, 1.0), (20, 1.0), (30, 1.0), (40, 1.0), (50, 1.0))},
            45.0 + 5.0 + 5.0,
            id="two-kinds",
        ),
        pytest.param(looks((64, 0.0), (65, 1.0)), {"save": interruption((60, 9.0))}, 35.0, id="not-again"),
        # 35 to go; seen at 20 and 30, and never again
        pytest.param(looks((64, 0.0), (65, 1.0)), {"save": interruption((20, 9.0), (30, 9.0))}, 35.0 + 4 * 9.0, id="overdue"),
        pytest.param(looks((59, 0.0), (60, 1.0)), {"save": interruption((20, 9.0), (30, 9.0))}, 40.0 + 5 * 9.0, id="due-now"),
        pytest.param(looks((0, 0.0), (10, 1.0)), {"save": interruption((0, 9.0))}, 9.0, id="at-the-very-start"),
    ],
)
def test_estimated_seconds_left_match_expected_values(history, interruptions, expected):
    assert estimate_seconds_left(history, interruptions, 100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("clock", "length", "expected"),
    [
        pytest.param(Clock(step=30), "100ba", (30.0, 100.0), id="steps"),
        pytest.param(Clock(step=30, tokens=3000), "9000tok", (3000.0, 9000.0), id="tokens"),
        pytest.param(Clock(step=30, seconds=20.5), "1m", (20.5, 60.0), id="seconds"),
        pytest.param(Clock(step=30, run_length=RunLength(total="60ba")), "1dur", (0.5, 1.0), id="share"),
        pytest.param(Clock(step=30), "2ep", None, id="first-epoch"),
        pytest.param(
            Clock(step=30, step_in_epoch=30, run_length=RunLength(steps_per_epoch=40)),
            "2ep",
            (30.0, 80.0),
            id="epochs-of-known-length",
        ),
        pytest.param(Clock(step=50, epoch=1, step_in_epoch=10), "3ep", (50.0, 120.0), id="epochs-that-were-seen"),
        pytest.param(Clock(step=120, epoch=3), "3ep", (120.0, 120.0), id="all-epochs"),
    ],
)
def test_progress_is_measured_in_unit_of_run_length(clock, length, expected):
    assert run_progress(clock, Duration.parse(length)) == expected


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    return fake_spans(monkeypatch)


def test_eta_includes_evaluation_and_checkpoint_time(seen):
    run, left = Run(), eta("100ba")
    assert left(run.at(10, 9.0)) == {"time/elapsed_s": 9.0}
    seen.add(step=8.0, data=2.0)
    assert left(run.at(20, 19.0)) == {"time/elapsed_s": 19.0, "time/left_s": 80.0, "time/end": 1080.0}
    seen.add(step=8.0, data=2.0, evaluate=30.0, save=5.0)
    # 70 steps of a second; both were seen at 30, so they come at 60 and 90 again
    assert left(run.at(30, 64.0))["time/left_s"] == 70.0 + 2 * 35.0
    seen.add(step=10.0)
    assert left(run.at(40, 74.0))["time/left_s"] == 60.0 + 2 * 35.0
    seen.add(step=10.0, evaluate=30.0)
    # evaluations at 30 and 50: at 70 and 90 again; checkpoints as before
    assert left(run.at(50, 115.0))["time/left_s"] == 50.0 + 2 * 30.0 + 2 * 5.0


def test_eta_ignores_one_time_costs(seen):
    run, left = Run(), eta(100)
    seen.add(setup=100.0)
    left(run.at(1))
    seen.add(step=9.0, compile=500.0, search=70.0, load=90.0)
    assert left(run.at(10))["time/left_s"] == 90.0


def test_eta_includes_rank_waiting_and_user_spans(seen, monkeypatch):
    monkeypatch.setitem(spans._RECORDER.categories, "generate", "evaluation")
    run, left = Run(), eta(100)
    left(run.at(10))
    seen.add(step=5.0, agree=2.0, reduce=1.0, other=2.0)
    assert left(run.at(20))["time/left_s"] == 80.0
    seen.add(step=10.0, generate=7.0)
    assert left(run.at(30))["time/left_s"] == 70.0 + 2 * 7.0


def test_resumed_run_restarts_estimate(seen):
    run, left = Run(), eta(100)
    for step in (10, 20):
        seen.add(step=1000.0, evaluate=100.0)
        left(run.at(step))
    run._run_context.lineage.resumed_from = "checkpoints/step-15"
    assert left(run.at(16, 5.0)) == {"time/elapsed_s": 5.0}
    seen.add(step=4.0)
    assert left(run.at(20, 9.0))["time/left_s"] == 80.0
    assert "time/left_s" not in left(run.at(5, 9.0)), "training went back"


def test_estimate_ignores_step_0_and_is_zero_at_end(seen):
    run, left = Run(), eta(20)
    assert "time/left_s" not in left(run.at(0))
    seen.add(step=500.0)
    assert "time/left_s" not in left(run.at(10))
    seen.add(step=5.0)
    assert left(run.at(20))["time/left_s"] == 0.0


def test_time_limited_run_needs_no_history(seen):
    assert eta("1m")(Run().at(3, 20.0)) == {"time/elapsed_s": 20.0, "time/left_s": 40.0, "time/end": 1040.0}


def test_history_memory_is_bounded(seen):
    run, left = Run(), eta(10_000)
    for step in range(1, 5001):
        seen.add(step=0.5)
        readings = left(run.at(step))
    assert readings["time/left_s"] == pytest.approx(2500.0)


def test_invalid_duration_is_refused():
    with pytest.raises(ConfigError, match="duration: cannot read 'later'"):
        eta("later")


def test_share_of_unknown_run_length_is_refused(seen):
    with pytest.raises(ConfigError, match="dur is a share of the run, whose length is not known"):
        eta("1dur")(Run().at(1))
