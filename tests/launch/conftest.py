"""Real launches: every job carries a mark in its environment, by which all of its processes are found afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jobs import LONG_S, Job, Result

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
        shown: str | None = "all",
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
        **popen: object,
    ) -> Job:
        mark = uuid.uuid4().hex
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        begun = script.with_name(f"{script.name}.{mark}")  # whole at once: a rank of another job may be about to read it
        begun.write_text(textwrap.dedent(source), encoding="utf-8")
        begun.replace(script)
        ranks = [] if n is None else ["-n", str(n)]
        ranks += [] if shown is None else ["--log-ranks", shown]
        settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "dtrain", "launch", *ranks, *options, *(target or [str(script)]), *args],
            env={**os.environ, "JOB_MARK": mark, "FOLDER": str(tmp_path), **(env or {})},
            **{**settings, **popen},  # type: ignore[call-overload]
        )
        jobs.append(Job(folder=tmp_path, mark=mark, process=process, script=script))
        return jobs[-1]

    yield start_job
    running, survivors = [], {}
    for job in jobs:  # all of them, before the report: a process that stays would be there in the next test
        if job.process.poll() is None:
            running.append(job.pid)
        else:
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
