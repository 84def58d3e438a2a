"""Which rank failed first, what the launcher exits with, and the one line it says. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dtrain.launch_protocol import PREEMPTED_EXIT_CODE, RankFailure

HANG_EXIT_CODE = 124
"""What the launcher exits with when the ranks made no progress, as ``timeout`` does."""

DETECTION_DELAY_S = 0.5
"""How long after a peer's exception the supervisor, on a busy machine, may first see the death that caused it."""

_OOM_HINT = "; often the kernel, out of memory"
_CONNECTION_ERRORS = {
    "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionResetError", "EOFError", "TimeoutError",
}  # fmt: skip
_MAX_MESSAGE_CHARS = 300  # characters of an exception's message in the summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A rank that has ended. ``code`` is its exit code, or the negative number of the signal that ended it; ``at`` is
    when that was seen, in seconds of the monotonic clock."""

    rank: int
    code: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The rank that failed first, and the exception it recorded, if any. ``code`` as in ``Exit``."""

    rank: int
    code: int
    failure: RankFailure | None


def is_failed_exit(exit_: RankExit) -> bool:
    """Whether a rank that ended like this ends the job; a preempted one does not, at once."""
    return exit_.code not in (0, PREEMPTED_EXIT_CODE)


def find_root_cause(exits: Sequence[RankExit], failures: Sequence[RankFailure]) -> RootCause | None:
    """The failure that the others follow from, or None when nothing failed.

    A record tells when its exception happened, so the earliest record wins over later ones, whichever process ended first. The
    exception of a collective often says no more than that a peer is gone, and a peer closes its groups before its own record is
    written: so such a record gives way to another within ``SEEN_LATE_S``. A rank that ended without a record (killed, crashed,
    ``os._exit``) is known only from when its end was seen; peers notice a lost connection within a millisecond, often before
    that. So it is the cause unless the earliest record is older by more than ``SEEN_LATE_S``. Ranks that ended without a record
    and were seen in the same moment: a signal comes before an exit code.

    Args:
        exits: ranks that ended, none of them because the launcher asked.
        failures: records of all ranks, also of those still running their exit handlers.
    """
    exited = {exit_.rank: exit_ for exit_ in exits}
    recorded = {}
    for failure in failures:
        ended = exited.get(failure.rank)
        if is_failed_exit(ended) if ended is not None else failure.exit_code != PREEMPTED_EXIT_CODE:
            recorded[failure.rank] = failure
    earliest = _earliest(recorded.values())
    silent = [
        exit_
        for exit_ in exits
        if is_failed_exit(exit_)
        and exit_.rank not in recorded
        and (earliest is None or exit_.at <= earliest.at + DETECTION_DELAY_S)
    ]
    if silent:
        first = min(silent, key=lambda exit_: (exit_.at, exit_.code >= 0, exit_.rank))
        return RootCause(rank=first.rank, code=first.code, failure=None)
    if earliest is None:
        return None
    ended = exited.get(earliest.rank)
    return RootCause(rank=earliest.rank, code=earliest.exit_code if ended is None else ended.code, failure=earliest)


def _earliest(failures: Collection[RankFailure]) -> RankFailure | None:
    """Return the earliest record. One of a collective gives way to another kind of record within ``SEEN_LATE_S``."""
    in_time = sorted(failures, key=lambda failure: (failure.at, failure.rank))
    if not in_time:
        return None
    close = [failure for failure in in_time if failure.at <= in_time[0].at + DETECTION_DELAY_S]
    return next((failure for failure in close if not failure.in_collective), in_time[0])


def is_certain_cause(cause: RootCause) -> bool:
    """Whether no other rank's failure can be behind this one: others need not be waited for before it is named."""
    if cause.failure is not None:
        return not cause.failure.maybe_from_peer
    return cause.code < 0 and cause.code != -signal.SIGABRT  # libraries abort when they lose a peer


def shell_exit_code(code: int) -> int:
    """A code as in ``Exit``, as a shell would give it: 128 + signal for a killed process."""
    return code if code >= 0 else 128 - code


def describe_failure(
    cause: RootCause,
    *,
    world_size: int,
    location: str,
    others_stopped: bool,
    same_exception: Sequence[int] = (),
    returned_early: Sequence[int] = (),
    oom_killed: bool = False,
) -> str:
    """The summary of a failed job.

    Args:
        cause: the rank that failed first.
        world_size: number of ranks.
        location: its pid and host.
        others_stopped: whether other ranks ran on until they were asked to end.
        same_exception: other ranks that made the same mistake.
        returned_early: ranks that had ended with 0: their peers often fail because of that.
        oom_killed: the kernel has counted a kill for want of memory.
    """
    rest = "; the other ranks were ended" if others_stopped else ""
    reason = _describe_exception(cause.failure)
    if returned_early and _is_lost_peer(cause.failure):
        them = "it" if len(returned_early) == 1 else "them"
        left = f"{_name_ranks(returned_early)} of {world_size} left early, with exit code 0, while others needed {them}"
        failed = f"rank {cause.rank} failed without {them}, with exit code {shell_exit_code(cause.code)} ({location})"
        return f"dtrain: launch: {left}; {failed}{reason and f': {reason}'}{rest}"
    if cause.code < 0:
        hint = ""
        if cause.code == -signal.SIGKILL:
            hint = "; the kernel killed a process of this job for want of memory" if oom_killed else _OOM_HINT
        what = f"was killed by {signal_name(-cause.code)} ({location}{hint})"
    else:
        what = f"failed with exit code {cause.code} ({location})"
    early = f"; {_name_ranks(returned_early)} had already ended with 0" if returned_early else ""
    same = (
        ""
        if not same_exception
        else f"; {'the other ranks' if len(same_exception) == world_size - 1 else _name_ranks(same_exception)} failed alike"
    )
    return f"dtrain: launch: rank {cause.rank} of {world_size} {what}{reason and f': {reason}'}{early}{same}{rest}"


def describe_partial_preemption(codes: Mapping[int, int | None]) -> str:
    """The summary of a job in which some ranks exited as preempted and others did not; None: ended by the launcher."""
    saved = sorted(rank for rank, code in codes.items() if code == PREEMPTED_EXIT_CODE)
    others = sorted(rank for rank, code in codes.items() if code != PREEMPTED_EXIT_CODE)
    how = "still running, and were ended" if any(codes[rank] is None for rank in others) else "ended with 0"
    return (
        f"dtrain: launch: ranks {_list_ranks(saved)} exited with {PREEMPTED_EXIT_CODE} (preempted and saved) but ranks {_list_ranks(others)} "
        f"{how}; {PREEMPTED_EXIT_CODE} counts only from all ranks"
    )


def describe_interrupt(number: int) -> str:
    """The summary of a job that was told to end."""
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
    return f"dtrain: launch: {words.get(signal.Signals(number), signal_name(number))}; ranks ended"


def describe_exit(code: int) -> str:
    """How a process ended whose code, as in ``Exit``, this is."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_lost_peer(failure: RankFailure | None) -> bool:
    """Return True if the exception is one that the absence of another rank causes."""
    return failure is not None and (failure.in_collective or failure.error_type in _CONNECTION_ERRORS)


def _describe_exception(failure: RankFailure | None) -> str:
    if failure is None:
        return ""
    message = next(iter(failure.message.strip().splitlines()), "")
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "..."
    if failure.error_type == "SystemExit":  # sys.exit(3) says no more than the exit code does
        return "" if message.lstrip("-").isdecimal() else message
    return f"{failure.error_type}: {message}" if message else failure.error_type


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list_ranks(ranks)}"


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
