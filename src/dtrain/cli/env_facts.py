"""Collect the facts of this machine: installed packages, torch's build, hardware, network, environment variables."""

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
    read_hardware,
    read_output,
    resolve_names,
    start_nvidia_smi,
    start_query,
)
from dtrain.launch.nodes.addresses import NetworkInterface, list_interfaces

# A cold import from a network file system takes most of a minute.
TORCH_TIMEOUT_S = 120.0
_FALLBACK_REQUIREMENTS = ("torch", "numpy", "torchdata", "tensordict", "einops", "typer", "safetensors")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Facts of the installed torch.

    Args:
        version: version with the build's suffix (``+cpu``, ``+cu128``).
        folder: folder of the package.
        cuda: version of CUDA or HIP; None for a CPU build.
        devices: names of usable GPUs.
        gloo: if True, collectives on CPUs are available.
        nccl: version of NCCL; None without NCCL.
        threads: threads of an operation on the CPU by default.
        warnings: warnings during the import and the query for GPUs.
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
    """Return the packages in dtrain's metadata, with their installed versions."""
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
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def start_torch_probe() -> subprocess.Popen[str]:
    """Start a Python process that queries torch, without the current folder in its path."""
    return start_query([sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))])


def read_torch_build(process: subprocess.Popen[str]) -> TorchBuild | str:
    """Return torch's facts, or the reason that torch could not be queried, in one line."""
    return parse_probe_output(read_output(process, timeout_s=TORCH_TIMEOUT_S))


def parse_probe_output(output: CommandOutput) -> TorchBuild | str:
    """Parse the facts in the last JSON line of the probe's output, or return the problem."""
    if output.code is None:
        return f"importing it took more than {TORCH_TIMEOUT_S:g} s"
    if output.code < 0:
        return f"importing it was ended by signal {-output.code}"
    if output.code > 0:
        return output.last_line
    # Libraries may print other lines.
    lines = [line for line in output.out.splitlines() if line.startswith("{")]
    if not lines:
        return "it ended before it could say anything"
    facts: Any = json.loads(lines[-1], object_hook=_lists_to_tuples)
    return TorchBuild(**facts)


def _lists_to_tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of the machine, its network, its packages and its environment.

    Args:
        dtrain: version of dtrain.
        python: version of Python.
        executable: path of Python.
        packages: packages that dtrain needs.
        torch: facts of torch; None if torch could not be queried.
        torch_problem: reason that torch could not be queried, in one line.
        hardware: cores, memory, limits, GPUs.
        host: name of this machine.
        addresses: addresses of the host name, and of MASTER_ADDR if set; () for a name that does not resolve.
        interfaces: network interfaces.
        variables: variables that affect a run, with values.
        named_variables: names of variables that affect a run and may be secret.
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
    """Collect the facts of this machine and this process. The slow queries (torch, GPUs) start first and are read last."""
    torch_query, gpu_query = start_torch_probe(), start_nvidia_smi()
    variables, host = machine.visible_variables(os.environ), socket.gethostname()
    interfaces = list_interfaces()
    addresses = resolve_names(dict.fromkeys([host, *filter(None, [variables.get(launch_protocol.MASTER_ADDR)])]))
    hardware = read_hardware(gpu_query)
    torch = read_torch_build(torch_query)
    return MachineFacts(
        dtrain=dtrain.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        packages=check_packages(),
        torch=None if isinstance(torch, str) else torch,
        torch_problem=torch if isinstance(torch, str) else None,
        hardware=hardware,
        host=host,
        addresses=addresses,
        interfaces=interfaces,
        variables=variables,
        named_variables=machine.hidden_variable_names(os.environ),
    )
