"""What Linux says of this process and this machine: files in /proc and /sys, read in some tens of microseconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

PROC, SYS = Path("/proc"), Path("/sys")
_SECTOR = 512  # bytes, whatever the disk has: the unit of /proc/diskstats


class Counters(NamedTuple):
    """Counts since the machine was started; None where they cannot be read."""

    busy: float | None = None
    cpu: float | None = None
    received: float | None = None
    sent: float | None = None
    read: float | None = None
    written: float | None = None


def resident(pid: int | str = "self") -> tuple[int, int] | None:
    """Bytes of main memory that the process holds, and the most that it has held; None where that cannot be read."""
    sizes = _sizes(f"{pid}/status", "VmRSS", "VmHWM")
    if "VmRSS" not in sizes:
        return None
    return sizes["VmRSS"], max(sizes["VmRSS"], sizes.get("VmHWM", 0))


def host_memory() -> tuple[int, int] | None:
    """Bytes of main memory that are in use, and how many there are; None where that cannot be read."""
    sizes = _sizes("meminfo", "MemTotal", "MemAvailable")
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return None
    return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]


def counters() -> Counters:
    """What has been counted so far: processor time (in the kernel's ticks), bytes over the network, bytes of disks."""
    busy, cpu = _processor()
    received, sent = _network()
    read, written = _disks()
    return Counters(busy, cpu, received, sent, read, written)


def _processor() -> tuple[float | None, float | None]:
    """Ticks of all cores that were not idle, and all ticks."""
    for line in _lines("stat"):
        if line.startswith("cpu "):
            ticks = [int(part) for part in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
            return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))
    return None, None


def _network() -> tuple[float | None, float | None]:
    """Bytes in and out over real interfaces; where there is none, as in a container, over all but the loopback."""
    rows = {}
    for line in _lines("net/dev"):
        name, colon, numbers = line.partition(":")
        if colon:
            parts = numbers.split()
            rows[name.strip()] = (int(parts[0]), int(parts[8]))
    rows.pop("lo", None)
    # A bridge or bond would count what goes through it a second time.
    real = {name: row for name, row in rows.items() if _exists(f"{SYS}/class/net/{name}/device")} or rows
    if not real:
        return None, None
    return float(sum(row[0] for row in real.values())), float(sum(row[1] for row in real.values()))


def _disks() -> tuple[float | None, float | None]:
    """Bytes read and written by real disks: partitions and what is made of disks would count them again."""
    read, written, any_disk = 0, 0, False
    for line in _lines("diskstats"):
        parts = line.split()
        if len(parts) > 9 and _exists(f"{SYS}/block/{parts[2]}/device"):
            read, written, any_disk = read + int(parts[5]), written + int(parts[9]), True
    return (float(read * _SECTOR), float(written * _SECTOR)) if any_disk else (None, None)


def _sizes(name: str, *wanted: str) -> dict[str, int]:
    """Lines such as ``VmRSS:  2080 kB``, in bytes; only those, since to take all of them apart takes twice the time."""
    text, found = f"\n{_text(name)}", {}
    for key in wanted:
        at = text.find(f"\n{key}:")
        parts = text[at : text.find("\n", at + 1)].split() if at >= 0 else ()
        if len(parts) == 3 and parts[2] == "kB" and parts[1].isdecimal():
            found[key] = int(parts[1]) * 1024
    return found


def _lines(name: str) -> list[str]:
    return _text(name).split("\n")


def _text(name: str) -> str:
    try:
        with open(f"{PROC}/{name}", "rb", buffering=0) as file:  # half the time of Path.read_text
            return file.read().decode("ascii", errors="replace")
    except OSError:
        return ""  # a container may hide it


@cache
def _exists(path: str) -> bool:
    """Asked once: of the devices of a machine, which do not change while it trains."""
    return Path(path).exists()
