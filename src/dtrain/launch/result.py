"""The mistakes that several ranks have made: each is shown once, however many ranks have made it. Pure.

The end of an attempt: its exit code, and the text about it. At most a dozen lines besides tracebacks. Reads the records of
the ranks' failures, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtrain import launch_protocol
from dtrain.launch import failure
from dtrain.launch.output.log_files import fill_template
from dtrain.launch.processes import descendants
from dtrain.launch.worker_group import WorkerGroup
from dtrain.launch_protocol import RankFailure

_MAX_TRACEBACKS = 4  # tracebacks of one attempt; further mistakes are counted
_MAX_MESSAGES = 8  # of ranks whose message differs from that of the first rank
_MAX_MESSAGE_CHARS = 300  # characters
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")  # differs from rank to rank
_FRAME_LOCATION = re.compile(r'^\s*File "(.*)", line ([0-9]+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctException:
    """One exception in one place of the script, and the ranks whose scripts it left; the earliest comes first."""

    failures: tuple[RankFailure, ...]

    @property
    def first(self) -> RankFailure:
        """The record of the rank that failed first."""
        return self.failures[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks that made this mistake, in order."""
        return sorted(failure.rank for failure in self.failures)

    def format_lines(self, *, full: bool) -> list[tuple[int, str]]:
        """Return the lines to show, each with its rank: the first traceback, and messages of other ranks that differ from it.

        Args:
            full: if True, with all frames of dtrain and torch.
        """
        first = self.first
        trace = ((full and first.traceback_text) or first.short_traceback or first.traceback_text).rstrip("\n").splitlines()
        others = [failure for failure in self.failures[1:] if failure.message != first.message]
        lines = [(first.rank, line) for line in trace]
        lines += [
            (failure.rank, f"{failure.error_type}: {_truncate_message(failure.message)}") for failure in others[:_MAX_MESSAGES]
        ]
        if len(others) > _MAX_MESSAGES:
            lines.append((first.rank, f"... and {len(others) - _MAX_MESSAGES} more ranks, each with a message of its own"))
        return lines


def group_exceptions(failures: Sequence[RankFailure], first: RankFailure | None) -> list[DistinctException]:
    """Group the records of ranks by mistake; the mistake of ``first`` comes first, then in the order of time.

    Two ranks made the same mistake if kind and place of the exception are the same, and the message but for its numbers. An
    exception of a collective is left out unless it is the mistake of ``first``: the rank has lost a peer.

    Args:
        failures: records of ranks, of the attempt that has ended.
        first: the record of the rank that failed first; None if that rank left no record, or no rank is named.
    """
    groups: dict[tuple[str, ...], list[RankFailure]] = {}
    for record in sorted(failures, key=lambda record: (record != first, record.at, record.rank)):
        groups.setdefault(_signature(record), []).append(record)
    return [
        DistinctException(failures=tuple(group))
        for group in groups.values()
        if group[0].error_type != "SystemExit" and (group[0] == first or not group[0].in_collective)
    ]


def format_exceptions(mistakes: Sequence[DistinctException], *, full: bool) -> list[tuple[int, str]]:
    """Return the lines to show, each with its rank; of many mistakes the first few.

    Args:
        mistakes: those that are to be shown, in order.
        full: if True, with all frames of dtrain and torch.
    """
    lines = [line for mistake in mistakes[:_MAX_TRACEBACKS] for line in mistake.format_lines(full=full)]
    if more := mistakes[_MAX_TRACEBACKS:]:
        lines.append((more[0].first.rank, f"... and {len(more)} more mistakes; the logs of the ranks have their tracebacks"))
    return lines


def _signature(failure: RankFailure) -> tuple[str, ...]:
    places = [f"{file}:{line}" for file, line in _FRAME_LOCATION.findall(failure.short_traceback or failure.traceback_text)]
    return failure.error_type, _NUMBER.sub("#", failure.message), *places


def _truncate_message(message: str) -> str:
    first = next(iter(message.strip().splitlines()), "")
    return first if len(first) <= _MAX_MESSAGE_CHARS else first[:_MAX_MESSAGE_CHARS] + "..."


_TAIL_LINES = 8  # of the log of a rank that left no traceback; half as many before one
_TAIL_SEARCH_LINES = 50
_TORCH_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ")

ReadTail = Callable[[int, int], list[str]]
"""The last lines of a rank's output: rank and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """``lines`` end with the launcher's one line about the cause, if there is something to say."""

    code: int
    lines: tuple[str, ...] = ()
    may_restart: bool = False  # it failed, and nobody asked for its end
    failed_rank: int | None = None  # the rank that failed first
    exceptions: tuple[DistinctException, ...] = ()  # to be shown before the lines


