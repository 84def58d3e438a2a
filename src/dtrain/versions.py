"""Find the versions of packages and the commit of the running code. Imports no torch."""

from __future__ import annotations

import platform
import re
from importlib.machinery import PathFinder
from pathlib import Path

from dtrain import __version__

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def package_versions() -> dict[str, str]:
    """Return the versions of dtrain, Python and torch ("none" if not installed), without importing torch."""
    return {"dtrain": __version__, "python": platform.python_version(), "torch": _torch_version() or "none"}


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in ``folder``, or None if unknown. Reads files, and runs no program."""
    try:
        git = next((path / ".git" for path in (folder, *folder.parents) if (path / ".git").exists()), None)
        if git is None:
            return None
        # In a work tree or a submodule, .git is a file that names the folder.
        if git.is_file():
            git = git.parent / _text(git).removeprefix("gitdir:").strip()
        head = _text(git / "HEAD")
        name = head.removeprefix("ref:").strip()
        commit = _resolve_ref(git, name) if head.startswith("ref:") else head
    except (OSError, UnicodeDecodeError):
        return None
    return commit if commit is not None and _HASH.fullmatch(commit) else None


def _torch_version() -> str | None:
    """Read torch's version from its own file. The module for package metadata would double the launcher's start time."""
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
    """Return the commit of a reference, from its own file or from the file of packed references."""
    common = git / _text(git / "commondir") if (git / "commondir").is_file() else git
    for folder in (git, common):
        if (folder / name).is_file():
            return _text(folder / name)
    lines = _text(common / "packed-refs").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
