"""website/setups.py: the folded setup of each page defines the names that its code assumes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest

from pages.assumptions import assumed, sentence
from pages.fences import DOCS, ROOT


@pytest.fixture(scope="module")
def setups() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setups", ROOT / "website" / "setups.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.costly
def test_setup_of_all_names_runs_in_an_empty_interpreter(setups: ModuleType, tmp_path) -> None:
    code = setups.code(setups.PARTS) + "\nstate, metrics = step(state, batch)\nassert state.step == 1\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_setup_has_only_the_needed_names(setups: ModuleType) -> None:
    assert setups.code(["lr"]) == "import torch, dtrain as dt\nlr = dt.schedules.constant(1.0)\n"
    assert "class Block" in setups.code(["model"])
    assert "class" not in setups.code(["loader"])


@pytest.mark.parametrize("page", [page for page in sorted(DOCS.glob("*.md")) if assumed(page)], ids=lambda page: page.name)
def test_fold_of_a_page_defines_or_lists_each_assumed_name(setups: ModuleType, page) -> None:
    folded = setups.fold(page.read_text())
    assert sentence(assumed(page)) not in folded
    (details,) = re.findall(r"<details class=\"setup\".*?</details>", folded, re.S)
    assert all(re.search(rf"\b{name}\b", details) for name in assumed(page))


def test_pages_without_assumptions_stay_as_they_are(setups: ModuleType) -> None:
    assert setups.fold("# A page\n\nText.\n") == "# A page\n\nText.\n"
