"""Find versions of packages, the packages and extras of dtrain, and the commit of the running code. Imports no torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from dtrain import __version__
from dtrain.errors import ConfigError

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


# Packages that a source folder needs that was never installed.
_FALLBACK_REQUIREMENTS = ("torch", "numpy", "torchdata", "tensordict", "einops", "typer", "safetensors")
EXTRA_MODULES: dict[str, tuple[str, ...]] = {
    "hf": ("transformers", "tokenizers"),
    "http": ("fsspec", "aiohttp"),
    "s3": ("fsspec", "s3fs"),
    "gcs": ("fsspec", "gcsfs"),
    "azure": ("fsspec", "adlfs"),
    "oci": ("fsspec", "ocifs"),
    "sftp": ("paramiko",),
    "compression": ("zstandard", "brotli", "snappy"),
    "parquet": ("pyarrow",),
    "images": ("PIL",),
    "streaming": ("zstandard", "brotli", "snappy", "pyarrow", "PIL"),
    "fp8": ("torchao",),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules of each extra of the package."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Package that dtrain needs, its installed version (None if not installed), and the minimum version."""

    name: str
    version: str | None
    at_least: str | None

    @property
    def too_old(self) -> bool:
        """True if the installed version is older than the minimum version."""
        return (
            self.version is not None
            and self.at_least is not None
            and parse_release(self.version) < parse_release(self.at_least)
        )


def check_packages() -> tuple[Package, ...]:
    """Return the packages in dtrain's metadata, with their installed versions."""
    # The launcher, which starts fast, imports this file.
    from importlib import metadata

    try:
        needed = metadata.requires("dtrain") or []
    # A source folder that was never installed has no minimum versions.
    except metadata.PackageNotFoundError:
        needed = list(_FALLBACK_REQUIREMENTS)
    return tuple(
        Package(name=name, version=installed_version(name), at_least=minimum) for name, minimum in parse_requirements(needed)
    )


def parse_requirements(lines: Iterable[str]) -> list[tuple[str, str | None]]:
    """Return name and minimum version of each requirement without an extra.

    >>> parse_requirements(["torch>=2.11", "einops", "pytest>=8; extra == 'test'"])
    [('torch', '2.11'), ('einops', None)]
    """
    requirements = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        name, minimum = re.match(r"[A-Za-z0-9._-]+", requirement), re.search(r">=\s*([0-9.]+)", requirement)
        if name and "extra" not in condition:
            requirements.append((name[0], minimum[1] if minimum else None))
    return requirements


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse_release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version for comparison, without suffixes and trailing zeros.

    >>> parse_release("2.13.0+cpu") < parse_release("2.13.1rc1")
    True
    """
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(number) for number in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def install_command(extra: str) -> str:
    """Return the command that installs ``extra``."""
    assert extra in EXTRA_MODULES, f"no extra {extra!r}"
    return f'pip install "dtrain[{extra}]"'


def missing_extra_error(need: str, extra: str) -> ConfigError:
    """Make the error for a missing package of ``extra``; ``need`` names the function and the package."""
    return ConfigError(f"{need}: {install_command(extra)}")
