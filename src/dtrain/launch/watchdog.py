"""Detect hanging ranks, dump their stacks and collectives, and explain the hang, in steps of the supervisor's event loop."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch import processes
from dtrain.launch.hang_report import announce_launcher, explain_stall, withdraw_launcher, write_hang_report
from dtrain.launch.heartbeats import ProgressKind, ProgressRecord
from dtrain.launch.rank_records import (
    BlockPhase,
    LauncherRecord,
    RankEvidence,
    RankProgress,
    clear_rank_records,
    collect_evidence,
    read_text,
    write_launcher_record,
)

PATIENCE_S = 3.0
"""Seconds until the ranks must answer. A record takes milliseconds, but a busy machine is slower."""

POLL_INTERVAL_S = 0.05
# fraction of PATIENCE_S after which silent ranks get the signal
_SIGNAL_AFTER = 0.5
# faulthandler writes line by line without an end mark, so wait so many seconds after the last file appears.
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpTargets:
    """Ranks of this node to query.

    Attributes:
        run_dir: folder of the launch.
        world_size: number of ranks in the job.
        timeout_s: seconds without progress; None for a query by a user, in which no rank gets a signal.
        pids: processes of running ranks.
        exit_codes: exit codes of the ranks that exited.
        progress: last progress by rank.
        node_rank: this node.
    """

    run_dir: Path
    world_size: int
    timeout_s: float | None
    pids: Mapping[int, int]
    exit_codes: Mapping[int, int]
    progress: Mapping[int, RankProgress]
    node_rank: int = 0


class RankDump:
    """Dump of stacks and collectives of all ranks. In a hang, ranks that cannot read the request get the signal at once.

    A rank in ``init_dist``'s block has a thread that writes its stacks and collectives on request. If a rank writes nothing,
    some code holds the interpreter's lock. Such a rank gets the signal, whose handler takes no lock. No other rank gets the
    signal: faulthandler walks the frames of all threads, and a thread that runs meanwhile changes its frames, which can crash
    the rank.

    Args:
        targets: ranks to query.
        query_fd: write end of the pipe that ranks know as ``launch_protocol.DUMP_REQUEST_FD``; the caller closes the pipe.
        now: seconds of the monotonic clock.

    Mutates: sends signals; removes the records of an earlier attempt.
    """

    def __init__(self, targets: DumpTargets, *, query_fd: int | None, now: float) -> None:
        clear_rank_records(launch_protocol.hang_folder(targets.run_dir), targets.pids)
        if query_fd is not None:
            # The pipe is broken if no rank runs any more.
            with contextlib.suppress(OSError):
                os.write(query_fd, b"?")
        self._targets, self._started_at = targets, now
        self._states = _process_states(targets.pids)
        self._queried_ranks = [
            rank for rank in self._responsive_ranks() if rank in targets.progress and targets.progress[rank].phase != "closed"
        ]
        # Exit codes of the ranks that exited since the query.
        self._exit_codes_after_query: Mapping[int, int] = {}
        mute = [rank for rank in self._responsive_ranks() if rank not in self._queried_ranks]
        # The signal may crash a rank, which is acceptable only for a rank that hangs.
        risk = targets.timeout_s is not None
        self._signalled_ranks = self._send_signal(mute) if risk else []
        self._signal_at: float | None = now + PATIENCE_S * _SIGNAL_AFTER if risk else None
        self._deadline = now + PATIENCE_S
        self._complete_at: float | None = None

    def poll(self, now: float, *, exit_codes: Mapping[int, int]) -> float | None:
        """Advance the dump and return the time of the next poll; None when all ranks answered or exited, or time is up.

        Args:
            now: seconds of the monotonic clock.
            exit_codes: exit codes of the ranks that exited by now.

        Mutates: this dump; sends signals to ranks that do not answer.
        """
        self._exit_codes_after_query = {rank: code for rank, code in exit_codes.items() if rank in self._targets.pids}
        if len(self._exit_codes_after_query) == len(self._targets.pids):
            return None
        if self._signal_at is not None and now >= self._signal_at:
            self._signalled_ranks += self._send_signal(rank for rank in self._queried_ranks if not self._record(rank).exists())
            # Count from now on, because this process itself may have been late.
            self._signal_at, self._deadline = None, now + PATIENCE_S * (1 - _SIGNAL_AFTER)
        if self._complete_at is None and self._is_complete():
            self._complete_at = now
        end = self._deadline if self._complete_at is None else min(self._deadline, self._complete_at + _SETTLE_S)
        return None if now >= end else min(end, now + POLL_INTERVAL_S)

    def finish(self) -> list[str]:
        """Return the explanation of the hang, ready to print.

        Mutates: the run folder, which gets the launcher's record and the full report.
        """
        targets, later = self._targets, _process_states(self._targets.pids)
        ranks = tuple(
            RankEvidence(
                rank=rank,
                pid=targets.pids.get(rank),
                progress=targets.progress.get(rank),
                silent_s=round(self._started_at - targets.progress[rank].at, 3) if rank in targets.progress else None,
                exit_code=targets.exit_codes.get(rank),
                exit_code_after_query=self._exit_codes_after_query.get(rank),
                # Any process may be in the kernel for a moment. Only an unchanged state counts.
                state=state if (state := self._states.get(rank, "")) == later.get(rank) else "",
                # The rank exited while dumping stacks.
                is_incomplete=rank in self._exit_codes_after_query and rank in self._signalled_ranks,
            )
            for rank in sorted({*targets.pids, *targets.exit_codes})
        )
        record = LauncherRecord(
            node_rank=targets.node_rank,
            at=time.time(),
            world_size=targets.world_size,
            timeout_s=targets.timeout_s,
            ranks=ranks,
        )
        folder = launch_protocol.hang_folder(targets.run_dir)
        evidence, report = collect_evidence(folder, ranks), folder / record.report
        lines = explain_stall(evidence, world_size=record.world_size, timeout_s=record.timeout_s, report=report)
        # A full disk costs the files, not the explanation.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_launcher_record(folder, record)
        # The report is last, because a query waits for the report.
        write_hang_report(report, lines, evidence, queried_at=record.at)
        return lines

    def _is_complete(self) -> bool:
        """Return True if all answers arrived. A rank that got the signal may still write a late record."""
        running = [rank for rank in self._queried_ranks if rank not in self._exit_codes_after_query]
        signalled = [rank for rank in self._signalled_ranks if rank not in self._exit_codes_after_query]
        return all(self._record(rank).exists() for rank in running) and all(read_text(self._stacks(rank)) for rank in signalled)

    def _responsive_ranks(self) -> list[int]:
        """Return the ranks that can answer, without stopped processes."""
        return [rank for rank in self._targets.pids if self._states.get(rank) not in ("T", "t")]

    def _send_signal(self, ranks: Iterable[int]) -> list[int]:
        """Send the stack signal to the ranks that handle it, and return these ranks."""
        handling = []
        for rank in ranks:
            pid = self._targets.pids[rank]
            # The signal kills a process without a handler, such as ``sleep``.
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", read_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
            handles = caught is not None and int(caught[1], 16) >> (launch_protocol.STACKS_SIGNAL - 1) & 1
            if handles and rank not in self._exit_codes_after_query:
                processes.send_signal(pid, launch_protocol.STACKS_SIGNAL)
                handling.append(rank)
        return handling

    def _record(self, rank: int) -> Path:
        return launch_protocol.flight_record_file(self._targets.run_dir, rank)

    def _stacks(self, rank: int) -> Path:
        return launch_protocol.stacks_file(self._targets.run_dir, rank)


def remove_empty_dumps(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove the empty stack files of ``ranks`` after a job without a hang.

    On a shared disk, files of other nodes stay, because ranks of other nodes may still run.

    Mutates: ``run_dir``, the folder of this launch.
    """
    for path in (launch_protocol.stacks_file(run_dir, rank) for rank in ranks):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
    # The folder may be missing or not empty.
    with contextlib.suppress(OSError):
        launch_protocol.hang_folder(run_dir).rmdir()


