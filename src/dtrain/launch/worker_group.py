"""One start of all ranks of a node: which of them run, how they ended, and what is due next.

Times are seconds of the monotonic clock, given by the caller. What this does to processes is to signal them.

Whether failed ranks are started again, and when. Pure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain import launch_protocol
from dtrain.launch import failure, processes
from dtrain.launch.failure import RankExit, RootCause
from dtrain.launch.launch_plan import LaunchPlan
from dtrain.launch_protocol import RankFailure

REPEATED_SIGNAL_S = 0.3  # `timeout` and a terminal may deliver one request twice; a person takes longer to repeat it

_FAILURE_COLLECT_S = 0.5  # after the first failure: the culprit may still be in its exit handlers when a peer dies of it
_KILL_RETRY_S = 0.05  # a process may fork while it is being killed
_GIVE_UP_S = 10.0  # after the first kill: what is left then sits in the kernel, and no signal reaches it


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """What is known about the ranks. ``pids`` has None for one that was asked for and is not there yet."""

    plan: LaunchPlan
    services: set[int]  # processes below the supervisor that are no ranks and outlive them
    pids: dict[int, int | None] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    unclaimed: dict[int, RankExit] = field(default_factory=dict)  # by pid: ended before we knew whose it is
    root_cause: RootCause | None = None
    launch_error: tuple[str, ...] = ()  # why the attempt failed, if not because of a rank's end
    launch_error_code: int = 1
    requested_signal: int | None = None  # the signal that asked for the end of the job
    requested_at: float = 0.0
    force_requested: bool = False  # somebody has asked again
    stopping: bool = False  # ranks were asked to end: later exits say nothing
    stopped_ranks: frozenset[int] = frozenset()  # those that ran on until they were asked to end
    orphans_signalled: bool = False
    decide_at: float | None = None
    hung: bool = False  # that is the verdict, and being explained: how ranks end meanwhile does not change it
    exit_deadline: float | None = None  # a rank has raised: by then it should have ended
    preempted_ranks: set[int] = field(default_factory=set)  # ranks that have left their script with 75: preempted and saved
    preemption_deadline: float | None = None  # a rank has saved: by then all should have ended
    kill_at: float | None = None
    give_up_at: float | None = None
    remaining_pids: list[int] = field(default_factory=list)  # pids that run on though no rank does

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in self.pids if rank not in self.exits]

    def running_pids(self) -> dict[int, int]:
        """The pids of the ranks that are there."""
        return {rank: pid for rank in self.alive if (pid := self.pids[rank]) is not None}

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the attempt runs any more."""
        return not self.alive and not self.remaining_pids

    def has_given_up(self, now: float) -> bool:
        """Whether what is left does not even die of SIGKILL."""
        return self.give_up_at is not None and now >= self.give_up_at

    def record_start(self, rank: int, pid: int, now: float) -> None:
        """Note the pid of a rank. Where the attempt is ending already, it is asked to end as well."""
        self.pids[rank] = pid
        gone = self.unclaimed.pop(pid, None)
        if gone is not None:
            self.exits[rank] = RankExit(rank=rank, code=gone.code, at=now)
        elif self.stopping:
            processes.send_signal(pid, signal.SIGTERM)

    def record_exits(self, ended: Iterable[tuple[int, int]], now: float) -> None:
        """Note processes that have ended, as pid and code."""
        ranks = {pid: rank for rank, pid in self.pids.items() if pid is not None and rank not in self.exits}
        for pid, code in ended:
            if pid in ranks:
                rank = ranks[pid]
                ended_after_save = self.stopping and rank in self.preempted_ranks
                self.exits[rank] = RankExit(
                    rank=rank, code=launch_protocol.PREEMPTED_EXIT_CODE if ended_after_save else code, at=now
                )
            else:
                self.unclaimed[pid] = RankExit(rank=-1, code=code, at=now)

    def advance(self, now: float) -> None:
        """Take every step that is due: decide about a failure, ask to end, kill."""
        if not self.stopping and not self.hung:
            self._detect_failure(now)
        alive = self.alive
        self.remaining_pids = [] if alive else [pid for pid in processes.descendants() if pid not in self.services]
        if self.remaining_pids and not self.orphans_signalled:
            self.orphans_signalled = True
            self._signal_all(signal.SIGTERM)
            if self.kill_at is None:
                self.kill_at = now + self.plan.grace_after_failure_s
        if self.kill_at is not None and now >= self.kill_at and not self.is_finished:
            self._signal_all(signal.SIGKILL)
            self.kill_at = now + _KILL_RETRY_S
            if self.give_up_at is None:
                self.give_up_at = now + _GIVE_UP_S

    def fail(self, trouble: Sequence[str], now: float, *, code: int = 1) -> None:
        """End the ranks for a reason that no rank has given."""
        if not self.stopping:
            self.launch_error, self.launch_error_code = tuple(trouble), code
            self._mark_as_failed()
            self.stop(now, signal.SIGTERM, self.plan.grace_after_failure_s)

    def stop(self, now: float, number: int, grace_s: float) -> None:
        """Ask the ranks to end with signal ``number``; what is left after ``grace_s`` seconds is killed."""
        self.stopping = True
        self.stopped_ranks = frozenset(self.alive)
        self.forward_signal(number)
        self.forward_signal(signal.SIGCONT)  # one that is stopped gets no other signal
        self.kill_at = now + grace_s

    def record_script_exit(self, rank: int, code: int, now: float) -> None:
        """Note that an exception has left a rank's script, and the exit code that follows from it.

        The process may take long to end, or for ever: its threads and exit handlers may not end.
        """
        if code == launch_protocol.PREEMPTED_EXIT_CODE:
            self.preempted_ranks.add(rank)
            self._start_preemption_grace(now)
        elif self.exit_deadline is None:
            self.exit_deadline = now + self.plan.grace_after_failure_s

    def drop_ranks(self, ranks: Iterable[int]) -> None:
        """Strike off ranks that were asked for and will not come."""
        for rank in ranks:
            self.pids.pop(rank, None)

    def forward_signal(self, number: int) -> None:
        """Pass a signal on to the ranks themselves: what they have started is their business."""
        for pid in self.running_pids().values():
            processes.send_signal(pid, number)

    def request_stop(self, number: int, now: float) -> None:
        """Somebody wants the job to end: pass it on the first time, kill at once the second time."""
        if self.requested_signal is None and self.alive:
            self.requested_signal, self.requested_at = number, now
            if number == signal.SIGINT:  # the ranks need not show where each of them was
                self._touch(launch_protocol.interrupted_file(self.plan.run_dir))
            if self.decide_at is not None and not self.stopping:  # a rank had failed before: that is the cause
                self.root_cause = self._find_root_cause()
            if self.stopping:
                self.forward_signal(number)
            else:
                self.stop(now, number, self.plan.grace_after_signal_s)
        elif self.requested_signal is None or now - self.requested_at > REPEATED_SIGNAL_S:
            self.force_requested = self.requested_signal is not None
            self.requested_signal = self.requested_signal or number
            self.stopping, self.kill_at = True, now

    def kill_now(self) -> None:
        """End everything without asking."""
        self.stopping, self.kill_at = True, 0.0

    def deadlines(self) -> list[float]:
        """When something is due."""
        due = [self.kill_at, self.give_up_at]
        if not self.stopping and not self.hung:
            due += [self.decide_at, self.exit_deadline, *([self.preemption_deadline] if self.alive else [])]
        return [at for at in due if at is not None]

    def _detect_failure(self, now: float) -> None:
        """Find out whether the ranks have failed; if so, name the cause and ask the others to end."""
        exits, alive = self.exits.values(), self.alive
        if self.decide_at is None and any(map(failure.is_failed_exit, exits)):
            first = self._find_root_cause()
            self.decide_at = now if first is not None and failure.is_certain_cause(first) else now + _FAILURE_COLLECT_S
        if self.decide_at is None and self.exit_deadline is not None and now >= self.exit_deadline:
            self.decide_at, self.exit_deadline = now if self._find_root_cause() is not None else None, None
        if any(exit_.code == launch_protocol.PREEMPTED_EXIT_CODE for exit_ in exits):  # of a program that announces nothing
            self._start_preemption_grace(now)
        if self.decide_at is not None and (now >= self.decide_at or not alive):
            self.root_cause = self._find_root_cause()
            self._mark_as_failed()
            self.stop(now, signal.SIGTERM, self.plan.grace_after_failure_s)
        elif self.decide_at is None and self.preemption_deadline is not None and now >= self.preemption_deadline and alive:
            self.stop(now, signal.SIGTERM, self.plan.grace_after_failure_s)

    def _start_preemption_grace(self, now: float) -> None:
        """Give all ranks the grace of a stop, counted from the first rank that has saved."""
        if self.preemption_deadline is None:
            self.preemption_deadline = now + self.plan.grace_after_signal_s

    def _mark_as_failed(self) -> None:
        """Let ranks that would save when they are asked to end know that not all of them are there to do so."""
        self._touch(launch_protocol.job_failed_file(self.plan.run_dir))

    @staticmethod
    def _touch(file: Path) -> None:
        with contextlib.suppress(OSError):  # it only makes ranks quicker or quieter
            file.touch()

    def read_failures(self) -> list[RankFailure]:
        """Read the records of the ranks of this node that were left by an exception."""
        records = [RankFailure.read(self.plan.failure_file(rank)) for rank in self.pids]
        return [record for record in records if record is not None]

    def _find_root_cause(self) -> RootCause | None:
        return failure.find_root_cause(list(self.exits.values()), self.read_failures())

    def _signal_all(self, number: int) -> None:
        leaders = [pid for pid in self.pids.values() if pid is not None]
        processes.signal_descendants(number, leaders, exclude=self.services)


