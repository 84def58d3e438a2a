"""Measure the wall time of this process in named spans of its main thread. Imports no torch.

At any moment the main thread is in one span: the innermost open span, or else ``other``. Before the first step of a run,
``setup`` takes the place of ``other``. So the times of all spans add up to the time since the recorder started. The time of a
span excludes the spans inside.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from threading import get_ident
from time import perf_counter_ns, time
from types import TracebackType
from typing import Literal, NamedTuple, ParamSpec, Protocol, TypeVar, get_args

from dtrain.arguments import check_choice
from dtrain.errors import ConfigError

TimeCategory = Literal[
    "compute", "data", "communication", "checkpoint", "evaluation", "logging", "compile", "restart", "stall", "setup", "other"
]
"""Category of a span. Only ``compute`` is productive. ``stall`` is waiting for other ranks, or a repeated step. ``setup`` lasts
until the first step of a run."""

P = ParamSpec("P")
R = TypeVar("R")

TIME_CATEGORIES: tuple[TimeCategory, ...] = get_args(TimeCategory)
# Time outside of all spans.
OTHER = "other"

_LIBRARY_SPANS: dict[str, TimeCategory] = {
    OTHER: "other",
    "setup": "setup",
    "rendezvous": "setup",
    "shard": "setup",
    "step": "compute",
    "data": "data",
    # Exchange of a step's records, where early ranks wait for the last rank.
    "agree": "stall",
    # Steps that ran out of memory and were repeated.
    "search": "stall",
    "reduce": "communication",
    "collective": "communication",
    "save": "checkpoint",
    "load": "checkpoint",
    "evaluate": "evaluation",
    "log": "logging",
    "compile": "compile",
}
# Further names count as ``other``, because names that contain a step number would never end.
_MAX_NAMES = 100 + len(_LIBRARY_SPANS)
# Events that are stored until a listener is set.
_MAX_EVENTS = 200


class SpanTime(NamedTuple):
    """Number of entries of a span, and its time without the spans inside."""

    # Hides the method ``count`` of tuples, which is not useful here.
    count: int  # type: ignore[assignment]
    seconds: float


class SpanListener(Protocol):
    """Interface of the ledger that records steps and events."""

    def on_step(self) -> None:
        """Record a step that has reached ``due_step`` or ``due_ns``, and schedule the next check."""
        ...

    def on_event(self, event: Mapping[str, object]) -> None:
        """Record an event. May be called from any thread."""
        ...


class _SpanRecorder:
    """Recorder of the spans of this process.

    ``top`` is the count and nanoseconds of the innermost span, complete up to ``mark``. ``stack`` contains the enclosing spans,
    the outermost first, behind the time outside of all spans. The lists in ``totals`` are never replaced, so their identity
    identifies a span. ``first_ns`` is the time of the first entry by span. ``in_setup`` is True from the start of a run to its
    first step.
    """

    # fmt: off
    __slots__ = ("categories", "due_ns", "due_step", "events", "first_ns", "in_setup", "listener", "mark", "observer",
                 "samples", "stack", "step", "steps", "thread", "tokens", "top", "totals")
    # fmt: on

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.mark = perf_counter_ns()
        self.top, self.steps = [0, 0], [0, 0]
        self.totals: dict[str, list[int]] = {OTHER: self.top, "step": self.steps}
        self.stack: list[list[int]] = []
        self.categories: dict[str, TimeCategory] = dict(_LIBRARY_SPANS)
        self.step, self.samples, self.tokens = 0, 0, 0
        self.due_step, self.due_ns = 0, 0
        self.in_setup = False
        self.listener: SpanListener | None = None
        self.observer: Callable[[int], None] | None = None
        self.first_ns: dict[str, int] = {}
        self.events: deque[Mapping[str, object]] = deque(maxlen=_MAX_EVENTS)


# An object of the module, because a process has one main thread, whose time is divided, and each span reads the object.
_RECORDER = _SpanRecorder()


# A class, because it is the fastest context manager.
class span:
    """Context manager that counts wall time under ``name``, without the spans inside.

    A span adds a row to the ledger of the run and to the report. The names of dtrain's own spans add to their rows:
    ``"save"``, ``"evaluate"``, ``"data"``. Outside of the main thread a span does nothing.

    Args:
        name: fixed text of at most 60 characters. After a hundred different names, further names count as ``"other"``.
        category: category of the time; None uses the category of dtrain's own span of this name, else ``"other"``.

    Example:
        for batch in loader:
            state, metrics = step(state, batch)
            if state.crossed("1_000ba"):
                with dt.span("generate", "evaluation"):
                    generate(state.model)

    Raises:
        ConfigError: an invalid name, an unknown category, or a category that differs from an earlier one of this name.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, category: TimeCategory | None = None) -> None:
        is_declared = type(name) is str and name in _RECORDER.totals
        if not is_declared or (category is not None and _RECORDER.categories.get(name) != category):
            _declare_span(name, category)
        self._name = name

    def __enter__(self) -> None:
        begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end(self._name)


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to count the time of each call under ``name``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


