"""Read the facts of this machine: control groups, cores, memory, GPUs, host names, limits, environment. Imports no torch.

``os.cpu_count`` and ``/proc/meminfo`` ignore control groups. Both versions of the kernel's interface are read:
https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1. A limit applies to all groups below, so the smallest limit
counts. Queries of other programs have a time limit. A broken program is an answer, not an exception or a hang.
"""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeVar

from dtrain.errors import ConfigError

_CGROUP_MOUNT = Path("sys/fs/cgroup")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_UP, _LOOPBACK = 0x1, 0x8  # linux/if.h
_Item = TypeVar("_Item")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NUMA_FOLDER = Path("/sys/devices/system/node")
# A rank holds N + 4 files for gloo's training group, the connections of the control plane, and a few of Python's. The process
# that serves the rendezvous store holds a connection of each rank, and a second one while the ranks report a failure.
_OPEN_FILES = 36
_OPEN_FILES_PER_RANK = 3
# Two channels of the control plane, each with two connections for each bit of the number of ranks.
_OPEN_FILES_PER_BIT = 4
# Shards, checkpoints, loader workers, NCCL.
_SPARE_OPEN_FILES = 512
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
# The program initializes the driver, which takes seconds with many GPUs.
_SMI_TIMEOUT_S = 30.0
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
_RECORDED_PREFIXES = (
    "ACCELERATE_", "CONDA_", "CUBLAS_", "CUDA_", "CUDNN_", "DTRAIN_", "FI_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_",
    "LD_", "LSB_", "MALLOC_", "MASTER_", "MKL_", "MLFLOW_", "NCCL_", "NVIDIA_", "OMP_", "OMPI_", "OPENBLAS_", "PBS_", "PMI",
    "PYTHON", "PYTORCH_", "RANK", "ROCR_", "SLURM_", "TF32_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_",
    "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip


def core_quota(root: Path = Path("/")) -> float | None:
    """Return the processor time that this process may use, in cores; None for no limit.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    quotas = []
    for folder in _cgroup_folders(root, ""):
        match _read_words(folder / "cpu.max"):
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
    for folder in _cgroup_folders(root, "cpu"):
        match _read_words(folder / "cpu.cfs_quota_us"), _read_words(folder / "cpu.cfs_period_us"):
            case [quota], [period] if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory in bytes that this process and its control group may use; None for no limit.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    files = [_read_words(folder / "memory.max") for folder in _cgroup_folders(root, "")]
    files += [_read_words(folder / "memory.limit_in_bytes") for folder in _cgroup_folders(root, "memory")]
    limits = [int(words[0]) for words in files if words and words[0] != "max"]
    # Version 1 writes 2**63 - 4096 for no limit.
    return min((limit for limit in limits if limit < 2**60), default=None)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills in this process's control group; None if no group counts kills.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for folder in _cgroup_folders(root, controller):
            for line in _read_lines(folder / name):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents; ``controller`` is "" in version 2."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        base = root / _CGROUP_MOUNT / controller
        group = base / path.lstrip("/")
        # In a container the path may be a path of the host, which does not exist. The limits are then at the mount point.
        yield from (folder for folder in (group, *group.parents) if folder == base or base in folder.parents)


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    # A missing or disabled controller has no limit.
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Core:
    """Hardware thread, which the kernel counts as one core. Sorting places neighbours next to each other.

    Attributes:
        node: the NUMA node.
        physical: the smallest number of the hardware threads on the same physical core.
        number: the kernel's number of the hardware thread.
    """

    node: int = 0
    physical: int
    number: int


def usable_cores(*, cpus: Path = _CPU_FOLDER, nodes: Path = _NUMA_FOLDER) -> list[Core]:
    """Return the cores that this process may run on, sorted."""
    if not hasattr(os, "sched_getaffinity"):
        return [Core(physical=number, number=number) for number in range(os.cpu_count() or 1)]
    node_of = _numa_nodes(nodes)
    return sorted(
        Core(node=node_of.get(number, 0), physical=_physical_core(cpus, number), number=number)
        for number in os.sched_getaffinity(0)
    )


def core_count() -> float:
    """Return the processor time of this process in cores: the minimum of its allowed cores and its control group's quota."""
    quota, cores = core_quota(), float(len(usable_cores()))
    return cores if quota is None else min(cores, quota)


def assign_cores(cores: Iterable[Core], nproc: int) -> list[list[int]]:
    """Return the numbers of the cores of each of ``nproc`` ranks: a block of neighbours. No side effects.

    The cores of a rank are on one NUMA node. If there are fewer ranks than nodes, a rank gets whole nodes. Two ranks never
    share a physical core, unless there are more ranks than physical cores. If there are fewer cores than ranks, ranks share
    cores.
    """
    cores = sorted(cores)
    if nproc >= len(cores):
        return [[cores[rank % len(cores)].number] for rank in range(nproc)]
    nodes = [list(group) for _, group in groupby(cores, key=lambda core: core.node)]
    if nproc < len(nodes):
        return [[core.number for node in share for core in node] for share in _split_evenly(nodes, nproc)]
    counts = _ranks_per_node([len(node) for node in nodes], nproc)
    return [share for node, count in zip(nodes, counts, strict=True) if count for share in _assign_node_cores(node, count)]


def _ranks_per_node(sizes: Sequence[int], nproc: int) -> list[int]:
    """Return the number of ranks on each node, given the nodes' core counts, so that the smallest share is maximal."""
    counts = [0] * len(sizes)
    for _ in range(nproc):
        node_with_most = max(range(len(sizes)), key=lambda node: sizes[node] / (counts[node] + 1))
        counts[node_with_most] += 1
    return counts


def _assign_node_cores(cores: Sequence[Core], nproc: int) -> Iterator[list[int]]:
    """Yield the cores of each rank of one node: whole physical cores if there are enough."""
    physical = [[core.number for core in group] for _, group in groupby(cores, key=lambda core: core.physical)]
    if nproc > len(physical):
        physical = [[core.number] for core in cores]
    for share in _split_evenly(physical, nproc):
        yield [number for group in share for number in group]


def _split_evenly(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """Split ``items`` into ``parts`` blocks whose sizes differ by at most one."""
    borders = [len(items) * number // parts for number in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(borders)]


def _physical_core(cpus: Path, number: int) -> int:
    """Return the smallest number of the threads that share a physical core with ``number``; ``number`` if unknown."""
    try:
        return min(_parse_cpu_list((cpus / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()), default=number)
    except (OSError, ValueError):
        return number


def _numa_nodes(folder: Path) -> dict[int, int]:
    """Return the NUMA node of each core that the kernel lists."""
    nodes: dict[int, int] = {}
    for path in folder.glob("node*/cpulist"):
        nodes.update(dict.fromkeys(_parse_cpu_list(path.read_text()), int(re.sub(r"\D", "", path.parent.name))))
    return nodes


def _parse_cpu_list(text: str) -> Iterator[int]:
    """Parse a list of numbers in the kernel's format: ``0-3,8``."""
    for entry in text.strip().split(","):
        first, _, last = entry.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


def open_files_needed(world_size: int) -> int:
    """Return the most files that a process of a job of ``world_size`` ranks opens, besides data and checkpoints."""
    bits = (world_size - 1).bit_length()
    return _OPEN_FILES + _OPEN_FILES_PER_RANK * world_size + _OPEN_FILES_PER_BIT * bits


def raise_open_file_limit(caller: str, world_size: int) -> None:
    """Raise the soft limit of open files if a process of a job of ``world_size`` ranks may need more.

    Mutates: this process's limit of open files, which its children inherit.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = open_files_needed(world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = hard != resource.RLIM_INFINITY
    if limited and hard < needed:
        raise ConfigError(
            f"{caller}: the hard limit of open files must be at least {needed} for {world_size} ranks, got {hard}. "
            f"Run `ulimit -n {needed}` as root before the start, or use at most {max_ranks(hard)} ranks."
        )
    wanted = min(needed + _SPARE_OPEN_FILES, hard) if limited else needed + _SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_ranks(hard_limit: int) -> int:
    """Return the number of ranks of the largest job that ``hard_limit`` open files allow, at least 1."""
    ranks = max(1, (hard_limit - _OPEN_FILES) // _OPEN_FILES_PER_RANK)
    while ranks > 1 and open_files_needed(ranks) > hard_limit:
        ranks -= 1
    return ranks


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
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Hardware(
        system=_describe_system(root),
        cores=CpuCores(present=os.cpu_count() or 1, usable=len(os.sched_getaffinity(0)), quota=core_quota(root)),
        memory=read_memory(root),
        shm_bytes=read_shm_bytes(root),
        open_files=(soft, hard),
        gpus=parse_gpus(read_output(smi, timeout_s=_SMI_TIMEOUT_S) if smi else None, count_gpu_files(names)),
    )


def read_memory(root: Path) -> HostMemory:
    """Read the memory from ``/proc/meminfo`` and the control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total = kib["MemTotal"] * 1024
    limit = memory_limit(root)
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


def count_gpu_files(names: Iterable[str]) -> int:
    """Return the number of GPUs among the names of files in ``/dev``: ``nvidia0``, ``nvidia1`` and so on."""
    return sum(re.fullmatch(r"nvidia[0-9]+", name) is not None for name in names)


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


def _describe_system(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split("=", 1)[1].strip("\"'") for line in lines if line.startswith("PRETTY_NAME=")]
    return ", ".join([f"{platform.system()} {platform.release()} {platform.machine()}", *names[:1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """Network interface. ``up`` is the administrator's setting, not the state of the cable."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool
    up: bool


def list_interfaces() -> tuple[NetworkInterface, ...]:
    """List all interfaces in the order of their numbers, with the first IPv4 address and all IPv6 addresses of each."""
    ipv6 = read_ipv6_addresses(Path("/"))
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _query_interface(probe, _SIOCGIFFLAGS, name)
            bits = struct.unpack_from("H", flags, 16)[0] if flags else 0
            address = _query_interface(probe, _SIOCGIFADDR, name)
            ipv4 = [socket.inet_ntoa(address[20:24])] if address else []
            addresses = (*ipv4, *ipv6.get(name, ()))
            interfaces.append(
                NetworkInterface(name=name, addresses=addresses, loopback=bool(bits & _LOOPBACK), up=bool(bits & _UP))
            )
    return tuple(interfaces)


def _query_interface(probe: socket.socket, request: int, name: str) -> bytes | None:
    """Return the kernel's ``struct ifreq`` of an interface, or None if the value does not exist (for example no address)."""
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def read_ipv6_addresses(root: Path) -> dict[str, list[str]]:
    """Read the IPv6 addresses of each interface from ``/proc/net/if_inet6``."""
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    # The kernel may have no IPv6.
    except OSError:
        return {}
    addresses: dict[str, list[str]] = {}
    for line in lines:
        digits, *_, name = line.split()
        addresses.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses


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


def visible_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values are shown, sorted by name: ranks, threads, interfaces, settings of libraries."""
    names = set(_VISIBLE.split())
    return {name: value for name, value in sorted(environ.items()) if name in names or name.startswith(_VISIBLE_PREFIXES)}


def hidden_variable_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sorted names of variables that may contain a secret or a long value, so only the names are shown."""
    return tuple(sorted(environ.keys() & set(_HIDDEN.split())))


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change the behaviour of a run, sorted by name. Values may contain secrets."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_RECORDED_PREFIXES)}