def summarize(
    group: WorkerGroup,
    *,
    host: str,
    oom_killed: bool,
    exit_codes: Mapping[int, int] | None = None,
    store_exit_code: int | None = None,
) -> JobResult:
    """The end of an attempt in which nothing runs any more.

    Args:
        group: after its last rank.
        host: name of this host.
        oom_killed: the kernel has killed a process of this job for want of memory, by the control group's own count.
        exit_codes: of the ranks of all nodes, where there are several and all have ended; else those of this node decide.
        store_exit_code: the code with which the process ended that serves the ranks' store, if it did: ranks fail because of that.
    """
    world_size = group.plan.layout.world_size
    stuck = _describe_unkillable(group)
    exits = group.exits.values()
    mistakes = _group_node_exceptions(group)
    ends: dict[int, int | None] = {exit_.rank: exit_.code for exit_ in exits} if exit_codes is None else dict(exit_codes)
    if (
        ends
        and all(code == launch_protocol.PREEMPTED_EXIT_CODE for code in ends.values())
        and len(ends) >= group.plan.layout.nproc
    ):
        return JobResult(code=launch_protocol.PREEMPTED_EXIT_CODE, lines=stuck)
    if group.root_cause is not None:
        code = failure.shell_exit_code(group.root_cause.code)
        if group.plan.reports_own_exit and group.root_cause.code >= 0:
            return JobResult(code=code, lines=stuck)
        alike = (
            [rank for rank in mistakes[0].ranks if rank != group.root_cause.rank]
            if _is_root_cause_first(mistakes, group)
            else []
        )
        line = failure.describe_failure(
            group.root_cause,
            world_size=world_size,
            location=f"pid {group.pids[group.root_cause.rank]} on {host}",
            others_stopped=bool(group.stopped_ranks - {group.root_cause.rank, *alike}),
            same_exception=alike,
            returned_early=sorted(exit_.rank for exit_ in exits if exit_.code == 0 and exit_.rank not in group.stopped_ranks),
            oom_killed=oom_killed,
        )
        if store_exit_code is not None:
            line += f"; the process that serves the ranks' store had ended before ({failure.describe_exit(store_exit_code)})"
        again = group.requested_signal is None
        return JobResult(
            code=code, lines=(*stuck, line), may_restart=again, failed_rank=group.root_cause.rank, exceptions=mistakes
        )
    if group.launch_error:
        again = group.requested_signal is None
        return JobResult(
            code=group.launch_error_code, lines=(*stuck, *group.launch_error), may_restart=again, exceptions=mistakes
        )
    if group.requested_signal is not None:
        code = failure.shell_exit_code(-group.requested_signal)
        return JobResult(code=code, lines=(*stuck, failure.describe_interrupt(group.requested_signal)), exceptions=mistakes)
    ends |= {rank: None for rank in group.stopped_ranks if ends.get(rank) != launch_protocol.PREEMPTED_EXIT_CODE}
    if launch_protocol.PREEMPTED_EXIT_CODE in ends.values():
        return JobResult(code=1, lines=(*stuck, failure.describe_partial_preemption(ends)))
    return JobResult(code=0, lines=stuck)


def describe_failures(
    group: WorkerGroup, result: JobResult, *, is_shown: Callable[[int], bool], read_tail: ReadTail, full: bool
) -> list[str]:
    """Return each mistake's traceback, once; before them the last lines of the rank that failed first, if it was not shown.

    Args:
        group: after its last rank.
        result: what ``conclude`` said of it.
        is_shown: if it returns True for a rank, the terminal has shown what that rank printed.
        read_tail: the last lines of a rank.
        full: if True, frames of dtrain and torch are shown too.
    """
    lines: list[str] = []
    mistakes = [one for one in result.exceptions if not (one.first.already_printed and is_shown(one.first.rank))]
    if result.failed_rank is not None and not is_shown(result.failed_rank):
        traced = bool(mistakes) and mistakes[0].first.rank == result.failed_rank
        # A rank that has printed its traceback itself has done so in its log; torch marks each line with the rank.
        printed = set(mistakes[0].first.traceback_text.splitlines()) if traced else set()
        said = [
            line
            for line in read_tail(result.failed_rank, _TAIL_SEARCH_LINES)
            if _TORCH_RANK_PREFIX.sub("", line) not in printed
        ]
        lines += [
            _line_prefix(group, result.failed_rank) + line for line in said[-(_TAIL_LINES // 2 if traced else _TAIL_LINES) :]
        ]
    return [*lines, *(_line_prefix(group, rank) + line for rank, line in format_exceptions(mistakes, full=full))]


def _line_prefix(attempt: WorkerGroup, rank: int) -> str:
    """Return what lines of ``rank`` begin with; nothing if it is alone and was shown as it is."""
    layout, output = attempt.plan.layout, attempt.plan.output
    alone = layout.world_size == 1 and (output.shown is None or rank in output.shown)
    return "" if alone else fill_template("--prefix", output.prefix, layout, rank)


def _group_node_exceptions(attempt: WorkerGroup) -> tuple[DistinctException, ...]:
    """Return the mistakes of this node's ranks; a Ctrl-C that was passed on to them is none."""
    failures = [
        one
        for one in attempt.read_failures()
        if one.exit_code != launch_protocol.PREEMPTED_EXIT_CODE
        and not (one.error_type == "KeyboardInterrupt" and attempt.requested_signal is not None)
    ]
    first = attempt.root_cause.failure if attempt.root_cause is not None else None
    return tuple(group_exceptions(failures, first))


def _is_root_cause_first(mistakes: Sequence[DistinctException], attempt: WorkerGroup) -> bool:
    """Return True if the first mistake is that of the rank that failed first."""
    return bool(mistakes) and attempt.root_cause is not None and mistakes[0].first.rank == attempt.root_cause.rank


def _describe_unkillable(attempt: WorkerGroup) -> tuple[str, ...]:
    if attempt.is_finished:
        return ()
    left = [str(pid) for pid in descendants() if pid not in attempt.services]
    if not left:  # the last of them ended since anybody looked
        return ()
    return (f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {', '.join(left)}",)
