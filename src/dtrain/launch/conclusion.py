"""The end of an attempt: its exit code, and the text about it. At most a dozen lines besides tracebacks. Reads the records of
the ranks' failures, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtrain import wire
from dtrain.launch import verdict
from dtrain.launch.attempt import Attempt
from dtrain.launch.mistakes import Mistake, find_mistakes, show_mistakes
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
    mistakes: tuple[Mistake, ...] = ()  # to be shown before the lines


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
    mistakes = _mistakes(attempt)
    ends: dict[int, int | None] = {exit_.rank: exit_.code for exit_ in exits} if codes is None else dict(codes)
    if ends and all(code == wire.PREEMPTED for code in ends.values()) and len(ends) >= attempt.plan.layout.nproc:
        return End(code=wire.PREEMPTED, lines=stuck)
    if attempt.cause is not None:
        code = verdict.exit_code(attempt.cause.code)
        if attempt.plan.says_own_end and attempt.cause.code >= 0:
            return End(code=code, lines=stuck)
        alike = [rank for rank in mistakes[0].ranks if rank != attempt.cause.rank] if _shows_cause(mistakes, attempt) else []
        line = verdict.describe_failure(
            attempt.cause,
            world_size=world_size,
            where=f"pid {attempt.pids[attempt.cause.rank]} on {host}",
            others_ended=bool(attempt.ended_ranks - {attempt.cause.rank, *alike}),
            alike=alike,
            returned_early=sorted(exit_.rank for exit_ in exits if exit_.code == 0 and exit_.rank not in attempt.ended_ranks),
            killed_for_memory=killed_for_memory,
        )
        if lost_store is not None:
            line += f"; the process that serves the ranks' store had ended before ({verdict.describe_end(lost_store)})"
        again = attempt.asked_by is None
        return End(code=code, lines=(*stuck, line), may_start_again=again, culprit=attempt.cause.rank, mistakes=mistakes)
    if attempt.trouble:
        again = attempt.asked_by is None
        return End(code=attempt.trouble_code, lines=(*stuck, *attempt.trouble), may_start_again=again, mistakes=mistakes)
    if attempt.asked_by is not None:
        code = verdict.exit_code(-attempt.asked_by)
        return End(code=code, lines=(*stuck, verdict.describe_interrupt(attempt.asked_by)), mistakes=mistakes)
    ends |= {rank: None for rank in attempt.ended_ranks if ends.get(rank) != wire.PREEMPTED}
    if wire.PREEMPTED in ends.values():
        return End(code=1, lines=(*stuck, verdict.describe_partial_preemption(ends)))
    return End(code=0, lines=stuck)


def describe_failures(attempt: Attempt, end: End, *, shows: Callable[[int], bool], tail: Tail, full: bool) -> list[str]:
    """Return each mistake's traceback, once; before them the last lines of the rank that failed first, if it was not shown.

    Args:
        attempt: after its last rank.
        end: what ``conclude`` said of it.
        shows: if it returns True for a rank, the terminal has shown what that rank printed.
        tail: the last lines of a rank.
        full: if True, frames of dtrain and torch are shown too.
    """
    lines: list[str] = []
    mistakes = [one for one in end.mistakes if not (one.first.printed and shows(one.first.rank))]
    if end.culprit is not None and not shows(end.culprit):
        traced = bool(mistakes) and mistakes[0].first.rank == end.culprit
        # A rank that has printed its traceback itself has done so in its log; torch marks each line with the rank.
        printed = set(mistakes[0].first.frames.splitlines()) if traced else set()
        said = [line for line in tail(end.culprit, _LOOKED_AT) if _TORCHS_MARK.sub("", line) not in printed]
        lines += [_mark(attempt, end.culprit) + line for line in said[-(_LAST_LINES // 2 if traced else _LAST_LINES) :]]
    return [*lines, *(_mark(attempt, rank) + line for rank, line in show_mistakes(mistakes, full=full))]


def _mark(attempt: Attempt, rank: int) -> str:
    """Return what lines of ``rank`` begin with; nothing if it is alone and was shown as it is."""
    layout, output = attempt.plan.layout, attempt.plan.output
    alone = layout.world_size == 1 and (output.shown is None or rank in output.shown)
    return "" if alone else fill("--prefix", output.prefix, layout, rank)


def _mistakes(attempt: Attempt) -> tuple[Mistake, ...]:
    """Return the mistakes of this node's ranks; a Ctrl-C that was passed on to them is none."""
    failures = [
        one
        for one in attempt.failures()
        if one.exit_code != wire.PREEMPTED and not (one.kind == "KeyboardInterrupt" and attempt.asked_by is not None)
    ]
    first = attempt.cause.failure if attempt.cause is not None else None
    return tuple(find_mistakes(failures, first))


def _shows_cause(mistakes: Sequence[Mistake], attempt: Attempt) -> bool:
    """Return True if the first mistake is that of the rank that failed first."""
    return bool(mistakes) and attempt.cause is not None and mistakes[0].first.rank == attempt.cause.rank


def _describe_stuck(attempt: Attempt) -> tuple[str, ...]:
    if attempt.over:
        return ()
    left = [str(pid) for pid in descendants() if pid not in attempt.services]
    if not left:  # the last of them ended since anybody looked
        return ()
    return (f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {', '.join(left)}",)
