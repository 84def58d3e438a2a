"""``Window``: how far training came in the last stretch, and in how much time. What meters of speed have in common."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dtrain import spans
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.state import TrainState

_MARKS = 100  # in a window: its edge is exact to a hundredth of it, however often a loop logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What happened between two calls.

    Args:
        steps: done; ``samples`` and ``tokens`` are global.
        seconds: of wall time, by the clock: the same on all ranks.
        compute: seconds of this rank in spans whose cause is ``compute``.
        spent: seconds of this rank in all spans, which is wall time; not quite ``seconds``, which end where a step begins.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
    compute: float
    spent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    clock: Clock
    compute: float
    spent: float


class Window:
    """The last stretch of at least ``length``, or all that there is since the first look where that is shorter.

    It begins anew when the run is another one: a checkpoint was loaded, or training went back.

    Args:
        length: any duration but a share of the run; where looks are further apart, it is their distance.
        where: who asks, for messages.

    Raises:
        ConfigError: no duration, or a share of the run.
    """

    def __init__(self, length: Duration | int | str, *, where: str) -> None:
        self._length = Duration.parse(length)
        if self._length.unit == "dur":
            raise ConfigError(f"{where}: window must be a length as '100ba' or '60sec', got {length!r}, a share of the run")
        self._marks: deque[_Mark] = deque()
        self._run: tuple[int, str | None] | None = None

    def look(self, state: TrainState) -> Stretch | None:
        """The stretch that ends now; None at the first look of a run, and where no step was done since.

        Mutates: what it remembers.
        """
        now, run = _mark(state.clock), run_of(state)
        # By the clock too: a state of another run may lie where the last one was.
        if run != self._run or (self._marks and now.clock.step < self._marks[-1].clock.step):
            self._run = run
            self._marks.clear()
        since = self._begin(now)
        if now.clock.step and (not self._marks or self._past(self._marks[-1], now) >= self._length.value / _MARKS):
            self._marks.append(now)  # not at step 0: the clock counts no time for the first step of a process
        if since is None or now.clock.step == since.clock.step:
            return None
        return Stretch(
            steps=now.clock.step - since.clock.step,
            samples=now.clock.samples - since.clock.samples,
            tokens=now.clock.tokens - since.clock.tokens,
            seconds=now.clock.seconds - since.clock.seconds,
            compute=now.compute - since.compute,
            spent=now.spent - since.spent,
        )

    def _begin(self, now: _Mark) -> _Mark | None:
        """The last mark that is at least the window's length ago, else the first. Mutates: drops those before it."""
        while len(self._marks) > 1 and self._past(self._marks[1], now) >= self._length.value:
            self._marks.popleft()
        return self._marks[0] if self._marks else None

    def _past(self, mark: _Mark, now: _Mark) -> float:
        unit = self._length.unit
        return now.clock.count(unit) - mark.clock.count(unit)


def _mark(clock: Clock) -> _Mark:
    totals = spans.totals()
    compute = spans.by_cause(totals)["compute"]
    return _Mark(clock=clock, compute=compute, spent=sum(total.seconds for total in totals.values()))


def run_of(state: TrainState) -> tuple[int, str | None]:
    """What differs where a state is of another run in this process, or of one that was loaded since."""
    return id(state.shared), state.shared.resumed_from  # not the object: it keeps a checkpoint's folder locked while it lives
