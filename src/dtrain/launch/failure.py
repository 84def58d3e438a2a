"""Find the rank that failed first, derive the launcher's exit code, and format the summary line. No side effects."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.launch_protocol import PREEMPTED_EXIT_CODE, RankFailure

HANG_EXIT_CODE = 124
"""Exit code of the launcher after a hang, as in ``timeout``."""

DETECTION_DELAY_S = 0.5
"""Seconds between the exception of a peer and the time at which a busy supervisor may first see the exit that caused it."""

_OOM_HINT = "; often the kernel, out of memory"
_CONNECTION_ERRORS = {
    "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionResetError", "EOFError", "TimeoutError",
}  # fmt: skip
_LOST_PEER_ERRORS = _CONNECTION_ERRORS | {"DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "RuntimeError"}
_MAX_MESSAGE_CHARS = 300  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """Exit of a rank.

    ``code`` is the exit code, negative for a signal. ``at`` is the time of detection, in seconds of the monotonic clock.
    """

    rank: int
    code: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Rank that failed first, its exit code as in ``RankExit``, and the exception that the rank recorded, if any."""

    rank: int
    code: int
    failure: RankFailure | None


def is_failed_exit(exit_: RankExit) -> bool:
    """Return True if the exit ends the job. The exit of a preempted rank does not end the job at once."""
    return exit_.code not in (0, PREEMPTED_EXIT_CODE)


def find_root_cause(exits: Sequence[RankExit], failures: Sequence[RankFailure]) -> RootCause | None:
    """Return the failure that caused all other failures, or None without failures.

    A record has the time of its exception, so the earliest record wins, whichever process exited first. The exception of a
    collective often only reports a lost peer, and a peer closes its process groups before the peer writes its own record. So a
    collective's record gives way to another record within ``DETECTION_DELAY_S``.

    A rank without a record (killed, crashed, ``os._exit``) is known only from the detection of its exit. Peers notice a lost
    connection within a millisecond, often before that detection. So a rank without a record is the cause, unless the earliest
    record is older by more than ``DETECTION_DELAY_S``. A signal other than SIGABRT has no cause in another rank. So a rank that
    such a signal killed precedes a record that a lost peer explains, however late a busy launcher detects the exit, and exits
    that are detected within ``DETECTION_DELAY_S`` of it.

    Args:
        exits: exits that the launcher did not request.
        failures: records of all ranks, including ranks that still run their exit handlers.
    """
    exited = {exit_.rank: exit_ for exit_ in exits}
    recorded = {}
    for failure in failures:
        exit_of_rank = exited.get(failure.rank)
        if is_failed_exit(exit_of_rank) if exit_of_rank is not None else failure.exit_code != PREEMPTED_EXIT_CODE:
            recorded[failure.rank] = failure
    in_time = sorted(recorded.values(), key=lambda failure: (failure.at, failure.rank))
    close = [failure for failure in in_time if failure.at <= in_time[0].at + DETECTION_DELAY_S]
    # A collective's record gives way to another kind of record.
    earliest = min(close, key=lambda failure: failure.in_collective, default=None)
    silent = [
        exit_
        for exit_ in exits
        if is_failed_exit(exit_)
        and exit_.rank not in recorded
        and (
            earliest is None
            or exit_.at <= earliest.at + DETECTION_DELAY_S
            or (earliest.maybe_from_peer and is_killed_from_outside(exit_.code))
        )
    ]
    if silent:
        latest = min(exit_.at for exit_ in silent) + DETECTION_DELAY_S
        killed = [exit_ for exit_ in silent if is_killed_from_outside(exit_.code) and exit_.at <= latest]
        first = min(killed or silent, key=lambda exit_: (exit_.at, exit_.code >= 0, exit_.rank))
        return RootCause(rank=first.rank, code=first.code, failure=None)
    if earliest is None:
        return None
    exit_of_rank = exited.get(earliest.rank)
    return RootCause(
        rank=earliest.rank, code=earliest.exit_code if exit_of_rank is None else exit_of_rank.code, failure=earliest
    )


def is_certain_cause(cause: RootCause) -> bool:
    """Return True if no other rank's failure can have caused this failure, so the launcher need not wait for other records."""
    if cause.failure is not None:
        return not cause.failure.maybe_from_peer
    return is_killed_from_outside(cause.code)


