"""What an attempt comes to: the exit code, and what is said about it. At most a dozen lines besides a traceback. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain import wire
from dtrain.launch import verdict
from dtrain.launch.attempt import Attempt
from dtrain.launch.output.templates import fill
from dtrain.launch.processes import descendants

_LAST_LINES = 8  # of the log of a rank that left no traceback; half as many before one
_LOOKED_AT = 50
_TORCHS_MARK = re.compile(r"^\[rank[0-9]+\]: ")

Tail = Callable[[int, int], list[str]]
"""The last lines of a rank's output: rank and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """``lines`` end with the launcher's one line about the cause, if there is something to say."""

    code: int
    lines: tuple[str, ...] = ()
    may_start_again: bool = False  # it failed, and nobody asked for its end
    culprit: int | None = None  # the rank that failed first


def conclude(
    attempt: Attempt,
    *,
    host: str,
    killed_for_memory: bool,
    codes: Mapping[int, int] | None = None,
    lost_store: int | None = None,
) -> End:
    """The end of an attempt in which nothing runs any more.

    Args:
        attempt: after its last rank.
        host: name of this host.
        killed_for_memory: the kernel has killed a process of this job for want of memory, by the control group's own count.
        codes: of the ranks of all nodes, where there are several and all have ended; else those of this node decide.
        lost_store: the code with which the process ended that serves the ranks' store, if it did: ranks fail because of that.
    """
    world_size = attempt.plan.layout.world_size
    stuck = _describe_stuck(attempt)
    exits = attempt.exits.values()
    ends: dict[int, int | None] = {exit_.rank: exit_.code for exit_ in exits} if codes is None else dict(codes)
    if ends and all(code == wire.PREEMPTED for code in ends.values()) and len(ends) >= attempt.plan.layout.nproc:
        return End(code=wire.PREEMPTED, lines=stuck)
    if attempt.cause is not None:
        code = verdict.exit_code(attempt.cause.code)
        if attempt.plan.says_own_end and attempt.cause.code >= 0:
            return End(code=code, lines=stuck)
        line = verdict.describe_failure(
            attempt.cause,
            world_size=world_size,
            where=f"pid {attempt.pids[attempt.cause.rank]} on {host}",
            others_ended=bool(attempt.ended_ranks - {attempt.cause.rank}),
            returned_early=sorted(exit_.rank for exit_ in exits if exit_.code == 0 and exit_.rank not in attempt.ended_ranks),
            killed_for_memory=killed_for_memory,
        )
        if lost_store is not None:
            line += f"; the process that serves the ranks' store had ended before ({verdict.describe_end(lost_store)})"
        again = attempt.asked_by is None
        return End(code=code, lines=(*stuck, line), may_start_again=again, culprit=attempt.cause.rank)
    if attempt.trouble:
        return End(code=attempt.trouble_code, lines=(*stuck, *attempt.trouble), may_start_again=attempt.asked_by is None)
    if attempt.asked_by is not None:
        return End(code=verdict.exit_code(-attempt.asked_by), lines=(*stuck, verdict.describe_interrupt(attempt.asked_by)))
    ends |= dict.fromkeys(attempt.ended_ranks)
    if wire.PREEMPTED in ends.values():
        return End(code=1, lines=(*stuck, verdict.describe_partial_preemption(ends)))
    return End(code=0, lines=stuck)


def describe_log(attempt: Attempt, end: End, tail: Tail) -> list[str]:
    """What the rank that failed had to say, if the terminal has not shown it: the last lines of its log, and its traceback."""
    if end.culprit is None or attempt.cause is None:
        return []
    mark = fill("--prefix", attempt.plan.output.prefix, attempt.plan.layout, end.culprit)
    failure = attempt.cause.failure
    trace = [] if failure is None or failure.kind == "SystemExit" else failure.frames.rstrip("\n").splitlines()
    printed = set(trace)  # the log ends with it; torch marks each of its lines with the rank
    said = [line for line in tail(end.culprit, _LOOKED_AT) if _TORCHS_MARK.sub("", line) not in printed]
    return [mark + line for line in (*said[-(_LAST_LINES // 2 if trace else _LAST_LINES) :], *trace)]


def _describe_stuck(attempt: Attempt) -> tuple[str, ...]:
    if attempt.over:
        return ()
    left = [str(pid) for pid in descendants() if pid not in attempt.services]
    if not left:  # the last of them ended since anybody looked
        return ()
    return (f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {', '.join(left)}",)
