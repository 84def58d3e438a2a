"""``early_stop`` and ``threshold_stop``: end a run by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from dtrain import spans
from dtrain.clock import Clock
from dtrain.dist.collectives import all_gather_numbers
from dtrain.durations import Duration
from dtrain.errors import ConfigError, PeerError
from dtrain.state import TrainState
from dtrain.typing import Plain

StopMode: TypeAlias = Literal["min", "max"]

_ROUNDING = 1e-9  # of a run: rounding of two shares that are taken off each other


def early_stop(metric: str, *, patience: Duration | int | str, min_delta: float = 0.0, mode: StopMode = "min") -> EarlyStop:
    """A decision that stops a run whose metric has not become better for so long.

    Call it when the metric is measured, before the save of the same step: the checkpoint then has the value. ``until`` ends
    when the stop says so, and hands out nothing if a resumed run had stopped::

        stop = dt.monitors.early_stop("loss", patience="2ep")
        extra = {"loader": loader, "stop": stop}
        state = dt.load_sharded("ckpt", state, extra=extra, missing_ok=True).state
        for batch in loader.until("90ep", stop=stop):
            state, metrics = step(state, batch)
            if state.crossed("1ep"):
                stop(state, dt.reduce_metrics(dt.evaluate(model, held_out, loss_fn)))
                dt.save_sharded("ckpt", state, extra=extra)

    The verdict is saved, and it holds as long as the stop is built with the same arguments. With more patience, say, the run
    goes on.

    Formula: better is ``value < best - min_delta`` (``"max"``: ``value > best + min_delta``); stop when
    ``now - time of the best >= patience``

    Args:
        metric: its name among the numbers.
        patience: in any unit of the clock: ``"2ep"``, ``"1_000ba"``, ``"1e9tok"``, ``"0.1dur"``; an integer counts steps. It is
            counted from the best value, or the first one; so with an evaluation each epoch, ``"2ep"`` allows for one that is
            not better, and the second one stops.
        min_delta: what is better by no more than this is not better, >= 0.
        mode: whether less is better, or more. NaN is never better than anything.

    Raises:
        ConfigError: no name, no duration, a ``min_delta`` or ``mode`` that cannot be.

    Source: Prechelt 1998, Early stopping, but when?, section 2 (its class UP, with a length of training for a count).

    Example:
        >>> stop, clock = early_stop("loss", patience=2), Clock()
        >>> for loss in (3.0, 2.0, 2.5, float("nan")):
        ...     clock = clock.tick(samples=1, tokens=0, seconds=0.1)
        ...     print(stop.judge(clock, loss), stop.best)
        False 3.0
        False 2.0
        False 2.0
        True 2.0
    """
    return EarlyStop(metric, patience=patience, min_delta=min_delta, mode=mode)


class _StopDecision:
    """The step at which a stop ended the run, if it did: saved with the stop, and kept while its arguments are the same."""

    __slots__ = ("_criterion", "_metric", "_restored", "_where", "stopped_at")

    def __init__(self, where: str, metric: str, criterion: list[Plain]) -> None:
        self._where, self._metric, self._criterion = where, metric, criterion
        self.stopped_at: int | None = None
        self._restored = False

    @property
    def stopped(self) -> bool:
        """True if the run has come to its end by this stop, in this start or in an earlier one."""
        return self.stopped_at is not None

    def _already_stopped(self, state: TrainState) -> bool:
        """True if the run had stopped already, and nothing is to be judged.

        Raises:
            ConfigError: the state was saved before the value was judged, or a resumed run has trained on behind its end.
        """
        if state.run_context.extra_saved_steps.get(id(self)) == state.step:
            raise ConfigError(
                f"{self._where}: the checkpoint of step {state.step} was saved before its {self._metric!r} was judged, and a "
                "resumed run would forget the value. Call stop(state, numbers) before save_sharded"
            )
        if self._restored and self.stopped_at is not None and state.step > self.stopped_at:
            raise ConfigError(
                f"{self._where}: the run stopped at step {self.stopped_at}, and after a restart it has trained on to "
                f"step {state.step}. Give the stop to the loop: loader.until(length, stop=stop)"
            )
        return self.stopped

    def _record_decision(self, state: TrainState, stop: bool, **told: Plain) -> bool:
        if stop:
            self.stopped_at = state.step
            spans.record_event(self._where, step=state.step, metric=self._metric, **told)
        return stop

    def state_dict(self) -> dict[str, Plain]:
        """The step of the verdict, None before it, and the arguments that it holds for."""
        return {"stopped_at": self.stopped_at, "criterion": list(self._criterion)}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Take over the verdict, if it was made with the same arguments. Mutates: the verdict."""
        at = state.get("stopped_at") if state.get("criterion") == self._criterion else None
        self.stopped_at = at if isinstance(at, int) else None
        self._restored = True


