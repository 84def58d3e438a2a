"""Installed packages against what dtrain needs, and torch's own account of its build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dtrain.cli.machine.children import Answer, answer, ask

TORCH_TIMEOUT_S = 120.0  # a cold import from a network file system takes most of a minute
_WITHOUT_METADATA = ("torch", "numpy", "torchdata", "tensordict", "einops", "typer", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that dtrain needs, the version that is installed (None: it is not), and the oldest one that will do."""

    name: str
    version: str | None
    at_least: str | None

    @property
    def too_old(self) -> bool:
        """Whether a newer version is needed than is installed."""
        return self.version is not None and self.at_least is not None and release(self.version) < release(self.at_least)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch says about itself.

    Args:
        version: with the build's suffix (``+cpu``, ``+cu128``).
        folder: where it was imported from.
        cuda: version of CUDA or HIP that it was built for, None for a CPU build.
        devices: names of the GPUs that it can use.
        gloo: whether it can run collectives on CPUs.
        nccl: version of NCCL, None without.
        threads: that an operation on the CPU uses in a process that sets nothing.
        warnings: that it raised when it was imported and asked for GPUs.
    """

    version: str
    folder: str
    cuda: str | None
    devices: tuple[str, ...]
    gloo: bool
    nccl: str | None
    threads: int
    warnings: tuple[str, ...]


def packages() -> tuple[Package, ...]:
    """What dtrain needs, by its own metadata."""
    try:
        needed = metadata.requires("dtrain") or []
    except metadata.PackageNotFoundError:  # run from a source folder that was never installed: no minimum is known
        needed = list(_WITHOUT_METADATA)
    return tuple(
        Package(name=name, version=installed_version(name), at_least=minimum) for name, minimum in requirements(needed)
    )


def requirements(lines: Iterable[str]) -> list[tuple[str, str | None]]:
    """Name and least version of each requirement that no extra asks for.

    >>> requirements(["torch>=2.11", "einops", "pytest>=8; extra == 'test'"])
    [('torch', '2.11'), ('einops', None)]
    """
    found = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        name, minimum = re.match(r"[A-Za-z0-9._-]+", requirement), re.search(r">=\s*([0-9.]+)", requirement)
        if name and "extra" not in condition:
            found.append((name[0], minimum[1] if minimum else None))
    return found


def installed_version(name: str) -> str | None:
    """The version of an installed package; None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers that versions are ordered by, without suffixes and trailing zeros: those of the release.

    >>> release("2.13.0+cpu") < release("2.13.1rc1")
    True
    """
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def ask_torch() -> subprocess.Popen[str]:
    """Start a Python that asks torch about itself; without the current folder in its path."""
    return ask([sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))])


def torch_build(asked: subprocess.Popen[str]) -> TorchBuild | str:
    """What torch said, or in one line why it could not."""
    return read_probe(answer(asked, timeout_s=TORCH_TIMEOUT_S))


def read_probe(said: Answer) -> TorchBuild | str:
    """The facts in the last line of the probe's output, or what went wrong."""
    if said.code is None:
        return f"importing it took more than {TORCH_TIMEOUT_S:g} s"
    if said.code < 0:
        return f"importing it was ended by signal {-said.code}"
    if said.code > 0:
        return said.last_words
    lines = [line for line in said.out.splitlines() if line.startswith("{")]  # libraries may print before and after it
    if not lines:
        return "it ended before it could say anything"
    facts: Any = json.loads(lines[-1], object_hook=_with_tuples)
    return TorchBuild(**facts)


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
