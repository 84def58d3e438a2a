"""Handle preemption: record the stop signal, the agreement of the ranks to stop, and a state that was saved afterwards.

The signal handler only sets a flag. The flag is part of the record that ranks exchange before a step (``step_sync``), so all
ranks learn of the signal in the same step.
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
"""Interval in which repeated signals of one number count once, in seconds. A scheduler may signal both the ranks and the
launcher, which forwards the signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgreement:
    """Step of a run in which all ranks learned of the signal ``signal_number``."""

    signal_number: int
    run_key: int
    step: int


@dataclass(slots=True, kw_only=True, eq=False)
class Preemption:
    """Stop signals of this process while ``init_dist``'s block is open. ``DistContext`` holds the only instance.

    Args:
        owner_pid: pid of the process; 0 while the block is not open.
        signals: signals that ask this process to stop.
        job_failed_file: file that the launcher makes when a rank has failed. Then a signal ends the process, because a
            checkpoint needs all ranks.
        previous_handlers: handlers that this object's handler has replaced.
        received: time at which each signal first arrived.
        agreement: agreement of the ranks to stop.
        loop_polls: if True, the loop calls ``should_stop``.
        reported: if True, the loop was asked to stop.
        saved: if True, the ranks have agreed to stop and have saved afterwards.
    """

    owner_pid: int = 0
    signals: tuple[int, ...] = ()
    job_failed_file: Path | None = None
    previous_handlers: dict[int, Any] = field(default_factory=dict)
    received: dict[int, float] = field(default_factory=dict)
    agreement: StopAgreement | None = None
    loop_polls: bool = False
    reported: bool = False
    saved: bool = False

    def open(self, signals: Sequence[int], *, job_failed_file: Path | None) -> None:
        """Set the signals that ask this process to stop. No handler is installed yet."""
        self.owner_pid, self.signals, self.job_failed_file = os.getpid(), tuple(dict.fromkeys(signals)), job_failed_file

    def install_handlers(self) -> None:
        """Install the signal handlers until the end of ``init_dist``'s block, once there is a state to save.

        A signal with a handler of the user is left alone. Nothing happens without ``init_dist``, in a fork of the rank, or
        outside the main thread.

        Mutates: this process's signal handling.
        """
        if self.owner_pid != os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        for number in self.signals:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self.previous_handlers[number] = signal.signal(number, self._handle_signal)

    def pending_signal(self) -> int:
        """Return the signal that asked this rank to stop, 0 without a signal."""
        return next(iter(self.received), 0)

    def record(self, signal_number: int, *, run_key: int, step: int) -> None:
        """Record the signal that all ranks learned of in the record of a step.

        If the ranks agreed to stop in an earlier step of the run and the loop never calls ``should_stop``, nothing will be
        saved. Then the default action of the signal ends this rank, and all other ranks.

        Args:
            signal_number: signal that some rank has received, 0 without a signal.
            run_key: identity of the run, for several runs that train in turns in one process (a GAN's two states).
            step: step of the run. A step may exchange its record several times.
        """
        before = self.agreement
        if before is None:
            self.agreement = StopAgreement(signal_number=signal_number, run_key=run_key, step=step) if signal_number else None
        elif not self.loop_polls and before.run_key == run_key and step > before.step:
            _die_by_signal(before.signal_number)

    def is_agreed(self) -> bool:
        """Return True if the ranks have agreed to stop."""
        return self.agreement is not None

    def poll(self) -> bool:
        """Return ``is_agreed()``, and note that the loop can stop by itself."""
        if self.is_agreed() and not self.reported:
            self.reported = True
            spans.record_event("stop", step=spans.position()[0])
        self.loop_polls = True
        return self.is_agreed()

    def record_save(self, *, after_agreement: bool) -> None:
        """Record that a state is durable on all ranks.

        Args:
            after_agreement: if True, the state was saved after the ranks had agreed to stop.
        """
        self.saved = self.saved or after_agreement

    def close(self, *, preempted: bool) -> None:
        """Reset the state and restore the previous handlers.

        Args:
            preempted: if True, this process ends now and is restarted later. The handlers stay installed: ranks get the signal
                at different times, and a late signal must not kill a rank that has saved. A second signal ends the process.

        Mutates: this process's signal handling.
        """
        self.received.clear()
        self.agreement, self.loop_polls, self.reported, self.saved = None, False, False, False
        if preempted:
            return
        self.owner_pid = 0
        for number, handler in self.previous_handlers.items():
            # Keep a handler that the user has installed since.
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, handler)
        self.previous_handlers.clear()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        repeated = now - self.received.setdefault(number, now) > DUPLICATE_SIGNAL_S
        job_failed = self.job_failed_file is not None and self.job_failed_file.exists()
        # A fork of the rank inherits the handler, but nothing in the fork reads the flag.
        if repeated or os.getpid() != self.owner_pid or job_failed:
            _die_by_signal(number)


def _die_by_signal(signal_number: int) -> NoReturn:
    """End this process by the default action of the signal."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal_number, signal.SIG_DFL)
        signal.raise_signal(signal_number)
    # The signal may be blocked, or its default action may not end the process.
    os._exit(128 + signal_number)