class outermost_span:
    """``span`` if no other span is open, else nothing. For functions that count only if the loop calls them directly."""

    __slots__ = ("_name", "_open")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._open = not _RECORDER.stack
        if self._open:
            begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open:
            end(self._name)


def _declare_span(name: str, category: TimeCategory | None) -> None:
    if not isinstance(name, str) or not name or len(name) > 60 or not name.isprintable():
        raise ConfigError(f"span: name must be a text of 1 to 60 printable characters, got {name!r}. Shorten the name.")
    if category is not None:
        check_choice("span", "category", category, TIME_CATEGORIES)
    declared = _RECORDER.categories.get(name)
    if category is not None and declared not in (None, category):
        raise ConfigError(f"span: category of {name!r} must be {declared} as before, got {category!r}. Choose another name.")
    if declared is None and len(_RECORDER.categories) < _MAX_NAMES:
        _RECORDER.categories[name] = category or "other"


def begin(name: str, times: int = 1) -> None:
    """Enter a span, if ``with`` is too slow. Call ``end`` in a ``finally``. No effect outside of the main thread.

    Args:
        name: name of one of dtrain's own spans, or a name that ``span`` has declared; other names count as ``"other"``.
        times: number of entries to count.
    """
    recorder = _RECORDER
    if get_ident() != recorder.thread:
        return
    top, totals = recorder.top, recorder.totals
    # Without a call, because a step enters several spans.
    entry = totals[name] if name in totals else _enter_first(recorder, name)
    entry[0] += times
    recorder.stack.append(top)
    if entry is not top:
        now = perf_counter_ns()
        top[1] += now - recorder.mark
        recorder.mark = now
        recorder.top = entry


def _enter_first(recorder: _SpanRecorder, name: str) -> list[int]:
    recorder.first_ns.setdefault(name, perf_counter_ns())
    return recorder.totals.setdefault(name if name in recorder.categories else OTHER, [0, 0])


def first_entry_ns(name: str) -> int | None:
    """Return the time of ``perf_counter_ns`` at which the process first entered a span; None if it has not."""
    return _RECORDER.first_ns.get(name)


def begin_step_once() -> bool:
    """Enter the span ``"step"`` uncounted, unless the process is in it already; return True if ``end`` must follow.

    A function of a step calls this, because a composed step is in the span, and a step by hand is not.
    """
    if _RECORDER.top is _RECORDER.totals.get("step"):
        return False
    begin("step", 0)
    return True


def end(name: str | None = None) -> None:
    """Leave the innermost span ``name``, and the spans inside that were never left. No effect outside of the main thread.

    So a generator that is closed late, or a repeated callback, does not change other spans.

    Args:
        name: name passed to ``begin``; None leaves the innermost span. Without such a span nothing happens.
    """
    recorder = _RECORDER
    if get_ident() != recorder.thread or not recorder.stack:
        return
    stack = recorder.stack
    if name is not None:
        entry = recorder.totals[name if name in recorder.totals else OTHER]
        if recorder.top is not entry:
            index = len(stack) - 1
            while index and stack[index] is not entry:
                index -= 1
            # The first entry is the time outside of all spans.
            if index == 0:
                return
            del stack[index + 1 :]
            _switch_to(recorder, stack.pop())
    before = stack.pop()
    if before is not recorder.top:
        _switch_to(recorder, before)


def _switch_to(recorder: _SpanRecorder, entry: list[int]) -> None:
    now = perf_counter_ns()
    recorder.top[1] += now - recorder.mark
    recorder.mark = now
    recorder.top = entry


def reassign_later(name: str) -> Callable[[str], None]:
    """Return a function that moves the time of spans called ``name`` from now on to another name, once the name is known."""
    recorder = _RECORDER
    add_time()
    entry = recorder.totals.setdefault(name, [0, 0])
    before = entry[1]

    def move(other: str) -> None:
        if get_ident() != recorder.thread:
            return
        add_time()
        moved, target = entry[1] - before, recorder.totals.setdefault(other, [0, 0])
        entry[1] -= moved
        target[0] += 1
        target[1] += moved

    return move