_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often ranks were started again. ``fruitless``: those in a row after which no new checkpoint was committed."""

    max_fruitless: int  # fruitless ones that are allowed
    total: int = 0
    fruitless: int = 0
    last_committed_step: int | None = None  # the newest step that a rank has reported

    @property
    def delay_s(self) -> float | None:
        """Seconds to wait before the next start, None when there is to be none.

        None at all before the first, then doubled with each fruitless one: what fails again at once is seldom cured by haste.
        """
        if self.fruitless >= self.max_fruitless:
            return None
        return 0.0 if self.fruitless == 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self.fruitless - 1))

    def after_restart(self) -> RestartPolicy:
        """After another start."""
        return replace(self, total=self.total + 1, fruitless=self.fruitless + 1)

    def after_commit(self, step: int) -> RestartPolicy:
        """After a rank has reported a committed step; one that was saved again after going back is not new."""
        if self.last_committed_step is not None and step <= self.last_committed_step:
            return self
        return replace(self, last_committed_step=step, fruitless=0)

    def describe_next(self) -> str:
        """What is about to happen, for the user."""
        wait = f" in {self.delay_s:g} s" if self.delay_s else ""
        return f"starting all ranks again{wait} (restart {self.fruitless + 1} of at most {self.max_fruitless} without a new checkpoint)"
