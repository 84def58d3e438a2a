"""A running launcher and all of its processes, found by a mark in their environment."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_ROUTINE = re.compile(r"dtrain: launch: (starting \d+ rank|done; |results: )")
LONG_S = 300  # no promise of the launcher's: how long a busy test machine may take


def without_routine(err: str) -> str:
    """Return ``err`` without the lines with which every launch begins, and every launch without a failure ends."""
    return "".join(line for line in err.splitlines(keepends=True) if not _ROUTINE.match(line))


def wait_until(condition: Callable[[], object], *, timeout_s: float = LONG_S) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> str:
        """Standard error without the lines with which every launch begins, and every launch without a failure ends."""
        return without_routine(self.err)

    @property
    def summary(self) -> list[str]:
        """The lines in ``errors`` that the launcher itself wrote."""
        return [line for line in self.errors.splitlines() if line.startswith("dtrain: ")]


@dataclass(kw_only=True)
class Job:
    """A running ``dtrain launch``; ``folder`` is where its scripts run and leave files."""

    folder: Path
    mark: str
    process: subprocess.Popen[str]
    script: Path = field(default=Path())

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> Result:
        out, err = self.process.communicate(timeout=LONG_S)
        return Result(code=self.process.returncode, out=out or "", err=err or "")

    def wait_for(self, *names: str) -> list[str]:
        """Wait until the script has written these files, and return their contents."""
        deadline = time.monotonic() + LONG_S
        for name in names:
            while not (path := self.folder / name).exists() or not path.read_text():
                assert self.process.poll() is None, f"ended with {self.process.returncode} before it wrote {name}"
                assert time.monotonic() < deadline, f"{name} never came; running: {self.processes()}"
                time.sleep(0.01)
        return [(self.folder / name).read_text() for name in names]

    def processes(self) -> dict[int, str]:
        """All processes of this job that are alive, by pid, with their command lines."""
        commands = {}
        for pid in (name for name in os.listdir("/proc") if name.isdecimal()):
            try:
                if f"JOB_MARK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    commands[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return commands

    def supervisor(self) -> int:
        """The pid of the supervisor: the only child of the front."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + LONG_S / 3
        while left := self.processes():
            assert time.monotonic() < deadline, f"survivors: {left}"
            time.sleep(0.01)
