"""Read folders of runs: restarts, lost time and stalls are found, the parts add up, and damage is listed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import runs_made
from dtrain.errors import ConfigError
from dtrain.report.model import Report, to_json
from dtrain.report.page import list_deaths, render_page
from dtrain.report.read_run import LiveRun, read_report, read_run
from dtrain.run import run_files
from runs_made import KILLED_TWICE, Part, write_run

NOW = runs_made.START + 10**6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 620.5 s: killed at step 340, failed at 720, done at 1000, resumed from 300 and 700."""
    return write_run(tmp_path_factory.mktemp("runs") / "gpt", KILLED_TWICE)


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "gpt"))


def read(folder, now=NOW):
    run = read_run(folder, now=now)
    json.dumps(to_json(run), allow_nan=False)
    return run


def test_attempts_have_their_outcome_and_lost_work(whole):
    run = read(whole)
    assert [(attempt.outcome, attempt.first_step, attempt.last_step) for attempt in run.attempts] == [
        ("killed", 0, 340),
        ("failed", 300, 720),
        ("done", 700, 1000),
    ]
    assert [(attempt.lost_steps, attempt.lost_s, attempt.down_s) for attempt in run.attempts] == [
        (40, 20.0, 0.0),
        (20, 10.0, 45.0),
        (0, 0.0, 20.0),
    ]
    assert [attempt.resumed_from for attempt in run.attempts] == [
        None,
        "checkpoints/step-00000300",
        "checkpoints/step-00000700",
    ]
    assert run.attempts[1].error == "rank 0: RuntimeError: CUDA error: device-side assert"
    assert (run.started_at, run.duration_s) == (runs_made.START, 620.5)
    assert run.missing == []


def test_goodput_counts_steps_that_were_not_repeated(whole):
    goodput = read(whole).goodput
    # 1000 steps of half a second, of which 82% are compute: 4% less in the lines that wrote a checkpoint, one of five.
    assert goodput.productive_s == pytest.approx(0.82 * 500 - 0.04 * 100)
    assert (goodput.down_s, goodput.repeated_setup_s, goodput.lost_s) == pytest.approx((65.0, 17.5, 30.0))
    assert goodput.by_cause["restart"] == pytest.approx(112.5)
    assert goodput.by_cause["setup"] == pytest.approx(8.0)
    assert sum(goodput.by_cause.values()) == pytest.approx(goodput.total_s) == pytest.approx(620.5)


def test_timeline_adds_up_to_the_duration(whole):
    run = read(whole)
    slices = run.timeline
    assert slices.seconds.sum() == pytest.approx(620.5)
    assert sum(slices.by_cause.values()) == pytest.approx(slices.seconds)
    assert slices.at[1:] == pytest.approx((slices.at + slices.seconds)[:-1])
    restart = sum(seconds for cause, seconds in slices.by_cause.items() if cause != "restart") == 0.0
    between = [(slices.attempt[index], slices.seconds[index]) for index in np.flatnonzero(restart & (slices.seconds > 15))]
    assert between == [(2, 45.0), (3, 20.0)]
    lost = {number: slices.seconds[restart & (slices.seconds <= 15) & (slices.attempt == number)].sum() for number in (1, 2)}
    assert lost == pytest.approx({1: 20.0, 2: 10.0})
    assert slices.by_cause["setup"].sum() == pytest.approx(25.5)
    for rank in run.ranks:
        assert sum(seconds for _, seconds, _ in rank.by_span.values()) + 25.5 == pytest.approx(sum(rank.by_cause.values()))
        assert rank.by_span["step"][0] == 340 + 420 + 300


def test_attempts_have_their_time_by_cause(whole):
    first, second, third = read(whole).attempts
    assert (first.by_cause["restart"], second.by_cause["restart"]) == pytest.approx((20.0, 10.0))
    assert "restart" not in third.by_cause
    for attempt in (first, second, third):
        assert sum(attempt.by_cause.values()) == pytest.approx(attempt.ended_at - attempt.at)


