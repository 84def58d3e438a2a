"""Each extra brings what it promises, and who lacks one is told how to get it."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dtrain
from dtrain.errors import ConfigError
from dtrain.optional_dependencies import EXTRA_MODULES, missing_extra_error

SOURCE = Path(dtrain.__file__).parent
ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_DEVELOPERS = {"test", "docs", "dev"}  # bring programs, and no part of dtrain asks for them


def test_every_extra_of_the_package_is_known():
    assert set(DECLARED) == set(EXTRA_MODULES) | OF_DEVELOPERS


@pytest.mark.parametrize("extra", sorted(EXTRA_MODULES))
def test_modules_of_each_extra_can_be_imported(extra):
    """Each import has a process of its own, because some modules warn at import or change the process."""
    absent = [module for module in EXTRA_MODULES[extra] if importlib.util.find_spec(module) is None]
    assert absent == [], "the tests install every extra"
    command = [sys.executable, "-W", "ignore", "-c", f"import {', '.join(EXTRA_MODULES[extra])}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_missing_extra_error_gives_the_install_command():
    error = missing_extra_error("x: needs the package y", "s3")
    assert isinstance(error, ConfigError)
    assert str(error) == 'x: needs the package y: pip install "dtrain[s3]"'


def test_install_commands_are_written_in_one_module_only():
    """So that an extra which is renamed is renamed everywhere."""
    written = {path.name for path in SOURCE.rglob("*.py") if re.search(r"pip install [\"']?dtrain\[", path.read_text())}
    assert written == {"optional_dependencies.py"}


def test_pages_name_extras_that_exist():
    named = {
        (page.name, extra)
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
        for extras in re.findall(r"dtrain\[([a-z0-9,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert {(page, extra) for page, extra in named if extra not in DECLARED} == set()
    assert len(named) >= 5
