"""All that is known about this machine, in one value."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass

import dtrain
from dtrain import wire
from dtrain.cli.machine import variables
from dtrain.cli.machine.hardware import Hardware, ask_for_gpus, hardware
from dtrain.cli.machine.installed import Package, TorchBuild, ask_torch, packages, torch_build
from dtrain.cli.machine.network import Interface, interfaces, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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
    interfaces: tuple[Interface, ...]
    variables: dict[str, str]
    named_variables: tuple[str, ...]


def collect() -> Facts:
    """The facts of this machine and this process. The slow ones (torch, GPUs) are asked for first and read last."""
    asked_torch, asked_gpus = ask_torch(), ask_for_gpus()
    shown, host = variables.shown(os.environ), socket.gethostname()
    links = interfaces()
    addresses = resolve(dict.fromkeys([host, *filter(None, [shown.get(wire.MASTER_ADDR)])]))
    parts = hardware(asked_gpus)
    torch = torch_build(asked_torch)
    return Facts(
        dtrain=dtrain.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        packages=packages(),
        torch=None if isinstance(torch, str) else torch,
        torch_problem=torch if isinstance(torch, str) else None,
        hardware=parts,
        host=host,
        addresses=addresses,
        interfaces=links,
        variables=shown,
        named_variables=variables.named(os.environ),
    )
