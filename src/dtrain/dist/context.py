"""Hold the distributed state of this process in one object, ``DistContext``, with its stop signals, ``Preemption``.

The handler of a stop signal only sets a flag. The flag is part of the record that ranks exchange before a step (``step_sync``),
so all ranks learn of the signal in the same step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtrain import spans
from dtrain.dist.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from dtrain.dist.control_plane import Channel, ControlPlane
    from dtrain.dist.incident import Incidents
    from dtrain.dist.init import DistInfo
    from dtrain.dist.mesh import LeaderGroup
    from dtrain.dist.reconfigure import Membership
    from dtrain.dist.rendezvous import RendezvousConfig


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
        return next(iter(self.received)) if self.received else 0

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


ShutdownHook = Callable[[BaseException | None], None]
"""Called with the exception that leaves ``init_dist``'s block, or None. An exception of the hook replaces it."""


ExchangeObserver = Callable[["Channel", str, int], None]
"""Called with the channel of an exchange, ``"all_gather"`` or ``"gather"``, and the bytes that the exchange brings together."""


@dataclass(slots=True, kw_only=True, eq=False)
class ShutdownHooks:
    """Hooks that run at the end of ``init_dist``'s block, by name: those of ``first``, then those of ``last``."""

    first: dict[str, ShutdownHook] = field(default_factory=dict)
    last: dict[str, ShutdownHook] = field(default_factory=dict)

    def run(self, error: BaseException | None) -> None:
        """Run all hooks, also after one has raised. Later hooks are called with the first exception."""
        failed: BaseException | None = None
        for hook in [*self.first.values(), *self.last.values()]:
            try:
                hook(error)
            except BaseException as failure:  # noqa: BLE001 - raised below
                failed = failure if failed is None else failed
                error = failure if error is None else error
        if failed is not None:
            raise failed


@dataclass(slots=True, kw_only=True, eq=False)
class EarlierInits:
    """Facts about earlier calls of ``init_dist`` in this process, for the next call.

    Args:
        rendezvous: rank and store address of the last rendezvous.
        store: connection to the store, which the next call reuses, because rank 0 cannot listen on its port again.
        num_reused_groups: number of default groups opened by the user that ``init_dist`` has used.
        abandoned_group: NCCL groups of a failed run that could not be closed. The reference is weak, because a fork of this
            process that destroys the groups would wait for threads that exist only in this process.
    """

    rendezvous: RendezvousConfig | None = None
    store: dist.Store | None = None
    num_reused_groups: int = 0
    abandoned_group: weakref.ref[dist.ProcessGroup] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class DistContext:
    """Process groups of this process, and everything that opens and closes with them.

    ``init_dist`` opens the context, and leaving its block closes the context. Fields from ``shutdown_hooks`` on outlive the
    block, because the process may call ``init_dist`` again.

    Args:
        info: this rank and its groups; None while no groups are open.
        meshes: meshes on the open groups, by axes and degrees.
        incidents: failures of ranks, and their watch; None while no groups are open, and in a world of one.
        control_plane: connections for records and JSON; None while no groups are open.
        membership: facts of a rank that may stay when another one dies; None if all ranks start again then.
        group_store: store of the training group, if dtrain made it.
        cpu_group: gloo group for CPU tensors, made on first use; None if the training group carries them.
        leader_group: leaders of several nodes and their gloo group, made on first use.
        set_gloo_interface: if True, ``init_dist`` has set gloo's interface variable, which closing removes.
        preemption: stop signals, and the agreement of the ranks to stop.
        flight_recorder: thread that answers the launcher's requests.
        shutdown_hooks: hooks that run when the block ends.
        exchange_observers: functions that are called after each gather of the control plane.
        earlier: facts about earlier calls of ``init_dist``.
        untracked_steps: number of steps of this process on batches without a ``BatchInfo``. A loader compares the number,
            because a copy of a batch has no reference to its loader.
        issuing_loader: identity of the loader that has issued a batch since the last step; None without one.
        runs: ``RunContext`` of each run of this process that is alive. A loss may use a model that another run trains.
    """

    info: DistInfo | None = None
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    incidents: Incidents | None = None
    control_plane: ControlPlane | None = None
    membership: Membership | None = None
    cpu_group: dist.ProcessGroup | None = None
    leader_group: LeaderGroup | None = None
    group_store: dist.Store | None = None
    set_gloo_interface: bool = False
    preemption: Preemption = field(default_factory=Preemption)
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder)
    shutdown_hooks: ShutdownHooks = field(default_factory=ShutdownHooks)
    exchange_observers: list[ExchangeObserver] = field(default_factory=list)
    earlier: EarlierInits = field(default_factory=EarlierInits)
    untracked_steps: int = 0
    issuing_loader: object | None = None
    runs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


# The only reference to the context. A process has one context, because torch has one default group per process, and because
# signal handlers and the launcher's pipe belong to the process.
_CONTEXT = DistContext()


def current_context() -> DistContext:
    """Return the context of this process."""
    return _CONTEXT


def register_shutdown_hook(name: str, hook: ShutdownHook, *, last: bool = False) -> None:
    """Call ``hook`` whenever ``init_dist``'s block ends, while the groups are still open.

    Args:
        name: key of the hook. A second registration under the same name replaces the first.
        hook: called on the main thread. If called with an exception, the hook must not raise.
        last: if True, run after all hooks without ``last``.

    Mutates: the hooks of the current context.
    """
    context = current_context()
    (context.shutdown_hooks.last if last else context.shutdown_hooks.first)[name] = hook


def exit_exception() -> BaseException | None:
    """Return the exception that ended the process, for exit handlers. None in an interactive session."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
