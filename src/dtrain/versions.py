"""Which code runs: the versions of packages, and the commit that is checked out. Imports no torch."""

from __future__ import annotations

import platform
import re
from importlib.machinery import PathFinder
from pathlib import Path

from dtrain import __version__

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def package_versions() -> dict[str, str]:
    """dtrain's, Python's and torch's version; torch's is "none" where it is not installed. Imports nothing for it."""
    return {"dtrain": __version__, "python": platform.python_version(), "torch": _torch_version() or "none"}


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in ``folder``, or None where that cannot be told. Reads files, and runs nothing."""
    try:
        git = next((path / ".git" for path in (folder, *folder.parents) if (path / ".git").exists()), None)
        if git is None:
            return None
        if git.is_file():  # a work tree or a submodule: its files are elsewhere
            git = git.parent / _text(git).removeprefix("gitdir:").strip()
        head = _text(git / "HEAD")
        name = head.removeprefix("ref:").strip()
        commit = _resolve_ref(git, name) if head.startswith("ref:") else head
    except (OSError, UnicodeDecodeError):
        return None
    return commit if commit is not None and _HASH.fullmatch(commit) else None


def _torch_version() -> str | None:
    """From torch's own file: the packages' metadata take a library that costs more than the rest of the launcher's start."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _resolve_ref(git: Path, name: str) -> str | None:
    """The commit that a reference stands for: a file of its own, or a line in the file of packed ones."""
    common = git / _text(git / "commondir") if (git / "commondir").is_file() else git
    for folder in (git, common):
        if (folder / name).is_file():
            return _text(folder / name)
    lines = _text(common / "packed-refs").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
