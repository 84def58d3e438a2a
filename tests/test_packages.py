"""Versions without an import of the package, commits from files that git has, and the packages of each extra."""

import importlib.util
import platform
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dtrain
from dtrain.errors import ConfigError
from dtrain.packages import (
    EXTRA_MODULES,
    Package,
    check_packages,
    git_commit,
    missing_extra_error,
    package_versions,
    parse_requirements,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_versions_are_read_without_importing_packages():
    seen = package_versions()
    assert seen == {"dtrain": dtrain.__version__, "python": platform.python_version(), "torch": torch.__version__}
    code = "import sys; from dtrain.packages import package_versions; package_versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90).stdout == "False\n"


def git_folder(root, head):
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text(head)
    return root / ".git"


def test_branch_commit_is_found_from_a_subfolder(tmp_path):
    git = git_folder(tmp_path, "ref: refs/heads/topic/a\n")
    (git / "refs" / "heads" / "topic").mkdir(parents=True)
    (git / "refs" / "heads" / "topic" / "a").write_text(f"{COMMIT}\n")
    (tmp_path / "below").mkdir()
    assert git_commit(tmp_path / "below") == COMMIT


def test_packed_and_detached_commits_are_found(tmp_path):
    git = git_folder(tmp_path, "ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'1' * 40} refs/heads/not/main\n{COMMIT} refs/heads/main\n")
    assert git_commit(tmp_path) == COMMIT
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert git_commit(tmp_path) == COMMIT


def test_commit_of_an_additional_worktree_is_found(tmp_path):
    (tmp_path / "first").mkdir()
    git = git_folder(tmp_path / "first", "ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"{COMMIT} refs/heads/topic\n")
    (git / "worktrees" / "second").mkdir(parents=True)
    (git / "worktrees" / "second" / "HEAD").write_text("ref: refs/heads/topic\n")
    (git / "worktrees" / "second" / "commondir").write_text("../..\n")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / ".git").write_text(f"gitdir: {git / 'worktrees' / 'second'}\n")
    assert git_commit(tmp_path / "second") == COMMIT


@pytest.mark.parametrize("head", ["ref: refs/heads/main\n", "not a hash\n", "\udcff", ""])
def test_unknown_commit_is_none(tmp_path, head):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(head.encode(errors="surrogateescape"))
    assert git_commit(tmp_path) is None


REQUIREMENTS = {
    "numpy": ("numpy", None),
    "torch>=2.11": ("torch", "2.11"),
    "torch<3,>=2.11.1": ("torch", "2.11.1"),
    "torch (>=2.11)": ("torch", "2.11"),
    "typer>=0.12.5; python_version >= '3.11'": ("typer", "0.12.5"),
    "fsspec[http]>=2024.1": ("fsspec", "2024.1"),
}


@pytest.mark.parametrize(("line", "expected"), REQUIREMENTS.items())
def test_requirements_are_parsed(line, expected):
    assert parse_requirements([line, "pytest>=8; extra == 'test'"]) == [expected]


@pytest.mark.parametrize(
    ("version", "at_least", "too_old"),
    [
        ("2.10.9+cu128", "2.11", True),
        ("2.11", "2.11.0", False),
        ("2.11.0a0+git12", "2.11", False),
        ("3", "2.11", False),
        ("1!2.0", "2.11", True),
        (None, "2.11", False),
        ("0.1", None, False),
    ],
)
def test_too_old_compares_releases(version, at_least, too_old):
    assert Package(name="x", version=version, at_least=at_least).too_old is too_old


def test_packages_are_taken_from_metadata():
    packages = {package.name: package for package in check_packages()}
    assert packages["torch"].at_least == "2.11"
    assert packages["torch"].version.startswith("2.")
    assert "pytest" not in packages


def test_packages_have_fallback_without_metadata(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert check_packages()[0].at_least is None
    assert {package.name for package in check_packages()} >= {"torch", "numpy", "typer"}


SOURCE = Path(dtrain.__file__).parent
ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_DEVELOPERS = {"test", "docs", "dev"}  # bring programs, and no part of dtrain asks for them


def test_every_extra_of_the_package_is_known():
    assert set(DECLARED) == set(EXTRA_MODULES) | OF_DEVELOPERS


@pytest.mark.costly
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
    assert written == {"packages.py"}


def test_pages_name_extras_that_exist():
    named = {
        (page.name, extra)
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
        for extras in re.findall(r"dtrain\[([a-z0-9,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert {(page, extra) for page, extra in named if extra not in DECLARED} == set()
    assert len(named) >= 5
