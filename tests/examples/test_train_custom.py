"""The loop that people copy: short, better than its baseline, and resumed bit for bit."""

import shutil
from unittest import mock

import pytest

import dtrain as dt
from example_runs import EXAMPLES, ended, here, launched

SCRIPT = "train_custom.py"


def test_training_on_two_ranks_learns_and_saves_the_last_step(tmp_path):
    found = ended(launched(SCRIPT, "--until", "150ba", out=tmp_path / "out"))
    assert found.value < 0.8 * found.baseline
    assert [each.step for each in dt.checkpoint.list_steps(tmp_path / "out")] == [135, 150]


def test_training_is_deterministic_and_resumes_bit_for_bit(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    printed = here(SCRIPT, "--until", "20ba", out=straight)
    shutil.copytree(straight / "step-00000018", resumed / "step-00000018")
    again = here(SCRIPT, "--until", "20ba", out=resumed)
    assert "step 18 " not in again, "it began anew"
    anew = here(SCRIPT, "--until", "20ba", out=tmp_path / "anew")
    with mock.patch("dtrain.spans.record_step") as stepped:
        over = here(SCRIPT, "--until", "20ba", out=straight)
    assert ("step " in over, stepped.call_count) == (False, 0), "it trained on after its end"
    assert {text.splitlines()[-1] for text in (printed, again, anew, over)} == {printed.splitlines()[-1]}


def test_script_has_at_most_forty_lines():
    assert len((EXAMPLES / SCRIPT).read_text().splitlines()) <= 40


@pytest.mark.slow
def test_complete_run_ends_well_below_the_entropy_baseline(tmp_path):
    found = ended(launched(SCRIPT, out=tmp_path / "out"))
    assert found.value < 0.6 * found.baseline
