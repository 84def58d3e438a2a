"""``schedule``: in which steps the profiler is on.

``Driver``: follows the steps of one loop, and has a ``Window`` open in those that the schedule names."""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, TypeVar

import torch

from dtrain import spans
from dtrain.dist.collectives import raise_if_any_failed
from dtrain.dist.init import get_dist_info
from dtrain.dist.shutdown import register_shutdown_hook
from dtrain.errors import ConfigError
from dtrain.profiling.trace_recorder import ClockOffset, ProfileOptions, TraceRecorder, measure_clock_offset

ProfilerPhase: TypeAlias = Literal["skip", "wait", "warmup", "active", "save"]
"""Of a step. ``warmup``: the profiler is prepared; ``active``: it records; ``save``: likewise, then the trace is written."""

PhaseSchedule: TypeAlias = Callable[[int], ProfilerPhase]
"""The phase of a step by its index, from 0; the same on all ranks."""


def schedule(*, skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1) -> PhaseSchedule:
    """The phase of each step: ``skip_first`` steps are skipped, then it waits, warms up and records, ``repeat`` times.

    Args:
        skip_first: steps before all else. The first step of a process compiles, allocates, and tells nothing of the others.
        wait: steps at the start of each cycle in which nothing is done.
        warmup: steps in which the profiler is there and records nothing: what it costs to begin is in none of the others.
        active: steps that are recorded, in one trace for each cycle.
        repeat: cycles, after which the rest is skipped; 0: for ever.

    Raises:
        ConfigError: a number that is none, or below what it may be.

    Example:
        >>> phase = cyclic(skip_first=1, wait=1, warmup=1, active=2)
        >>> [phase(index) for index in range(6)]
        ['skip', 'wait', 'warmup', 'active', 'save', 'skip']
    """
    for name, number, least in (
        ("skip_first", skip_first, 0),
        ("wait", wait, 0),
        ("warmup", warmup, 0),
        ("active", active, 1),
        ("repeat", repeat, 0),
    ):
        if type(number) is not int or number < least:
            raise ConfigError(f"cyclic: {name} is a number of steps >= {least}, got {name}={number!r}")
    cycle = wait + warmup + active

    def phase(index: int) -> ProfilerPhase:
        at = index - skip_first
        if at < 0 or (repeat and at >= repeat * cycle):
            return "skip"
        at %= cycle
        if at < wait:
            return "wait"
        if at < wait + warmup:
            return "warmup"
        return "active" if at < cycle - 1 else "save"

    return phase


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _ActiveProfiler:
    """Whose turn it is: torch has one profiler for a process. Weak, so a step that is dropped in a window does not keep it."""

    holder_ref: weakref.ref[ProfilerDriver] | None = None
    registered: bool = False

    @property
    def holder(self) -> ProfilerDriver | None:
        return None if self.holder_ref is None else self.holder_ref()


_ACTIVE = _ActiveProfiler()


