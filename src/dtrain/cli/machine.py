"""Query the machine: hardware, host names, and environment variables without secrets.

Queries of other programs have a time limit. A broken program is an answer, not an exception or a hang.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.launch import host_resources


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Output of a program: its exit code (None after a timeout), and its two streams."""

    code: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """Last line on stderr, or on stdout if stderr is empty: in a traceback, the error."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return lines[-1] if lines else "it printed nothing"


def start_query(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a program whose output is read later.

    Raises:
        OSError: the program does not exist.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


def read_output(process: subprocess.Popen[str], *, timeout_s: float) -> CommandOutput:
    """Read the output of a program of ``start_query``, and kill the program after ``timeout_s`` seconds."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # Do not wait for the process, because a process that hangs in a driver does not exit.
        process.kill()
        return CommandOutput(code=None, out="", err="")
    return CommandOutput(code=process.returncode, out=out, err=err)


_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
# The program initializes the driver, which takes seconds with many GPUs.
_SMI_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCores:
    """Number of cores in the machine, of cores usable by this process, and the control group's quota (None: no quota)."""

    present: int
    usable: int
    quota: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of memory in the machine, available bytes, and the control group's limit (None: no limit)."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU in the list of ``nvidia-smi``."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of the machine.

    Args:
        listed: GPUs that ``nvidia-smi`` lists, whatever CUDA_VISIBLE_DEVICES contains.
        device_files: number of ``/dev/nvidia0``, ``/dev/nvidia1`` and so on.
        problem: reason that ``nvidia-smi`` failed; None if it worked or does not exist.
    """

    listed: tuple[Gpu, ...]
    device_files: int
    problem: str | None

    @property
    def count(self) -> int:
        """Number of GPUs, from the driver or the device files."""
        return max(len(self.listed), self.device_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware of the machine. ``open_files`` are the soft and the hard limit, None for no limit."""

    system: str
    cores: CpuCores
    memory: HostMemory
    shm_bytes: int | None
    open_files: tuple[int | None, int | None]
    gpus: Gpus


def start_nvidia_smi() -> subprocess.Popen[str] | None:
    """Start ``nvidia-smi``; None if it does not exist."""
    return start_query(_SMI) if shutil.which(_SMI[0]) else None


def read_hardware(smi: subprocess.Popen[str] | None, root: Path = Path("/")) -> Hardware:
    """Read the hardware of the machine.

    Args:
        smi: process of ``start_nvidia_smi``.
        root: folder that contains ``proc``, ``sys``, ``dev`` and ``etc``.
    """
    names = os.listdir(root / "dev") if (root / "dev").is_dir() else []
    device_files = sum(re.fullmatch(r"nvidia[0-9]+", name) is not None for name in names)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Hardware(
        system=_describe_system(root),
        cores=CpuCores(present=os.cpu_count() or 1, usable=_count_usable_cores(), quota=host_resources.core_quota(root)),
        memory=read_memory(root),
        shm_bytes=read_shm_bytes(root),
        open_files=(_finite_limit(soft), _finite_limit(hard)),
        gpus=parse_gpus(read_output(smi, timeout_s=_SMI_TIMEOUT_S) if smi else None, device_files),
    )


def read_memory(root: Path) -> HostMemory:
    """Read the memory from ``/proc/meminfo`` and the control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total = kib["MemTotal"] * 1024
    limit = host_resources.memory_limit(root)
    return HostMemory(
        total_bytes=total,
        available_bytes=kib["MemAvailable"] * 1024,
        limit_bytes=limit if limit is not None and limit < total else None,
    )


def read_shm_bytes(root: Path) -> int | None:
    """Return the size of ``/dev/shm``, which processes use to exchange tensors; None if it does not exist."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def parse_gpus(output: CommandOutput | None, device_files: int) -> Gpus:
    """Parse the GPUs from the output of ``nvidia-smi``; None if ``nvidia-smi`` does not exist."""
    if output is None:
        return Gpus(listed=(), device_files=device_files, problem=None)
    if output.code is None:
        return Gpus(listed=(), device_files=device_files, problem=f"it did not answer within {_SMI_TIMEOUT_S:g} s")
    if output.code != 0:
        # The program prints errors to stdout, for example a failed connection to the driver.
        return Gpus(listed=(), device_files=device_files, problem=f"exit code {output.code}: {output.last_line}")
    return Gpus(
        listed=tuple(_parse_gpu(line) for line in output.out.splitlines() if line.count(",") >= 2),
        device_files=device_files,
        problem=None,
    )


def _parse_gpu(line: str) -> Gpu:
    name, mib, driver = (field.strip() for field in line.rsplit(",", 2))
    return Gpu(name=name, memory_bytes=int(mib) * 2**20 if mib.isdecimal() else 0, driver=driver)


def _count_usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _finite_limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _describe_system(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split("=", 1)[1].strip("\"'") for line in lines if line.startswith("PRETTY_NAME=")]
    return ", ".join([f"{platform.system()} {platform.release()} {platform.machine()}", *names[:1]])


def resolve_names(names: Iterable[str], *, timeout_s: float = 5.0) -> dict[str, tuple[str, ...]]:
    """Resolve host names; () for a name without an address, or whose name server does not answer in time."""
    resolved: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        # The name is unknown, or not a host name.
        except (OSError, UnicodeError):
            return
        resolved[name] = tuple(dict.fromkeys(str(address[0]) for *_, address in answers))

    # getaddrinfo has no timeout, so each call runs in a daemon thread that can be abandoned.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in resolved]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(resolved)


_VISIBLE = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG "
    "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG "
    "SLURM_JOB_ID SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_PROCID SLURM_LOCALID"
)
_VISIBLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCHELASTIC_", "DTRAIN_")
_HIDDEN = (
    "PYTHONPATH PYTHONHOME LD_LIBRARY_PATH LD_PRELOAD HF_HOME HF_TOKEN WANDB_API_KEY "
    "AWS_PROFILE AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GOOGLE_APPLICATION_CREDENTIALS AZURE_STORAGE_CONNECTION_STRING "
    "HTTP_PROXY HTTPS_PROXY http_proxy https_proxy"
)


def visible_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values are shown, sorted by name: ranks, threads, interfaces, settings of libraries."""
    names = set(_VISIBLE.split())
    return {name: value for name, value in sorted(environ.items()) if name in names or name.startswith(_VISIBLE_PREFIXES)}


def hidden_variable_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sorted names of variables that may contain a secret or a long value, so only the names are shown."""
    return tuple(sorted(environ.keys() & set(_HIDDEN.split())))
