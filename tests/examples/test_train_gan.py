"""The example of two states in one loop: it learns, on two processes as on one, and goes on from what it has saved."""

from pathlib import Path

import pytest

from dtrain.loggers.records import read_jsonl
from example_runs import Ending, ended, here, launched


def run(out: Path, *, steps: int, save_every: int = 100, how=launched) -> tuple[dict[int, dict], Ending]:
    """The records of a run on two processes (or in this one, with ``how=here``), by step, and how it ended."""
    printed = how("train_gan.py", "--steps", str(steps), "--save-every", str(save_every), out=out)
    records = {step: dict(record) for step, record in read_jsonl(out / "metrics.jsonl").items()}
    for record in records.values():
        record.pop("time")
    return records, ended(printed)


def test_training_on_two_ranks_moves_towards_the_ring(tmp_path):
    records, _ = run(tmp_path / "run", steps=100)
    assert list(records) == [1, 100]
    assert records[100]["energy_distance"] < 0.5 * records[1]["energy_distance"]


@pytest.mark.slow
def test_training_on_two_ranks_learns_the_ring(tmp_path):
    records, end = run(tmp_path / "run", steps=400)
    assert list(records) == [1, 100, 200, 300, 400]
    assert records[1]["energy_distance"] > 0.4
    assert end.value < 0.8 * end.baseline, "nearer to the ring than any normal distribution"


def test_resumed_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    """The test compares both states, and the noise, which is drawn from the global generator."""
    whole = run(tmp_path / "whole", steps=100, how=here)
    first, _ = run(tmp_path / "parts", steps=70, how=here)
    assert list(first) == [1]
    assert run(tmp_path / "parts", steps=100, how=here) == whole


@pytest.mark.slow
def test_interrupted_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    whole = run(tmp_path / "whole", steps=500)
    run(tmp_path / "parts", steps=130, save_every=130)
    assert run(tmp_path / "parts", steps=500) == whole
