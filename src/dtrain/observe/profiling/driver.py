"""``Driver``: follows the steps of one loop, and has a ``Window`` open in those that the schedule names."""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from dtrain import spans
from dtrain.dist.closing import before_closing
from dtrain.dist.collectives import raise_together
from dtrain.dist.init import current
from dtrain.errors import ConfigError
from dtrain.observe.profiling.offset import Offset, clock_offset
from dtrain.observe.profiling.phases import Phase, Phases
from dtrain.observe.profiling.window import What, Window

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Process:
    """Whose turn it is: torch has one profiler for a process. Weak, so a step that is dropped in a window does not keep it."""

    holding: weakref.ref[Driver] | None = None
    registered: bool = False

    @property
    def holder(self) -> Driver | None:
        return None if self.holding is None else self.holding()


_PROCESS = _Process()


class Driver:
    """What ``profile`` and ``profiled`` share.

    Args:
        what: is recorded.
        schedule: the phase of each step, by its index since this began.
        ranks: those that record, None for all.
    """

    __slots__ = ("__weakref__", "_broken", "_index", "_inside", "_phase", "_ranks", "_schedule", "_step", "_what", "_window")

    def __init__(self, what: What, schedule: Phases, ranks: frozenset[int] | None) -> None:
        self._what, self._schedule, self._ranks = what, schedule, ranks
        self._index = 0
        self._phase: Phase = "skip"
        self._step: int | None = None  # the step in progress, None before the first
        self._inside = False
        self._window: Window | None = None
        self._broken = False  # on this rank: a window could not be opened or written, so there are no more

    @property
    def step(self) -> int | None:
        """The step in progress; None before the first."""
        return self._step

    def begin(self, step: int) -> None:
        """The first step begins, and is number ``step``."""
        self._step = step
        self._turn(step)

    def advance(self, step: int) -> None:
        """A step has ended, and ``step`` begins."""
        if self._window is not None:
            self._window.end_step(done=True)
        self._index, self._step, self._inside = self._index + 1, step, False
        self._turn(step)

    def enter(self, step: int) -> None:
        """The step function begins with ``step``; more than once where a transform computes its gradient again."""
        if self._step is None:
            self.begin(step)
        elif self._inside and self._step != step:
            self.advance(step)  # the update of the step before was skipped, or it raised and somebody caught that
        if not self._inside and self._window is not None and self._phase in ("active", "save"):
            self._window.enter()
        self._inside = True

    def leave(self, step: int) -> None:
        """The step function ends, and what comes until ``enter`` is the loop's."""
        if self._window is not None:
            self._window.leave()
        self.advance(step + 1)

    def close(self) -> None:
        """Stop, and write what was recorded so far. Nothing where nothing is open."""
        window, self._window = self._window, None
        if window is not None:
            self._guarded(partial(_written, window))
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
        recording, error = self._recording(), None
        if current().rank in recording and not self._broken:
            try:
                self._take()
            except ConfigError as refused:
                error = refused
        try:
            if len(recording) > 1:
                raise_together(error, where="profile")
            elif error is not None:
                raise error
        except BaseException:
            self._release()
            raise

    def _take(self) -> None:
        if _PROCESS.holder is self:
            return
        if _PROCESS.holder is not None or torch.autograd._profiler_enabled():
            other = "another dt.profile or dt.profiled" if _PROCESS.holder is not None else "a profiler of torch's own"
            raise ConfigError(f"profile: a process has one profiler, and {other} is running; let it end first, or leave it out")
        _PROCESS.holding = weakref.ref(self)
        if not _PROCESS.registered:
            _PROCESS.registered = True
            atexit.register(_finish, None)
        before_closing("profile", _finish)

    def _recording(self) -> frozenset[int]:
        return frozenset(range(current().world_size)) if self._ranks is None else self._ranks

    def _release(self) -> None:
        if _PROCESS.holder is self:
            _PROCESS.holding = None

    def _turn(self, step: int) -> None:
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
            self._open()
        window = self._window
        if window is not None and phase != "warmup":
            self._guarded(partial(_marked, window, step))

    def _open(self) -> None:
        """A new window, on the ranks that record; the others tell the time only."""
        recording = self._recording()
        offset = clock_offset() if len(recording) > 1 else Offset(0, 0)
        if current().rank in recording and not self._broken:
            self._window = self._guarded(partial(Window, what=self._what, offset=offset))

    def _guarded(self, act: Callable[[], T]) -> T | None:
        """What observes never stops training: an error ends the profiling on this rank, with a warning."""
        try:
            with _costs():
                return act()
        except Exception as error:  # noqa: BLE001  # a full disk, or a device that refuses to be profiled
            self._broken, self._window = True, None
            spans.event("dropped", sink="profile", error=f"{type(error).__name__}: {error}")
            self._release()
            warnings.warn(f"profile: no more traces from this rank: {type(error).__name__}: {error}", stacklevel=2)
            return None


def _costs() -> AbstractContextManager[None]:
    """Where the time goes that the profiler itself takes; not into the loader's, nor into the step's."""
    return spans.span("profile", "other")


def _marked(window: Window, step: int) -> None:
    if window.first is None:
        window.start(step)
    window.mark(step)


def _written(window: Window) -> None:
    path = window.write()
    if path is not None:
        spans.event("profiled", step=window.first, path=str(path))


def _finish(error: BaseException | None) -> None:
    """At the end of ``init_dist``'s block, and of the process."""
    holder = _PROCESS.holder
    if holder is not None:
        holder.close()
