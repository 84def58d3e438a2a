"""Measure the progress of a run with meters, functions from a training state to numbers, and ``collect`` their numbers.

``throughput`` counts samples, tokens and steps per second and ``mfu`` FLOPs, both over a moving window. ``eta`` estimates the
remaining time. ``learning_rates`` lists the learning rate of each parameter group. ``batch_balance`` tells how evenly
a batch was dealt to the ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from dtrain import spans
from dtrain.arguments import check_int, check_number, warn
from dtrain.data.loader import Loader
from dtrain.device import device_name
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.monitors.flops import ComputeDtype, peak_flops
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.spans import SpanTime
from dtrain.state import TrainState

Meter: TypeAlias = Callable[[TrainState], Mapping[str, float]]
"""Meter: function from a training state to numbers by name. Memory between calls is not part of the training state."""
# largest number of samples; beyond, every second sample is dropped
_MAX_SAMPLES = 128
# fraction of an interval
_ROUNDING = 1e-6
# number of recent costs in the mean of each span
_MAX_COSTS = 16
# categories of spans that recur
_RECURRING_CATEGORIES = ("evaluation", "checkpoint")
# categories of spans that happen once
_ONE_TIME_CATEGORIES = ("compile", "restart", "setup")
# spans that happen once, in categories that recur
_ONE_TIME_SPANS = ("search", "load")
# samples per window: the window length is exact to 1/100, however often a loop logs
_SAMPLES_PER_WINDOW = 100


def collect(state: TrainState, *sources: Mapping[str, float] | Meter) -> dict[str, float]:
    """Merge the numbers of all ``sources`` into one dict, in order, for a logger.

    Args:
        state: training state after the step; passed to the meters.
        sources: mappings of numbers, such as the result of ``reduce_metrics``, and meters, such as ``throughput()``,
            ``memory_stats`` or any function of a state.

    Collective: those of the meters.

    Example:
        >>> import dtrain as dt
        >>> dt.monitors.collect(None, {"loss": 2.5}, lambda state: {"lr": 0.1})
        {'loss': 2.5, 'lr': 0.1}

    Raises:
        ConfigError: two sources return the same name, a source is neither a mapping nor a function, or a meter returns no
            mapping.
    """
    merged: dict[str, float] = {}
    for position, source in enumerate(sources, start=1):
        numbers = source(state) if callable(source) else source
        if not isinstance(numbers, Mapping):
            meter = getattr(source, "__qualname__", type(source).__name__)
            origin = f" from the meter {meter}" if callable(source) else ""
            raise ConfigError(
                f"collect: source {position} must be or return a mapping of numbers, got {type(numbers).__name__}{origin}. "
                "Pass a dict, or a meter such as dt.monitors.throughput()."
            )
        duplicate = next((name for name in numbers if name in merged), None)
        if duplicate is not None:
            raise ConfigError(
                f"collect: names must be unique, got {duplicate!r} from source {position} and an earlier source. "
                "Rename the number."
            )
        merged.update(numbers)
    return merged


def learning_rates(state: TrainState, *, extra_options: Sequence[str] = ()) -> dict[str, float]:
    """Return the learning rate of each parameter group: ``lr``, or ``lr/<name>`` with several groups (or ``lr/<index>``).

    The numbers are the values of the groups between steps. ``scale_lr`` and ``set_option`` change an option only during an
    update and add the metric ``lr`` to the step. The numbers here are then called ``base_lr`` and ``base_lr/<name>``, so that
    ``collect`` can merge both. The same holds for other scheduled options.

    Args:
        state: training state with the optimizer.
        extra_options: further options of the groups, such as ``("weight_decay", "momentum", "betas")``; a pair such as
            ``betas`` becomes ``betas0`` and ``betas1``. Groups without the option are skipped. For a meter, use
            ``functools.partial(dt.monitors.learning_rates, extra_options=...)``.

    Host sync: none; one for each option that is a tensor on a device.

    Example:
        >>> from types import SimpleNamespace
        >>> import dtrain as dt
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> state = SimpleNamespace(
        ...     optimizer=torch.optim.Adam([weight], lr=0.5), transform_states={}
        ... )
        >>> dt.monitors.learning_rates(state, extra_options=("betas",))
        {'lr': 0.5, 'betas0': 0.9, 'betas1': 0.999}

    Raises:
        ConfigError: no group has a number with the name.
    """
    groups = state.optimizer.param_groups
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(groups))]
    # Transform states have the names of all transforms of the step.
    scheduled = {
        option for option in ("lr", *extra_options) if {f"scale_{option}", f"set_{option}"} & set(state.transform_states)
    }
    rates: dict[str, float] = {}
    for option in ("lr", *extra_options):
        labeled = [(label, group[option]) for label, group in zip(labels, groups, strict=True) if option in group]
        if not labeled:
            known = ", ".join(sorted({name for group in groups for name in group} - {"params", "name"}))
            raise ConfigError(
                f"learning_rates: extra_options must be options of {type(state.optimizer).__name__} ({known}), got {option!r}. "
                "Choose from these options."
            )
        for label, value in labeled:
            values = {f"{option}{index}": each for index, each in enumerate(value)} if isinstance(value, tuple | list) else {}
            for name, each in (values or {option: value}).items():
                metric = f"base_{name}" if option in scheduled else name
                rates[metric if len(groups) == 1 else f"{metric}/{label}"] = _to_number(option, each)
    return rates


def _to_number(option: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"learning_rates: option {option!r} must be a number, got {value!r}. Remove the option.") from None


def run_identity(state: TrainState) -> tuple[int, str | None]:
    """Return an identifier that changes if a state belongs to another run or to a newly loaded checkpoint."""
    # The id avoids a reference to the object, which would keep the checkpoint's folder locked.
    return id(state._run_context), state._run_context.lineage.resumed_from


class WindowTotals(NamedTuple):
    """Totals of a run, or between two calls: steps; samples and tokens of all ranks; and seconds.

    ``seconds`` is wall time by the clock, the same on all ranks. ``compute_s`` is the time of this rank in spans of category
    ``compute``, and ``span_s`` in all spans, slightly more than ``seconds``, which end at the start of a step.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
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
        # count of the clock in the unit of the length, and totals
        self._samples: deque[tuple[float, WindowTotals]] = deque()
        self._run: tuple[int, str | None] | None = None

    def update(self, state: TrainState) -> WindowTotals | None:
        """Return the totals of the window that ends now; None at the first call of a run or without a new step.

        Mutates: the samples of the window.
        """
        clock, run = state.clock, run_identity(state)
        seconds = spans.seconds_by_category(spans.totals())
        now = WindowTotals(clock.step, clock.samples, clock.tokens, clock.seconds, seconds["compute"], sum(seconds.values()))
        count, samples = clock.count(self._length.unit), self._samples
        # A new run may have the same identity if its object has the same address, so the step is compared, too.
        if run != self._run or (samples and now.steps < samples[-1][1].steps):
            self._run = run
            samples.clear()
        # The window starts at the last sample at least one length ago, or at the first sample.
        while len(samples) > 1 and count - samples[1][0] >= self._length.value:
            samples.popleft()
        since = samples[0][1] if samples else None
        # The clock counts no time for the first step of a process, so step 0 is no sample.
        if clock.step and (not samples or count - samples[-1][0] >= self._length.value / _SAMPLES_PER_WINDOW):
            samples.append((count, now))
        if since is None or now.steps == since.steps:
            return None
        return WindowTotals._make(last - first for first, last in zip(since, now, strict=True))


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


