"""Summarize an attempt: its exit code, its summary lines, and each distinct exception of its ranks once.

The text has at most a dozen lines besides tracebacks. The module reads the failure records of the ranks and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtrain import launch_protocol
from dtrain.arguments import format_count
from dtrain.launch import failure
from dtrain.launch.failure import RootCause, shorten_message
from dtrain.launch.job_output import fill_template
from dtrain.launch.processes import descendants
from dtrain.launch.worker_group import WorkerGroup
from dtrain.launch_protocol import RankFailure

# Further exceptions of an attempt are only counted.
_MAX_TRACEBACKS = 4
# ranks whose message differs from the message of the first rank
_MAX_MESSAGES = 8
# Numbers differ from rank to rank.
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
_FRAME_LOCATION = re.compile(r'^\s*File "(.*)", line ([0-9]+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctException:
    """Exception at one location of the script, with the records of the ranks that raised it; the earliest record is first."""

    failures: tuple[RankFailure, ...]

    @property
    def first(self) -> RankFailure:
        """Record of the rank that raised the exception first."""
        return self.failures[0]

    @property
    def ranks(self) -> list[int]:
        """Ranks that raised the exception, sorted."""
        return sorted(failure.rank for failure in self.failures)

    def format_lines(self, *, full: bool) -> list[tuple[int, str]]:
        """Format the first traceback and the differing messages of other ranks as pairs of rank and line.

        Args:
            full: if True, frames of dtrain and torch are shown.
        """
        first = self.first
        trace = ((full and first.traceback_text) or first.short_traceback or first.traceback_text).rstrip("\n").splitlines()
        others = [failure for failure in self.failures[1:] if failure.message != first.message]
        lines = [(first.rank, line) for line in trace]
        lines += [
            (failure.rank, f"{failure.error_type}: {shorten_message(failure.message)}") for failure in others[:_MAX_MESSAGES]
        ]
        if len(others) > _MAX_MESSAGES:
            more = format_count(len(others) - _MAX_MESSAGES, "more rank")
            lines.append((first.rank, f"... and {more}, each with a message of its own"))
        return lines


def group_exceptions(failures: Sequence[RankFailure], first: RankFailure | None) -> list[DistinctException]:
    """Group failure records by exception; the exception of ``first`` comes first, then in order of time.

    Two exceptions are the same if their types, locations and messages agree, except for numbers in messages. The exception of a
    collective is omitted unless ``first`` raised it, because it only reports a lost peer.

    Args:
        failures: records of the ranks of an attempt.
        first: the record of the rank that failed first; None if no such record exists.
    """
    groups: dict[tuple[str, ...], list[RankFailure]] = {}
    for record in sorted(failures, key=lambda record: (record != first, record.at, record.rank)):
        frames = _FRAME_LOCATION.findall(record.short_traceback or record.traceback_text)
        groups.setdefault((record.error_type, _NUMBER.sub("#", record.message), *map(":".join, frames)), []).append(record)
    return [
        DistinctException(failures=tuple(group))
        for group in groups.values()
        if group[0].error_type != "SystemExit" and (group[0] == first or not group[0].in_collective)
    ]


def format_exceptions(exceptions: Sequence[DistinctException], *, full: bool) -> list[tuple[int, str]]:
    """Format the first few exceptions as pairs of rank and line.

    Args:
        exceptions: exceptions to show, in order.
        full: if True, frames of dtrain and torch are shown.
    """
    lines = [line for exception in exceptions[:_MAX_TRACEBACKS] for line in exception.format_lines(full=full)]
    if more := exceptions[_MAX_TRACEBACKS:]:
        count = format_count(len(more), "more mistake")
        lines.append((more[0].first.rank, f"... and {count}; the logs of the ranks have the tracebacks"))
    return lines


# lines of the log of a rank without a traceback; half as many before a traceback
_TAIL_LINES = 8
_TAIL_SEARCH_LINES = 50
_TORCH_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ")

ReadTail = Callable[[int, int], list[str]]
"""Function from a rank and a number of lines to the last lines of the rank's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of an attempt.

    Attributes:
        code: exit code of the launcher.
        lines: summary lines; the last line is the cause, if any.
        may_restart: True if the attempt failed, nobody requested its end, and no wrong argument would fail again.
        failed_rank: the rank that failed first.
        exceptions: exceptions to show before the lines.
    """

    code: int
    lines: tuple[str, ...] = ()
    may_restart: bool = False
    failed_rank: int | None = None
    exceptions: tuple[DistinctException, ...] = ()


def summarize(
    group: WorkerGroup,
    *,
    host: str,
    oom_killed: bool,
    exit_codes: Mapping[int, int] | None = None,
    store_exit_code: int | None = None,
) -> JobResult:
    """Summarize an attempt after the exit of its last process.

    Args:
        group: ranks of this node.
        host: name of this host.
        oom_killed: if True, the control group counted an out-of-memory kill of this job.
        exit_codes: exit codes of the ranks of all nodes, if all have exited; None uses the ranks of this node.
        store_exit_code: exit code of the store process, if it exited before the ranks, which makes ranks fail.
    """
    # The last process may have exited meanwhile.
    remaining = [] if group.is_finished else [str(pid) for pid in descendants() if pid not in group.services]
    text = f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {', '.join(remaining)}"
    unkillable = (text,) if remaining else ()
    exceptions = _group_node_exceptions(group)
    record = None if group.root_cause is None else group.root_cause.failure
    may_restart = group.ending.requested_signal is None and not (record is not None and record.is_config_error)
    codes: dict[int, int | None] = dict(exit_codes or {rank: exit_.code for rank, exit_ in group.exits.items()})
    if len(codes) >= group.plan.layout.nproc and set(codes.values()) == {launch_protocol.PREEMPTED_EXIT_CODE}:
        return JobResult(code=launch_protocol.PREEMPTED_EXIT_CODE, lines=unkillable)
    if (cause := group.root_cause) is not None:
        code = failure.shell_exit_code(cause.code)
        line = _describe_cause(group, cause, exceptions, host=host, oom_killed=oom_killed)
        if store_exit_code is not None:
            line += f"; the process that serves the ranks' store had ended before ({failure.describe_exit(store_exit_code)})"
        lines = (*unkillable, line)
        return JobResult(code=code, lines=lines, may_restart=may_restart, failed_rank=cause.rank, exceptions=exceptions)
    if group.launch_error is not None:
        lines = (*unkillable, *group.launch_error.lines)
        return JobResult(code=group.launch_error.code, lines=lines, may_restart=may_restart, exceptions=exceptions)
    if group.ending.requested_signal is not None:
        lines = (*unkillable, failure.describe_interrupt(group.ending.requested_signal))
        return JobResult(code=failure.shell_exit_code(-group.ending.requested_signal), lines=lines, exceptions=exceptions)
    codes |= {rank: None for rank in group.stopped_ranks if codes.get(rank) != launch_protocol.PREEMPTED_EXIT_CODE}
    if launch_protocol.PREEMPTED_EXIT_CODE in codes.values():
        return JobResult(code=1, lines=(*unkillable, failure.describe_partial_preemption(codes)))
    return JobResult(code=0, lines=unkillable)


def _describe_cause(
    group: WorkerGroup, cause: RootCause, exceptions: Sequence[DistinctException], *, host: str, oom_killed: bool
) -> str:
    """Describe the rank that failed first, and the other ranks with the same exception."""
    is_first = bool(exceptions) and exceptions[0].first.rank == cause.rank
    same_exception = [rank for rank in exceptions[0].ranks if rank != cause.rank] if is_first else []
    return failure.describe_failure(
        cause,
        world_size=group.plan.layout.world_size,
        location=f"pid {group.pids[cause.rank]} on {host}",
        others_stopped=bool(group.stopped_ranks - {cause.rank, *same_exception}),
        same_exception=same_exception,
        returned_early=sorted(set(group.exits) - group.stopped_ranks - {r for r, exit_ in group.exits.items() if exit_.code}),
        oom_killed=oom_killed,
    )


def describe_failures(
    group: WorkerGroup, result: JobResult, *, is_shown: Callable[[int], bool], read_tail: ReadTail, full: bool
) -> list[str]:
    """Format each exception once, after the last output of the rank that failed first unless the terminal has shown it.

    Args:
        group: ranks of this node, after their exit.
        result: result of ``summarize``.
        is_shown: function that returns True for a rank whose output the terminal has shown.
        read_tail: function that returns the last lines of a rank's output.
        full: if True, frames of dtrain and torch are shown.
    """
    lines: list[str] = []
    exceptions = [item for item in result.exceptions if not (item.first.already_printed and is_shown(item.first.rank))]
    if result.failed_rank is not None and not is_shown(result.failed_rank):
        traced = bool(exceptions) and exceptions[0].first.rank == result.failed_rank
        # The log contains a traceback that the rank printed itself. torch adds the rank to each line.
        printed = set(exceptions[0].first.traceback_text.splitlines()) if traced else set()
        tail = [
            line
            for line in read_tail(result.failed_rank, _TAIL_SEARCH_LINES)
            if _TORCH_RANK_PREFIX.sub("", line) not in printed
        ]
        lines += [
            _line_prefix(group, result.failed_rank) + line for line in tail[-(_TAIL_LINES // 2 if traced else _TAIL_LINES) :]
        ]
    return [*lines, *(_line_prefix(group, rank) + line for rank, line in format_exceptions(exceptions, full=full))]


def _line_prefix(group: WorkerGroup, rank: int) -> str:
    """Return the prefix of lines of ``rank``; empty for a single rank that is shown unchanged."""
    layout, output = group.plan.layout, group.plan.output
    is_single = layout.world_size == 1 and (output.shown is None or rank in output.shown)
    return "" if is_single else fill_template("--prefix", output.prefix, layout, rank)


def _group_node_exceptions(group: WorkerGroup) -> tuple[DistinctException, ...]:
    """Return the exceptions of this node's ranks, without a Ctrl-C that was forwarded to the ranks."""
    failures = [
        record
        for record in group.read_failures()
        if record.exit_code != launch_protocol.PREEMPTED_EXIT_CODE
        and not (record.error_type == "KeyboardInterrupt" and group.ending.requested_signal is not None)
    ]
    first = group.root_cause.failure if group.root_cause is not None else None
    return tuple(group_exceptions(failures, first))
