"""Asking another program something, for a limited time: a broken one is an answer, never an exception or a hang.

Cores, memory, limits and GPUs, as the operating system and NVIDIA's driver tell them.

Network interfaces and what names resolve to: where ranks can meet.

Environment variables that change how a run behaves. The value is told only where it cannot be a secret."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.launch import host_resources


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """What a program said: its exit code (None: it had not ended in time), and its two streams."""

    code: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line that it printed to stderr, or to stdout where that is empty: of a traceback, the error."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return lines[-1] if lines else "it printed nothing"


def start_query(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a program whose answer is wanted later.

    Raises:
        OSError: there is no such program.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


def read_output(process: subprocess.Popen[str], *, timeout_s: float) -> CommandOutput:
    """The answer of a program that ``ask`` started; it is killed when it takes longer than ``timeout_s``."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what hangs in a driver does not die
        return CommandOutput(code=None, out="", err="")
    return CommandOutput(code=process.returncode, out=out, err=err)


_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 30.0  # it initialises the driver, which takes seconds with many GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCores:
    """Cores that are there, those this process may run on, and what its control group allows (None: all of them)."""

    present: int
    usable: int
    quota: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
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
    cores: CpuCores
    memory: HostMemory
    shm_bytes: int | None
    open_files: tuple[int | None, int | None]
    gpus: Gpus


def start_nvidia_smi() -> subprocess.Popen[str] | None:
    """Start ``nvidia-smi``; None where there is none."""
    return start_query(_SMI) if shutil.which(_SMI[0]) else None


def read_hardware(smi: subprocess.Popen[str] | None, root: Path = Path("/")) -> Hardware:
    """What the machine is.

    Args:
        smi: from ``start_nvidia_smi``.
        root: where ``proc``, ``sys``, ``dev`` and ``etc`` are.
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
    """Memory by ``/proc/meminfo`` and the control group."""
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
    """Size of ``/dev/shm``, where processes hand tensors to each other; None when it is not there."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def parse_gpus(said: CommandOutput | None, device_files: int) -> Gpus:
    """The GPUs out of what ``nvidia-smi`` said, None where there is no ``nvidia-smi``."""
    if said is None:
        return Gpus(listed=(), device_files=device_files, problem=None)
    if said.code is None:
        return Gpus(listed=(), device_files=device_files, problem=f"it did not answer within {_SMI_TIMEOUT_S:g} s")
    if said.code != 0:
        # It prints its errors to stdout, for example that it cannot reach the driver.
        return Gpus(listed=(), device_files=device_files, problem=f"exit code {said.code}: {said.last_line}")
    return Gpus(
        listed=tuple(_parse_gpu(line) for line in said.out.splitlines() if line.count(",") >= 2),
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


_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_UP, _LOOPBACK = 0x1, 0x8  # linux/if.h


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One network interface; ``up`` is the administrator's switch, not the cable."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool
    up: bool


def list_interfaces(root: Path = Path("/")) -> tuple[NetworkInterface, ...]:
    """All interfaces in the order of their numbers, with the first IPv4 address and all IPv6 addresses of each.

    Args:
        root: where ``proc`` is.
    """
    ipv6 = read_ipv6_addresses(root)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _query_interface(probe, _SIOCGIFFLAGS, name)
            bits = struct.unpack_from("H", flags, 16)[0] if flags else 0
            address = _query_interface(probe, _SIOCGIFADDR, name)
            ipv4 = [socket.inet_ntoa(address[20:24])] if address else []
            addresses = (*ipv4, *ipv6.get(name, ()))
            found.append(NetworkInterface(name=name, addresses=addresses, loopback=bool(bits & _LOOPBACK), up=bool(bits & _UP)))
    return tuple(found)


def _query_interface(probe: socket.socket, request: int, name: str) -> bytes | None:
    """The kernel's ``struct ifreq`` for an interface, or None when it has no such value (no IPv4 address, say)."""
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def read_ipv6_addresses(root: Path) -> dict[str, list[str]]:
    """IPv6 addresses by interface, from ``/proc/net/if_inet6``."""
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def resolve_names(names: Iterable[str], *, timeout_s: float = 5.0) -> dict[str, tuple[str, ...]]:
    """The addresses of host names, () for one that has none or whose name server does not answer in time."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError):  # unknown, or no host name at all
            return
        found[name] = tuple(dict.fromkeys(str(address[0]) for *_, address in answers))

    # getaddrinfo knows no timeout: a thread that is left behind, if need be, is the only way to give up on it.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


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
    """The variables whose value is told, sorted by name: ranks, threads, interfaces, switches of libraries."""
    names = set(_VISIBLE.split())
    return {name: value for name, value in sorted(environ.items()) if name in names or name.startswith(_VISIBLE_PREFIXES)}


def hidden_variable_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that matter too, but may hold a secret or are long: names only, sorted."""
    return tuple(sorted(environ.keys() & set(_HIDDEN.split())))
