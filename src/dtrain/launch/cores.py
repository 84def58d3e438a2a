"""The cores that ranks may run on, and how they share them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dtrain.launch.cgroup import core_quota


def usable_cores() -> list[int]:
    """The cores that this process may run on, those of one NUMA node next to each other."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    node_of = _numa_nodes(Path("/sys/devices/system/node"))
    return sorted(os.sched_getaffinity(0), key=lambda core: (node_of.get(core, 0), core))


def core_count() -> float:
    """How many cores' worth of time this process gets: what it may run on, and what its control group allows."""
    quota = core_quota()
    return len(usable_cores()) if quota is None else min(float(len(usable_cores())), quota)


def share_cores(cores: Sequence[int], nproc: int) -> list[list[int]]:
    """A block of neighbouring cores for each of ``nproc`` ranks; fewer cores than ranks are shared. Pure."""
    if nproc >= len(cores):
        return [[cores[rank % len(cores)]] for rank in range(nproc)]
    borders = [len(cores) * rank // nproc for rank in range(nproc + 1)]
    return [list(cores[begin:end]) for begin, end in pairwise(borders)]


def _numa_nodes(folder: Path) -> dict[int, int]:
    """The NUMA node of each core, as far as the kernel tells."""
    nodes: dict[int, int] = {}
    for path in folder.glob("node*/cpulist"):
        number = int(re.sub(r"\D", "", path.parent.name))
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                nodes.update(dict.fromkeys(range(int(first), int(last or first) + 1), number))
    return nodes
