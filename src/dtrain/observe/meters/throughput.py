"""``throughput``: samples, tokens and steps a second."""

from __future__ import annotations

from dtrain.dist.init import current
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.observe.meters.readings import Meter
from dtrain.observe.meters.window import Window
from dtrain.state import TrainState


def throughput(window: Duration | int | str = "100ba", *, devices: int | None = None) -> Meter:
    """A meter of speed over the last ``window``: of all devices together and of each, over all time and over productive time.

    Formula: ``speed/samples_per_s = samples / seconds``, ``speed/samples_per_s_per_device`` a device's share of it,
    ``speed/samples_per_s/compute = samples / compute seconds``

    It gives ``speed/samples_per_s``, ``speed/tokens_per_s`` (where tokens are counted) and ``speed/steps_per_s``; the first two
    also as ``..._per_device``. Each of them comes twice: over wall time, by rank 0's clock and so the same on all ranks, and as
    ``.../compute`` over the seconds that this rank has spent in spans of cause ``compute``: what the speed would be if nothing
    ever waited for data, other ranks, checkpoints or evaluation. ``speed/productive`` is the share of those seconds in wall
    time. On a GPU the host's time stands for the device's: where the host runs ahead, its wait is counted where it waits.

    The first call begins the window and gives nothing; so does the first after a checkpoint was loaded. Where calls are further
    apart than ``window``, it reaches back to the call before. Names are the same on all ranks.

    Args:
        window: a number of steps, or a duration (``"60sec"``, ``"1e6tok"``); not a share of the run.
        devices: whose share ``..._per_device`` is; None for one a rank.

    Collective: none. Host sync: none.

    Raises:
        ConfigError: a window that is no duration or a share of the run, ``devices`` that is no whole number of at least 1.

    Example:
        >>> from dtrain.clock import Clock
        >>> from types import SimpleNamespace
        >>> speed, shared = throughput("10ba", devices=2), SimpleNamespace(resumed_from=None)
        >>> states = [SimpleNamespace(clock=Clock(step=n, samples=8 * n, seconds=n / 4), shared=shared) for n in (10, 20)]
        >>> speed(states[0])
        {}
        >>> found = speed(states[1])
        >>> found["speed/steps_per_s"], found["speed/samples_per_s"], found["speed/samples_per_s_per_device"]
        (4.0, 32.0, 16.0)
    """
    seen = Window(window, where="throughput")
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ConfigError(f"throughput: devices must be a whole number of at least 1, got {devices!r}")

    def speed(state: TrainState) -> dict[str, float]:
        stretch = seen.look(state)
        if stretch is None:
            return {}
        counts = {"speed/samples_per_s": stretch.samples}
        if state.clock.tokens:
            counts["speed/tokens_per_s"] = stretch.tokens
        share = devices or current().world_size
        parts = {f"{name}_per_device": count / share for name, count in counts.items()}
        rates: dict[str, float] = {**counts, **parts, "speed/steps_per_s": stretch.steps}
        found: dict[str, float] = {}
        if stretch.seconds > 0:
            found |= {name: count / stretch.seconds for name, count in rates.items()}
        if stretch.compute > 0:
            found |= {f"{name}/compute": count / stretch.compute for name, count in rates.items()}
        if stretch.spent > 0:
            found["speed/productive"] = stretch.compute / stretch.spent
        return found

    return speed
