"""``Window``: how far training came in the last stretch, and in how much time. What meters of speed have in common.

``throughput``: samples, tokens and steps a second.

``mfu``: how much of what the devices could compute goes into the model."""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import dataclass

import torch

from dtrain import spans
from dtrain.clock import Clock
from dtrain.dist.init import get_dist_info
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.monitors.flops import ComputeDtype, peak_flops
from dtrain.monitors.meter import Meter
from dtrain.state import TrainState

_SAMPLES_PER_WINDOW = 100  # in a window: its edge is exact to a hundredth of it, however often a loop logs


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """What happened between two calls.

    Args:
        steps: done; ``samples`` and ``tokens`` are global.
        seconds: of wall time, by the clock: the same on all ranks.
        compute_s: seconds of this rank in spans whose cause is ``compute_s``.
        span_s: seconds of this rank in all spans, which is wall time; not quite ``seconds``, which end where a step begins.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
    compute_s: float
    span_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowSample:
    clock: Clock
    compute_s: float
    span_s: float


class MovingWindow:
    """The last stretch of at least ``length``, or all that there is since the first look where that is shorter.

    It begins anew when the run is another one: a checkpoint was loaded, or training went back.

    Args:
        length: any duration but a share of the run; where looks are further apart, it is their distance.
        caller: who asks, for messages.

    Raises:
        ConfigError: no duration, or a share of the run.
    """

    def __init__(self, length: Duration | int | str, *, caller: str) -> None:
        self._length = Duration.parse(length)
        if self._length.unit == "dur":
            raise ConfigError(f"{caller}: window must be a length as '100ba' or '60sec', got {length!r}, a share of the run")
        self._samples: deque[_WindowSample] = deque()
        self._run: tuple[int, str | None] | None = None

    def update(self, state: TrainState) -> WindowTotals | None:
        """The stretch that ends now; None at the first look of a run, and where no step was done since.

        Mutates: what it remembers.
        """
        now, run = _take_sample(state.clock), run_identity(state)
        # By the clock too: a state of another run may lie where the last one was.
        if run != self._run or (self._samples and now.clock.step < self._samples[-1].clock.step):
            self._run = run
            self._samples.clear()
        since = self._window_start(now)
        if now.clock.step and (
            not self._samples or self._distance(self._samples[-1], now) >= self._length.value / _SAMPLES_PER_WINDOW
        ):
            self._samples.append(now)  # not at step 0: the clock counts no time for the first step of a process
        if since is None or now.clock.step == since.clock.step:
            return None
        return WindowTotals(
            steps=now.clock.step - since.clock.step,
            samples=now.clock.samples - since.clock.samples,
            tokens=now.clock.tokens - since.clock.tokens,
            seconds=now.clock.seconds - since.clock.seconds,
            compute_s=now.compute_s - since.compute_s,
            span_s=now.span_s - since.span_s,
        )

    def _window_start(self, now: _WindowSample) -> _WindowSample | None:
        """The last mark that is at least the window's length ago, else the first. Mutates: drops those before it."""
        while len(self._samples) > 1 and self._distance(self._samples[1], now) >= self._length.value:
            self._samples.popleft()
        return self._samples[0] if self._samples else None

    def _distance(self, mark: _WindowSample, now: _WindowSample) -> float:
        unit = self._length.unit
        return now.clock.count(unit) - mark.clock.count(unit)


def _take_sample(clock: Clock) -> _WindowSample:
    totals = spans.totals()
    compute = spans.seconds_by_category(totals)["compute"]
    return _WindowSample(clock=clock, compute_s=compute, span_s=sum(total.seconds for total in totals.values()))


