"""The example of tensor parallelism: the same losses on 2 x 2 processes as on one, and a run that changes between them."""

import sysconfig
from functools import partial
from pathlib import Path

import pytest

from dtrain.loggers.records import read_jsonl
from example_runs import ended, here, launched

TEXT = str(Path(sysconfig.get_path("stdlib")) / "asyncio" / "*.py")
STEPS = 12

# Other ranks add the same float32 numbers in another order, and twelve steps of AdamW carry that on. Another batch differs by
# 1e-2.
TOLERANCE = 1e-4


def losses(out: Path, tp: int, *, processes: int, steps: int = STEPS) -> dict[int, float]:
    run = here if processes == 1 else partial(launched, n=processes)
    run("tensor_parallel.py", "--tp", str(tp), "--steps", str(steps), "--text", TEXT, out=out)
    return {step: record["loss"] for step, record in read_jsonl(out / "metrics.jsonl").items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, float]:
    by_step = losses(tmp_path_factory.mktemp("alone") / "run", 1, processes=1)
    assert list(by_step) == list(range(1, STEPS + 1))
    assert by_step[STEPS] < by_step[1] - 0.5, "it learns"
    return by_step


def test_four_process_losses_match_one_process_and_resume_on_one(alone, tmp_path):
    four = losses(tmp_path / "run", 2, processes=4, steps=STEPS // 2)
    assert list(four) == list(range(1, STEPS // 2 + 1))
    both = losses(tmp_path / "run", 1, processes=1)
    assert list(both) == list(alone)
    assert [both[step] for step in alone] == pytest.approx(list(alone.values()), rel=TOLERANCE)


@pytest.mark.slow
def test_tensor_parallelism_alone_matches_one_process_losses(alone, tmp_path):
    two = losses(tmp_path / "run", 2, processes=2)
    assert [two[step] for step in alone] == pytest.approx(list(alone.values()), rel=TOLERANCE)


@pytest.mark.slow
def test_training_on_the_default_text_ends_below_the_baseline(tmp_path):
    """Two processes run instead of four, because a machine may not have the cores for four."""
    end = ended(launched("tensor_parallel.py", "--steps", "20", out=tmp_path / "run"))
    assert end.value < 0.92 * end.baseline
