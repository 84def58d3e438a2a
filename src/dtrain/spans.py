"""Where the wall time of this process goes: named spans of its main thread. Imports no torch.

At any moment the main thread is in one span, the innermost that is open, or in ``other``. So the seconds by name always add up
to the time since the recorder began, whatever is nested in what, and a span holds its own time only.
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

from dtrain.errors import ConfigError

TimeCategory = Literal[
    "compute", "data", "communication", "checkpoint", "evaluation", "compile", "restart", "stall", "setup", "other"
]
"""What time goes to. Productive is ``compute`` alone; ``stall`` is waiting for other ranks, or for a step that began again."""

P = ParamSpec("P")
R = TypeVar("R")

TIME_CATEGORIES: tuple[TimeCategory, ...] = get_args(TimeCategory)
OTHER = "other"  # the name of what is in no span

_LIBRARY_SPANS: dict[str, TimeCategory] = {
    OTHER: "other",
    "setup": "setup",
    "step": "compute",
    "data": "data",
    "agree": "stall",  # at the step's records: a rank that came early waits there for the last one
    "search": "stall",  # steps that ran out of memory and were begun again
    "reduce": "communication",
    "collective": "communication",
    "save": "checkpoint",
    "load": "checkpoint",
    "evaluate": "evaluation",
    "compile": "compile",
}
_MAX_NAMES = 100 + len(_LIBRARY_SPANS)  # different ones; what comes later is ``other``: a name with a step in it has no end
_MAX_EVENTS = 200  # events until somebody listens


class SpanTime(NamedTuple):
    """How often a span was entered, and its own seconds: without those of spans inside it."""

    count: int  # type: ignore[assignment]  # a tuple's method of this name counts nothing that is in here
    seconds: float


class SpanListener(Protocol):
    """Who writes down what this module only counts."""

    def on_step(self) -> None:
        """A step is done, and it is time to look: ``due_step`` or ``due_ns`` has come. It sets new ones."""
        ...

    def on_event(self, event: Mapping[str, object]) -> None:
        """Something is worth a line of its own; from any thread."""
        ...


class _SpanRecorder:
    """Of this process. ``top`` is the count and nanoseconds of the innermost span, charged up to ``mark``; ``stack`` has those
    that it is in, the outermost first. The lists in ``totals`` are never replaced, so two are of one name if they are the same.
    """

    __slots__ = ("categories", "due_ns", "due_step", "events", "listener", "mark", "samples", "stack", "step", "steps", "thread",
                 "tokens", "top", "totals")  # fmt: skip

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.mark = perf_counter_ns()
        self.top, self.steps = [0, 0], [0, 0]
        self.totals: dict[str, list[int]] = {OTHER: self.top, "step": self.steps}
        self.stack: list[list[int]] = []
        self.categories: dict[str, TimeCategory] = dict(_LIBRARY_SPANS)
        self.step, self.samples, self.tokens = 0, 0, 0
        self.due_step, self.due_ns = 0, 0
        self.listener: SpanListener | None = None
        self.events: deque[Mapping[str, object]] = deque(maxlen=_MAX_EVENTS)


_RECORDER = _SpanRecorder()


class span:  # used as a function, and a class is the cheapest context manager
    """A context whose wall time is counted under ``name``, without that of spans inside it.

    ``with dt.span("generate"): ...`` in a loop adds a row of that name to the ledger of the run, and to the report. Names that
    dtrain uses itself add to its own rows: ``"save"``, ``"evaluate"``, ``"data"``. Outside of the main thread it does nothing.

    Args:
        name: one of a few fixed texts, of at most 60 characters; after a hundred different ones, further are counted as other.
        category: what the time goes to; None for that of dtrain's own span of this name, else ``"other"``.

    Raises:
        ConfigError: another kind of name, an unknown cause, or one that differs from what this name had before.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, category: TimeCategory | None = None) -> None:
        known = type(name) is str and name in _RECORDER.totals
        if not known or (category is not None and _RECORDER.categories.get(name) != category):
            _declare_span(name, category)
        self._name = name

    def __enter__(self) -> None:
        begin(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end(self._name)


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the time of each call is counted under ``name``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


class outermost_span:
    """``span`` where no other is open, else nothing: for what counts by itself only when the loop calls it."""

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
        raise ConfigError(f"span: a name is a text of 1 to 60 printable characters, got {name!r}")
    if category is not None and category not in TIME_CATEGORIES:
        raise ConfigError(f"span: cause must be one of {', '.join(TIME_CATEGORIES)}, got {category!r}")
    known = _RECORDER.categories.get(name)
    if category is not None and known not in (None, category):
        raise ConfigError(f"span: {name!r} counts as {known} already, got cause={category!r}; choose another name")
    if known is None and len(_RECORDER.categories) < _MAX_NAMES:
        _RECORDER.categories[name] = category or "other"


def begin(name: str, times: int = 1) -> None:
    """Enter a span; for where a ``with`` costs too much. Always with ``end`` in a ``finally``. Not outside of the main thread.

    Args:
        name: one of dtrain's own, or one that ``span`` has met; all others are counted as other.
        times: how often it counts.
    """
    recorder = _RECORDER
    if get_ident() != recorder.thread:
        return
    top = recorder.top
    entry = recorder.totals.get(name)
    if entry is None:
        entry = recorder.totals.setdefault(name if name in recorder.categories else OTHER, [0, 0])
    entry[0] += times
    recorder.stack.append(top)
    if entry is not top:
        now = perf_counter_ns()
        top[1] += now - recorder.mark
        recorder.mark = now
        recorder.top = entry


def end(name: str | None = None) -> None:
    """Leave the innermost span called ``name``, and those in it that were never left. Nothing outside of the main thread.

    So a generator that is closed late, or a callback that comes twice, spoils no other span.

    Args:
        name: what ``begin`` was given; None for the innermost, whatever it is called. Nothing happens if there is none.
    """
    recorder = _RECORDER
    if get_ident() != recorder.thread or not recorder.stack:
        return
    stack = recorder.stack
    if name is not None:
        entry = recorder.totals.get(name) or recorder.totals[OTHER]
        if recorder.top is not entry:
            at = len(stack) - 1
            while at and stack[at] is not entry:
                at -= 1
            if at == 0:  # the first is what is in no span
                return
            del stack[at + 1 :]
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
    """A function that moves what spans called ``name`` take from here on to another name: for what shows late what it was."""
    recorder = _RECORDER
    add_time()
    entry = recorder.totals.setdefault(name, [0, 0])
    before = entry[1]

    def move(other: str) -> None:
        if get_ident() != recorder.thread:
            return
        add_time()
        taken, to = entry[1] - before, recorder.totals.setdefault(other, [0, 0])
        entry[1] -= taken
        to[0] += 1
        to[1] += taken

    return move


def add_time() -> None:
    """Count what the innermost span has taken up to now. Nothing outside of the main thread."""
    recorder = _RECORDER
    if get_ident() == recorder.thread:
        now = perf_counter_ns()
        recorder.top[1] += now - recorder.mark
        recorder.mark = now


def record_step(step: int, *, samples: int, tokens: int) -> None:
    """A step is done: ``step`` so far, ``samples`` and ``tokens`` so far, all global. Called where the clock ticks.

    It counts the step, which spans called ``"step"`` do not: a step written by hand has two of them, one that is begun again
    more.
    """
    recorder = _RECORDER
    recorder.step, recorder.samples, recorder.tokens = step, samples, tokens
    recorder.steps[0] += 1
    if recorder.listener is not None and (step >= recorder.due_step or recorder.mark >= recorder.due_ns):
        recorder.listener.on_step()


def set_position(step: int, *, samples: int, tokens: int) -> None:
    """The run goes on after ``step``: what ``position`` says until the next one is done."""
    _RECORDER.step, _RECORDER.samples, _RECORDER.tokens = step, samples, tokens


def record_event(name: str, /, **fields: object) -> None:
    """Something that is worth a line of its own in the run's ledger: ``event("committed", step=100, bytes=...)``.

    From any thread. Kept (the last two hundred) until the run is opened, and forgotten if it never is.

    Args:
        name: what happened.
        fields: plain data.
    """
    happened = {**fields, "name": name, "at": time()}
    listener = _RECORDER.listener
    if listener is not None:
        listener.on_event(happened)
    else:
        _RECORDER.events.append(happened)


def totals() -> dict[str, SpanTime]:
    """What has been counted so far, by name: up to now, and in other threads up to where the main one is known to have been."""
    add_time()
    return {name: SpanTime(count, ns / 1e9) for name, (count, ns) in list(_RECORDER.totals.items())}


def seconds_by_category(found: Mapping[str, SpanTime]) -> dict[TimeCategory, float]:
    """Seconds by cause of what ``totals`` returned (or a difference of two): all categories, those without time as 0."""
    seconds: dict[TimeCategory, float] = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for name, total in found.items():
        seconds[category_of(name)] += total.seconds
    return seconds


def category_of(name: str) -> TimeCategory:
    """What the time of a span goes to."""
    return _RECORDER.categories.get(name, "other")


def is_library_span(name: str) -> bool:
    """Whether dtrain itself has a span of this name."""
    return name in _LIBRARY_SPANS


def position() -> tuple[int, int, int]:
    """Steps, samples and tokens after the last step; zeros before the first."""
    return _RECORDER.step, _RECORDER.samples, _RECORDER.tokens


def set_listener(listener: SpanListener | None) -> list[Mapping[str, object]]:
    """Have ``listener`` told from now on, nobody with None. Returns the events that nobody has heard, which are forgotten."""
    unheard = list(_RECORDER.events) if listener is not None else []
    _RECORDER.thread = threading.main_thread().ident  # another one in a fork that was made by another thread
    _RECORDER.listener = listener
    _RECORDER.due_step, _RECORDER.due_ns = 0, 0
    if listener is not None:
        _RECORDER.events.clear()
    return unheard


def schedule_next_check(*, step: int, in_s: float) -> None:
    """When the listener is to be told of a step next: at ``step``, or after ``in_s`` seconds, whichever is first."""
    _RECORDER.due_step, _RECORDER.due_ns = step, perf_counter_ns() + int(in_s * 1e9)
