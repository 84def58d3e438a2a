"""Cores, memory, limits and GPUs, as the operating system and NVIDIA's driver tell them."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dtrain.cli.machine.children import Answer, answer, ask
from dtrain.launch import cgroup

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 30.0  # it initialises the driver, which takes seconds with many GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Cores that are there, those this process may run on, and what its control group allows (None: all of them)."""

    present: int
    usable: int
    quota: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of memory: in the machine, free for new programs, and what the control group allows (None: all of it)."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as ``nvidia-smi`` lists it."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs.

    Args:
        listed: what ``nvidia-smi`` lists, whatever CUDA_VISIBLE_DEVICES says.
        device_files: number of ``/dev/nvidia0``, ``/dev/nvidia1`` and so on.
        problem: why ``nvidia-smi`` could not list them, None where it could or is not there.
    """

    listed: tuple[Gpu, ...]
    device_files: int
    problem: str | None

    @property
    def count(self) -> int:
        """How many there are, by the driver or by their device files."""
        return max(len(self.listed), self.device_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine without its network. ``open_files`` are the soft and the hard limit, None for no limit."""

    system: str
    cores: Cores
    memory: Memory
    shm_bytes: int | None
    open_files: tuple[int | None, int | None]
    gpus: Gpus


def ask_for_gpus() -> subprocess.Popen[str] | None:
    """Start ``nvidia-smi``; None where there is none."""
    return ask(_SMI) if shutil.which(_SMI[0]) else None


def hardware(smi: subprocess.Popen[str] | None, root: Path = Path("/")) -> Hardware:
    """What the machine is.

    Args:
        smi: from ``ask_for_gpus``.
        root: where ``proc``, ``sys``, ``dev`` and ``etc`` are.
    """
    names = os.listdir(root / "dev") if (root / "dev").is_dir() else []
    device_files = sum(re.fullmatch(r"nvidia[0-9]+", name) is not None for name in names)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Hardware(
        system=_system(root),
        cores=Cores(present=os.cpu_count() or 1, usable=_usable_cores(), quota=cgroup.core_quota(root)),
        memory=memory(root),
        shm_bytes=shm_bytes(root),
        open_files=(_limit(soft), _limit(hard)),
        gpus=gpus(answer(smi, timeout_s=_SMI_TIMEOUT_S) if smi else None, device_files),
    )


def memory(root: Path) -> Memory:
    """Memory by ``/proc/meminfo`` and the control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total = kib["MemTotal"] * 1024
    limit = cgroup.memory_limit(root)
    return Memory(
        total_bytes=total,
        available_bytes=kib["MemAvailable"] * 1024,
        limit_bytes=limit if limit is not None and limit < total else None,
    )


def shm_bytes(root: Path) -> int | None:
    """Size of ``/dev/shm``, where processes hand tensors to each other; None when it is not there."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def gpus(said: Answer | None, device_files: int) -> Gpus:
    """The GPUs out of what ``nvidia-smi`` said, None where there is no ``nvidia-smi``."""
    if said is None:
        return Gpus(listed=(), device_files=device_files, problem=None)
    if said.code is None:
        return Gpus(listed=(), device_files=device_files, problem=f"it did not answer within {_SMI_TIMEOUT_S:g} s")
    if said.code != 0:
        # It prints its errors to stdout, for example that it cannot reach the driver.
        return Gpus(listed=(), device_files=device_files, problem=f"exit code {said.code}: {said.last_words}")
    return Gpus(
        listed=tuple(_gpu(line) for line in said.out.splitlines() if line.count(",") >= 2),
        device_files=device_files,
        problem=None,
    )


def _gpu(line: str) -> Gpu:
    name, mib, driver = (field.strip() for field in line.rsplit(",", 2))
    return Gpu(name=name, memory_bytes=int(mib) * 2**20 if mib.isdecimal() else 0, driver=driver)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _system(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split("=", 1)[1].strip("\"'") for line in lines if line.startswith("PRETTY_NAME=")]
    return ", ".join([f"{platform.system()} {platform.release()} {platform.machine()}", *names[:1]])
