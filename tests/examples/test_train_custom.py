"""The loop that people copy: short, better than its baseline, and resumed bit for bit."""

import shutil

import pytest

from example_runs import EXAMPLES, ended, launched

SCRIPT = "train_custom.py"


def test_it_learns_on_two_ranks_and_resumes_bit_for_bit(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    printed = launched(SCRIPT, "--until", "400ba", out=straight)
    found = ended(printed)
    assert found.value < 0.75 * found.baseline
    shutil.copytree(straight / "step-00000200", resumed / "step-00000200")
    again = launched(SCRIPT, "--until", "400ba", out=resumed)
    assert "step 200 " not in again, "it began anew"
    assert again.splitlines()[-1] == printed.splitlines()[-1]


def test_it_is_under_forty_lines():
    assert len((EXAMPLES / SCRIPT).read_text().splitlines()) < 40


@pytest.mark.slow
def test_the_whole_run_goes_well_below_the_entropy(tmp_path):
    found = ended(launched(SCRIPT, out=tmp_path / "out"))
    assert found.value < 0.6 * found.baseline