def is_killed_from_outside(code: int) -> bool:
    """Return True if a signal ended the process for which no other rank can be the reason."""
    # Libraries abort when they lose a peer.
    return code < 0 and code != -signal.SIGABRT


def may_be_of_another_node(cause: RootCause) -> bool:
    """Return True if the rank only lost a connection, as after the end of another node."""
    return cause.failure is not None and cause.failure.in_collective and cause.failure.error_type in _LOST_PEER_ERRORS


def shell_exit_code(code: int) -> int:
    """Convert a code of ``RankExit`` to a shell's exit code: 128 + signal for a killed process."""
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
    """Format the summary of a failed job.

    Args:
        cause: the rank that failed first.
        world_size: number of ranks.
        location: pid and host of the rank.
        others_stopped: if True, the launcher ended other ranks.
        same_exception: other ranks with the same exception.
        returned_early: ranks that had exited with code 0, which often makes their peers fail.
        oom_killed: if True, the kernel counted an out-of-memory kill.
    """
    rest = "; the other ranks were ended" if others_stopped else ""
    reason = _describe_exception(cause.failure)
    # The absence of another rank causes such an exception.
    lost = cause.failure is not None and (cause.failure.in_collective or cause.failure.error_type in _CONNECTION_ERRORS)
    if returned_early and lost:
        pronoun = "it" if len(returned_early) == 1 else "them"
        early = f"{_name_ranks(returned_early)} of {world_size} left early, with exit code 0, while others needed {pronoun}"
        failed = f"rank {cause.rank} failed without {pronoun}, with exit code {shell_exit_code(cause.code)} ({location})"
        return f"dtrain: launch: {early}; {failed}{reason and f': {reason}'}{rest}"
    if cause.code < 0:
        hint = ""
        if cause.code == -signal.SIGKILL:
            hint = "; the kernel killed a process of this job for want of memory" if oom_killed else _OOM_HINT
        outcome = f"was killed by {signal_name(-cause.code)} ({location}{hint})"
    else:
        outcome = f"failed with exit code {cause.code} ({location})"
    early = f"; {_name_ranks(returned_early)} had already ended with 0" if returned_early else ""
    same = (
        ""
        if not same_exception
        else f"; {'the other ranks' if len(same_exception) == world_size - 1 else _name_ranks(same_exception)} failed alike"
    )
    return f"dtrain: launch: rank {cause.rank} of {world_size} {outcome}{reason and f': {reason}'}{early}{same}{rest}"


def describe_partial_preemption(codes: Mapping[int, int | None]) -> str:
    """Format the summary of a job in which only some ranks exited as preempted. Code None: ended by the launcher."""
    saved = sorted(rank for rank, code in codes.items() if code == PREEMPTED_EXIT_CODE)
    others = sorted(rank for rank, code in codes.items() if code != PREEMPTED_EXIT_CODE)
    state = "still running, and were ended" if any(codes[rank] is None for rank in others) else "ended with 0"
    return (
        f"dtrain: launch: ranks {_list_ranks(saved)} exited with {PREEMPTED_EXIT_CODE} (preempted and saved) "
        f"but ranks {_list_ranks(others)} {state}; {PREEMPTED_EXIT_CODE} counts only from all ranks"
    )


def describe_interrupt(number: int) -> str:
    """Format the summary of a job that a signal ended."""
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
    return f"dtrain: launch: {words.get(signal.Signals(number), signal_name(number))}; ranks ended"


def describe_exit(code: int) -> str:
    """Describe an exit with a code of ``RankExit``."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def describe_cause(cause: RootCause) -> str:
    """Describe the failure of a rank in a few words: its exception, or its exit."""
    return _describe_exception(cause.failure) or describe_exit(cause.code)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _describe_exception(failure: RankFailure | None) -> str:
    if failure is None:
        return ""
    message = shorten_message(failure.message)
    # sys.exit(3) has no information besides the exit code.
    if failure.error_type == "SystemExit":
        return "" if message.lstrip("-").isdecimal() else message
    return f"{failure.error_type}: {message}" if message else failure.error_type


def shorten_message(message: str) -> str:
    """Return the first line of an exception's message, cut if it is long."""
    first = next(iter(message.strip().splitlines()), "")
    return first if len(first) <= _MAX_MESSAGE_CHARS else first[:_MAX_MESSAGE_CHARS] + "..."


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list_ranks(ranks)}"


def _list_ranks(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"{first}, ..." if len(ranks) > 8 else first
