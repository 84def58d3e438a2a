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

SAME_S = 2.0
"""Signals of one number that come within so many seconds are one request: a scheduler may signal the launcher, which forwards
it, and the ranks as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreement:
    """In which step of which run all ranks learned of the signal ``number``."""

    number: int
    run: int
    step: int


@dataclass(slots=True)
class _Process:
    """What this process knows while ``init_dist``'s block is open; ``owner`` is its pid then, 0 otherwise."""

    owner: int = 0
    signals: tuple[int, ...] = ()
    failed: Path | None = None  # a file that is there once the job has failed
    previous: dict[int, Any] = field(default_factory=dict)  # handlers in whose place ours is
    seen: dict[int, float] = field(default_factory=dict)  # when a signal came first
    agreed: _Agreement | None = None
    asked: bool = False  # the loop calls should_stop
    told: bool = False  # it was told to stop
    saved: bool = False


_PROCESS = _Process()


def begin(signals: Sequence[int], *, failed: Path | None = None) -> None:
    """Note which signals ask this process to stop; nothing is installed yet.

    Args:
        signals: their numbers.
        failed: a file that the launcher makes when a rank has failed: the signals mean the end then, since nobody can save.

    Mutates: this process's record.
    """
    _PROCESS.owner, _PROCESS.signals, _PROCESS.failed = os.getpid(), tuple(dict.fromkeys(signals)), failed


def watch() -> None:
    """Take the signals in hand, from now on until the end of ``init_dist``'s block: there is a state that could be saved.

    A signal that has a handler of the user's own is left to it. Nothing happens without ``init_dist``, in a fork of the rank,
    or outside the main thread.

    Mutates: this process's signal handling.
    """
    if _PROCESS.owner != os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    for number in _PROCESS.signals:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _PROCESS.previous[number] = signal.signal(number, _on_signal)


def wanted() -> int:
    """The signal that has asked this rank to stop, 0 when none has."""
    return next(iter(_PROCESS.seen), 0)


def settle(number: int, *, run: int, step: int) -> None:
    """Note what all ranks have heard in the record of a step.

    Where they had agreed to stop in an earlier step of the run, and the loop has never asked, nobody will save: this rank ends
    as the signal would have ended it, and so do the others.

    Args:
        number: a signal that some rank has got, 0 when none has.
        run: tells apart what trains in turns in one process (a GAN's two states).
        step: of the run; a step may exchange its record several times.

    Mutates: this process's record.
    """
    before = _PROCESS.agreed
    if before is None:
        _PROCESS.agreed = _Agreement(number=number, run=run, step=step) if number else None
    elif not _PROCESS.asked and before.run == run and step > before.step:
        _end_by(before.number)


def agreed() -> bool:
    """Whether the ranks have agreed to stop."""
    return _PROCESS.agreed is not None


def ask() -> bool:
    """``agreed``, for a loop: it has a way to stop. Mutates: this process's record."""
    if agreed() and not _PROCESS.told:
        _PROCESS.told = True
        spans.event("stop", step=spans.position()[0])
    _PROCESS.asked = True
    return agreed()


def committed(*, since_agreed: bool) -> None:
    """Note that a state is durable on all ranks.

    Args:
        since_agreed: it was taken after they had agreed to stop.

    Mutates: this process's record.
    """
    _PROCESS.saved = _PROCESS.saved or since_agreed


def saved() -> bool:
    """Whether the ranks have agreed to stop, and have saved since."""
    return _PROCESS.saved


def finish(*, preempted: bool) -> None:
    """Forget it all, and put the previous handlers back.

    Args:
        preempted: this process ends now, to be started again. Its handlers stay: not all ranks get a signal at the same time,
            and one that comes late must not kill a rank that has done what it asks for. A second one ends it, as ever.

    Mutates: this process's record and signal handling.
    """
    _PROCESS.seen.clear()
    _PROCESS.agreed, _PROCESS.asked, _PROCESS.told, _PROCESS.saved = None, False, False, False
    if preempted:
        return
    _PROCESS.owner = 0
    for number, handler in _PROCESS.previous.items():
        if signal.getsignal(number) is _on_signal:  # not one that the user has put on top since
            signal.signal(number, handler)
    _PROCESS.previous.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    again = now - _PROCESS.seen.setdefault(number, now) > SAME_S
    # A fork of the rank has its handlers, but nobody there looks at the flag.
    if again or os.getpid() != _PROCESS.owner or (_PROCESS.failed is not None and _PROCESS.failed.exists()):
        _end_by(number)


def _end_by(number: int) -> NoReturn:
    """End this process as the signal does that nobody handles."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    os._exit(128 + number)  # a signal that is blocked, or ends nothing by default
