"""What the control groups of this process allow it and did to it, which ``os.cpu_count`` and ``/proc/meminfo`` do not know.

Both versions of the kernel's interface are read: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1. A limit of
any group up the tree holds for the ones below, so the smallest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("sys/fs/cgroup")


def core_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of processor time per second that this process may use, or None for no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    quotas = []
    for folder in _groups(root, ""):
        match _words(folder / "cpu.max"):
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
    for folder in _groups(root, "cpu"):
        match _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us"):
            case [quota], [period] if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process and its group may use, or None for no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [_words(folder / "memory.max") for folder in _groups(root, "")]
    found += [_words(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    limits = [int(words[0]) for words in found if words and words[0] != "max"]
    return min((limit for limit in limits if limit < 2**60), default=None)  # version 1 writes 2**63 - 4096 for none


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this group the kernel has killed for want of memory; None where no group counts them.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for folder in _groups(root, controller):
            for line in _lines(folder / name):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of its parents; ``controller`` is "" in version 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        base = root / _MOUNT / controller
        group = base / path.lstrip("/")
        # In a container the path may be the host's, which is not there; the limits are at the mount point then.
        yield from (folder for folder in (group, *group.parents) if folder == base or base in folder.parents)


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or a controller that is switched off: no limit from it
        return []
