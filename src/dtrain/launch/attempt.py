"""One start of all ranks of a node: which of them run, how they ended, and what is due next.

Times are seconds of the monotonic clock, given by the caller. What this does to processes is to signal them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtrain import wire
from dtrain.launch import processes, verdict
from dtrain.launch.plan import LaunchPlan
from dtrain.launch.verdict import Cause, Exit
from dtrain.wire import Failure

REPEAT_S = 0.3  # `timeout` and a terminal may deliver one request twice; a person takes longer to repeat it

_COLLECT_S = 0.5  # after the first failure: the culprit may still be in its exit handlers when a peer dies of it
_KILL_AGAIN_S = 0.05  # a process may fork while it is being killed
_GIVE_UP_S = 10.0  # after the first kill: what is left then sits in the kernel, and no signal reaches it


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What is known about the ranks. ``pids`` has None for one that was asked for and is not there yet."""

    plan: LaunchPlan
    services: set[int]  # processes below the supervisor that are no ranks and outlive them
    pids: dict[int, int | None] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    unclaimed: dict[int, Exit] = field(default_factory=dict)  # by pid: ended before we knew whose it is
    cause: Cause | None = None
    trouble: tuple[str, ...] = ()  # why the attempt failed, if not because of a rank's end
    trouble_code: int = 1
    asked_by: int | None = None  # the signal that asked for the end of the job
    asked_at: float = 0.0
    insisted: bool = False  # somebody has asked again
    ending: bool = False  # ranks were asked to end: later exits say nothing
    ended_ranks: frozenset[int] = frozenset()  # those that ran on until they were asked to end
    orphans_asked: bool = False
    decide_at: float | None = None
    hangs: bool = False  # that is the verdict, and being explained: how ranks end meanwhile does not change it
    raised_until: float | None = None  # a rank has raised: by then it should have ended
    saved: set[int] = field(default_factory=set)  # ranks that have left their script with 75: preempted and saved
    preempted_until: float | None = None  # a rank has saved: by then all should have ended
    kill_at: float | None = None
    give_up_at: float | None = None
    left: list[int] = field(default_factory=list)  # pids that run on though no rank does

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in self.pids if rank not in self.exits]

    def running(self) -> dict[int, int]:
        """The pids of the ranks that are there."""
        return {rank: pid for rank in self.alive if (pid := self.pids[rank]) is not None}

    @property
    def over(self) -> bool:
        """Whether nothing of the attempt runs any more."""
        return not self.alive and not self.left

    def gave_up(self, now: float) -> bool:
        """Whether what is left does not even die of SIGKILL."""
        return self.give_up_at is not None and now >= self.give_up_at

    def started(self, rank: int, pid: int, now: float) -> None:
        """Note the pid of a rank. Where the attempt is ending already, it is asked to end as well."""
        self.pids[rank] = pid
        gone = self.unclaimed.pop(pid, None)
        if gone is not None:
            self.exits[rank] = Exit(rank=rank, code=gone.code, at=now)
        elif self.ending:
            processes.send(pid, signal.SIGTERM)

    def collect(self, ended: Iterable[tuple[int, int]], now: float) -> None:
        """Note processes that have ended, as pid and code."""
        ranks = {pid: rank for rank, pid in self.pids.items() if pid is not None and rank not in self.exits}
        for pid, code in ended:
            if pid in ranks:
                rank = ranks[pid]
                ended_after_save = self.ending and rank in self.saved
                self.exits[rank] = Exit(rank=rank, code=wire.PREEMPTED if ended_after_save else code, at=now)
            else:
                self.unclaimed[pid] = Exit(rank=-1, code=code, at=now)

    def advance(self, now: float) -> None:
        """Take every step that is due: decide about a failure, ask to end, kill."""
        if not self.ending and not self.hangs:
            self._decide(now)
        alive = self.alive
        self.left = [] if alive else [pid for pid in processes.descendants() if pid not in self.services]
        if self.left and not self.orphans_asked:
            self.orphans_asked = True
            self._signal_all(signal.SIGTERM)
            if self.kill_at is None:
                self.kill_at = now + self.plan.grace_after_failure_s
        if self.kill_at is not None and now >= self.kill_at and not self.over:
            self._signal_all(signal.SIGKILL)
            self.kill_at = now + _KILL_AGAIN_S
            if self.give_up_at is None:
                self.give_up_at = now + _GIVE_UP_S

    def fail(self, trouble: Sequence[str], now: float, *, code: int = 1) -> None:
        """End the ranks for a reason that no rank has given."""
        if not self.ending:
            self.trouble, self.trouble_code = tuple(trouble), code
            self._mark_as_failed()
            self.end(now, signal.SIGTERM, self.plan.grace_after_failure_s)

    def end(self, now: float, number: int, grace_s: float) -> None:
        """Ask the ranks to end with signal ``number``; what is left after ``grace_s`` seconds is killed."""
        self.ending = True
        self.ended_ranks = frozenset(self.alive)
        self.forward(number)
        self.forward(signal.SIGCONT)  # one that is stopped gets no other signal
        self.kill_at = now + grace_s

    def left_script(self, rank: int, code: int, now: float) -> None:
        """Note that an exception has left a rank's script, and the exit code that follows from it.

        The process may take long to end, or for ever: its threads and exit handlers may not end.
        """
        if code == wire.PREEMPTED:
            self.saved.add(rank)
            self._begin_preemption(now)
        elif self.raised_until is None:
            self.raised_until = now + self.plan.grace_after_failure_s

    def forget(self, ranks: Iterable[int]) -> None:
        """Strike off ranks that were asked for and will not come."""
        for rank in ranks:
            self.pids.pop(rank, None)

    def forward(self, number: int) -> None:
        """Pass a signal on to the ranks themselves: what they have started is their business."""
        for pid in self.running().values():
            processes.send(pid, number)

    def ask_to_end(self, number: int, now: float) -> None:
        """Somebody wants the job to end: pass it on the first time, kill at once the second time."""
        if self.asked_by is None and self.alive:
            self.asked_by, self.asked_at = number, now
            if number == signal.SIGINT:  # the ranks need not show where each of them was
                self._leave(wire.interrupted_file(self.plan.run_dir))
            if self.decide_at is not None and not self.ending:  # a rank had failed before: that is the cause
                self.cause = self._first_failure()
            if self.ending:
                self.forward(number)
            else:
                self.end(now, number, self.plan.grace_after_signal_s)
        elif self.asked_by is None or now - self.asked_at > REPEAT_S:
            self.insisted = self.asked_by is not None
            self.asked_by = self.asked_by or number
            self.ending, self.kill_at = True, now

    def kill_now(self) -> None:
        """End everything without asking."""
        self.ending, self.kill_at = True, 0.0

    def deadlines(self) -> list[float]:
        """When something is due."""
        due = [self.kill_at, self.give_up_at]
        if not self.ending and not self.hangs:
            due += [self.decide_at, self.raised_until, *([self.preempted_until] if self.alive else [])]
        return [at for at in due if at is not None]

    def _decide(self, now: float) -> None:
        """Find out whether the ranks have failed; if so, name the cause and ask the others to end."""
        exits, alive = self.exits.values(), self.alive
        if self.decide_at is None and any(map(verdict.is_failure, exits)):
            first = self._first_failure()
            self.decide_at = now if first is not None and verdict.is_certain(first) else now + _COLLECT_S
        if self.decide_at is None and self.raised_until is not None and now >= self.raised_until:
            self.decide_at, self.raised_until = now if self._first_failure() is not None else None, None
        if any(exit_.code == wire.PREEMPTED for exit_ in exits):  # of a program that announces nothing
            self._begin_preemption(now)
        if self.decide_at is not None and (now >= self.decide_at or not alive):
            self.cause = self._first_failure()
            self._mark_as_failed()
            self.end(now, signal.SIGTERM, self.plan.grace_after_failure_s)
        elif self.decide_at is None and self.preempted_until is not None and now >= self.preempted_until and alive:
            self.end(now, signal.SIGTERM, self.plan.grace_after_failure_s)

    def _begin_preemption(self, now: float) -> None:
        """Give all ranks the grace of a stop, counted from the first rank that has saved."""
        if self.preempted_until is None:
            self.preempted_until = now + self.plan.grace_after_signal_s

    def _mark_as_failed(self) -> None:
        """Let ranks that would save when they are asked to end know that not all of them are there to do so."""
        self._leave(wire.failed_file(self.plan.run_dir))

    @staticmethod
    def _leave(file: Path) -> None:
        with contextlib.suppress(OSError):  # it only makes ranks quicker or quieter
            file.touch()

    def failures(self) -> list[Failure]:
        """Read the records of the ranks of this node that were left by an exception."""
        records = [Failure.read(self.plan.failure_file(rank)) for rank in self.pids]
        return [record for record in records if record is not None]

    def _first_failure(self) -> Cause | None:
        return verdict.first_failure(list(self.exits.values()), self.failures())

    def _signal_all(self, number: int) -> None:
        leaders = [pid for pid in self.pids.values() if pid is not None]
        processes.send_all(number, leaders, spare=self.services)
