"""Asking the ranks of a job that hangs what they are doing, in steps that a loop can take: begin, look again, finish."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain import wire
from dtrain.launch import processes
from dtrain.launch.hang.explain import explain
from dtrain.launch.hang.known import Account, Known, evidence_of, forget, read, write_account
from dtrain.launch.hang.report import write_report
from dtrain.launch.hang.watch import Seen

PATIENCE_S = 3.0
"""How long the ranks have to answer: a record takes milliseconds, but a busy machine takes its time."""

LOOK_EVERY_S = 0.05
_UNTIL_SIGNAL = 0.5  # of the patience
_SETTLE_S = 0.2  # after the last file has come: faulthandler writes line by line, and says nothing at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """A job that hangs, as its launcher knows it. Ranks are those of this node.

    Without ``timeout_s`` somebody has asked, and the job may be in good health: then no rank is sent the signal.
    """

    run_dir: Path
    world_size: int
    timeout_s: float | None
    pids: Mapping[int, int]  # of the ranks whose processes run
    ended: Mapping[int, int]  # exit codes of those that have ended
    seen: Mapping[int, Seen]
    node_rank: int = 0


class Inspection:
    """One round of questions. ``begin`` makes it.

    A rank in ``init_dist``'s block has a thread that writes down its stacks and its collectives when it is asked. Where nothing
    comes, something holds the interpreter, and there is the signal, whose handler takes no lock. It is for those only:
    faulthandler walks the frames of all threads, and one that runs meanwhile, such as the one that is just answering, changes
    them under its feet: the rank would die of the question.
    """

    def __init__(self, suspects: Suspects, *, now: float) -> None:
        self._suspects, self._began = suspects, now
        self._states = _states(suspects.pids)
        self._answering = [rank for rank in self._able() if rank in suspects.seen and suspects.seen[rank].phase != "closed"]
        self._died: Mapping[int, int] = {}  # exit codes of those that ended since they were asked
        mute = [rank for rank in self._able() if rank not in self._answering]
        risk = suspects.timeout_s is not None  # a rank may die of the signal: one that hangs loses nothing by it
        self._signalled = self._send_signal(mute) if risk else []
        self._signal_at: float | None = now + PATIENCE_S * _UNTIL_SIGNAL if risk else None
        self._deadline = now + PATIENCE_S
        self._complete_at: float | None = None

    def look(self, now: float, *, ended: Mapping[int, int]) -> float | None:
        """When to look again; None when it is time to ``finish``: all have answered or ended, or their time is over.

        Args:
            now: seconds of the monotonic clock.
            ended: exit codes of the ranks that have ended by now.

        Mutates: this inspection; sends signals to ranks that do not answer.
        """
        self._died = {rank: code for rank, code in ended.items() if rank in self._suspects.pids}
        if len(self._died) == len(self._suspects.pids):
            return None
        if self._signal_at is not None and now >= self._signal_at:
            self._signalled += self._send_signal(rank for rank in self._answering if not self._record(rank).exists())
            # From now on: this process itself may have been late.
            self._signal_at, self._deadline = None, now + PATIENCE_S * (1 - _UNTIL_SIGNAL)
        if self._complete_at is None and self._complete():
            self._complete_at = now
        end = self._deadline if self._complete_at is None else min(self._deadline, self._complete_at + _SETTLE_S)
        return None if now >= end else min(end, now + LOOK_EVERY_S)

    def finish(self) -> list[str]:
        """The message about the hang, to be printed as it is.

        Mutates: the run folder, which gets what is known about the ranks, and the whole as a text.
        """
        suspects, later = self._suspects, _states(self._suspects.pids)
        ranks = [
            Known(
                rank=rank,
                pid=suspects.pids.get(rank),
                seen=suspects.seen.get(rank),
                quiet_s=round(self._began - suspects.seen[rank].at, 3) if rank in suspects.seen else None,
                ended=suspects.ended.get(rank),
                died=self._died.get(rank),
                # Any process may be in the kernel for a moment; one that hangs there stays.
                state=state if (state := self._states.get(rank, "")) == later.get(rank) else "",
                cut_short=self._cut_short(rank),
            )
            for rank in sorted({*suspects.pids, *suspects.ended})
        ]
        return _concluded(suspects, ranks)

    def _complete(self) -> bool:
        """Whether nothing more will come. Of a rank that was sent the signal, a late record is still worth the wait."""
        return all(self._record(rank).exists() for rank in self._answering if rank not in self._died) and all(
            read(self._stacks(rank)) for rank in self._signalled if rank not in self._died
        )

    def _cut_short(self, rank: int) -> bool:
        """Whether the rank ended while the signal's handler wrote, perhaps of it: what it wrote tells of the wrong thread."""
        return rank in self._died and rank in self._signalled

    def _able(self) -> list[int]:
        """The ranks that can answer: one that is stopped does nothing at all."""
        return [rank for rank in self._suspects.pids if self._states.get(rank) not in ("T", "t")]

    def _send_signal(self, ranks: Iterable[int]) -> list[int]:
        """Have those of the ranks write their stacks that have a handler for it; which these are."""
        pids = self._suspects.pids
        able = [rank for rank in ranks if rank not in self._died and _catches(pids[rank], wire.STACKS_SIGNAL)]
        for rank in able:
            processes.send(pids[rank], wire.STACKS_SIGNAL)
        return able

    def _record(self, rank: int) -> Path:
        return wire.blackbox_file(self._suspects.run_dir, rank)

    def _stacks(self, rank: int) -> Path:
        return wire.stacks_file(self._suspects.run_dir, rank)


