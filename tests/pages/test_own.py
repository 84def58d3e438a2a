"""docs/own.md: every block of code is a file, and its tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pages.fences import DOCS, fences

PAGE = DOCS / "own.md"
BLOCKS = [each for each in fences(PAGE) if each.language == "python"]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Return pytest's report about the files of the page."""
    folder = tmp_path_factory.mktemp("own")
    for block in BLOCKS:
        (folder / str(block.file)).write_text(block.text)
    options = ["-v", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_code_block_is_a_file_with_tests():
    names = [block.file for block in BLOCKS]
    assert None not in names
    assert len(set(names)) == len(names)
    things = [name for name in names if not name.startswith(("test_", "conftest"))]
    assert len(things) == 5
    assert {f"test_{name}" for name in things} <= set(names)


def test_every_test_on_the_page_passes(report):
    named = {name for block in BLOCKS for name in re.findall(r"^def (test_\w+)", block.text, re.M)}
    assert len(named) >= 15
    assert set(re.findall(r"::(test_\w+)\S* PASSED", report)) == named
