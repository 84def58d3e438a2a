"""Preemption: the signal that asks this rank to save and stop, what the ranks agreed about it, and whether it was saved since.

The handler sets a flag and nothing else. The flag travels in the record that ranks exchange before a step (``control``), so all
of them learn of it in the same step, whichever of them got the signal. These are facts of the process, like its groups.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dtrain import spans

DUPLICATE_SIGNAL_S = 2.0
"""Signals of one number that come within so many seconds are one request: a scheduler may signal the launcher, which forwards
it, and the ranks as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StopAgreement:
    """In which step of which run all ranks learned of the signal ``signal_number``."""

    signal_number: int
    run_key: int
    step: int


@dataclass(slots=True)
class _PreemptionState:
    """What this process knows while ``init_dist``'s block is open; ``owner_pid`` is its pid then, 0 otherwise."""

    owner_pid: int = 0
    signals: tuple[int, ...] = ()
    job_failed_file: Path | None = None  # a file that is there once the job has failed
    previous_handlers: dict[int, Any] = field(default_factory=dict)  # handlers in whose place ours is
    received: dict[int, float] = field(default_factory=dict)  # when a signal came first
    agreement: _StopAgreement | None = None
    loop_polls: bool = False  # the loop calls should_stop
    reported: bool = False  # it was told to stop
    saved: bool = False


_STATE = _PreemptionState()


def configure(signals: Sequence[int], *, job_failed_file: Path | None = None) -> None:
    """Note which signals ask this process to stop; nothing is installed yet.

    Args:
        signals: their numbers.
        job_failed_file: a file that the launcher makes when a rank has failed: the signals mean the end then, since nobody can save.

    Mutates: this process's record.
    """
    _STATE.owner_pid, _STATE.signals, _STATE.job_failed_file = os.getpid(), tuple(dict.fromkeys(signals)), job_failed_file


def install_handlers() -> None:
    """Take the signals in hand, from now on until the end of ``init_dist``'s block: there is a state that could be saved.

    A signal that has a handler of the user's own is left to it. Nothing happens without ``init_dist``, in a fork of the rank,
    or outside the main thread.

    Mutates: this process's signal handling.
    """
    if _STATE.owner_pid != os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    for number in _STATE.signals:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _STATE.previous_handlers[number] = signal.signal(number, _handle_signal)


def pending_signal() -> int:
    """The signal that has asked this rank to stop, 0 when none has."""
    return next(iter(_STATE.received), 0)


def record(signal_number: int, *, run_key: int, step: int) -> None:
    """Note what all ranks have heard in the record of a step.

    Where they had agreed to stop in an earlier step of the run, and the loop has never asked, nobody will save: this rank ends
    as the signal would have ended it, and so do the others.

    Args:
        signal_number: a signal that some rank has got, 0 when none has.
        run_key: tells apart what trains in turns in one process (a GAN's two states).
        step: of the run; a step may exchange its record several times.

    Mutates: this process's record.
    """
    before = _STATE.agreement
    if before is None:
        _STATE.agreement = _StopAgreement(signal_number=signal_number, run_key=run_key, step=step) if signal_number else None
    elif not _STATE.loop_polls and before.run_key == run_key and step > before.step:
        _die_by_signal(before.signal_number)


def is_agreed() -> bool:
    """Whether the ranks have agreed to stop."""
    return _STATE.agreement is not None


def poll() -> bool:
    """``agreed``, for a loop: it has a way to stop. Mutates: this process's record."""
    if is_agreed() and not _STATE.reported:
        _STATE.reported = True
        spans.record_event("stop", step=spans.position()[0])
    _STATE.loop_polls = True
    return is_agreed()


def record_save(*, after_agreement: bool) -> None:
    """Note that a state is durable on all ranks.

    Args:
        after_agreement: it was taken after they had agreed to stop.

    Mutates: this process's record.
    """
    _STATE.saved = _STATE.saved or after_agreement


def is_saved() -> bool:
    """Whether the ranks have agreed to stop, and have saved since."""
    return _STATE.saved


def reset(*, preempted: bool) -> None:
    """Forget it all, and put the previous handlers back.

    Args:
        preempted: this process ends now, to be started again. Its handlers stay: not all ranks get a signal at the same time,
            and one that comes late must not kill a rank that has done what it asks for. A second one ends it, as ever.

    Mutates: this process's record and signal handling.
    """
    _STATE.received.clear()
    _STATE.agreement, _STATE.loop_polls, _STATE.reported, _STATE.saved = None, False, False, False
    if preempted:
        return
    _STATE.owner_pid = 0
    for number, handler in _STATE.previous_handlers.items():
        if signal.getsignal(number) is _handle_signal:  # not one that the user has put on top since
            signal.signal(number, handler)
    _STATE.previous_handlers.clear()


def _handle_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    again = now - _STATE.received.setdefault(number, now) > DUPLICATE_SIGNAL_S
    # A fork of the rank has its handlers, but nobody there looks at the flag.
    if again or os.getpid() != _STATE.owner_pid or (_STATE.job_failed_file is not None and _STATE.job_failed_file.exists()):
        _die_by_signal(number)


def _die_by_signal(signal_number: int) -> NoReturn:
    """End this process as the signal does that nobody handles."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal_number, signal.SIG_DFL)
        signal.raise_signal(signal_number)
    os._exit(128 + signal_number)  # a signal that is blocked, or ends nothing by default
