"""The loop that people copy: short, better than its baseline, and resumed bit for bit."""

import shutil
from unittest import mock

import pytest

import dtrain as dt
from example_runs import ended, here, launched

SCRIPT = "train_custom.py"


def test_training_on_two_ranks_learns_and_saves_the_last_step(tmp_path):
    ending = ended(launched(SCRIPT, "--until", "150ba", out=tmp_path / "out"))
    assert ending.value < 0.8 * ending.baseline
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps(tmp_path / "out" / "checkpoints")] == [135, 150]


def test_training_is_deterministic_and_resumes_bit_for_bit(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    printed = here(SCRIPT, "--until", "20ba", out=straight)
    saved = "checkpoints/step-00000018"
    shutil.copytree(straight / saved, resumed / saved)
    again = here(SCRIPT, "--until", "20ba", out=resumed)
    assert min(dt.loggers.read_jsonl(resumed / "metrics.jsonl")) == 19, "it began anew"
    anew = here(SCRIPT, "--until", "20ba", out=tmp_path / "anew")
    with mock.patch("dtrain.spans.record_step") as stepped:
        over = here(SCRIPT, "--until", "20ba", out=straight)
    assert stepped.call_count == 0, "it trained on after its end"
    assert {text.splitlines()[-1] for text in (printed, again, anew, over)} == {printed.splitlines()[-1]}


@pytest.mark.slow
def test_complete_run_ends_well_below_the_entropy_baseline(tmp_path):
    ending = ended(launched(SCRIPT, out=tmp_path / "out"))
    assert ending.value < 0.6 * ending.baseline
