"""The example of two states in one loop: it learns, on two processes as on one, and goes on from what it has saved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.observe.sinks import read_jsonl

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gan.py"
PATIENCE_S = 300  # for anything that takes seconds: the machine may be busy


def run(out: Path, *, processes: int, steps: int, save_every: int = 100) -> dict[int, dict]:
    """The records of a run, by step."""
    launcher = ["-m", "dtrain", "launch", "-n", str(processes)] if processes > 1 else []
    options = ["--steps", str(steps), "--save-every", str(save_every), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_jsonl(out / "metrics.jsonl")
    return {step: {name: value for name, value in record.items() if name != "time"} for step, record in records.items()}


def test_two_processes_learn_the_ring_and_go_on_where_they_stopped(tmp_path):
    first = run(tmp_path / "run", processes=2, steps=40, save_every=40)
    assert list(first) == [1]
    both = run(tmp_path / "run", processes=2, steps=100)
    assert list(both) == [1, 100]
    assert both[1]["energy_distance"] > 0.4
    assert both[100]["energy_distance"] < 0.3, "on the way down; a whole run comes below 0.06"


@pytest.mark.slow
def test_a_whole_run_comes_close_and_an_interrupted_one_ends_with_the_same_numbers(tmp_path):
    whole = run(tmp_path / "whole", processes=2, steps=500)
    assert whole[500]["energy_distance"] < 0.06
    run(tmp_path / "parts", processes=2, steps=130, save_every=130)
    parts = run(tmp_path / "parts", processes=2, steps=500)
    assert parts == whole