def test_timeline_and_gauges_have_the_speed_and_the_memory(whole):
    run = read(whole)
    slices, middle = run.timeline, len(run.timeline.at) // 2
    done = (slices.steps[middle], slices.samples[middle], slices.tokens[middle])
    assert np.array(done) / slices.seconds[middle] == pytest.approx((2, 512, 512 * 1024))
    assert slices.steps[middle] / slices.compute_s[middle] > 2.4
    assert set(run.gauges) == {"rss_bytes", "device_bytes"}
    assert set(run.gauges["rss_bytes"].ranks) == {1}
    assert run.gauges["rss_bytes"].values[-1] == 2**31 + (1 << 20) + 1_000_000


def test_series_have_tokens_and_times(whole):
    run = read(whole)
    loss = run.series["loss"]
    assert (loss.count, loss.last_step, loss.steps[0], loss.times[0], loss.times[-1]) == (1000, 1000, 1, 8.5, 620.5)
    assert loss.tokens[-1] == 1000 * 256 * 1024
    assert run.series["eval/loss"].steps.tolist() == [250, 500, 750, 1000]


def test_checkpoints_and_events_are_read(whole):
    run = read(whole)
    assert [checkpoint["step"] for checkpoint in run.checkpoints] == [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert {checkpoint["blocked_s"] for checkpoint in run.checkpoints} == {0.5}
    assert [checkpoint["duration_s"] for checkpoint in run.checkpoints] == [3.2] * 9 + [None]
    assert run.event_counts == {"save": 10, "committed": 9, "resumed": 2}
    assert [event["fields"] for event in run.events if event["name"] == "resumed"] == [
        {"path": "checkpoints/step-00000300"},
        {"path": "checkpoints/step-00000700"},
    ]


def test_differences_list_the_facts_that_changed(whole):
    assert read(whole).differences == {
        "settings.lr": {1: 3e-4, 2: 3e-4, 3: 2e-4},
        "versions.torch": {1: "2.13.0", 2: "2.13.0", 3: "2.13.1"},
        "git.dirty": {1: False, 2: True, 3: True},
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_straggler_is_rank_with_least_waiting(tmp_path, ranks):
    run = read(write_run(tmp_path / "slow", [Part(begin=0, end=1000, ranks=ranks)], straggler=1))
    assert [(slow.rank, slow.most) for slow in run.slowest] == [(1, "data")]
    assert run.slowest[0].waited_for_s == pytest.approx(75, rel=0.02)
    assert "they waited for it; it spent" in run.slowest[0].text
    assert read(write_run(tmp_path / "even", [Part(begin=0, end=1000, ranks=ranks)])).slowest == []


def test_rank_count_can_change_between_attempts(tmp_path):
    parts = [Part(begin=0, end=100, ranks=4, reason=None), Part(begin=80, end=200, ranks=2, down_s=5.0)]
    run = read(write_run(tmp_path / "elastic", parts))
    assert [attempt.world_size for attempt in run.attempts] == [4, 2]
    assert [rank.by_span["step"][0] for rank in run.ranks] == [220, 220, 100, 100]
    assert sum(run.goodput.by_cause.values()) == pytest.approx(run.duration_s)
    assert run.missing == []


@pytest.mark.parametrize("says", ["an event", "nothing"])
def test_resumed_attempt_may_open_before_loading_checkpoint(tmp_path, says):
    """As open_run writes it: the line ``open`` and the sums before the first step know of no step yet."""
    folder, opened = write_run(tmp_path / "gpt", [Part(begin=0, end=340, reason=None, ranks=1)]), runs_made.START + 200
    done = {"kind": "sum", "attempt": 2, "tokens": 0}
    rows = [
        {
            "kind": "open",
            "attempt": 2,
            "at": opened,
            "rank": 0,
            "host": "a",
            "pid": 7,
            "version": "0",
            "setup_s": 2.0,
            "step": 0,
        },
        done | {"at": opened + 4, "seconds": 4.0, "step": 0, "samples": 0, "spans": {"load": [1, 4.0]}},
        {"kind": "event", "attempt": 2, "at": opened + 4, "name": "resumed", "step": 300, "path": "x"},
        done | {"at": opened + 14, "seconds": 10.0, "step": 320, "samples": 3200, "spans": {"step": [20, 9.0]}},
        done | {"at": opened + 34, "seconds": 20.0, "step": 360, "samples": 3600, "spans": {"step": [40, 19.0]}},
    ]
    runs_made.append(folder / run_files.METRICS, [{"step": 310, "loss": 1.0}, {"step": 311, "loss": 2.0}])
    runs_made.append(ledger(folder), [row for row in rows if says == "an event" or row["kind"] != "event"])
    run = read(folder)
    assert [(attempt.first_step, attempt.last_step, attempt.lost_steps) for attempt in run.attempts] == [
        (0, 340, 40),
        (300, 360, 0),
    ]
    assert run.attempts[0].lost_s == pytest.approx(20.0)
    assert run.timeline.samples[run.timeline.attempt == 2].sum() == pytest.approx(600)
    assert run.series["loss"].count == 302


def test_first_sum_of_resumed_run_counts_no_steps(tmp_path):
    """As open_run writes it: ``resumed`` first writes down the sums so far, with the step that was loaded."""
    where = "/a/folder/with/a/name/that/is/longer/than/many/others/" * 4 + "step-00000300"
    folder = write_run(tmp_path / "gpt", [Part(begin=0, end=340, reason=None), Part(begin=300, end=400, resumed=where)])
    run = read(folder)
    assert [(attempt.first_step, attempt.lost_steps, attempt.resumed_from) for attempt in run.attempts] == [
        (0, 40, None),
        (300, 0, where),
    ]
    assert run.series["loss"].count == 400
    assert run.timeline.samples[run.timeline.attempt == 2].sum() == pytest.approx(100 * 256)


def test_killed_rank_is_credited_with_steps_logged_in_metrics(tmp_path):
    """The last line of rank 0 is of step 340 at 178 s, that of rank 1 of 320; the last record of step 356 at 186 s."""
    parts = [Part(begin=0, end=356, reason=None), Part(begin=300, end=500, down_s=12.0)]
    folder = write_run(tmp_path / "gpt", parts, evaluate_every=0)
    for rank, step in ((0, 340), (1, 320)):
        rows = rows_of(ledger(folder, rank))
        ledger(folder, rank).write_text("")
        runs_made.append(ledger(folder, rank), [row for row in rows if row["attempt"] == 2 or row.get("step", 0) <= step])
    run = read(folder)
    first, second = run.attempts
    assert (first.last_step, first.ended_at, first.lost_steps, second.down_s) == (356, 186.0, 56, 12.0)
    assert first.lost_s == pytest.approx(28.0)
    slices = run.timeline
    counted = (slices.attempt == 1) & np.isfinite(slices.steps)
    assert (slices.at + slices.seconds)[counted].max() == pytest.approx(178.0)
    assert run.goodput.lost_s == pytest.approx(28.0)
    assert sum(run.goodput.by_cause.values()) == pytest.approx(run.goodput.total_s)
    assert sum(slices.by_cause.values()) == pytest.approx(slices.seconds)


def test_records_of_one_step_are_merged_by_name(tmp_path):
    rows = [{"step": 10, "time": 5.0, "loss": 2.0, "lr": 0.1}, {"step": 10, "time": 6.0, "eval/loss": 3.0, "lr": 0.2}]
    runs_made.append(tmp_path / run_files.METRICS, [*rows, {"step": 20, "time": 9.0, "loss": 1.0, "lr": 0.3}])
    series = read(tmp_path).series
    assert {name: (values.steps.tolist(), values.values.tolist()) for name, values in series.items()} == {
        "loss": ([10, 20], [2.0, 1.0]),
        "lr": ([10, 20], [0.2, 0.3]),
        "eval/loss": ([10], [3.0]),
    }


def test_silent_run_is_killed_and_writing_run_is_running(tmp_path):
    folder = write_run(tmp_path / "gpt", [Part(begin=0, end=100, reason=None)])
    end = runs_made.START + 58
    assert read(folder, now=end + 30).attempts[0].outcome == "running"
    assert read(folder, now=end + 3000).attempts[0].outcome == "killed"


def test_many_restarts_keep_report_size_bounded(tmp_path):
    parts = [Part(begin=10 * number, end=10 * number + 12, reason=None, down_s=3.0) for number in range(210)]
    run = read(write_run(tmp_path / "gpt", parts, per_line=5, save_every=1))
    assert len(run.attempts) == 210
    assert len(run.timeline.at) <= 400
    assert run.timeline.seconds.sum() == pytest.approx(run.duration_s)
    assert sum(run.timeline.by_cause.values()) == pytest.approx(run.timeline.seconds)
    assert np.nansum(run.timeline.steps) == pytest.approx(210 * 12)
    assert run.goodput.lost_s == pytest.approx(209 * 2 * 0.5)
    assert len(run.events) <= 1000
    assert run.event_counts["save"] > 500


def ledger(folder, rank=0):
    return folder / run_files.LEDGER / run_files.ledger_name(rank)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def newer(folder):
    path = folder / run_files.ATTEMPTS / run_files.attempt_name(3)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "more": 1}))
    runs_made.append(ledger(folder), [{"kind": "power", "attempt": 3, "at": NOW, "watts": 700}] * 3)


