"""Select the steps to profile (``schedule``) and switch torch's profiler on and off in these steps (``ProfilerDriver``)."""

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
from dtrain.arguments import check_int
from dtrain.dist.collectives import raise_if_any_failed
from dtrain.dist.context import register_shutdown_hook
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.profiling.trace_recorder import ClockOffset, ProfileOptions, TraceRecorder, measure_clock_offset

ProfilerPhase: TypeAlias = Literal["skip", "wait", "warmup", "active", "save"]
"""Phase of a step. ``warmup``: the profiler is prepared. ``active``: it records. ``save``: it records, then writes the trace.
"""

PhaseSchedule: TypeAlias = Callable[[int], ProfilerPhase]
"""Phase of a step by index from 0; equal on all ranks."""


def schedule(*, skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1) -> PhaseSchedule:
    """Create a profiler schedule: skip ``skip_first`` steps, then wait, warm up and record, ``repeat`` times.

    Args:
        skip_first: number of steps before the first cycle. The first step of a process compiles and allocates, so its trace is
            not typical.
        wait: number of steps without profiler at the start of each cycle.
        warmup: number of steps with a prepared profiler that records nothing, to keep the startup cost out of the trace.
        active: number of recorded steps, in one trace per cycle.
        repeat: number of cycles; 0 repeats forever.

    Example:
        >>> import dtrain as dt
        >>> phase_of = dt.profiling.schedule(skip_first=1, wait=1, warmup=1, active=2)
        >>> [phase_of(index) for index in range(6)]
        ['skip', 'wait', 'warmup', 'active', 'save', 'skip']

    Raises:
        ConfigError: an argument is not an integer, or too small.
    """
    for name, number, least in (
        ("skip_first", skip_first, 0),
        ("wait", wait, 0),
        ("warmup", warmup, 0),
        ("active", active, 1),
        ("repeat", repeat, 0),
    ):
        check_int("schedule", name, number, minimum=least)
    cycle = wait + warmup + active

    def phase_of(index: int) -> ProfilerPhase:
        position = index - skip_first
        if position < 0 or (repeat and position >= repeat * cycle):
            return "skip"
        position %= cycle
        if position < wait:
            return "wait"
        if position < wait + warmup:
            return "warmup"
        return "active" if position < cycle - 1 else "save"

    return phase_of


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _ActiveProfiler:
    """Driver that owns the only profiler of this process. The weak reference lets a dropped step be freed."""

    holder_ref: weakref.ref[ProfilerDriver] | None = None
    registered: bool = False

    @property
    def holder(self) -> ProfilerDriver | None:
        return None if self.holder_ref is None else self.holder_ref()


# torch allows one profiler per process, so its owner is a fact of the process.
_ACTIVE = _ActiveProfiler()


class ProfilerDriver:
    """Driver of the profiler, shared by ``profile`` and ``step_profiler``.

    Args:
        options: recording options.
        schedule: phase of each step, by index since the driver was created.
        ranks: recording ranks; None for all ranks.
    """

    __slots__ = (
        "__weakref__",
        "_broken",
        "_in_step_fn",
        "_index",
        "_options",
        "_phase",
        "_ranks",
        "_recorder",
        "_schedule",
        "_step",
    )

    def __init__(self, options: ProfileOptions, schedule: PhaseSchedule, ranks: frozenset[int] | None) -> None:
        self._options, self._schedule, self._ranks = options, schedule, ranks
        self._index = 0
        self._phase: ProfilerPhase = "skip"
        # step in progress, None before the first step
        self._step: int | None = None
        self._in_step_fn = False
        self._recorder: TraceRecorder | None = None
        # True after a failure on this rank, which ends profiling
        self._broken = False

    @property
    def step(self) -> int | None:
        """Step in progress; None before the first step."""
        return self._step

    def begin(self, step: int) -> None:
        """Begin the first step, with number ``step``."""
        self._step = step
        self._apply_phase(step)

    def advance(self, step: int) -> None:
        """End a step and begin ``step``."""
        if self._recorder is not None:
            self._recorder.end_step(done=True)
        self._index, self._step, self._in_step_fn = self._index + 1, step, False
        self._apply_phase(step)

    def enter_step_fn(self, step: int) -> None:
        """Enter the step function of ``step``, several times if a transform recomputes the gradient."""
        if self._step is None:
            self.begin(step)
        # The last update was skipped, or the caller caught its error.
        elif self._in_step_fn and self._step != step:
            self.advance(step)
        if not self._in_step_fn and self._recorder is not None and self._phase in ("active", "save"):
            self._recorder.enter_step_fn()
        self._in_step_fn = True

    def leave_step_fn(self, step: int) -> None:
        """Leave the step function. The time until ``enter_step_fn`` belongs to the loop."""
        if self._recorder is not None:
            self._recorder.leave_step_fn()
        self.advance(step + 1)

    def close(self) -> None:
        """Stop and write the recorded steps. Without a recording, do nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._run_guarded(partial(_write_trace, recorder))
        self._release()

    def __del__(self) -> None:
        # A step may be dropped during a recording, as in a notebook.
        if self._recorder is not None:
            self.close()

    def claim(self) -> None:
        """Claim the profiler of this process on all recording ranks or on none, before the ranks compare clocks.

        Collective: one exchange, if more than one rank records.

        Raises:
            ConfigError: another profiler is running.
            PeerError: another profiler is running on another rank.
        """
        recording, error = self._recording_ranks(), None
        if get_dist_info().rank in recording and not self._broken:
            try:
                self._acquire()
            except ConfigError as claim_error:
                error = claim_error
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
            raise ConfigError(f"profile: only one profiler can run per process, got {other}. End the running profiler first.")
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
        """Apply the phase of the step that begins."""
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
        recorder = self._recorder
        if recorder is not None and phase != "warmup":
            self._run_guarded(partial(_mark_step, recorder, step))

    def _open_recorder(self) -> None:
        """Open a recorder on the recording ranks. The remaining ranks only compare clocks."""
        recording = self._recording_ranks()
        offset = measure_clock_offset() if len(recording) > 1 else ClockOffset(0, 0)
        if get_dist_info().rank in recording and not self._broken:
            self._recorder = self._run_guarded(partial(TraceRecorder, options=self._options, offset=offset))

    def _run_guarded(self, action: Callable[[], T]) -> T | None:
        """Run ``action``. After an error, end profiling on this rank with a warning, so that training continues."""
        try:
            with _profiler_span():
                return action()
        except Exception as error:  # noqa: BLE001 - for example a full disk, or a device without profiler
            self._broken, self._recorder = True, None
            spans.record_event("dropped", logger="profile", error=f"{type(error).__name__}: {error}")
            self._release()
            warnings.warn(f"profile: {type(error).__name__}: {error}. This rank writes no more traces.", stacklevel=2)
            return None


def _profiler_span() -> AbstractContextManager[None]:
    """Open the span for the cost of the profiler, which belongs neither to the loader nor to the step."""
    return spans.span("profile", "other")


def _mark_step(recorder: TraceRecorder, step: int) -> None:
    if recorder.first_step is None:
        recorder.start(step)
    recorder.begin_step(step)


def _write_trace(recorder: TraceRecorder) -> None:
    path = recorder.write()
    if path is not None:
        spans.record_event("profiled", step=recorder.first_step, path=str(path))


def _close_active(error: BaseException | None) -> None:
    """Close the active profiler, at the end of ``init_dist``'s block and of the process."""
    holder = _ACTIVE.holder
    if holder is not None:
        holder.close()
