"""``progress_line``: where a run is, on one line."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.clock import Clock
from dtrain.observe.metrics import tokens_per_second
from dtrain.state import TrainState


def progress_line(state: TrainState, numbers: Mapping[str, float], *, total_steps: int, since: Clock) -> str:
    """A line such as ``step 120/600  loss 2.1034  lr 3.00e-03  51,200 tok/s  1:20 left``. Pure.

    Args:
        state: after the step to report.
        numbers: what ``reduce_metrics`` returned; ``loss`` and ``lr`` are shown where they are there.
        total_steps: length of the run.
        since: the clock at the last report: speed and time left are those of the stretch in between. Where no tokens are
            counted, the speed is in samples.
    """
    clock = state.clock
    steps, seconds = clock.step - since.step, clock.seconds - since.seconds
    parts = [f"step {clock.step}/{total_steps}"]
    parts += [f"{name} {numbers[name]:{how}}" for name, how in (("loss", ".4f"), ("lr", ".2e")) if name in numbers]
    if seconds > 0 and steps > 0:
        left = round((total_steps - clock.step) * seconds / steps)
        parts += [_speed(since, clock, seconds), f"{left // 60}:{left % 60:02d} left"]
    return "  ".join(parts)


def _speed(since: Clock, now: Clock, seconds: float) -> str:
    if now.tokens > since.tokens:
        return f"{tokens_per_second(since, now):,.0f} tok/s"
    rate = (now.samples - since.samples) / seconds
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"