def batch_balance(loader: Loader) -> Meter:
    """Create a meter of how evenly the loader's last batch was dealt to the ranks.

    Formula: ``balance/spread = (max(costs) - min(costs)) / mean(costs)``, ``balance/idle = 1 - mean(costs) / max(costs)``,
    ``balance/padding = 1 - tokens / padded tokens``

    ``costs`` are the sums of each rank's costs, as ``build_loader(balance=)`` defines a cost; tokens without ``balance``.
    ``balance/padding`` is returned if the loader makes microbatches (``max_tokens``). The numbers are the same on all ranks.

    Args:
        loader: loader with ``balance`` or ``max_tokens``.

    Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loader = dt.build_loader(
        ...     torch.ones(4, 8),
        ...     global_batch_size=4,
        ...     seed=0,
        ...     balance="tokens",
        ...     lengths=[8, 2, 5, 1],
        ... )
        >>> batch = next(loader.until("1ep"))
        >>> dt.monitors.batch_balance(loader)(None)
        {'balance/spread': 0.0, 'balance/idle': 0.0}
    """

    def meter_fn(state: TrainState) -> dict[str, float]:
        balance = loader.balance
        if balance is None:
            return {}
        numbers = {"balance/spread": balance.spread, "balance/idle": balance.idle}
        return {**numbers, "balance/padding": balance.padding} if any(balance.microbatches) else numbers

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
    if (flops_per_token is None) is (flops_per_sample is None):
        raise ConfigError(
            f"mfu: exactly one of flops_per_token and flops_per_sample must be given, got {flops_per_token=}, "
            f"{flops_per_sample=}. Use dt.monitors.transformer_flops or dt.monitors.count_flops."
        )
    for name, value in (("flops_per_token", flops_per_token), ("flops_per_sample", flops_per_sample), ("peak", peak)):
        if value is not None:
            check_number("mfu", name, value, above=0)
    if devices is not None:
        check_int("mfu", "devices", devices)
    # Raise for an unknown dtype.
    peak_flops("", dtype)
    moving_window = MovingWindow(window, caller="mfu")

    @cache
    def find_peak(device: torch.device) -> float | None:
        rate = peak_flops(name := device_name(device), dtype)
        if rate is None and get_dist_info().rank == 0:
            warn(
                f"mfu: peak must be given for an unknown device, got {name!r} in {dtype}. speed/mfu is left out. "
                "Pass mfu(peak=...), operations per second of one device."
            )
        return rate

    def meter_fn(state: TrainState) -> dict[str, float]:
        peak_rate = find_peak(state.device) if peak is None else peak
        totals = moving_window.update(state)
        if totals is None:
            return {}
        if flops_per_token is not None and not state.clock.tokens:
            raise ConfigError(
                "mfu: flops_per_token must be used in a run with a token count, got no tokens. Name the token axis in the "
                "step's batch_spec, or pass flops_per_sample."
            )
        total_flops = (flops_per_token or 0.0) * totals.tokens + (flops_per_sample or 0.0) * totals.samples
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """Progress at one moment.

    Args:
        progress: training progress, in any unit.
        seconds: training time so far, without recurring and one-time interruptions.
    """

    progress: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class Interruption:
    """Interruption that recurs at intervals, such as an evaluation.

    Args:
        first: progress at the first occurrence; ``last``, at the latest; ``times``, number of occurrences.
        costs: seconds of the latest occurrences.
    """

    first: float
    last: float
    times: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_COSTS))

    def add(self, progress: float, seconds: float) -> None:
        """Add an occurrence. Mutates: all fields except ``first``."""
        self.last, self.times = progress, self.times + 1
        self.costs.append(seconds)

    def remaining(self, now: float, total: float) -> float:
        """Estimate the seconds of all occurrences from ``now`` until ``total``, at the observed interval.

        Overdue occurrences are ignored.

        After a single occurrence, the interval is the progress at this occurrence.
        """
        interval = (self.last - self.first) / (self.times - 1) if self.times > 1 else self.first
        if interval <= 0:
            return 0.0
        # An occurrence that is due exactly now still counts.
        passed = math.ceil((now - self.last) / interval - _ROUNDING) - 1 if now > self.last else 0
        times = int((total - self.last) / interval + _ROUNDING) - passed
        return max(0, times) * sum(self.costs) / len(self.costs)


