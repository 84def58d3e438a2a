"""Measure training speed over a moving window: ``throughput`` in samples, tokens and steps per second, ``mfu`` in FLOPs."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass

import torch

from dtrain import spans
from dtrain.arguments import check_int, check_number
from dtrain.device import device_name
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.monitors.flops import ComputeDtype, peak_flops
from dtrain.monitors.meter import Meter, run_identity
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState

# samples per window: the window length is exact to 1/100, however often a loop logs
_SAMPLES_PER_WINDOW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """Totals between two calls.

    Args:
        steps: number of steps; ``samples`` and ``tokens`` are global.
        seconds: wall time by the clock, the same on all ranks.
        compute_s: seconds of this rank in spans of category ``compute``.
        span_s: seconds of this rank in all spans; slightly more than ``seconds``, which end at the start of a step.
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
    """Moving window of at least ``length``, or everything since the first call if shorter.

    The window restarts for a new run: a checkpoint was loaded, or the step count decreased.

    Args:
        length: any duration except a fraction of the run; the interval between calls is the minimum.
        caller: prefix of messages.

    Raises:
        ConfigError: invalid duration, or a fraction of the run.
    """

    def __init__(self, length: Duration | int | str, *, caller: str) -> None:
        self._length = Duration.parse(length)
        if self._length.unit == "dur":
            raise ConfigError(
                f"{caller}: window must be a length such as '100ba' or '60sec', got {length!r}, a part of the run. "
                "Give it in steps, samples, tokens or seconds."
            )
        self._samples: deque[_WindowSample] = deque()
        self._run: tuple[int, str | None] | None = None

    def update(self, state: TrainState) -> WindowTotals | None:
        """Return the totals of the window that ends now; None at the first call of a run or without a new step.

        Mutates: the samples of the window.
        """
        now, run = _take_sample(state.clock), run_identity(state)
        # A new run may have the same identity if its object has the same address, so the step is compared, too.
        if run != self._run or (self._samples and now.clock.step < self._samples[-1].clock.step):
            self._run = run
            self._samples.clear()
        since = self._window_start(now)
        # The clock counts no time for the first step of a process, so step 0 is no sample.
        if now.clock.step and (
            not self._samples or self._distance(self._samples[-1], now) >= self._length.value / _SAMPLES_PER_WINDOW
        ):
            self._samples.append(now)
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
        """Return the last sample at least one window length ago, or the first sample. Mutates: drops earlier samples."""
        while len(self._samples) > 1 and self._distance(self._samples[1], now) >= self._length.value:
            self._samples.popleft()
        return self._samples[0] if self._samples else None

    def _distance(self, sample: _WindowSample, now: _WindowSample) -> float:
        unit = self._length.unit
        return now.clock.count(unit) - sample.clock.count(unit)


def _take_sample(clock: Clock) -> _WindowSample:
    totals = spans.totals()
    compute = spans.seconds_by_category(totals)["compute"]
    return _WindowSample(clock=clock, compute_s=compute, span_s=sum(total.seconds for total in totals.values()))


def throughput(window: Duration | int | str = "100ba", *, devices: int | None = None) -> Meter:
    """Create a meter of training speed over the last ``window``: global and per device, over wall time and over compute time.

    Formula: ``speed/samples_per_s = samples / seconds``, ``speed/samples_per_s_per_device`` the same per device,
    ``speed/samples_per_s/compute = samples / compute seconds``

    The meter returns ``speed/samples_per_s``, ``speed/tokens_per_s`` (if tokens are counted) and ``speed/steps_per_s``;
    samples and tokens also as ``..._per_device``. Each rate comes twice: over wall time by rank 0's clock, equal on all ranks;
    and as ``.../compute`` over this rank's seconds in spans of category ``compute``, the speed without waits for data, other
    ranks, checkpoints or evaluation. ``speed/productive`` is the compute fraction of wall time. On a GPU, host time stands for
    device time: if the host runs ahead, the wait counts in the span of the wait.

    The first call starts the window and returns nothing, also after loading a checkpoint. If calls are further apart than
    ``window``, the window reaches back to the previous call. Names are the same on all ranks.

    Args:
        window: number of steps, or a duration (``"60sec"``, ``"1e6tok"``); not a fraction of the run.
        devices: number of devices for ``..._per_device``; None counts one per rank.

    Collective: none. Host sync: none.

    Example:
        import dtrain as dt

        speed = dt.monitors.throughput("100ba")
        for batch in loader:
            state, metrics = step(state, batch)
            if state.crossed("100ba"):
                log(state.clock.step, dt.monitors.collect(state, dt.reduce_metrics(metrics), speed))

    Raises:
        ConfigError: ``window`` is invalid or a fraction of the run, or ``devices`` is not an integer of at least 1.
    """
    moving_window = MovingWindow(window, caller="throughput")
    if devices is not None:
        check_int("throughput", "devices", devices)

    def meter_fn(state: TrainState) -> dict[str, float]:
        totals = moving_window.update(state)
        if totals is None:
            return {}
        counts = {"speed/samples_per_s": totals.samples}
        if state.clock.tokens:
            counts["speed/tokens_per_s"] = totals.tokens
        num_devices = devices or get_dist_info().world_size
        per_device = {f"{name}_per_device": count / num_devices for name, count in counts.items()}
        rates: dict[str, float] = {**counts, **per_device, "speed/steps_per_s": totals.steps}
        speeds: dict[str, float] = {}
        if totals.seconds > 0:
            speeds |= {name: count / totals.seconds for name, count in rates.items()}
        if totals.compute_s > 0:
            speeds |= {f"{name}/compute": count / totals.compute_s for name, count in rates.items()}
        if totals.span_s > 0:
            speeds["speed/productive"] = totals.compute_s / totals.span_s
        return speeds

    return meter_fn


