"""The cores that ranks may run on, and how they share them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeVar

from dtrain.launch.cgroup import core_quota

_Item = TypeVar("_Item")
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Core:
    """What the kernel counts as one core: a hardware thread. Those that are near each other are neighbours when sorted."""

    node: int = 0  # of memory
    physical: int  # the same for threads that share one physical core: the smallest of their numbers
    number: int


def usable_cores(*, cpus: Path = _CPUS, nodes: Path = _NODES) -> list[Core]:
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


def share_cores(cores: Iterable[Core], nproc: int) -> list[list[int]]:
    """The numbers of the cores of each of ``nproc`` ranks: a block of neighbours. Pure.

    No rank has cores on two memory nodes, unless there are fewer ranks than nodes: then it has whole ones. No two ranks are on
    the threads of one physical core, unless there are more ranks than such cores. Fewer cores than ranks are shared.
    """
    cores = sorted(cores)
    if nproc >= len(cores):
        return [[cores[rank % len(cores)].number] for rank in range(nproc)]
    nodes = [list(group) for _, group in groupby(cores, key=lambda core: core.node)]
    if nproc < len(nodes):
        return [[core.number for node in part for core in node] for part in _cut(nodes, nproc)]
    counts = _ranks_of_nodes([len(node) for node in nodes], nproc)
    return [share for node, count in zip(nodes, counts, strict=True) if count for share in _share_node(node, count)]


def _ranks_of_nodes(sizes: Sequence[int], nproc: int) -> list[int]:
    """How many ranks go to nodes of so many cores, for the poorest rank to have as many cores as it can."""
    counts = [0] * len(sizes)
    for _ in range(nproc):
        richest = max(range(len(sizes)), key=lambda node: sizes[node] / (counts[node] + 1))
        counts[richest] += 1
    return counts


def _share_node(cores: Sequence[Core], nproc: int) -> Iterator[list[int]]:
    """The shares of the ranks of one node: whole physical cores where there are enough."""
    physical = [[core.number for core in group] for _, group in groupby(cores, key=lambda core: core.physical)]
    if nproc > len(physical):
        physical = [[core.number] for core in cores]
    for part in _cut(physical, nproc):
        yield [number for group in part for number in group]


def _cut(items: Sequence[_Item], parts: int) -> list[Sequence[_Item]]:
    """``items`` in ``parts`` blocks whose sizes differ by one at most."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(borders)]


def _physical_core(cpus: Path, number: int) -> int:
    """The smallest number of the threads that share a physical core with ``number``; itself where the kernel does not tell."""
    try:
        return min(_parse_list((cpus / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()), default=number)
    except (OSError, ValueError):
        return number


def _numa_nodes(folder: Path) -> dict[int, int]:
    """The NUMA node of each core, as far as the kernel tells."""
    nodes: dict[int, int] = {}
    for path in folder.glob("node*/cpulist"):
        nodes.update(dict.fromkeys(_parse_list(path.read_text()), int(re.sub(r"\D", "", path.parent.name))))
    return nodes


def _parse_list(text: str) -> Iterator[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)
