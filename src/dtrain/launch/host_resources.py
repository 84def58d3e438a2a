"""Read limits and kills of control groups, assign cores to ranks, and raise the limit of open files.

``os.cpu_count`` and ``/proc/meminfo`` ignore control groups. Both versions of the kernel's interface are read:
https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1. A limit applies to all groups below, so the smallest limit
counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeVar

_CGROUP_MOUNT = Path("sys/fs/cgroup")


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
    found = [_read_words(folder / "memory.max") for folder in _cgroup_folders(root, "")]
    found += [_read_words(folder / "memory.limit_in_bytes") for folder in _cgroup_folders(root, "memory")]
    limits = [int(words[0]) for words in found if words and words[0] != "max"]
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


_Item = TypeVar("_Item")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NUMA_FOLDER = Path("/sys/devices/system/node")


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
        return [[core.number for node in part for core in node] for part in _split_evenly(nodes, nproc)]
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
    for part in _split_evenly(physical, nproc):
        yield [number for group in part for number in group]


def _split_evenly(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """Split ``items`` into ``parts`` blocks whose sizes differ by at most one."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
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
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)