def mfu(
    *,
    flops_per_token: float | None = None,
    flops_per_sample: float | None = None,
    peak: float | None = None,
    dtype: ComputeDtype | torch.dtype = "bf16",
    window: Duration | int | str = "100ba",
    devices: int | None = None,
) -> Meter:
    """Create a meter of model FLOPs per second and of model FLOPs utilization (MFU).

    Formula: ``speed/flops_per_s = flops_per_token * tokens / seconds``, ``speed/mfu = speed/flops_per_s / (devices * peak)``

    The meter returns ``speed/flops_per_s``, ``speed/flops_per_s_per_device`` and, with a known peak, ``speed/mfu`` over wall
    time and ``speed/mfu/compute`` over this rank's compute seconds (see ``throughput``). The first call starts the window and
    returns nothing.

    Args:
        flops_per_token: operations of forward and backward, as from ``transformer_flops``; the batches' tokens must be
            counted. Give either ``flops_per_token`` or ``flops_per_sample``.
        flops_per_sample: operations of forward and backward per sample, as from ``count_flops``.
        peak: peak operations per second of one device; None uses ``peak_flops`` for the GPU of this rank. For an unknown
            device, ``speed/mfu`` is absent, with one warning on rank 0.
        dtype: data type of the matrix products, to select the peak; ignored if ``peak`` is given.
        window: length of the window, as in ``throughput``.
        devices: number of devices; None counts one per rank.

    Collective: none. Host sync: none.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.

    Example:
        import dtrain as dt

        flops = dt.monitors.transformer_flops(params=124_000_000, layers=12, dim=768, seq=1024)
        meter = dt.monitors.mfu(flops_per_token=flops, dtype="bf16")
        if state.crossed("100ba"):
            log(state.clock.step, meter(state))

    Raises:
        ConfigError: both or neither of ``flops_per_token`` and ``flops_per_sample``, a number that is not positive,
            ``devices`` below 1, an unknown dtype or an invalid window; in a call, ``flops_per_token`` in a run without a token
            count.
    """
    flops = _require_one(flops_per_token, flops_per_sample)
    for name, value in (("flops_per_token", flops_per_token), ("flops_per_sample", flops_per_sample), ("peak", peak)):
        if value is not None:
            check_number("mfu", name, value, above=0)
    if devices is not None:
        check_int("mfu", "devices", devices)
    # Raise for an unknown dtype.
    peak_flops("", dtype)
    moving_window, device_peak = MovingWindow(window, caller="mfu"), _DevicePeak(peak, dtype)

    def meter_fn(state: TrainState) -> dict[str, float]:
        peak_rate = device_peak.lookup(state.device)
        totals = moving_window.update(state)
        if totals is None:
            return {}
        if flops_per_token is not None and not state.clock.tokens:
            raise ConfigError(
                "mfu: flops_per_token must be used in a run with a token count, got no tokens. Name the token axis in the "
                "step's batch_spec, or pass flops_per_sample."
            )
        total_flops = flops * (totals.samples if flops_per_token is None else totals.tokens)
        num_devices = devices or get_dist_info().world_size
        rates: dict[str, float] = {}
        if totals.seconds > 0:
            rate = total_flops / totals.seconds
            rates |= {"speed/flops_per_s": rate, "speed/flops_per_s_per_device": rate / num_devices}
        for name, seconds in (("speed/mfu", totals.seconds), ("speed/mfu/compute", totals.compute_s)):
            if peak_rate is not None and seconds > 0:
                rates[name] = total_flops / seconds / num_devices / peak_rate
        return rates

    return meter_fn


def _require_one(flops_per_token: float | None, flops_per_sample: float | None) -> float:
    values = [value for value in (flops_per_token, flops_per_sample) if value is not None]
    if len(values) != 1:
        raise ConfigError(
            f"mfu: exactly one of flops_per_token and flops_per_sample must be given, got {flops_per_token=}, "
            f"{flops_per_sample=}. Use dt.monitors.transformer_flops or dt.monitors.count_flops."
        )
    return values[0]


class _DevicePeak:
    """Peak rate of a device, looked up once."""

    def __init__(self, peak: float | None, dtype: ComputeDtype | torch.dtype) -> None:
        self._peak, self._dtype = peak, dtype
        self._known = peak is not None

    def lookup(self, device: torch.device) -> float | None:
        if not self._known:
            self._known = True
            name = device_name(device)
            self._peak = peak_flops(name, self._dtype)
            if self._peak is None and get_dist_info().rank == 0:
                warnings.warn(
                    f"mfu: peak must be given for an unknown device, got {name!r} in {self._dtype}. speed/mfu is left out. "
                    "Pass mfu(peak=...), operations per second of one device.",
                    stacklevel=3,
                )
        return self._peak