class ProfilerDriver:
    """What ``profile`` and ``step_profiler`` share.

    Args:
        options: is recorded.
        schedule: the phase of each step, by its index since this began.
        ranks: those that record, None for all.
    """

    __slots__ = ("__weakref__", "_broken", "_index", "_inside", "_phase", "_ranks", "_schedule", "_step", "_what", "_window")

    def __init__(self, options: ProfileOptions, schedule: PhaseSchedule, ranks: frozenset[int] | None) -> None:
        self._what, self._schedule, self._ranks = options, schedule, ranks
        self._index = 0
        self._phase: ProfilerPhase = "skip"
        self._step: int | None = None  # the step in progress, None before the first
        self._inside = False
        self._window: TraceRecorder | None = None
        self._broken = False  # on this rank: a window could not be opened or written, so there are no more

    @property
    def step(self) -> int | None:
        """The step in progress; None before the first."""
        return self._step

    def begin(self, step: int) -> None:
        """The first step begins, and is number ``step``."""
        self._step = step
        self._apply_phase(step)

    def advance(self, step: int) -> None:
        """A step has ended, and ``step`` begins."""
        if self._window is not None:
            self._window.end_step(done=True)
        self._index, self._step, self._inside = self._index + 1, step, False
        self._apply_phase(step)

    def enter_step_fn(self, step: int) -> None:
        """The step function begins with ``step``; more than once where a transform computes its gradient again."""
        if self._step is None:
            self.begin(step)
        elif self._inside and self._step != step:
            self.advance(step)  # the update of the step before was skipped, or it raised and somebody caught that
        if not self._inside and self._window is not None and self._phase in ("active", "save"):
            self._window.enter_step_fn()
        self._inside = True

    def leave_step_fn(self, step: int) -> None:
        """The step function ends, and what comes until ``enter`` is the loop's."""
        if self._window is not None:
            self._window.leave_step_fn()
        self.advance(step + 1)

    def close(self) -> None:
        """Stop, and write what was recorded so far. Nothing where nothing is open."""
        window, self._window = self._window, None
        if window is not None:
            self._run_guarded(partial(_write_trace, window))
        self._release()

    def __del__(self) -> None:
        if self._window is not None:  # a step that was dropped in the middle of a window, as in a notebook
            self.close()

    def claim(self) -> None:
        """Be the one that profiles in this process, on all ranks that record or on none: they are about to compare clocks.

        Collective: one exchange, if more than one rank records.

        Raises:
            ConfigError: somebody else does.
            PeerError: that is so on another rank.
        """
        recording, error = self._recording_ranks(), None
        if get_dist_info().rank in recording and not self._broken:
            try:
                self._acquire()
            except ConfigError as refused:
                error = refused
        try:
            if len(recording) > 1:
                raise_if_any_failed(error, caller="profile")
            elif error is not None:
                raise error
        except BaseException:
            self._release()
            raise

    def _acquire(self) -> None:
        if _ACTIVE.holder is self:
            return
        if _ACTIVE.holder is not None or torch.autograd._profiler_enabled():
            other = (
                "another dt.profiling.profile or dt.profiling.step_profiler"
                if _ACTIVE.holder is not None
                else "a profiler of torch's own"
            )
            raise ConfigError(f"profile: a process has one profiler, and {other} is running; let it end first, or leave it out")
        _ACTIVE.holder_ref = weakref.ref(self)
        if not _ACTIVE.registered:
            _ACTIVE.registered = True
            atexit.register(_close_active, None)
        register_shutdown_hook("profile", _close_active)

    def _recording_ranks(self) -> frozenset[int]:
        return frozenset(range(get_dist_info().world_size)) if self._ranks is None else self._ranks

    def _release(self) -> None:
        if _ACTIVE.holder is self:
            _ACTIVE.holder_ref = None

    def _apply_phase(self, step: int) -> None:
        """Do what the phase of the step that begins asks for."""
        phase = self._schedule(self._index)
        before, self._phase = self._phase, phase
        if phase in ("skip", "wait"):
            if before not in ("skip", "wait"):
                self.close()
            return
        if before == "save":
            self.close()
        if before in ("skip", "wait", "save"):
            self.claim()
            self._open_recorder()
        window = self._window
        if window is not None and phase != "warmup":
            self._run_guarded(partial(_mark_step, window, step))

    def _open_recorder(self) -> None:
        """A new window, on the ranks that record; the others tell the time only."""
        recording = self._recording_ranks()
        offset = measure_clock_offset() if len(recording) > 1 else ClockOffset(0, 0)
        if get_dist_info().rank in recording and not self._broken:
            self._window = self._run_guarded(partial(TraceRecorder, options=self._what, offset=offset))

    def _run_guarded(self, act: Callable[[], T]) -> T | None:
        """What observes never stops training: an error ends the profiling on this rank, with a warning."""
        try:
            with _profiler_span():
                return act()
        except Exception as error:  # noqa: BLE001  # a full disk, or a device that refuses to be profiled
            self._broken, self._window = True, None
            spans.record_event("dropped", sink="profile", error=f"{type(error).__name__}: {error}")
            self._release()
            warnings.warn(f"profile: no more traces from this rank: {type(error).__name__}: {error}", stacklevel=2)
            return None


def _profiler_span() -> AbstractContextManager[None]:
    """Where the time goes that the profiler itself takes; not into the loader's, nor into the step's."""
    return spans.span("profile", "other")


def _mark_step(window: TraceRecorder, step: int) -> None:
    if window.first_step is None:
        window.start(step)
    window.begin_step(step)


def _write_trace(window: TraceRecorder) -> None:
    path = window.write()
    if path is not None:
        spans.record_event("profiled", step=window.first_step, path=str(path))


def _close_active(error: BaseException | None) -> None:
    """At the end of ``init_dist``'s block, and of the process."""
    holder = _ACTIVE.holder
    if holder is not None:
        holder.close()