def _process_states(pids: Mapping[int, int]) -> dict[int, str]:
    """Return the state letter of each rank's process in ``/proc``, empty if unreadable."""
    return {rank: next(iter(processes.process_fields(pid)), "") for rank, pid in pids.items()}


_PHASES: Mapping[ProgressKind, BlockPhase] = {
    ProgressKind.OPENED: "open",
    ProgressKind.LEAVING: "leaving",
    ProgressKind.CLOSED: "closed",
}
# A supervisor that wakes up so many seconds late was suspended itself, perhaps together with its ranks.
_SUSPENDED_S = 5.0


class ProgressTimer:
    """Progress timer for the ranks of one node, for one attempt.

    A job hangs when *no* rank has made progress for ``timeout_s`` and at least one rank is in ``init_dist``'s block. A rank
    that stops soon stops the other ranks, which wait for it. While one rank makes progress, the other ranks may wait for good
    reason: one rank may save a checkpoint alone. After the block, a rank must exit once another rank has exited.

    Args:
        timeout_s: seconds, > 0; None never reports a hang and only records progress.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._progress: dict[int, RankProgress] = {}
        # Time at which each exit was seen first.
        self._exited_at: dict[int, float] = {}
        # The timer does not start before this time.
        self._not_before = 0.0

    @property
    def progress(self) -> Mapping[int, RankProgress]:
        """Last progress by rank."""
        return dict(self._progress)

    def record(self, report: ProgressRecord) -> None:
        """Record a progress report of a rank. Mutates: this timer."""
        last = self._progress.get(report.rank)
        if report.kind in _PHASES:
            passed, doing = (last.passed, last.doing) if last is not None and report.kind != ProgressKind.OPENED else (0, "")
            self._progress[report.rank] = RankProgress(phase=_PHASES[report.kind], at=report.at, passed=passed, doing=doing)
        elif report.kind == ProgressKind.PROGRESS and last is not None:
            self._progress[report.rank] = replace(last, at=report.at, passed=report.value, doing=report.activity)

    def record_exit(self, rank: int, now: float) -> None:
        """Record that the process of ``rank`` exited by ``now``. Mutates: this timer."""
        self._exited_at.setdefault(rank, now)

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget ranks that other processes replace. Mutates: this timer."""
        for rank in ranks:
            self._progress.pop(rank, None)
            self._exited_at.pop(rank, None)

    def deadline(self) -> float | None:
        """Return the time at which the job hangs if no further progress is reported.

        None without a timeout, and while every rank is outside of ``init_dist``'s block. The deadline still applies outside of
        the block if one rank exited and another rank runs on.
        """
        phases = [progress.phase for rank, progress in self._progress.items() if rank not in self._exited_at]
        if self.timeout_s is None or not phases:
            return None
        times = [self._not_before, *(progress.at for progress in self._progress.values())]
        if all(phase == "closed" for phase in phases):
            if not self._exited_at:
                return None
            times += self._exited_at.values()
        return max(times) + self.timeout_s

    def is_hung(self, now: float) -> bool:
        """Return True if the job hangs. Record all progress reports before the call.

        Mutates: this timer, if the call is much later than ``deadline``. The supervisor was then suspended (a frozen container,
        a paused machine), so the timeout starts again.
        """
        deadline = self.deadline()
        if deadline is None or self.timeout_s is None or now < deadline:
            return False
        if now > deadline + max(_SUSPENDED_S, self.timeout_s / 2):
            self._not_before = now
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """Explanation of the state of the ranks, after a hang (``is_hang``) or for a query."""

    lines: list[str]
    is_hang: bool


