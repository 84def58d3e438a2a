"""The checkpoint benchmark at tiny sizes: every way saves and loads, and the output states the measured sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_claims import LARGE, SMALL, Claim, claim_row, judged, time_rows
from checkpoint_peers import LOADS, SAVES
from checkpoint_ranks import dip, leave, loads, memory, saves
from measure import Figure

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
SMALL_MODEL, LARGE_MODEL = ("small", 3), ("large", 720)


# Each direction runs with one model, so that both models and both directions run. --slow runs the other two combinations.
@pytest.mark.parametrize(
    ("model", "size"), [pytest.param(*SMALL_MODEL, id="small"), pytest.param(*LARGE_MODEL, id="large", marks=pytest.mark.slow)]
)
def test_every_save_method_is_timed_and_cleaned_up(ranks, tmp_path, model, size):
    one, other = ranks(2).run(saves, model, size, str(tmp_path), list(SAVES), 1)
    timings = one["timings"]
    assert timings == other["timings"]  # all ranks wait for the slowest
    assert timings.keys() | {"raw write past the page cache + fsync"} == SAVES.keys()
    assert all(len(rounds) == 1 and min(rounds[0]) > 0 for moments in timings.values() for rounds in moments.values())
    assert {name for name, moments in timings.items() if "held" in moments} == {name for name in SAVES if "async" in name}
    assert not [*tmp_path.rglob("step-*"), *tmp_path.rglob("rank-*")]
    assert one["bytes"] > 12 * size  # parameters and two averages


@pytest.mark.parametrize(
    ("model", "size"), [pytest.param(*SMALL_MODEL, id="small", marks=pytest.mark.slow), pytest.param(*LARGE_MODEL, id="large")]
)
def test_every_load_method_restores_the_saved_state(ranks, tmp_path, model, size):
    report = ranks(2).run(loads, model, size, str(tmp_path), list(LOADS), 1)[0]
    assert report["timings"].keys() == LOADS.keys()  # each was checked once, or this would have raised


def test_memory_of_a_load_at_another_world_size_is_reported(ranks, tmp_path):
    ranks(2).run(leave, "large", 720, str(tmp_path), ["dtrain", "DCP"])
    for name in ("dtrain", "DCP"):
        (report,) = ranks(1).run(memory, "large", 720, str(tmp_path), name)
        assert report["own"] > 12 * 720
        assert report["above"] >= 0


def test_dip_benchmark_trains_during_a_save(ranks, tmp_path):
    figures = ranks(1).run(dip, 720, str(tmp_path), "cpu", 2)[0]
    assert 0 < figures["held_s"] <= figures["window_s"]
    assert figures["before"] > 0
    assert figures["during"] >= 0


def test_claims_name_measured_methods_and_phases():
    moments = {(name, moment) for name in SAVES for moment in ("held", "done")}
    for claims in (SMALL, LARGE):
        assert all({claim.of, claim.against} <= moments for claim in claims["save"])
        assert all({claim.of[0], claim.against[0]} <= LOADS.keys() for claim in claims["load"])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(0.9, 1.2, "met", id="met"),
        pytest.param(1.2, 1.3, "not resolved", id="in-the-band"),
        pytest.param(1.3, 1.6, "**missed by 20%**", id="missed"),
    ],
)
def test_verdict_states_the_margin_of_a_missed_target(low, high, expected):
    assert judged(Figure(value=1.5, low=low, high=high), 1.25) == expected
    assert judged(Figure(value=1.5, low=low, high=high), None) == ""


def test_claim_row_shows_both_times_the_ratio_and_the_verdict():
    claim = Claim(what="save", of=("a", "done"), against=("b", "done"), at_most=0.6)
    timings = {"a": {"done": [(0.5, 0.5)] * 3}, "b": {"done": [(1.0, 1.0)] * 3}}
    assert claim_row(claim, timings) == "| save | 500 ms / 1.00 s | 0.500 | 0.500 to 0.500 | 0.6 | met |"
    assert claim_row(claim, {"a": timings["a"]}) is None


def test_time_row_shows_the_stall_only_for_asynchronous_saves():
    rows = time_rows({"a": {"held": [(0.1, 0.1)], "done": [(0.5, 0.5)]}, "b": {"done": [(2.0, 2.0)]}}, 10**9)
    assert rows == ["| a | 100 ms | 500 ms | 500 ms to 500 ms | 2.00 |", "| b |  | 2.00 s | 2.00 s to 2.00 s | 0.50 |"]


@pytest.mark.slow
def test_script_prints_every_table(tmp_path):
    command = [sys.executable, str(SCRIPT), "--size", "20k", "--tensors", "5", "--rounds", "1", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    headings = [line.split(" in all")[0] for line in done.stdout.splitlines() if line.startswith("### ")]
    assert [re.sub(r" [^ ]+ GB$", "", heading) for heading in headings] == [
        "### 5 small tensors with AdamW's state: save",
        "### 5 small tensors with AdamW's state: load",
        "### 5 small tensors with AdamW's state: claims",
        "### 0.02 M parameters with AdamW's state: save",
        "### 0.02 M parameters with AdamW's state: load",
        "### 0.02 M parameters with AdamW's state: claims",
        "### Peak resident memory of a load at another world size, above that before it",
        "### On a GPU: training while an async save is under way",
    ]
    assert not list(tmp_path.iterdir())
