"""Asking the ranks of a job that hangs what they are doing, in steps that a loop can take: begin, look again, finish."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain import wire
from dtrain.launch import processes
from dtrain.launch.hang.collectives import parse_record
from dtrain.launch.hang.explain import Evidence, explain
from dtrain.launch.hang.watch import Seen

PATIENCE_S = 3.0
"""How long the ranks have to answer: a record takes milliseconds, but a busy machine takes its time."""

LOOK_EVERY_S = 0.05
_SETTLE_S = 0.2  # after the last file has come: faulthandler writes line by line, and says nothing at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """A job that hangs, as its launcher knows it. Ranks are those of this node."""

    run_dir: Path
    world_size: int
    timeout_s: float
    pids: Mapping[int, int]  # of the ranks whose processes run
    ended: Mapping[int, int]  # exit codes of those that have ended
    seen: Mapping[int, Seen]


class Inspection:
    """One round of questions. ``begin`` makes it."""

    def __init__(self, suspects: Suspects, *, asked: list[int], now: float) -> None:
        self._suspects = suspects
        self._states = _states(suspects.pids)
        self._asked = asked  # ranks whose stacks are on their way
        self._deadline = now + PATIENCE_S
        self._complete_at: float | None = None

    def look(self, now: float) -> float | None:
        """When to look again; None when it is time to ``finish``: all have answered, or their time is over.

        Mutates: this inspection.
        """
        if self._complete_at is None and self._complete():
            self._complete_at = now
        end = self._deadline if self._complete_at is None else min(self._deadline, self._complete_at + _SETTLE_S)
        return None if now >= end else min(end, now + LOOK_EVERY_S)

    def finish(self) -> list[str]:
        """The message about the hang, to be printed as it is."""
        suspects, later = self._suspects, _states(self._suspects.pids)
        evidence = [
            Evidence(
                rank=rank,
                seen=suspects.seen.get(rank),
                ended=suspects.ended.get(rank),
                # Any process may be in the kernel for a moment; one that hangs there stays.
                state=state if (state := self._states.get(rank, "")) == later.get(rank) else "",
                record=parse_record(_read(wire.blackbox_file(suspects.run_dir, rank))),
                stacks=_read(wire.stacks_file(suspects.run_dir, rank)),
            )
            for rank in sorted({*suspects.pids, *suspects.ended})
        ]
        folder = wire.stacks_file(suspects.run_dir, 0).parent
        return explain(evidence, world_size=suspects.world_size, timeout_s=suspects.timeout_s, folder=folder)

    def _complete(self) -> bool:
        suspects = self._suspects
        can_write = [rank for rank in suspects.pids if rank in suspects.seen and self._states.get(rank) not in ("T", "t")]
        return all(wire.blackbox_file(suspects.run_dir, rank).exists() for rank in can_write) and all(
            _read(wire.stacks_file(suspects.run_dir, rank)) for rank in self._asked if self._states.get(rank) not in ("T", "t")
        )


def begin(suspects: Suspects, *, ask: int | None, now: float) -> Inspection:
    """Ask every rank for its stacks and its last collectives.

    Args:
        suspects: the job.
        ask: the end to write to of the pipe that the ranks know as ``wire.ASK_FD``; the caller closes it.
        now: seconds of the monotonic clock.

    Mutates: sends signals; removes what an earlier start of the ranks wrote down.
    """
    for rank in suspects.pids:
        with contextlib.suppress(OSError):
            wire.blackbox_file(suspects.run_dir, rank).unlink()
    if ask is not None:
        with contextlib.suppress(OSError):  # no rank is there any more
            os.write(ask, b"?")
    asked = [rank for rank, pid in suspects.pids.items() if _catches(pid, wire.STACKS_SIGNAL)]
    for rank in asked:
        processes.send(suspects.pids[rank], wire.STACKS_SIGNAL)
    return Inspection(suspects, asked=asked, now=now)


def tidy(run_dir: Path) -> None:
    """Remove the files in which no rank wrote anything: a job that did not hang leaves none.

    Mutates: ``run_dir``, that of this launch.
    """
    folder = wire.stacks_file(run_dir, 0).parent
    for path in folder.glob("*.stacks"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
    with contextlib.suppress(OSError):  # not there, or something is in it
        folder.rmdir()


def _catches(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for the signal: one that has none (a command that is no Python) would die of it."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _states(pids: Mapping[int, int]) -> dict[int, str]:
    """The letter of each rank's process in ``/proc``, empty where it cannot be read."""
    stats = {rank: _read(Path(f"/proc/{pid}/stat")) for rank, pid in pids.items()}
    return {rank: stat.rpartition(")")[2].split()[0] if stat else "" for rank, stat in stats.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""  # it was never written, or its process has ended
