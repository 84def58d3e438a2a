"""Installed packages against what dtrain needs, and torch's own account of its build.

All that is known about this machine, in one value."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol
from dtrain.cli import machine
from dtrain.cli.machine import (
    CommandOutput,
    Hardware,
    NetworkInterface,
    list_interfaces,
    read_hardware,
    read_output,
    resolve_names,
    start_nvidia_smi,
    start_query,
)

TORCH_TIMEOUT_S = 120.0  # a cold import from a network file system takes most of a minute
_FALLBACK_REQUIREMENTS = ("torch", "numpy", "torchdata", "tensordict", "einops", "typer", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that dtrain needs, the version that is installed (None: it is not), and the oldest one that will do."""

    name: str
    version: str | None
    at_least: str | None

    @property
    def too_old(self) -> bool:
        """Whether a newer version is needed than is installed."""
        return (
            self.version is not None
            and self.at_least is not None
            and parse_release(self.version) < parse_release(self.at_least)
        )


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


def check_packages() -> tuple[Package, ...]:
    """What dtrain needs, by its own metadata."""
    try:
        needed = metadata.requires("dtrain") or []
    except metadata.PackageNotFoundError:  # run from a source folder that was never installed: no minimum is known
        needed = list(_FALLBACK_REQUIREMENTS)
    return tuple(
        Package(name=name, version=installed_version(name), at_least=minimum) for name, minimum in parse_requirements(needed)
    )


def parse_requirements(lines: Iterable[str]) -> list[tuple[str, str | None]]:
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


def parse_release(version: str) -> tuple[int, ...]:
    """The numbers that versions are ordered by, without suffixes and trailing zeros: those of the release.

    >>> release("2.13.0+cpu") < release("2.13.1rc1")
    True
    """
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def start_torch_probe() -> subprocess.Popen[str]:
    """Start a Python that asks torch about itself; without the current folder in its path."""
    return start_query([sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))])


def read_torch_build(asked: subprocess.Popen[str]) -> TorchBuild | str:
    """What torch said, or in one line why it could not."""
    return parse_probe_output(read_output(asked, timeout_s=TORCH_TIMEOUT_S))


def parse_probe_output(said: CommandOutput) -> TorchBuild | str:
    """The facts in the last line of the probe's output, or what went wrong."""
    if said.code is None:
        return f"importing it took more than {TORCH_TIMEOUT_S:g} s"
    if said.code < 0:
        return f"importing it was ended by signal {-said.code}"
    if said.code > 0:
        return said.last_line
    lines = [line for line in said.out.splitlines() if line.startswith("{")]  # libraries may print before and after it
    if not lines:
        return "it ended before it could say anything"
    facts: Any = json.loads(lines[-1], object_hook=_lists_to_tuples)
    return TorchBuild(**facts)


def _lists_to_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine, its network, what is installed, and the environment.

    Args:
        dtrain: its version.
        python: its version.
        executable: of that Python.
        packages: that dtrain needs.
        torch: what torch says about itself, None when it could not be asked.
        torch_problem: why not, in one line.
        hardware: cores, memory, limits, GPUs.
        host: name of this machine.
        addresses: of the host name, and of MASTER_ADDR where it is set; () for a name that does not resolve.
        interfaces: of the network.
        variables: that matter to a run, with values.
        named_variables: that matter and may be secret.
    """

    dtrain: str
    python: str
    executable: str
    packages: tuple[Package, ...]
    torch: TorchBuild | None
    torch_problem: str | None
    hardware: Hardware
    host: str
    addresses: dict[str, tuple[str, ...]]
    interfaces: tuple[NetworkInterface, ...]
    variables: dict[str, str]
    named_variables: tuple[str, ...]


def collect_machine_facts() -> MachineFacts:
    """The facts of this machine and this process. The slow ones (torch, GPUs) are asked for first and read last."""
    asked_torch, asked_gpus = start_torch_probe(), start_nvidia_smi()
    shown, host = machine.visible_variables(os.environ), socket.gethostname()
    links = list_interfaces()
    addresses = resolve_names(dict.fromkeys([host, *filter(None, [shown.get(launch_protocol.MASTER_ADDR)])]))
    parts = read_hardware(asked_gpus)
    torch = read_torch_build(asked_torch)
    return MachineFacts(
        dtrain=dtrain.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        packages=check_packages(),
        torch=None if isinstance(torch, str) else torch,
        torch_problem=torch if isinstance(torch, str) else None,
        hardware=parts,
        host=host,
        addresses=addresses,
        interfaces=links,
        variables=shown,
        named_variables=machine.hidden_variable_names(os.environ),
    )
