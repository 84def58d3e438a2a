"""The example of two states in one loop: it learns, on two processes as on one, and goes on from what it has saved."""

from pathlib import Path

import pytest

from dtrain.loggers.records import read_jsonl
from example_runs import Ending, ended, here, launched

DISTANCE = "held_out/energy_distance"


def run(out: Path, *, steps: int, save_every: int = 100, how=launched) -> tuple[dict[int, dict], Ending]:
    """The records of a run on two processes (or in this one, with ``how=here``), by step, and how it ended."""
    printed = how("train_gan.py", "--steps", str(steps), "--save-every", str(save_every), out=out)
    records = {step: dict(record) for step, record in read_jsonl(out / "metrics.jsonl").items()}
    for record in records.values():
        record.pop("time")
    return records, ended(printed)


def distances(records: dict[int, dict]) -> dict[int, float]:
    return {step: record[DISTANCE] for step, record in records.items() if DISTANCE in record}


@pytest.mark.slow
def test_training_on_two_ranks_moves_towards_the_ring(tmp_path):
    records, _ = run(tmp_path / "run", steps=100)
    assert list(records) == [1, *range(10, 101, 10)]
    found = distances(records)
    assert list(found) == [1, 100]
    assert found[100] < 0.5 * found[1]


@pytest.mark.slow
def test_training_on_two_ranks_learns_the_ring(tmp_path):
    records, end = run(tmp_path / "run", steps=400)
    found = distances(records)
    assert list(found) == [1, 100, 200, 300, 400]
    assert found[1] > 0.4
    assert end.value < 0.8 * end.baseline, "nearer to the ring than any normal distribution"


def test_resumed_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    """The test compares both states, and the noise, which is drawn from the global generator."""
    whole = run(tmp_path / "whole", steps=100, how=here)
    first, _ = run(tmp_path / "parts", steps=70, how=here)
    assert list(distances(first)) == [1, 70]
    records, end = run(tmp_path / "parts", steps=100, how=here)
    del records[70][DISTANCE]  # measured at the end of the first part
    assert (records, end) == whole


@pytest.mark.slow
def test_interrupted_run_ends_with_the_numbers_of_an_uninterrupted_run(tmp_path):
    whole = run(tmp_path / "whole", steps=500)
    run(tmp_path / "parts", steps=130, save_every=130)
    records, end = run(tmp_path / "parts", steps=500)
    del records[130][DISTANCE]
    assert (records, end) == whole
