"""What the whole table has to leave as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")


def shared() -> dict[int, str]:
    """The files in the memory that processes share: name by inode."""
    return {entry.inode(): entry.name for entry in os.scandir(SHARED)} if SHARED.exists() else {}


def in_use() -> set[int]:
    """Those that a process has mapped: others use this machine, too. By inode: a semaphore is mapped under another name."""
    found = set()
    for pid in (name for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return found


@pytest.fixture(scope="package", autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    """No row leaves a file in the memory that processes share."""
    before = shared()
    yield
    left = {inode: name for inode, name in shared().items() if inode not in before}
    used = in_use() if left else set()
    gone = left.keys() - shared().keys()
    assert [name for inode, name in left.items() if inode not in used | gone] == []
