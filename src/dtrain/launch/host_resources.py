"""What the control groups of this process allow it and did to it, which ``os.cpu_count`` and ``/proc/meminfo`` do not know.

Both versions of the kernel's interface are read: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1. A limit of
any group up the tree holds for the ones below, so the smallest counts.

The cores that ranks may run on, and how they share them.

How many files the launcher has to hold open, and whether it may."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeVar

from dtrain.errors import ConfigError

_CGROUP_MOUNT = Path("sys/fs/cgroup")


def core_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of processor time per second that this process may use, or None for no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
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
    """Bytes of memory that this process and its group may use, or None for no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [_read_words(folder / "memory.max") for folder in _cgroup_folders(root, "")]
    found += [_read_words(folder / "memory.limit_in_bytes") for folder in _cgroup_folders(root, "memory")]
    limits = [int(words[0]) for words in found if words and words[0] != "max"]
    return min((limit for limit in limits if limit < 2**60), default=None)  # version 1 writes 2**63 - 4096 for none


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this group the kernel has killed for want of memory; None where no group counts them.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for folder in _cgroup_folders(root, controller):
            for line in _read_lines(folder / name):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of its parents; ``controller`` is "" in version 2."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        base = root / _CGROUP_MOUNT / controller
        group = base / path.lstrip("/")
        # In a container the path may be the host's, which is not there; the limits are at the mount point then.
        yield from (folder for folder in (group, *group.parents) if folder == base or base in folder.parents)


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or a controller that is switched off: no limit from it
        return []


_Item = TypeVar("_Item")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NUMA_FOLDER = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Core:
    """What the kernel counts as one core: a hardware thread. Those that are near each other are neighbours when sorted."""

    node: int = 0  # of memory
    physical: int  # the same for threads that share one physical core: the smallest of their numbers
    number: int


def usable_cores(*, cpus: Path = _CPU_FOLDER, nodes: Path = _NUMA_FOLDER) -> list[Core]:
    """The cores that this process may run on, neighbours next to each other."""
    if not hasattr(os, "sched_getaffinity"):
        return [Core(physical=number, number=number) for number in range(os.cpu_count() or 1)]
    node_of = _numa_nodes(nodes)
    return sorted(
        Core(node=node_of.get(number, 0), physical=_physical_core(cpus, number), number=number)
        for number in os.sched_getaffinity(0)
    )


def core_count() -> float:
    """How many cores' worth of time this process gets: what it may run on, and what its control group allows."""
    quota, cores = core_quota(), float(len(usable_cores()))
    return cores if quota is None else min(cores, quota)


def assign_cores(cores: Iterable[Core], nproc: int) -> list[list[int]]:
    """The numbers of the cores of each of ``nproc`` ranks: a block of neighbours. Pure.

    No rank has cores on two memory nodes, unless there are fewer ranks than nodes: then it has whole ones. No two ranks are on
    the threads of one physical core, unless there are more ranks than such cores. Fewer cores than ranks are shared.
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
    """How many ranks go to nodes of so many cores, for the poorest rank to have as many cores as it can."""
    counts = [0] * len(sizes)
    for _ in range(nproc):
        richest = max(range(len(sizes)), key=lambda node: sizes[node] / (counts[node] + 1))
        counts[richest] += 1
    return counts


def _assign_node_cores(cores: Sequence[Core], nproc: int) -> Iterator[list[int]]:
    """The shares of the ranks of one node: whole physical cores where there are enough."""
    physical = [[core.number for core in group] for _, group in groupby(cores, key=lambda core: core.physical)]
    if nproc > len(physical):
        physical = [[core.number] for core in cores]
    for part in _split_evenly(physical, nproc):
        yield [number for group in part for number in group]


def _split_evenly(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """``items`` in ``parts`` blocks whose sizes differ by one at most."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(borders)]


def _physical_core(cpus: Path, number: int) -> int:
    """The smallest number of the threads that share a physical core with ``number``; itself where the kernel does not tell."""
    try:
        return min(_parse_cpu_list((cpus / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()), default=number)
    except (OSError, ValueError):
        return number


def _numa_nodes(folder: Path) -> dict[int, int]:
    """The NUMA node of each core, as far as the kernel tells."""
    nodes: dict[int, int] = {}
    for path in folder.glob("node*/cpulist"):
        nodes.update(dict.fromkeys(_parse_cpu_list(path.read_text()), int(re.sub(r"\D", "", path.parent.name))))
    return nodes


def _parse_cpu_list(text: str) -> Iterator[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


_LAUNCHER_OPEN_FILES = 24  # streams, pipes and sockets of the launcher's own, with some to spare
_OPEN_FILES_PER_RANK = 4  # two pipes, and two log files or the other ends of the pipes


def raise_open_file_limit(nproc: int) -> None:
    """Make sure that ``nproc`` ranks can be looked after, by raising the soft limit where that is needed.

    Mutates: this process's limit of open files, which its children inherit.

    Raises:
        ConfigError: the hard limit is below what is needed.
    """
    needed = _LAUNCHER_OPEN_FILES + _OPEN_FILES_PER_RANK * nproc
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        fewer = max(1, (hard - _LAUNCHER_OPEN_FILES) // _OPEN_FILES_PER_RANK)
        raise ConfigError(
            f"launch: -n {nproc} needs {needed} open files, but at most {hard} are allowed; `ulimit -n {needed}`, or -n {fewer}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
