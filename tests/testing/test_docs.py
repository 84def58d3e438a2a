"""docs/testing.md: every block of code is a file of a test suite, and the suite passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.testing.fault_injection import FAULT_POINTS

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Return pytest's report about the files of the page."""
    folder = tmp_path_factory.mktemp("page")
    for _, block in BLOCKS:
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    options = ["-v", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_code_block_has_a_unique_file_name():
    names = [block.splitlines()[0] for _, block in BLOCKS]
    assert [language for language, _ in BLOCKS] == ["python"] * len(BLOCKS)
    assert all(re.fullmatch(r"# (test_\w+|conftest)\.py", name) for name in names)
    assert len(names) == len(set(names)) >= 5


@pytest.mark.costly
def test_documented_tests_pass(report):
    named = re.findall(r"^def (test_\w+)", PAGE, re.M)
    passed = re.findall(r"::(test_\w+)\S* PASSED", report)
    assert set(named) == set(passed)
    assert len(named) == 11


def test_fault_point_table_matches_the_code():
    table = PAGE.split("| `at=` | the point |")[1].split("\n\n")[0]
    named = [name for row in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*FAULT_POINTS, "optimizer"])