def run_identity(state: TrainState) -> tuple[int, str | None]:
    """What differs where a state is of another run in this process, or of one that was loaded since."""
    return id(
        state.run_context
    ), state.run_context.resumed_from  # not the object: it keeps a checkpoint's folder locked while it lives


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
        >>> speed, shared = throughput("10ba", devices=2), SimpleNamespace(resumed_steps=None)
        >>> states = [SimpleNamespace(clock=Clock(step=n, samples=8 * n, seconds=n / 4), shared=shared) for n in (10, 20)]
        >>> speed(states[0])
        {}
        >>> found = speed(states[1])
        >>> found["speed/steps_per_s"], found["speed/samples_per_s"], found["speed/samples_per_s_per_device"]
        (4.0, 32.0, 16.0)
    """
    seen = MovingWindow(window, caller="throughput")
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ConfigError(f"throughput: devices must be a whole number of at least 1, got {devices!r}")

    def speed(state: TrainState) -> dict[str, float]:
        stretch = seen.update(state)
        if stretch is None:
            return {}
        counts = {"speed/samples_per_s": stretch.samples}
        if state.clock.tokens:
            counts["speed/tokens_per_s"] = stretch.tokens
        share = devices or get_dist_info().world_size
        parts = {f"{name}_per_device": count / share for name, count in counts.items()}
        rates: dict[str, float] = {**counts, **parts, "speed/steps_per_s": stretch.steps}
        found: dict[str, float] = {}
        if stretch.seconds > 0:
            found |= {name: count / stretch.seconds for name, count in rates.items()}
        if stretch.compute_s > 0:
            found |= {f"{name}/compute": count / stretch.compute_s for name, count in rates.items()}
        if stretch.span_s > 0:
            found["speed/productive"] = stretch.compute_s / stretch.span_s
        return found

    return speed


def mfu(
    *,
    flops_per_token: float | None = None,
    flops_per_sample: float | None = None,
    peak: float | None = None,
    dtype: ComputeDtype | torch.dtype = "bf16",
    window: Duration | int | str = "100ba",
    devices: int | None = None,
) -> Meter:
    """A meter of model FLOPs: how many a second, and which share that is of what the devices could do (MFU).

    Formula: ``speed/flops_per_s = flops_per_token * tokens / seconds``, ``speed/mfu = speed/flops_per_s / (devices * peak)``

    It gives ``speed/flops_per_s`` and ``speed/flops_per_s_per_device``, and where the peak is known ``speed/mfu``, over wall
    time, and ``speed/mfu/compute``, over the seconds of this rank whose cause is ``compute``, as ``throughput`` has it. The
    first call begins the window and gives nothing.

    Args:
        flops_per_token: of forward and backward, as ``transformer_flops`` gives it; the batches' tokens must be counted. Either
            this or ``flops_per_sample``.
        flops_per_sample: likewise, as ``count_flops`` gives it.
        peak: operations a second that one device can do at most. None takes that of ``peak_flops`` for the GPU of this rank;
            for another device, or one that is not in its table, there is no ``speed/mfu``, and one warning on rank 0.
        dtype: which of the device's peaks it is to be: what products are computed in. Used without ``peak`` only.
        window: as for ``throughput``.
        devices: how many there are; None for one a rank.

    Collective: none. Host sync: none.

    Raises:
        ConfigError: both or neither of ``flops_per_token`` and ``flops_per_sample``, a number that is not positive, ``devices``
            that is no whole number of at least 1, an unknown dtype, a window that is no duration; in a call, FLOPs per token in
            a run whose tokens are not counted.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    each = _require_one(flops_per_token, flops_per_sample)
    for name, value in (("flops_per_token", flops_per_token), ("flops_per_sample", flops_per_sample), ("peak", peak)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf):
            raise ConfigError(f"mfu: {name} must be a positive number, got {value!r}")
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ConfigError(f"mfu: devices must be a whole number of at least 1, got {devices!r}")
    peak_flops("", dtype)  # which refuses an unknown dtype
    seen, known = MovingWindow(window, caller="mfu"), _DevicePeak(peak, dtype)

    def utilization(state: TrainState) -> dict[str, float]:
        most = known.lookup(state.device)
        stretch = seen.update(state)
        if stretch is None:
            return {}
        if flops_per_token is not None and not state.clock.tokens:
            raise ConfigError(
                "mfu: the run counts no tokens, which flops_per_token needs; name their axis in the step's batch_spec, or give "
                "flops_per_sample"
            )
        flops, share = (
            each * (stretch.samples if flops_per_token is None else stretch.tokens),
            devices or get_dist_info().world_size,
        )
        found: dict[str, float] = {}
        if stretch.seconds > 0:
            rate = flops / stretch.seconds
            found |= {"speed/flops_per_s": rate, "speed/flops_per_s_per_device": rate / share}
        for name, seconds in (("speed/mfu", stretch.seconds), ("speed/mfu/compute", stretch.compute_s)):
            if most is not None and seconds > 0:
                found[name] = flops / seconds / share / most
        return found

    return utilization


def _require_one(flops_per_token: float | None, flops_per_sample: float | None) -> float:
    given = [value for value in (flops_per_token, flops_per_sample) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"mfu: needs either flops_per_token or flops_per_sample, got {flops_per_token=}, {flops_per_sample=}; "
            "dt.monitors.transformer_flops and dt.monitors.count_flops give them"
        )
    return given[0]


class _DevicePeak:
    """The peak of a device, looked up once."""

    def __init__(self, given: float | None, dtype: ComputeDtype | torch.dtype) -> None:
        self._peak, self._dtype = given, dtype
        self._known = given is not None

    def lookup(self, device: torch.device) -> float | None:
        if not self._known:
            self._known = True
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            self._peak = peak_flops(name, self._dtype)
            if self._peak is None and get_dist_info().rank == 0:
                warnings.warn(
                    f"mfu: the peak of {name!r} in {self._dtype} is not known, so there is no speed/mfu; give mfu(peak=...), "
                    "operations a second of one device",
                    stacklevel=3,
                )
        return self._peak
