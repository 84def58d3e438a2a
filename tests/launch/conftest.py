"""Real launches: every job carries a mark in its environment, by which all of its processes are found afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LONG_S = 90  # no promise of the launcher's: how long a busy test machine may take


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> list[str]:
        """The lines that the launcher itself wrote."""
        return [line for line in self.err.splitlines() if line.startswith("dtrain: ")]


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
        """Wait until the script has written these files, and return what is in them."""
        deadline = time.monotonic() + LONG_S
        for name in names:
            while not (path := self.folder / name).exists() or not path.read_text():
                assert self.process.poll() is None, f"ended with {self.process.returncode} before it wrote {name}"
                assert time.monotonic() < deadline, f"{name} never came; running: {self.processes()}"
                time.sleep(0.01)
        return [(self.folder / name).read_text() for name in names]

    def processes(self) -> dict[int, str]:
        """All processes of this job that are alive, by pid, with their command lines."""
        found = {}
        for pid in (name for name in os.listdir("/proc") if name.isdecimal()):
            try:
                if f"JOB_MARK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def supervisor(self) -> int:
        """The pid of the supervisor: the only child of the front."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + LONG_S / 3
        while left := self.processes():
            assert time.monotonic() < deadline, f"survivors: {left}"
            time.sleep(0.01)


StartJob = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """Start ``dtrain launch`` on a script given as source. At the end of the test nothing of it may be alive."""
    jobs: list[Job] = []

    def start_job(
        source: str,
        *args: str | bytes,
        n: int | None = 2,
        options: Sequence[str] = (),
        name: str = "script.py",
        target: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
        **popen: object,
    ) -> Job:
        mark = uuid.uuid4().hex
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        ranks = [] if n is None else ["-n", str(n)]
        settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "dtrain", "launch", *ranks, *options, *(target or [str(script)]), *args],
            env={**os.environ, "JOB_MARK": mark, "FOLDER": str(tmp_path), **(env or {})},
            **{**settings, **popen},  # type: ignore[call-overload]
        )
        jobs.append(Job(folder=tmp_path, mark=mark, process=process, script=script))
        return jobs[-1]

    yield start_job
    survivors = {}
    for job in jobs:
        running = job.process.poll() is None
        if not running:
            survivors.update(job.processes())
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
        job.process.communicate(timeout=LONG_S)
        assert not running, "the test ended before its launcher"
    assert not survivors


@pytest.fixture
def run(start: StartJob) -> Callable[..., Result]:
    """Run a script to its end; afterwards nothing of it may be alive."""

    def run_job(source: str, *args: str | bytes, **settings: object) -> Result:
        return start(source, *args, **settings).wait()

    return run_job
