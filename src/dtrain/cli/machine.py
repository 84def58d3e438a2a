"""Collect the facts of this machine: hardware, torch's build, packages, network, and environment variables without secrets.

Queries of other programs have a time limit. A broken program is an answer, not an exception or a hang.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol, machine
from dtrain.launch.addresses import NetworkInterface, list_interfaces
from dtrain.packages import Package, check_packages


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
        cores=CpuCores(present=os.cpu_count() or 1, usable=_count_usable_cores(), quota=machine.core_quota(root)),
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
    limit = machine.memory_limit(root)
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


# A cold import from a network file system takes most of a minute.
TORCH_TIMEOUT_S = 120.0


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
    variables, host = visible_variables(os.environ), socket.gethostname()
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
        named_variables=hidden_variable_names(os.environ),
    )