def estimate_seconds_left(
    samples: Sequence[ProgressSample], interruptions: Mapping[str, Interruption], total: float
) -> float | None:
    """Estimate the seconds until ``total``; None without enough samples. Pure.

    Formula: ``(total - progress) * seconds / progress``, over the newer half of the samples, plus for each interruption its
    mean cost times the number of expected occurrences

    Only the newer half counts, so a slow start (compilation of the first step, microbatch search) is soon forgotten.

    Example:
        >>> times = {10: 100.0, 20: 105.0, 30: 110.0}
        >>> samples = [
        ...     ProgressSample(progress=progress, seconds=seconds)
        ...     for progress, seconds in times.items()
        ... ]
        >>> estimate_seconds_left(samples, {}, 100)  # 70 to go at 10 in 5 seconds
        35.0
        >>> evaluation = Interruption(first=20, last=20)
        >>> evaluation.add(20, 4.0)
        >>> estimate_seconds_left(
        ...     samples, {"evaluate": evaluation}, 100
        ... )  # and evaluations at 40, 60, 80 and 100
        51.0
    """
    if not samples:
        return None
    last = samples[-1]
    if last.progress >= total:
        return 0.0
    since = samples[(len(samples) - 1) // 2]
    if last.progress <= since.progress:
        return None
    pace = max(0.0, last.seconds - since.seconds) / (last.progress - since.progress)
    return (total - last.progress) * pace + sum(each.remaining(last.progress, total) for each in interruptions.values())


def eta(run_length: Duration | int | str) -> Meter:
    """Create a meter of run time: ``time/elapsed_s``, ``time/left_s``, and ``time/end`` in seconds since 1970.

    The remaining time is training at recent speed plus the expected evaluations and checkpoints. Their interval and cost are
    those observed in this process (spans of category ``evaluation`` and ``checkpoint``). One-time costs (compilation,
    microbatch search, loading) are excluded. The first call returns the elapsed time only, also after loading a checkpoint,
    since the machine may differ. Each rank computes its own estimate.

    Args:
        run_length: length of the run: ``10_000``, ``"3ep"``, ``"1e9tok"``, ``"2h"``; ``"1dur"`` if ``step.init`` knows the
            length. With epochs, the estimate needs the steps per epoch: from ``step.init(run_length=...)``, else after the
            first epoch.

    Collective: none. Host sync: none.

    Example:
        import dtrain as dt

        meter = dt.monitors.eta("3ep")
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if state.crossed("100ba"):
                log(state.clock.step, meter(state))

    Raises:
        ConfigError: invalid duration; in a call, ``dur`` in a run of unknown length.
    """
    whole = Duration.parse(run_length)
    history = _RunHistory()

    def meter_fn(state: TrainState) -> dict[str, float]:
        clock = state.clock
        times = {"time/elapsed_s": clock.seconds}
        progress = run_progress(clock, whole)
        if progress is None:
            return times
        done, total = progress
        seconds = history.estimate(run_identity(state), clock.step, done, total)
        # A length in seconds gives the exact remaining time.
        if whole.unit == "sec":
            seconds = max(0.0, total - done)
        if seconds is not None:
            times |= {"time/left_s": seconds, "time/end": time.time() + seconds}
        return times

    return meter_fn


def run_progress(clock: Clock, whole: Duration) -> tuple[float, float] | None:
    """Return the progress and the total length of a run in one unit; None if the steps per epoch are unknown."""
    if whole.unit != "ep":
        return float(clock.count(whole.unit)), float(whole.value)
    steps: float | None = clock.run_length.steps_per_epoch if clock.run_length is not None else None
    if steps is None and clock.epoch:
        steps = (clock.step - clock.step_in_epoch) / clock.epoch
    if not steps:
        return None
    # In real steps, so that an epoch of another length changes the total and not the progress.
    return float(clock.step), clock.step + max(0.0, (whole.value - clock.epoch) * steps - min(clock.step_in_epoch, steps))


class _RunHistory:
    """Observations of one run by this process."""

    def __init__(self) -> None:
        self._run: tuple[int, str | None] | None = None
        self._step = 0
        self._samples: list[ProgressSample] = []
        self._interruptions: dict[str, Interruption] = {}
        self._last_totals: dict[str, SpanTime] = {}

    def estimate(self, run: tuple[int, str | None], step: int, done: float, total: float) -> float | None:
        """Add a sample and return the estimated seconds left. Mutates: the samples and interruptions."""
        totals = spans.totals()
        if run != self._run or step < self._step:
            self._run, self._last_totals = run, totals
            self._samples.clear()
            self._interruptions.clear()
        self._step = step
        # The first steps are slower than usual.
        if not step:
            return 0.0 if done >= total else None
        training = 0.0
        for name, (_, seconds) in totals.items():
            category = spans.category_of(name)
            if category in _RECURRING_CATEGORIES:
                spent = seconds - self._last_totals.get(name, SpanTime(0, 0.0)).seconds
                if spent > 0 and name not in _ONE_TIME_SPANS:
                    self._interruptions.setdefault(name, Interruption(first=done, last=done)).add(done, spent)
            elif category not in _ONE_TIME_CATEGORIES and name not in _ONE_TIME_SPANS:
                training += seconds
        self._last_totals = totals
        self._samples.append(ProgressSample(progress=done, seconds=training))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1::2]
        return estimate_seconds_left(self._samples, self._interruptions, total)
