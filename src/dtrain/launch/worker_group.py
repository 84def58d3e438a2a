"""Track one attempt of all ranks of a node: running ranks, exits, deadlines and signals.

When a rank fails, ``WorkerGroup`` decides how the other ranks end, and ``RestartPolicy`` about the next attempt. Times are
seconds of the monotonic clock, passed by the caller. The only effects on processes are signals. Only
``kill_service`` and ``wait_for_service`` wait.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch import failure, processes
from dtrain.launch.failure import RankExit, RootCause
from dtrain.launch.heartbeats import ProgressKind, ProgressRecord
from dtrain.launch.launch_plan import DEFAULT_SILENCE_S, LaunchPlan
from dtrain.launch_protocol import RankFailure

# `timeout` and a terminal may deliver one request twice. A person takes longer to repeat a request.
REPEATED_SIGNAL_S = 0.3

# The rank that failed first may still run its exit handlers when a peer fails.
_FAILURE_COLLECT_S = 0.5
# A rank that has left ``init_dist``, and so its peers, may still run its exit handlers. On a busy machine they take seconds.
_LEAVING_S = 10.0
# The ranks of this node have only lost a connection. The cause may be another node, and a silent node is found after
# ``DEFAULT_SILENCE_S``, at its next missing heartbeat.
NODE_NEWS_S = DEFAULT_SILENCE_S + 3.0
# A process may fork while it is being killed.
_KILL_RETRY_S = 0.05
# seconds to wait for killed services
_REAP_S = 10.0
# Processes that survive SIGKILL for so long wait in the kernel, and no signal reaches them.
_GIVE_UP_S = 10.0


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """Signs of a failure, until the root cause is determined.

    Attributes:
        decide_at: time at which the root cause is determined; None without a failure.
        leave_deadline: time until which the determination waits for the exit of a rank that has left its peers.
        closed_ranks: ranks that have left ``init_dist``'s block.
        awaits_news: if True, the root cause is determined at ``decide_at`` even if no rank is left, because another node may
            report the cause before.
        hung: True while a hang is explained, so exits meanwhile are not failures.
        exit_deadline: time by which a rank that raised an exception must have exited.
        preempted_ranks: ranks whose script ended as preempted, after a save.
        preemption_deadline: time by which all ranks must have exited after the first save.
    """

    decide_at: float | None = None
    leave_deadline: float = 0.0
    closed_ranks: set[int] = field(default_factory=set)
    awaits_news: bool = False
    hung: bool = False
    exit_deadline: float | None = None
    preempted_ranks: set[int] = field(default_factory=set)
    preemption_deadline: float | None = None


@dataclass(slots=True, kw_only=True)
class Ending:
    """Requests to end the ranks, and the deadlines that follow.

    Attributes:
        requested_signal: signal that requested the end of the job.
        requested_at: time of the request.
        force_requested: True after a repeated request.
        orphans_signalled: True once processes without ranks got SIGTERM.
        kill_at: time of SIGKILL.
        give_up_at: time after which survivors of SIGKILL are ignored.
    """

    requested_signal: int | None = None
    requested_at: float = 0.0
    force_requested: bool = False
    orphans_signalled: bool = False
    kill_at: float | None = None
    give_up_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchError:
    """Failure that is not a rank's exit: lines for the user, and the exit code of the launcher."""

    lines: tuple[str, ...]
    code: int = 1


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """State of the ranks of this node in one attempt.

    Attributes:
        plan: the launch.
        services: processes below the supervisor that are not ranks and outlive the ranks.
        pids: processes by rank; None for a rank that was requested and has not started.
        exits: exits by rank.
        unclaimed: exits by pid of processes that are not known as ranks.
        root_cause: the failure that caused all other failures.
        launch_error: failure that is not a rank's exit.
        stopping: True once the ranks were asked to end, so later exits are not failures.
        stopped_ranks: ranks that ran until they were asked to end.
        remaining_pids: processes that run after all ranks exited.
        diagnosis: signs of a failure.
        ending: requests to end, and their deadlines.
        staying_ranks: ranks that stay when another rank dies.
        may_replace: if True, dead ranks may be replaced.
        dead_ranks: ranks to replace, while all others stay.
        is_asked: if True, a rank waits for the word that no rank is replaced.
    """

    plan: LaunchPlan
    services: set[int]
    pids: dict[int, int | None] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    unclaimed: dict[int, RankExit] = field(default_factory=dict)
    root_cause: RootCause | None = None
    launch_error: LaunchError | None = None
    stopping: bool = False
    stopped_ranks: frozenset[int] = frozenset()
    remaining_pids: list[int] = field(default_factory=list)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    ending: Ending = field(default_factory=Ending)
    staying_ranks: set[int] = field(default_factory=set)
    may_replace: bool = False
    dead_ranks: tuple[int, ...] = ()
    is_asked: bool = False

    @property
    def alive(self) -> list[int]:
        """Ranks that have not exited."""
        return [rank for rank in self.pids if rank not in self.exits]

    def running_pids(self) -> dict[int, int]:
        """Return the pids of the running ranks."""
        return {rank: pid for rank in self.alive if (pid := self.pids[rank]) is not None}

    @property
    def is_finished(self) -> bool:
        """Return True if no process of the attempt runs."""
        return not self.alive and not self.remaining_pids

    def has_given_up(self, now: float) -> bool:
        """Return True if some processes survived SIGKILL for too long."""
        return self.ending.give_up_at is not None and now >= self.ending.give_up_at

    def record_start(self, rank: int, pid: int, now: float) -> None:
        """Record the pid of a rank. If the attempt is stopping, the rank gets SIGTERM."""
        self.pids[rank] = pid
        early_exit = self.unclaimed.pop(pid, None)
        if early_exit is not None:
            self.exits[rank] = RankExit(rank=rank, code=early_exit.code, at=now)
        elif self.stopping:
            processes.send_signal(pid, signal.SIGTERM)

    def record_exits(self, ended: Iterable[tuple[int, int]], now: float) -> None:
        """Record exited processes, as pairs of pid and code."""
        ranks = {pid: rank for rank, pid in self.pids.items() if pid is not None and rank not in self.exits}
        for pid, code in ended:
            if pid in ranks:
                rank = ranks[pid]
                ended_after_save = self.stopping and rank in self.diagnosis.preempted_ranks
                self.exits[rank] = RankExit(
                    rank=rank, code=launch_protocol.PREEMPTED_EXIT_CODE if ended_after_save else code, at=now
                )
            else:
                self.unclaimed[pid] = RankExit(rank=-1, code=code, at=now)

    def advance(self, now: float) -> None:
        """Take every step that is due: determine the root cause, ask ranks to end, kill processes."""
        ending = self.ending
        if not self.stopping and not self.diagnosis.hung:
            self._detect_failure(now)
        alive = self.alive
        self.remaining_pids = [] if alive else [pid for pid in processes.descendants() if pid not in self.services]
        if self.remaining_pids and not ending.orphans_signalled:
            ending.orphans_signalled = True
            self._signal_all(signal.SIGTERM)
            if ending.kill_at is None:
                ending.kill_at = now + self.plan.grace_after_failure_s
        if ending.kill_at is not None and now >= ending.kill_at and not self.is_finished:
            self._signal_all(signal.SIGKILL)
            ending.kill_at = now + _KILL_RETRY_S
            if ending.give_up_at is None:
                ending.give_up_at = now + _GIVE_UP_S

    def fail(self, lines: Sequence[str], now: float, *, code: int = 1) -> None:
        """End the ranks because of a failure that is not a rank's exit."""
        if not self.stopping:
            self.launch_error = LaunchError(lines=tuple(lines), code=code)
            self._mark_as_failed()
            self.stop(now, signal.SIGTERM, self.plan.grace_of_others_s)

    def stop(self, now: float, number: int, grace_s: float) -> None:
        """Ask the ranks to end with signal ``number``, and kill the remaining processes after ``grace_s`` seconds."""
        self.stopping = True
        self.stopped_ranks = frozenset(self.alive)
        self.forward_signal(number)
        # A stopped process does not handle other signals.
        self.forward_signal(signal.SIGCONT)
        self.ending.kill_at = now + grace_s

    def record_script_exit(self, rank: int, code: int, now: float) -> None:
        """Record that an exception ended a rank's script, and the resulting exit code.

        The process may take long to exit, or never exit, because of its threads and exit handlers.
        """
        if code == launch_protocol.PREEMPTED_EXIT_CODE:
            self.diagnosis.preempted_ranks.add(rank)
            self._start_preemption_grace(now)
        elif self.diagnosis.exit_deadline is None:
            self.diagnosis.exit_deadline = now + self.plan.grace_after_failure_s

    def record_progress(self, record: ProgressRecord, now: float) -> None:
        """Record a progress report of a rank."""
        if record.kind == ProgressKind.CLOSED:
            self.diagnosis.closed_ranks.add(record.rank)
        elif record.kind == ProgressKind.FAILED:
            self.record_script_exit(record.rank, record.value, now)
        elif record.kind == ProgressKind.ASKS:
            self.is_asked = True
        elif record.kind == ProgressKind.STAYS and record.value:
            self.staying_ranks.add(record.rank)
        elif record.kind == ProgressKind.STAYS:
            self.staying_ranks.discard(record.rank)

    def drop_ranks(self, ranks: Iterable[int]) -> None:
        """Drop ranks that were requested and will not start."""
        for rank in ranks:
            self.pids.pop(rank, None)

    def forward_signal(self, number: int) -> None:
        """Send a signal to the ranks themselves, but not to the processes that they started."""
        for pid in self.running_pids().values():
            processes.send_signal(pid, number)

    def request_stop(self, number: int, now: float) -> None:
        """Handle a request to end the job: forward the first request, kill at once after the second request."""
        ending = self.ending
        if ending.requested_signal is None and self.alive:
            ending.requested_signal, ending.requested_at = number, now
            # After Ctrl-C the ranks do not print their tracebacks.
            if number == signal.SIGINT:
                self._touch(launch_protocol.interrupted_file(self.plan.run_dir))
            # A rank that had failed before the request is the cause.
            if self.diagnosis.decide_at is not None and not self.stopping:
                self.root_cause = self._find_root_cause()
            if self.stopping:
                self.forward_signal(number)
            else:
                self.stop(now, number, self.plan.grace_after_signal_s)
        elif ending.requested_signal is None or now - ending.requested_at > REPEATED_SIGNAL_S:
            ending.force_requested = ending.requested_signal is not None
            ending.requested_signal = ending.requested_signal or number
            self.stopping, ending.kill_at = True, now

    def kill_now(self) -> None:
        """Kill all processes without a request to end."""
        self.stopping, self.ending.kill_at = True, 0.0

    def kill_service(self, pid: int) -> None:
        """Kill a service, unless it has exited, and wait for its exit."""
        if pid not in self.unclaimed:
            processes.send_signal(pid, signal.SIGKILL)
            self.wait_for_service(pid, _REAP_S)
        self.services.discard(pid)

    def wait_for_service(self, pid: int, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the exit of a service."""
        deadline = time.monotonic() + timeout_s
        while pid not in self.unclaimed and time.monotonic() < deadline:
            self.record_exits(processes.reap_children()[0], time.monotonic())
            time.sleep(0.001)

    def deadlines(self) -> list[float]:
        """Return the times of the next steps."""
        ending, signs = self.ending, self.diagnosis
        due = [ending.kill_at, ending.give_up_at]
        if not self.stopping and not signs.hung:
            due += [signs.decide_at, signs.exit_deadline, *([signs.preemption_deadline] if self.alive else [])]
        return [deadline for deadline in due if deadline is not None]

    def _detect_failure(self, now: float) -> None:
        """Detect a failure of the ranks; if there is a failure, determine the root cause and ask the other ranks to end."""
        signs, exits, alive = self.diagnosis, self.exits.values(), self.alive
        if signs.decide_at is None and any(map(failure.is_failed_exit, exits)):
            first = self._find_root_cause()
            signs.decide_at = now if first is not None and failure.is_certain_cause(first) else now + _FAILURE_COLLECT_S
            signs.leave_deadline = now + _LEAVING_S
        if signs.decide_at is not None and signs.decide_at <= now < signs.leave_deadline and self._is_rank_leaving():
            signs.decide_at = min(now + _FAILURE_COLLECT_S, signs.leave_deadline)
        if signs.decide_at is not None and (now >= signs.decide_at or not alive) and not signs.awaits_news:
            cause = self._find_root_cause()
            # The ranks of this node have only lost a connection, and other nodes may know the cause.
            if self.plan.layout.nodes > 1 and cause is not None and failure.may_be_of_another_node(cause):
                signs.decide_at, signs.awaits_news = now + NODE_NEWS_S, True
        if signs.decide_at is None and signs.exit_deadline is not None and now >= signs.exit_deadline:
            signs.decide_at, signs.exit_deadline = now if self._find_root_cause() is not None else None, None
        # Some programs exit as preempted without an announcement.
        if any(exit_.code == launch_protocol.PREEMPTED_EXIT_CODE for exit_ in exits):
            self._start_preemption_grace(now)
        if signs.decide_at is not None and (now >= signs.decide_at or not (alive or signs.awaits_news)):
            if self._can_replace():
                self.dead_ranks = tuple(sorted(self.exits))
                return
            self.root_cause = self._find_root_cause()
            self._mark_as_failed()
            self.stop(now, signal.SIGTERM, self.plan.grace_of_others_s)
        elif signs.decide_at is None and signs.preemption_deadline is not None and now >= signs.preemption_deadline and alive:
            self.stop(now, signal.SIGTERM, self.plan.grace_after_failure_s)

    def _can_replace(self) -> bool:
        """Return True if all ranks stay but those that were killed, which cannot be the fault of another rank."""
        killed = [failure.is_killed_from_outside(exit_.code) for exit_ in self.exits.values()]
        ranks = set(self.plan.layout.ranks)
        is_known = ranks == self.staying_ranks and set(self.running_pids()) | set(self.exits) == ranks
        return self.may_replace and is_known and all(killed) and bool(self.alive) and not self.read_failures()

    def forget_dead_ranks(self) -> None:
        """Forget the dead ranks, before their new processes start. The other ranks must say again that they stay.

        Processes that the dead ranks have left are killed: they may hold ports and files that the new ones need.
        """
        # Each rank leads a session.
        processes.kill_sessions({pid for rank in self.dead_ranks if (pid := self.pids[rank]) is not None})
        for rank in self.dead_ranks:
            del self.exits[rank]
            self.pids[rank] = None
        self.dead_ranks, self.diagnosis = (), Diagnosis()
        self.staying_ranks.clear()

    def _is_rank_leaving(self) -> bool:
        """Return True if a rank has left its peers without an exception and still runs, and a peer has only lost a connection.

        Such a rank may be the cause, which its exit code tells once the rank has exited.
        """
        cause = self._find_root_cause()
        if cause is None or cause.failure is None or not cause.failure.maybe_from_peer:
            return False
        return bool(self.diagnosis.closed_ranks.intersection(self.alive) - {record.rank for record in self.read_failures()})

    def _start_preemption_grace(self, now: float) -> None:
        """Set the deadline of a stop for all ranks, from the exit of the first rank that has saved."""
        if self.diagnosis.preemption_deadline is None:
            self.diagnosis.preemption_deadline = now + self.plan.grace_after_signal_s

    def _mark_as_failed(self) -> None:
        """Mark the job as failed, so that ranks that save on a stop request know that some ranks are missing."""
        self._touch(launch_protocol.job_failed_file(self.plan.run_dir))

    @staticmethod
    def _touch(file: Path) -> None:
        # The file only makes ranks quicker or quieter.
        with contextlib.suppress(OSError):
            file.touch()

    def read_failures(self) -> list[RankFailure]:
        """Read the failure records of this node's ranks."""
        records = [RankFailure.read(self.plan.failure_file(rank)) for rank in self.pids]
        return [record for record in records if record is not None]

    def _find_root_cause(self) -> RootCause | None:
        return failure.find_root_cause(list(self.exits.values()), self.read_failures())

    def _signal_all(self, number: int) -> None:
        leaders = [pid for pid in self.pids.values() if pid is not None]
        processes.signal_descendants(number, leaders, exclude=self.services)


@dataclass(slots=True, kw_only=True, eq=False)
class RankStore:
    """Store of the ranks of one attempt.

    Attributes:
        port: port of the store; on another node than node 0, the port on node 0.
        listener: socket of the store, until a process serves it.
        pid: process that serves the store.
        exit_code: exit code of the process, if it exited before the ranks.
    """

    port: int = 0
    listener: socket.socket | None = None
    pid: int | None = None
    exit_code: int | None = None


_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Restart counts of the ranks. A restart is fruitless if no new checkpoint follows.

    Attributes:
        max_fruitless: fruitless restarts in a row that are allowed.
        total: restarts so far.
        fruitless: fruitless restarts in a row.
        last_committed_step: newest step that a rank has committed.
        in_replacement: if True, the last restart was the replacement of dead ranks, and no new checkpoint has followed. It may
            fail because the ranks cannot stay, so a restart of all ranks is allowed as if nothing had been tried.
    """

    max_fruitless: int
    total: int = 0
    fruitless: int = 0
    last_committed_step: int | None = None
    in_replacement: bool = False

    @property
    def delay_s(self) -> float | None:
        """Seconds to wait before the next attempt; None if no further attempt is allowed.

        Zero before the first restart, then doubled by each fruitless restart, because an early retry seldom helps.
        """
        if self._counted >= self.max_fruitless:
            return None
        return 0.0 if self._counted == 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self._counted - 1))

    def after_restart(self) -> RestartPolicy:
        """Return the policy after one more restart of all ranks."""
        return replace(self, total=self.total + 1, fruitless=self._counted + 1, in_replacement=False)

    def after_replacement(self) -> RestartPolicy:
        """Return the policy after a restart of dead ranks only."""
        return replace(self, total=self.total + 1, fruitless=self.fruitless + 1, in_replacement=True)

    def after_commit(self, step: int) -> RestartPolicy:
        """Return the policy after a rank committed ``step``; a step that is saved again after a restart is not new."""
        if self.last_committed_step is not None and step <= self.last_committed_step:
            return self
        return replace(self, last_committed_step=step, fruitless=0, in_replacement=False)

    def describe_next(self, killed: Mapping[int, RankExit] | None = None) -> str:
        """Describe the next attempt for the user: of all ranks, or only of those that were ``killed``."""
        wait = f" in {self.delay_s:g} s" if self.delay_s else ""
        count = f"restart {self._counted + 1} of at most {self.max_fruitless} without a new checkpoint"
        if killed:
            dead = ", ".join(f"rank {rank} was {failure.describe_exit(exit_.code)}" for rank, exit_ in sorted(killed.items()))
            return f"{dead}; the other ranks stay, starting {'it' if len(killed) == 1 else 'them'} again ({count})"
        return f"starting all ranks again{wait} ({count})"

    @property
    def _counted(self) -> int:
        return self.fruitless - self.in_replacement