class Watchdog:
    """Detect a hang of the ranks of one node, dump their state and explain the hang. Close the watchdog after the ranks' exit.

    Args:
        run_dir: folder of the launch.
        world_size: number of ranks in the job.
        timeout_s: seconds without progress that count as a hang; None only answers queries.
        node_rank: node of this launcher.
        ranks: ranks of this node.

    Mutates: the run folder, which gets the address for queries.
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
        """Record a progress report of a rank. Mutates: this watchdog."""
        self._timer.record(record)

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget ranks that other processes replace. Mutates: this watchdog."""
        self._timer.forget(ranks)

    def request_dump(self) -> None:
        """Request a dump of ranks that need not hang; ``poll`` starts the dump. Mutates: this watchdog."""
        self._dump_requested = True

    @property
    def is_hang_found(self) -> bool:
        """Return True if a hang was detected and its dump was started."""
        return self._dump is not None and not self._dump_requested_only

    def deadline(self) -> float | None:
        """Return the latest time of the next ``poll``."""
        return self._next_poll_at if self._dump is not None else self._timer.deadline()

    def poll(self, now: float, *, pids: Mapping[int, int], exit_codes: Mapping[int, int]) -> HangReport | None:
        """Advance the watchdog, and return the report when a dump is complete.

        Args:
            now: seconds of the monotonic clock.
            pids: processes of running ranks.
            exit_codes: exit codes of the ranks that exited.

        Mutates: this watchdog; sends signals to the ranks of a job that hangs.
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
        report = HangReport(lines=self._dump.finish(), is_hang=not self._dump_requested_only)
        self._dump_requested = False
        if self._dump_requested_only:
            self._dump, self._dump_requested_only = None, False
        return report

    def _start_dump_if_due(self, now: float, *, pids: Mapping[int, int], ended: Mapping[int, int]) -> None:
        hang = self._timer.is_hung(now)
        if not hang and not self._dump_requested:
            return
        targets = DumpTargets(
            run_dir=self._run_dir,
            world_size=self._world_size,
            timeout_s=self._timer.timeout_s if hang else None,
            pids=pids,
            exit_codes=ended,
            progress=self._timer.progress,
            node_rank=self._node_rank,
        )
        self._dump_requested_only = not hang
        self._dump = RankDump(targets, query_fd=self._ask, now=now)

    def close(self) -> None:
        """Close the query pipe and remove empty files. Mutates: the run folder."""
        os.close(self.ask_fd)
        os.close(self._ask)
        withdraw_launcher(self._run_dir, self._node_rank)
        remove_empty_dumps(self._run_dir, self._ranks)
