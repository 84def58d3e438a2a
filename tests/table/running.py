"""Run a row with a launcher, ours or another, and return the result. This module does not know the expected result."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path

from jobs import Job, without_routine
from table.rows import Row

Command = Callable[[Row, str], list[str]]
"""The beginning of a launcher's command line, for a row and a number of ranks."""

_LOOK_S = 0.02


def dtrain(row: Row, n: str) -> list[str]:
    """As ``dtrain launch``."""
    return [sys.executable, "-m", "dtrain", "launch", "-n", n, *row.options]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Result of a job. ``code`` is None if the job did not end in time."""

    code: int | None
    err: str
    script: str
    survivors: dict[int, str]
    seconds: float  # from the row's event to the launcher's end
    left: list[str]  # in the folder for temporary files

    @property
    def lines(self) -> list[str]:
        """Lines on standard error besides the tracebacks of the program."""
        return besides_tracebacks(without_routine(self.err), self.script)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that has been started for a row."""

    row: Row
    job: Job
    n: int
    culprit: int
    started_at: float
    reader: FileIO | None  # of output that is not read

    def act(self) -> float:
        """Do the row's act to the job; return the time at which it began."""
        if self.row.act is None:
            return self.started_at
        with contextlib.suppress(AssertionError):  # it ended first: its exit code will say so
            self.job.wait_for(*(f"up-{rank}" for rank in range(self.n)))
        began = time.time()
        self.row.act(self.job, self.n)
        return began

    def finish(self, began: float, *, within_s: float, settle_s: float) -> Seen:
        """Wait for the launcher's end, and then for ``settle_s`` at most until nothing is left. Ends all that is."""
        deadline = time.monotonic() + within_s
        while self.job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        code, ended = self.job.process.poll(), time.time()
        deadline = time.monotonic() + settle_s
        while (survivors := self._others()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.end()
        folder = self.job.folder
        events = [path.stat().st_mtime for path in folder.glob("event-*")]
        return Seen(
            code=code,
            err=_read(folder / "stderr.txt"),
            script=Path(self.row.script).name,
            survivors=survivors,
            seconds=ended - max([began, *events]),
            left=sorted(path.name for path in (folder / "tmp").iterdir()),
        )

    def _others(self) -> dict[int, str]:
        return {pid: line for pid, line in self.job.processes().items() if pid != self.job.pid}

    def end(self) -> None:
        """Kill all remaining processes of the job."""
        while left := self.job.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.process.wait(timeout=_LOOK_S)
        self.job.process.wait()
        if self.reader is not None:
            self.reader.close()


def start(
    row: Row,
    command: Command,
    folder: Path,
    *,
    n: int,
    culprit: int,
    extra: Sequence[str] = (),
    variables: Mapping[str, str],
) -> Running:
    """Start a launcher on a row, in a folder of its own.

    Args:
        extra: more options of the launcher.
        variables: those of the row's world.
    """
    (folder / "tmp").mkdir(parents=True)
    row.write(folder)
    mark = uuid.uuid4().hex
    words = [*command(row, row.n or str(n)), *extra, row.script, str(culprit), str(n)]
    words = [word.replace("{folder}", str(folder)) for word in words]
    environment = {"LAUNCHER": "dtrain" if command is dtrain else "another"}
    env = {
        # Jobs start in threads, while pytest changes the environment.
        **{name: os.environ.get(name) for name in list(os.environ)},
        **row.env,
        **environment,
        "JOB_MARK": mark,
        "FOLDER": str(folder),
        "TMPDIR": str(folder / "tmp"),
        **variables,
    }
    stdout, reader = _open_stdout(row, folder)
    with open(folder / "stderr.txt", "wb") as err:
        process = subprocess.Popen(
            [*_wrap(row), *words],
            cwd=folder,
            env={name: value for name, value in env.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=err,
            text=True,
        )
    os.close(stdout)
    job = Job(folder=folder, mark=mark, process=process)
    return Running(row=row, job=job, n=n, culprit=culprit, started_at=time.time(), reader=reader)


def _wrap(row: Row) -> list[str]:
    """Return the command that becomes the launcher."""
    before = [*([row.shell] if row.shell else []), *(["exec 1>&-"] if row.stdout == "closed" else [])]
    if not before:
        return []
    return [*(["unshare", "-m"] if row.mounts else []), "bash", "-c", " && ".join([*before, 'exec "$@"']), "bash"]


def _open_stdout(row: Row, folder: Path) -> tuple[int, FileIO | None]:
    if row.stdout == "unread":
        reader, writer = os.pipe()
        return writer, FileIO(reader)
    path = "/dev/full" if row.stdout == "full" else folder / "stdout.txt"
    return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def besides_tracebacks(text: str, script: str) -> list[str]:
    """The lines of ``text`` that belong to no traceback of ``script``; a launcher's own traceback counts."""
    lines: list[str] = []
    block: list[str] = []  # a traceback: from its heading to the error's own line, or to where its rank was ended
    for line in text.splitlines():
        bare = re.sub(r"^\[[^\]]*\][: ]", "", line)
        if block and line.startswith("dtrain: "):
            lines += [] if any(script in frame for frame in block) else block
            block = []
        if block or bare.startswith("Traceback (most recent call last)"):
            block.append(line)
            if len(block) > 1 and not bare.startswith(" "):
                lines += [] if any(script in frame for frame in block) else block
                block = []
        else:
            lines.append(line)
    return lines + block


@cache
def why_no_mounts() -> str:
    """Return the machine's reason against a mount of our own; empty if it gives one."""
    try:
        asked = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60).stderr.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
