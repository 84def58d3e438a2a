"""Asking the ranks of a job that hangs what they are doing, in steps that a loop can take: begin, look again, finish.

The watch over one start of the ranks, and the questions when they hang, as the supervisor's loop drives them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain import launch_protocol
from dtrain.heartbeats import ProgressRecord
from dtrain.launch import processes
from dtrain.launch.hang.explain import explain_stall, write_hang_report
from dtrain.launch.hang.launcher_record import (
    LauncherRecord,
    ObservedRank,
    clear_rank_records,
    collect_evidence,
    read_text,
    write_launcher_record,
)
from dtrain.launch.hang.progress_timer import ProgressTimer, RankProgress
from dtrain.launch.hang.query import announce_launcher, withdraw_launcher

PATIENCE_S = 3.0
"""How long the ranks have to answer: a record takes milliseconds, but a busy machine takes its time."""

POLL_INTERVAL_S = 0.05
_SIGNAL_AFTER = 0.5  # of the patience
_SETTLE_S = 0.2  # after the last file has come: faulthandler writes line by line, and says nothing at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpTargets:
    """A job that hangs, as its launcher knows it. Ranks are those of this node.

    Without ``timeout_s`` somebody has asked, and the job may be in good health: then no rank is sent the signal.
    """

    run_dir: Path
    world_size: int
    timeout_s: float | None
    pids: Mapping[int, int]  # of the ranks whose processes run
    exit_codes: Mapping[int, int]  # exit codes of those that have ended
    progress: Mapping[int, RankProgress]
    node_rank: int = 0


class RankDump:
    """One round of questions. ``begin`` makes it.

    A rank in ``init_dist``'s block has a thread that writes down its stacks and its collectives when it is asked. Where nothing
    comes, something holds the interpreter, and there is the signal, whose handler takes no lock. It is for those only:
    faulthandler walks the frames of all threads, and one that runs meanwhile, such as the one that is just answering, changes
    them under its feet: the rank would die of the question.
    """

    def __init__(self, suspects: DumpTargets, *, now: float) -> None:
        self._targets, self._started_at = suspects, now
        self._states = _process_states(suspects.pids)
        self._queried_ranks = [
            rank for rank in self._responsive_ranks() if rank in suspects.progress and suspects.progress[rank].phase != "closed"
        ]
        self._exit_codes_after_query: Mapping[int, int] = {}  # exit codes of those that ended since they were asked
        mute = [rank for rank in self._responsive_ranks() if rank not in self._queried_ranks]
        risk = suspects.timeout_s is not None  # a rank may die of the signal: one that hangs loses nothing by it
        self._signalled_ranks = self._send_signal(mute) if risk else []
        self._signal_at: float | None = now + PATIENCE_S * _SIGNAL_AFTER if risk else None
        self._deadline = now + PATIENCE_S
        self._complete_at: float | None = None

    def poll(self, now: float, *, exit_codes: Mapping[int, int]) -> float | None:
        """When to look again; None when it is time to ``finish``: all have answered or ended, or their time is over.

        Args:
            now: seconds of the monotonic clock.
            exit_codes: exit codes of the ranks that have ended by now.

        Mutates: this inspection; sends signals to ranks that do not answer.
        """
        self._exit_codes_after_query = {rank: code for rank, code in exit_codes.items() if rank in self._targets.pids}
        if len(self._exit_codes_after_query) == len(self._targets.pids):
            return None
        if self._signal_at is not None and now >= self._signal_at:
            self._signalled_ranks += self._send_signal(rank for rank in self._queried_ranks if not self._record(rank).exists())
            # From now on: this process itself may have been late.
            self._signal_at, self._deadline = None, now + PATIENCE_S * (1 - _SIGNAL_AFTER)
        if self._complete_at is None and self._is_complete():
            self._complete_at = now
        end = self._deadline if self._complete_at is None else min(self._deadline, self._complete_at + _SETTLE_S)
        return None if now >= end else min(end, now + POLL_INTERVAL_S)

    def finish(self) -> list[str]:
        """The message about the hang, to be printed as it is.

        Mutates: the run folder, which gets what is known about the ranks, and the whole as a text.
        """
        suspects, later = self._targets, _process_states(self._targets.pids)
        ranks = [
            ObservedRank(
                rank=rank,
                pid=suspects.pids.get(rank),
                progress=suspects.progress.get(rank),
                silent_s=round(self._started_at - suspects.progress[rank].at, 3) if rank in suspects.progress else None,
                exit_code=suspects.exit_codes.get(rank),
                exit_code_after_query=self._exit_codes_after_query.get(rank),
                # Any process may be in the kernel for a moment; one that hangs there stays.
                state=state if (state := self._states.get(rank, "")) == later.get(rank) else "",
                is_incomplete=self._is_incomplete(rank),
            )
            for rank in sorted({*suspects.pids, *suspects.exit_codes})
        ]
        return _write_evidence(suspects, ranks)

    def _is_complete(self) -> bool:
        """Whether nothing more will come. Of a rank that was sent the signal, a late record is still worth the wait."""
        return all(
            self._record(rank).exists() for rank in self._queried_ranks if rank not in self._exit_codes_after_query
        ) and all(read_text(self._stacks(rank)) for rank in self._signalled_ranks if rank not in self._exit_codes_after_query)

    def _is_incomplete(self, rank: int) -> bool:
        """Whether the rank ended while the signal's handler wrote, perhaps of it: what it wrote tells of the wrong thread."""
        return rank in self._exit_codes_after_query and rank in self._signalled_ranks

    def _responsive_ranks(self) -> list[int]:
        """The ranks that can answer: one that is stopped does nothing at all."""
        return [rank for rank in self._targets.pids if self._states.get(rank) not in ("T", "t")]

    def _send_signal(self, ranks: Iterable[int]) -> list[int]:
        """Have those of the ranks write their stacks that have a handler for it; which these are."""
        pids = self._targets.pids
        able = [
            rank
            for rank in ranks
            if rank not in self._exit_codes_after_query and _has_signal_handler(pids[rank], launch_protocol.STACKS_SIGNAL)
        ]
        for rank in able:
            processes.send_signal(pids[rank], launch_protocol.STACKS_SIGNAL)
        return able

    def _record(self, rank: int) -> Path:
        return launch_protocol.flight_record_file(self._targets.run_dir, rank)

    def _stacks(self, rank: int) -> Path:
        return launch_protocol.stacks_file(self._targets.run_dir, rank)