def newer_cause(folder):
    line = {"kind": "sum", "attempt": 3, "at": runs_made.START + 700, "seconds": 5.0, "step": 1000}
    runs_made.append(ledger(folder), [line | {"spans": {"nap": [1, 5.0]}, "causes": {"nap": "sleep"}}])


def numbers_beyond_reason(folder):
    line = {"kind": "sum", "attempt": 3, "at": 1e300, "seconds": 1, "step": 1, "spans": {}}
    late = {"kind": "sum", "attempt": 3, "at": NOW, "seconds": 1.0, "step": 5, "spans": {"step": [1, float("nan")]}}
    runs_made.append(ledger(folder), [line, late, late | {"spans": {"step": [1, "x"]}}, late | {"at": None}])


def an_attempt_is_lost(folder):
    for rank in (0, 1):
        lines = ledger(folder, rank).read_text().splitlines()
        ledger(folder, rank).write_text("".join(line + "\n" for line in lines if '"attempt": 2' not in line))


def clock_put_back_within(folder):
    path, changed = ledger(folder), []
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        changed.append(json.dumps(row | {"at": row["at"] - 3600 if number > 10 and row["attempt"] == 1 else row["at"]}))
    path.write_text("\n".join(changed) + "\n")


GARBAGE = bytes(range(256)) * 50
STRANGE = [{"kind": "sum", "attempt": 3}, {"kind": "sum"}, {"a": 1}, {"kind": "open", "attempt": "x"}]
DAMAGE = {
    "cut short": (
        lambda folder: runs_made.cut(ledger(folder, 1), 25),
        "ledger/rank-00001.jsonl: 1 line could not be read: cut short, or damaged",
    ),
    "torn ledger": (
        lambda folder: runs_made.garble(ledger(folder), 3000),
        "ledger/rank-00000.jsonl: 2 lines could not be read",
    ),
    "torn metrics": (
        lambda folder: runs_made.garble(folder / run_files.METRICS, 3000),
        "metrics.jsonl: 2 lines could not be read",
    ),
    "no ledger": (lambda folder: shutil.rmtree(folder / run_files.LEDGER), "no ledger: where the time went"),
    "no metrics": (lambda folder: (folder / run_files.METRICS).unlink(), "no metrics.jsonl: loss"),
    "no attempts": (lambda folder: shutil.rmtree(folder / run_files.ATTEMPTS), "no file about an attempt: settings"),
    "a rank is gone": (lambda folder: ledger(folder, 1).unlink(), "attempt 1: nothing from rank 1 of 2"),
    "ledger of garbage": (
        lambda folder: [ledger(folder, rank).write_bytes(GARBAGE) for rank in (0, 1)],
        "the ledgers have no line that could be read",
    ),
    "metrics of garbage": (
        lambda folder: (folder / run_files.METRICS).write_bytes(GARBAGE),
        "metrics.jsonl: has no record that could be read",
    ),
    "newer": (newer, "attempts/attempt-00003.json: written by a newer version (format 2, this reads 1)"),
    "newer cause": (newer_cause, "ledger: causes that this version does not know count as other: sleep"),
    "broken attempt": (
        lambda folder: (folder / run_files.ATTEMPTS / run_files.attempt_name(2)).write_text('{"format": 1, "att'),
        "attempts/attempt-00002.json: cannot be read",
    ),
    "texts": (
        lambda folder: runs_made.append(folder / run_files.METRICS, [{"step": 1001, "phase": "cooldown", "loss": 2.0}]),
        "metrics.jsonl: 1 value of 'phase' is no number; left out",
    ),
    "strange lines": (
        lambda folder: runs_made.append(ledger(folder), STRANGE),
        "ledger/rank-00000.jsonl: 4 lines are no line of a ledger",
    ),
    "numbers beyond reason": (numbers_beyond_reason, "ledger/rank-00000.jsonl: 4 lines are no line of a ledger"),
    "first line is lost": (
        lambda folder: ledger(folder).write_text(ledger(folder).read_text().partition("\n")[2]),
        "attempt 1: rank 0 has no line of when it began",
    ),
    "an attempt is lost": (an_attempt_is_lost, "nothing in the ledgers of attempt 2"),
    "clock put back": (clock_put_back_within, "the clock was put back by 36"),
    "two at once": (
        lambda folder: runs_made.append(ledger(folder), [row for row in rows_of(ledger(folder)) if row["attempt"] == 1]),
        "several runs have written into this folder at once (attempt 1)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_read_run_lists_damage_and_reads_the_rest(folder, damage):
    make, expected = DAMAGE[damage]
    make(folder)
    run = read(folder)
    assert [line for line in run.missing if expected in line] != [], run.missing
    assert run.attempts or run.series
    if damage not in ("no ledger", "ledger of garbage"):
        assert [attempt.number for attempt in run.attempts] == ([1, 3] if damage == "an attempt is lost" else [1, 2, 3])
        assert 0.3 < run.goodput.share < 0.7
    if damage not in ("no metrics", "metrics of garbage"):
        assert run.series["loss"].count >= 990


@pytest.mark.parametrize(
    "change",
    [{"kind": "close", "reason": []}, {"kind": "event", "name": "save", "step": 10**400, "blocked_s": 10**400},
     {"kind": "event", "name": "x", "seconds": 10**400},
     {"kind": "sum", "seconds": 1.0, "step": 1000, "spans": {}, "gauges": [1]}],
    ids=["a reason", "a step", "a field", "gauges"],
)  # fmt: skip
def test_invalid_value_types_are_ignored(folder, change):
    runs_made.append(ledger(folder), [{"attempt": 3, "at": runs_made.START + 621} | change])
    run = read(folder)
    assert (run.attempts[2].outcome, run.attempts[2].last_step, set(run.gauges)) == (
        "done",
        1000,
        {"rss_bytes", "device_bytes"},
    )
    assert "</html>" in render_page(Report(version="1", title="", written_at=NOW, runs=[run], problems=[]))


def test_overlapping_attempts_have_nonnegative_time(folder):
    lines = rows_of(ledger(folder))
    moved = [row | {"at": row["at"] - 9000} if row["attempt"] == 3 else row for row in lines]
    runs_made.append(ledger(folder), [*moved, *[row for row in lines if row["attempt"] == 1]])
    run = read(folder)
    assert run.goodput.total_s > 0
    assert min(attempt.at for attempt in run.attempts) == 0


def test_unknown_record_kind_is_ignored_and_reported(folder):
    newer(folder)
    assert "ledger: 3 lines of a kind that this version does not know, 'power'; left out" in read(folder).missing


def test_clock_set_back_between_attempts_shifts_later_attempt(tmp_path):
    folder = write_run(tmp_path / "gpt", [Part(begin=0, end=100, reason=None)])
    lines = rows_of(ledger(folder))
    for rank in (0, 1):
        runs_made.append(
            ledger(folder, rank), [row | {"attempt": 2, "at": row["at"] - 500, "step": row["step"] + 90} for row in lines]
        )
    run = read(folder)
    assert [(attempt.at, attempt.ended_at, attempt.down_s) for attempt in run.attempts] == [
        (0.0, 58.0, 0.0),
        (58.0, 116.0, 0.0),
    ]
    assert "the clock was put back by 558 s before attempt 2, which is moved to follow" in run.missing


def test_run_without_ledger_detects_restarts_from_metrics(folder):
    DAMAGE["no ledger"][0](folder)
    run = read(folder)
    assert (run.attempts, run.goodput, run.timeline, run.slowest) == ([], None, None, [])
    assert "metrics.jsonl: the steps go back 2 times: restarts, with which 60 records no longer count" in run.missing
    assert run.series["loss"].times[-1] == pytest.approx(620.5 - 8)
    assert run.started_at == pytest.approx(runs_made.START + 8)


def test_rotated_metrics_are_read_oldest_first(folder):
    lines = (folder / run_files.METRICS).read_text().splitlines(keepends=True)
    third = len(lines) // 3
    for name, content in (("metrics.jsonl.2", lines[:third]), ("metrics.jsonl.1", lines[third : 2 * third]),
                       ("metrics.jsonl", lines[2 * third :])):  # fmt: skip
        (folder / name).write_text("".join(content))
    (folder / "metrics-eval.jsonl").write_text('{"step": 5, "loss": 1.5}\n')
    run = read(folder)
    assert run.series["loss"].count == 1000
    assert run.series["loss (metrics-eval)"].values.tolist() == [1.5]
    assert run.missing == []


def test_several_runs_are_combined_in_one_report(whole, tmp_path):
    other = write_run(tmp_path / "other", [Part(begin=0, end=50)], about=False)
    report = read_report([whole, other, tmp_path / "nowhere"], version="0.1.0", now=NOW)
    assert [run.name for run in report.runs] == ["gpt", "other"]
    assert (report.title, report.version, report.written_at) == ("gpt, other", "0.1.0", NOW)
    assert report.problems == [
        f"report: path must be the folder of a run, got {str(tmp_path / 'nowhere')!r}, which is not there. "
        "Pass the folder given to dt.open_run.",
        "other: no file about an attempt: settings, versions and the command are not known",
    ]


def test_read_report_rejects_folders_without_a_run(whole, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    table = {
        tmp_path / "file": r"which is a file\. Pass the folder",
        tmp_path / "empty": r"which has no ledger, no metrics.jsonl and no attempts\. Call dt.open_run in the loop",
        whole.parent: "Runs below: gpt",
        tmp_path / ("x" * 5000): "cannot be read",
        "a\0b": "cannot be read|is not there",
    }
    for path, expected in table.items():
        with pytest.raises(ConfigError, match=expected):
            read_report([path], version="0.1.0")
    with pytest.raises(ConfigError, match="folders must have at least 1 folder"):
        read_report([], version="0.1.0")


def test_deaths_have_tier_seconds_and_lost_steps(folder):
    for rank in range(2):
        file = folder / "ledger" / run_files.ledger_name(rank)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        place = next(number for number, line in enumerate(lines) if line["attempt"] == 2 and line["kind"] == "sum")
        shared = {"kind": "event", "attempt": 2, "at": lines[place]["at"]}
        lines[place:place] = [
            shared | {"name": "resumed", "step": 300, "path": "/dev/shm/dtrain-1/step-00000300", "tier": "memory"},
            shared | {"name": "recovered", "step": 301, "rank_died": 1, "cause": "killed by SIGKILL", "last_step": 340,
                      "lost_steps": 40, "seconds": 0.714, "survivors": 3, "parts": {"ending": 0.1, "step": 0.614}},
        ]  # fmt: skip
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(folder)
    (death,) = run.deaths
    assert {key: death[key] for key in ("rank", "cause", "tier", "step", "lost_steps", "seconds", "attempt")} == {
        "rank": 1, "cause": "killed by SIGKILL", "tier": "memory", "step": 300, "lost_steps": 40, "seconds": 0.714,
        "attempt": 2,
    }  # fmt: skip
    row = list_deaths(run)[0]
    assert row[1:] == ["1", "killed by SIGKILL", "memory", "300", "0.71 s", "40", "3", "ending 0.10, step 0.61"]
    line = "rank 1 killed by SIGKILL; back from memory at step 300 after 0.71 s, 40 steps lost, survivors kept 3"
    assert LiveRun(folder).refresh(NOW).last_death == line