class EarlyStop(_StopDecision):
    """The decision that ``early_stop`` makes: ``stop(state, numbers) -> bool``.

    ``best`` is the best value so far, None before the first. ``stopped`` is True once the run was to stop.
    """

    __slots__ = ("_at", "_better", "_min_delta", "_patience", "best")

    def __init__(self, metric: str, *, patience: Duration | int | str, min_delta: float = 0.0, mode: StopMode = "min") -> None:
        _check_metric_and_mode("early_stop", metric, mode)
        if isinstance(min_delta, bool) or not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"early_stop: needs a finite min_delta >= 0, got {min_delta=}")
        self._patience, self._min_delta = Duration.parse(patience), float(min_delta)
        super().__init__("early_stop", metric, [metric, str(self._patience), self._min_delta, mode])
        self._better = -1.0 if mode == "min" else 1.0
        self.best: float | None = None
        self._at: float | None = None  # the clock's count, in the unit of the patience, at the best value or at the first call

    def __call__(self, state: TrainState, numbers: Mapping[str, float]) -> bool:
        """Judge the metric's value now. Return True if the run is to stop: on every rank alike, by the value of rank 0.

        Args:
            state: the newest state, not saved yet at this step.
            numbers: by name, as ``reduce_metrics`` returns them.

        Mutates: the best value and its time, the verdict.
        Collective: one all-gather of two numbers on the control group; every rank must call it.
        Host sync: none.

        Raises:
            ConfigError: the metric is not among ``numbers``, or is no number; the step was saved already with this stop in
                ``extra``; a resumed run has trained on behind its end.
            PeerError: so on another rank.
        """
        if self._already_stopped(state):
            return True
        stop = self.decide(state.clock, _value_of_rank_0("early_stop", self._metric, numbers))
        return self._record_decision(state, stop, best=self.best)

    def decide(self, clock: Clock, value: float) -> bool:
        """The decision alone, from a value and a time. Mutates: the best value and its time."""
        now = clock.count(self._patience.unit)
        if self._at is None or self._is_better(value):
            self._at = now
        if self._is_better(value):
            self.best = value
        slack = _ROUNDING if self._patience.unit == "dur" else 0.0
        return now - self._at >= self._patience.value - slack

    def _is_better(self, value: float) -> bool:
        if self.best is None:  # what is infinitely bad, or NaN, is no best value
            return value * self._better > -math.inf
        return (value - self.best) * self._better > self._min_delta

    def state_dict(self) -> dict[str, Plain]:
        """The best value, and when it was, in the unit of the patience; the verdict."""
        return {"best": self.best, "at": self._at, "unit": self._patience.unit, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Go on from what ``state_dict`` returned.

        Mutates: the best value and its time, the verdict.

        Raises:
            ConfigError: it was measured in another unit: ``patience`` was in epochs, say, and is in steps now.
        """
        if state.get("unit") != self._patience.unit:
            raise ConfigError(
                f"early_stop: the saved wait is in {state.get('unit')!r}, patience={str(self._patience)!r} now; keep the unit, "
                "or leave it out of extra to begin anew"
            )
        super().load_state_dict(state)
        best, at = state.get("best"), state.get("at")
        self.best = float(best) if isinstance(best, int | float) else None
        self._at = at if isinstance(at, int | float) else None

    def __repr__(self) -> str:
        return f"EarlyStop({self._metric!r}, patience={str(self._patience)!r}, best={self.best})"


def threshold_stop(metric: str, threshold: float, *, mode: StopMode = "min", stop_on_nan: bool = False) -> ThresholdStop:
    """A decision that stops a run whose metric is as good as ``threshold``: ``stop(state, numbers) -> bool``.

    Use it as ``early_stop``: judge before the save, ``{"stop": stop}`` in ``extra``, ``loader.until(length, stop=stop)``.

    Formula: stop when ``value <= threshold`` (``"max"``: ``value >= threshold``)

    Args:
        metric: its name among the numbers.
        threshold: the value that is good enough.
        mode: whether less is better, or more.
        stop_on_nan: whether NaN stops the run, too.

    Raises:
        ConfigError: no name, a ``threshold`` that is no number, an unknown ``mode``.

    Source: the target quality of a time-to-accuracy benchmark, Coleman et al. 2017, DAWNBench.

    Example:
        >>> stop = threshold_stop("accuracy", 0.9, mode="max")
        >>> stop.judge(0.89), stop.judge(0.9), stop.judge(float("nan"))
        (False, True, False)
    """
    return ThresholdStop(metric, threshold, mode=mode, stop_on_nan=stop_on_nan)


class ThresholdStop(_StopDecision):
    """The decision that ``threshold_stop`` makes. ``stopped`` is True once the metric was good enough."""

    __slots__ = ("_better", "_on_nan", "_threshold")

    def __init__(self, metric: str, threshold: float, *, mode: StopMode = "min", stop_on_nan: bool = False) -> None:
        _check_metric_and_mode("threshold_stop", metric, mode)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or math.isnan(threshold):
            raise ConfigError(f"threshold_stop: needs a number as threshold, got {threshold!r}")
        super().__init__("threshold_stop", metric, [metric, float(threshold), mode, stop_on_nan])
        self._threshold, self._on_nan = float(threshold), stop_on_nan
        self._better = -1.0 if mode == "min" else 1.0

    def __call__(self, state: TrainState, numbers: Mapping[str, float]) -> bool:
        """Judge the metric's value now. Return True if the run is to stop: on every rank alike, by the value of rank 0.

        Mutates: the verdict.
        Collective: one all-gather of two numbers on the control group; every rank must call it.
        Host sync: none.

        Raises:
            ConfigError: as ``EarlyStop``.
            PeerError: the metric is missing on another rank.
        """
        if self._already_stopped(state):
            return True
        value = _value_of_rank_0("threshold_stop", self._metric, numbers)
        return self._record_decision(state, self.decide(value), value=value if math.isfinite(value) else str(value))

    def decide(self, value: float) -> bool:
        """The decision alone."""
        if math.isnan(value):
            return self._on_nan
        return value * self._better >= self._threshold * self._better

    def __repr__(self) -> str:
        return f"ThresholdStop({self._metric!r}, {self._threshold:g}, mode={'min' if self._better < 0 else 'max'!r})"


def _check_metric_and_mode(where: str, metric: str, mode: str) -> None:
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"{where}: metric is a name, as in {where}('eval/loss', ...), got {metric!r}")
    if mode not in ("min", "max"):
        raise ConfigError(f"{where}: mode must be 'min' (less is better) or 'max', got {mode!r}")


def _value_of_rank_0(where: str, metric: str, numbers: Mapping[str, float]) -> float:
    """The value of rank 0, on every rank: numbers that were not reduced differ, and the decision must not."""
    value, error = math.nan, None
    if metric not in numbers:
        error = ConfigError(f"{where}: there is no metric {metric!r}; there are {', '.join(sorted(numbers)) or 'none'}")
    else:
        try:
            value = float(numbers[metric])
        except (TypeError, ValueError):
            error = ConfigError(f"{where}: the metric {metric!r} is no number, got {numbers[metric]!r}")
    rows = all_gather_numbers([value, error is not None], caller=where)
    if error is not None:
        raise error
    failed = [rank for rank, (_, broken) in enumerate(rows) if broken]
    if failed:
        raise PeerError(
            f"{where}: rank {failed[0]} has no number {metric!r} ({len(failed)} of {len(rows)} ranks); see its error"
        )
    return rows[0][0]