def start_dump(targets: DumpTargets, *, query_fd: int | None, now: float) -> RankDump:
    """Ask every rank for its stacks and its last collectives; those that cannot hear the question get the signal at once.

    Args:
        targets: the job.
        query_fd: the end to write to of the pipe that the ranks know as ``wire.ASK_FD``; the caller closes it.
        now: seconds of the monotonic clock.

    Mutates: sends signals; removes what an earlier start of the ranks wrote down.
    """
    clear_rank_records(_hang_folder(targets.run_dir), targets.pids)
    if query_fd is not None:
        with contextlib.suppress(OSError):  # no rank is there any more
            os.write(query_fd, b"?")
    return RankDump(targets, now=now)


def _write_evidence(suspects: DumpTargets, ranks: list[ObservedRank]) -> list[str]:
    """The message about these ranks; all that it rests on stays in the run folder."""
    account = LauncherRecord(
        node_rank=suspects.node_rank,
        at=time.time(),
        world_size=suspects.world_size,
        timeout_s=suspects.timeout_s,
        ranks=tuple(ranks),
    )
    folder = _hang_folder(suspects.run_dir)
    evidence, report = collect_evidence(folder, ranks), folder / account.report
    lines = explain_stall(evidence, world_size=account.world_size, timeout_s=account.timeout_s, report=report)
    with contextlib.suppress(OSError):  # a full disk costs the files, not the message
        folder.mkdir(parents=True, exist_ok=True)
        write_launcher_record(folder, account)
    write_hang_report(report, lines, evidence, queried_at=account.at)  # last: who has asked waits for it
    return lines


def _hang_folder(run_dir: Path) -> Path:
    return launch_protocol.stacks_file(run_dir, 0).parent


