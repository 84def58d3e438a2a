"""docs/own.md: every block of code is a file, and the tests of each piece pass, on the page or in own_tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages.fences import DOCS, fences

PAGE = DOCS / "own.md"
BLOCKS = {str(block.file): block.text for block in fences(PAGE) if block.language == "python"}
ASIDE = {f"test_{path.name}": path.read_text() for path in sorted((Path(__file__).parent / "own_tests").glob("*.py"))}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Return pytest's report about the files of the page and their tests."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in (BLOCKS | ASIDE).items():
        (folder / name).write_text(text)
    options = ["-v", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_piece_on_the_page_has_tests():
    assert "None" not in BLOCKS, "a block without a name"
    pieces = [name for name in BLOCKS if not name.startswith(("test_", "conftest"))]
    assert len(pieces) == 5
    assert {f"test_{name}" for name in pieces} <= {*BLOCKS, *ASIDE}


@pytest.mark.costly
def test_every_test_of_the_pieces_passes(report):
    named = {name for text in (BLOCKS | ASIDE).values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert set(re.findall(r"::(test_\w+)\S* PASSED", report)) == named