def add_time() -> None:
    """Add the time of the innermost span up to now. No effect outside of the main thread."""
    recorder = _RECORDER
    if get_ident() == recorder.thread:
        now = perf_counter_ns()
        recorder.top[1] += now - recorder.mark
        recorder.mark = now


def record_step(step: int, *, samples: int, tokens: int) -> None:
    """Record the counts after a step, all global, when the clock ticks.

    The number of steps is counted here, because a step may enter several spans called ``"step"``, for example when repeated.
    """
    recorder = _RECORDER
    recorder.step, recorder.samples, recorder.tokens = step, samples, tokens
    recorder.steps[0] += 1
    if recorder.observer is not None:
        recorder.observer(step)
    if recorder.in_setup:
        _count_outside_as(OTHER)
    if recorder.listener is not None and (step >= recorder.due_step or recorder.mark >= recorder.due_ns):
        recorder.listener.on_step()


def set_position(step: int, *, samples: int, tokens: int) -> None:
    """Set the counts that ``position`` returns until the next step, for a resumed run."""
    _RECORDER.step, _RECORDER.samples, _RECORDER.tokens = step, samples, tokens


def record_event(name: str, /, **fields: object) -> None:
    """Record an event for the run's ledger: ``record_event("committed", step=100, bytes=...)``.

    May be called from any thread. The last two hundred events are stored until a run is opened.

    Args:
        name: name of the event.
        fields: plain data.
    """
    event = {**fields, "name": name, "at": time()}
    listener = _RECORDER.listener
    if listener is not None:
        listener.on_event(event)
    else:
        _RECORDER.events.append(event)


def totals() -> dict[str, SpanTime]:
    """Return count and time of each span up to now. In other threads, up to the main thread's last change."""
    add_time()
    return {name: SpanTime(count, ns / 1e9) for name, (count, ns) in list(_RECORDER.totals.items())}


def seconds_by_category(span_times: Mapping[str, SpanTime]) -> dict[TimeCategory, float]:
    """Return seconds by category for the result of ``totals`` (or a difference of two results), all categories included."""
    seconds: dict[TimeCategory, float] = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for name, total in span_times.items():
        seconds[category_of(name)] += total.seconds
    return seconds


def category_of(name: str) -> TimeCategory:
    """Return the category of a span."""
    return _RECORDER.categories.get(name, "other")


def is_library_span(name: str) -> bool:
    """Return True if dtrain itself has a span of this name."""
    return name in _LIBRARY_SPANS


def position() -> tuple[int, int, int]:
    """Return steps, samples and tokens after the last step, zeros before the first step."""
    return _RECORDER.step, _RECORDER.samples, _RECORDER.tokens


def set_listener(listener: SpanListener | None) -> list[Mapping[str, object]]:
    """Set the listener, None for no listener. Return the stored events, which are then discarded.

    With a listener, the time outside of all spans counts as setup until the first step.
    """
    unheard = list(_RECORDER.events) if listener is not None else []
    # A fork made by another thread has another main thread.
    _RECORDER.thread = threading.main_thread().ident
    _RECORDER.listener = listener
    _RECORDER.due_step, _RECORDER.due_ns = 0, 0
    _count_outside_as(OTHER if listener is None else "setup")
    if listener is not None:
        _RECORDER.events.clear()
    return unheard


def set_observer(observer: Callable[[int], None] | None) -> None:
    """Set a function that is called with each completed step, in the main thread; None for no function."""
    _RECORDER.observer = observer


def _count_outside_as(name: str) -> None:
    """Count the time outside of all spans under ``name`` from now on. No effect outside of the main thread."""
    recorder = _RECORDER
    if get_ident() != recorder.thread:
        return
    recorder.in_setup = name != OTHER
    entry = recorder.totals.setdefault(name, [0, 0])
    if recorder.stack:
        recorder.stack[0] = entry
    else:
        _switch_to(recorder, entry)


def schedule_next_check(*, step: int, in_s: float) -> None:
    """Schedule the listener's next check of a step: at ``step`` or after ``in_s`` seconds, whichever is first."""
    _RECORDER.due_step, _RECORDER.due_ns = step, perf_counter_ns() + int(in_s * 1e9)