def remove_empty_dumps(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove the files in which these ranks wrote nothing: a job that did not hang leaves none.

    Those of other nodes are theirs, where the folder is on a disk that nodes share: their ranks may still run.

    Mutates: ``run_dir``, that of this launch.
    """
    for path in (launch_protocol.stacks_file(run_dir, rank) for rank in ranks):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
    with contextlib.suppress(OSError):  # not there, or something is in it
        _hang_folder(run_dir).rmdir()


def _has_signal_handler(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for the signal: one that has none (a command that is no Python) would die of it."""
    for line in read_text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _process_states(pids: Mapping[int, int]) -> dict[int, str]:
    """The letter of each rank's process in ``/proc``, empty where it cannot be read."""
    stats = {rank: read_text(Path(f"/proc/{pid}/stat")) for rank, pid in pids.items()}
    return {rank: stat.rpartition(")")[2].split()[0] if stat else "" for rank, stat in stats.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """What was found out about the ranks: because they ``is_hang``, or because somebody has asked."""

    lines: list[str]
    is_hang: bool


class Watchdog:
    """Notices that the ranks hang, asks them what they are doing, and says so. Close it when the ranks have ended.

    Args:
        run_dir: the folder of this launch.
        world_size: ranks of the whole job.
        timeout_s: without progress for so long, the ranks hang; None: they never do, but somebody may ask.
        node_rank: of this launcher.
        ranks: those of this node.

    Mutates: the run folder, in which it says where it can be asked.
    """

    def __init__(self, *, run_dir: Path, world_size: int, timeout_s: float | None, node_rank: int, ranks: range) -> None:
        self._run_dir, self._world_size, self._node_rank, self._ranks = run_dir, world_size, node_rank, ranks
        self._timer = ProgressTimer(timeout_s)
        self._dump: RankDump | None = None
        self._dump_requested_only, self._dump_requested = False, False
        self._next_poll_at: float | None = None
        self.ask_fd, self._ask = os.pipe()
        announce_launcher(run_dir, node_rank, single_node=len(ranks) == world_size)

    def record_progress(self, record: ProgressRecord) -> None:
        """Take note of what a rank reports. Mutates: this guard."""
        self._timer.record(record)

    def request_dump(self) -> None:
        """Find out what the ranks do, although they may be well; ``step`` does it. Mutates: this guard."""
        self._dump_requested = True

    @property
    def is_hang_found(self) -> bool:
        """Whether the ranks are known to hang, and have been asked."""
        return self._dump is not None and not self._dump_requested_only

    def deadline(self) -> float | None:
        """When to call ``step`` again, at the latest."""
        return self._next_poll_at if self._dump is not None else self._timer.deadline()

    def poll(self, now: float, *, pids: Mapping[int, int], exit_codes: Mapping[int, int]) -> HangReport | None:
        """Take the step that is due; the message once the ranks have been looked into.

        Args:
            now: seconds of the monotonic clock.
            pids: of the ranks that run.
            exit_codes: exit codes of those that do not.

        Mutates: this guard; sends signals to the ranks of a job that hangs.
        """
        for rank in exit_codes:
            self._timer.record_exit(rank, now)
        if self._dump is None and pids:
            self._start_dump_if_due(now, pids=pids, ended=exit_codes)
        if self._dump is None:
            return None
        self._next_poll_at = self._dump.poll(now, exit_codes=exit_codes)
        if self._next_poll_at is not None:
            return None
        answer = HangReport(lines=self._dump.finish(), is_hang=not self._dump_requested_only)
        self._dump_requested = False
        if self._dump_requested_only:
            self._dump, self._dump_requested_only = None, False
        return answer

    def _start_dump_if_due(self, now: float, *, pids: Mapping[int, int], ended: Mapping[int, int]) -> None:
        hang = self._timer.is_hung(now)
        if not hang and not self._dump_requested:
            return
        suspects = DumpTargets(
            run_dir=self._run_dir,
            world_size=self._world_size,
            timeout_s=self._timer.timeout_s if hang else None,
            pids=pids,
            exit_codes=ended,
            progress=self._timer.progress,
            node_rank=self._node_rank,
        )
        self._dump_requested_only = not hang
        self._dump = start_dump(suspects, query_fd=self._ask, now=now)

    def close(self) -> None:
        """Close the pipe by which ranks are asked, and remove what was prepared for nothing. Mutates: the run folder."""
        os.close(self.ask_fd)
        os.close(self._ask)
        withdraw_launcher(self._run_dir, self._node_rank)
        remove_empty_dumps(self._run_dir, self._ranks)
