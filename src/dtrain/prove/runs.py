"""Start the ranks of a proof's runs, several runs at a time if there are cores: ``run_all``.

Ranks are forks of one process that has imported torch, so a start takes tenths of a second. A rank that waits for a lost peer
is ended with the run. Every run has a current folder of its own, which is a copy of the script's current folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.forkserver import ForkServer
from multiprocessing.util import Finalize
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch.local_ranks import LocalRanks, wait_for_exits
from dtrain.prove.proof_rank import run_rank
from dtrain.prove.run_config import RunConfig

# Time for the other ranks to end after one has failed, so that the first error is recorded. Seconds.
_SETTLE_S = 5.0
# Files above this size are links into the original folder instead of copies. Bytes.
_MAX_COPY_BYTES = 1 << 20
_SKIPPED_FOLDERS = (".git", ".venv", "__pycache__", "node_modules", ".nox", ".mypy_cache", ".ruff_cache", ".pytest_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """End of a run.

    Args:
        config: the run.
        codes: exit code of each rank; a negative number is a signal.
        error: first error of a rank, with the place in the script; None without an error.
        timed_out: if True, the run was ended because it took too long.
        seconds: duration of the run.
    """

    config: RunConfig
    codes: tuple[int, ...]
    error: str | None
    timed_out: bool
    seconds: float

    @property
    def failed(self) -> bool:
        """True if the run did not end as planned."""
        killed = self.config.kill_after is not None and -signal.SIGKILL in self.codes
        return self.timed_out or (any(self.codes) and not killed)


def copy_work_folder(source: Path, destination: Path) -> None:
    """Make ``destination`` look like ``source``, without its outputs: small files are copied, large files are links.

    Folders of checkpoints and hidden folders are left out, so that a run starts from its beginning.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(source):
        target = destination / entry.name
        if entry.name in _SKIPPED_FOLDERS or target.exists() or entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not _is_output(Path(entry.path)):
                target.symlink_to(os.path.realpath(entry.path))
        elif entry.is_file() and entry.stat().st_size <= _MAX_COPY_BYTES:
            shutil.copy2(entry.path, target)
        else:
            target.symlink_to(os.path.realpath(entry.path))


def _is_output(folder: Path) -> bool:
    """Return True for a folder that looks like the output of a training run."""
    names = {path.name for path in folder.iterdir()} if os.access(folder, os.R_OK) else set()
    return folder.name in ("ckpt", "checkpoints", "runs", "out", "output", "outputs") or any(
        name.startswith(("step-", "checkpoint")) for name in names
    )


@dataclass(slots=True, eq=False)
class _Running:
    config: RunConfig
    ranks: LocalRanks
    started: float
    deadline: float
    timed_out: bool = False


def run_all(
    configs: Sequence[RunConfig],
    *,
    slots: int,
    timeout_s: float,
    on_start: Callable[[RunConfig], None] = lambda config: None,
    on_end: Callable[[RunOutcome], None] = lambda outcome: None,
) -> dict[str, RunOutcome]:
    """Run all ``configs`` and return their outcomes by name.

    Args:
        configs: runs that do not depend on each other.
        slots: number of ranks that run at a time; a run with more ranks runs alone.
        timeout_s: seconds after which a run is ended.
        on_start: called with each run that starts.
        on_end: called with each outcome.
    """
    waiting, running, outcomes = list(configs), list[_Running](), dict[str, RunOutcome]()
    try:
        while waiting or running:
            used = sum(run.config.ranks for run in running)
            while waiting and (not running or used + waiting[0].ranks <= slots):
                config = waiting.pop(0)
                on_start(config)
                running.append(_start(config, timeout_s))
                used += config.ranks
            _wait(running)
            for run in [run for run in running if not run.ranks.running]:
                running.remove(run)
                run.ranks.end()
                outcome = _outcome(run)
                outcomes[run.config.name] = outcome
                on_end(outcome)
    finally:
        for run in running:
            run.ranks.end()
    return outcomes


def _start(config: RunConfig, timeout_s: float) -> _Running:
    path, ranks = config.write(), LocalRanks(config.ranks)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launch_protocol.OWNED_PREFIXES)}
    inherited |= {
        launch_protocol.OMP_THREADS: "1",
        # Compilation takes longer than the run, and changes rounding. torch.compile reads the variable at each call.
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for rank in range(config.ranks):
        ranks.fork_from_server(run_rank, str(path), ranks.environment(rank, inherited), server=_fork_server())
    now = time.monotonic()
    return _Running(config=config, ranks=ranks, started=now, deadline=now + timeout_s)


@cache
def _fork_server() -> ForkServer:
    """Return the server of this process whose forks are the ranks of all proofs."""
    server = ForkServer()
    server.set_forkserver_preload(["dtrain.prove.preload"])
    Finalize(None, server._stop, exitpriority=10)  # type: ignore[attr-defined]
    return server


def _wait(running: list[_Running]) -> None:
    """Wait for the exit of a rank, or for the deadline of a run, whose ranks are killed then."""
    earliest = min(run.deadline for run in running)
    wait_for_exits([run.ranks for run in running], max(0.0, earliest - time.monotonic()))
    for run in running:
        now = time.monotonic()
        if any(exit_.code for exit_ in run.ranks.exits.values()):
            # The peers wait for this rank.
            run.deadline = min(run.deadline, now + (0.5 if run.config.kill_after is not None else _SETTLE_S))
        if now >= run.deadline and run.ranks.running:
            run.timed_out = not any(exit_.code for exit_ in run.ranks.exits.values())
            run.ranks.kill()


def _outcome(run: _Running) -> RunOutcome:
    folder, failures = Path(run.config.folder), []
    for path in folder.glob("rank-*.failure.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        # Another rank's error is the cause of an error in communication.
        follows = "PeerError" in record["error"] or "DistError" in record["error"] or "Connection" in record["error"]
        failures.append((follows, path.stat().st_mtime, record))
    first = min(failures, key=lambda item: item[:2])[2] if failures else None
    text = _last_error_line(folder)
    if first is not None:
        text = f"{first['error']} (rank {first['rank']}{', ' + first['where'] if first['where'] else ''})"
    return RunOutcome(
        config=run.config,
        codes=tuple(run.ranks.exits[rank].code for rank in range(run.config.ranks)),
        error=text,
        timed_out=run.timed_out,
        seconds=time.monotonic() - run.started,
    )


def _last_error_line(folder: Path) -> str | None:
    """Return the last line that a rank wrote to its standard error, for a process that ended without an exception."""
    for path in sorted(folder.glob("rank-*.err")):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if written := [line for line in lines if line.strip()]:
            return written[-1].strip()[:300]
    return None