def begin(suspects: Suspects, *, ask: int | None, now: float) -> Inspection:
    """Ask every rank for its stacks and its last collectives; those that cannot hear the question get the signal at once.

    Args:
        suspects: the job.
        ask: the end to write to of the pipe that the ranks know as ``wire.ASK_FD``; the caller closes it.
        now: seconds of the monotonic clock.

    Mutates: sends signals; removes what an earlier start of the ranks wrote down.
    """
    forget(_records(suspects.run_dir), suspects.pids)
    if ask is not None:
        with contextlib.suppress(OSError):  # no rank is there any more
            os.write(ask, b"?")
    return Inspection(suspects, now=now)


def _concluded(suspects: Suspects, ranks: list[Known]) -> list[str]:
    """The message about these ranks; all that it rests on stays in the run folder."""
    account = Account(
        node_rank=suspects.node_rank,
        at=time.time(),
        world_size=suspects.world_size,
        timeout_s=suspects.timeout_s,
        ranks=tuple(ranks),
    )
    folder = _records(suspects.run_dir)
    evidence, report = evidence_of(folder, ranks), folder / account.report
    lines = explain(evidence, world_size=account.world_size, timeout_s=account.timeout_s, report=report)
    with contextlib.suppress(OSError):  # a full disk costs the files, not the message
        folder.mkdir(parents=True, exist_ok=True)
        write_account(folder, account)
    write_report(report, lines, evidence, at=account.at)  # last: who has asked waits for it
    return lines


def _records(run_dir: Path) -> Path:
    return wire.stacks_file(run_dir, 0).parent


def tidy(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove the files in which these ranks wrote nothing: a job that did not hang leaves none.

    Those of other nodes are theirs, where the folder is on a disk that nodes share: their ranks may still run.

    Mutates: ``run_dir``, that of this launch.
    """
    for path in (wire.stacks_file(run_dir, rank) for rank in ranks):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
    with contextlib.suppress(OSError):  # not there, or something is in it
        _records(run_dir).rmdir()


def _catches(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for the signal: one that has none (a command that is no Python) would die of it."""
    for line in read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _states(pids: Mapping[int, int]) -> dict[int, str]:
    """The letter of each rank's process in ``/proc``, empty where it cannot be read."""
    stats = {rank: read(Path(f"/proc/{pid}/stat")) for rank, pid in pids.items()}
    return {rank: stat.rpartition(")")[2].split()[0] if stat else "" for rank, stat in stats.items()}
