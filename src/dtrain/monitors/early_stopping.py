"""Stop a run early by a metric: no improvement (``early_stop``) or a reached threshold (``threshold_stop``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from dtrain import spans
from dtrain.arguments import check_choice, check_number, explain_arguments
from dtrain.dist.collectives import all_gather_numbers
from dtrain.errors import ConfigError, PeerError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.typing import Plain

StopGoal: TypeAlias = Literal["min", "max"]
_GOALS: tuple[StopGoal, ...] = ("min", "max")
_SMALLER_IS_BETTER = ("loss", "perplexity", "error")

# rounding error of the difference of two fractions of a run
_ROUNDING = 1e-9


@explain_arguments
def early_stop(
    metric: str, *, patience: Duration | int | str, min_delta: float = 0.0, goal: StopGoal | None = None
) -> EarlyStop:
    """Stop a run if a metric has not improved for a given time.

    Call the stop after each measurement and before the save of the same step, so that the checkpoint holds the value.
    ``until`` ends after the stop, and yields nothing if a resumed run had stopped::

        stop = dt.monitors.early_stop("loss", patience="2ep")
        state = step.init(model, optimizer, loader=loader, stateful={"stop": stop})
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        for batch in loader.until("90ep", stop=stop):
            state, metrics = step(state, batch)
            if state.crossed("1ep"):
                stop(state, dt.reduce_metrics(dt.evaluate(model, held_out, loss_fn)))
                dt.save_sharded("ckpt", state)

    The decision is saved and remains valid while the arguments stay the same. With a longer patience, for example, the run
    continues.

    Formula: better is ``value < best - min_delta`` (``"max"``: ``value > best + min_delta``); stop when ``now - time of the
    best >= patience``

    Args:
        metric: name of the metric.
        patience: time without improvement in any unit of the clock: ``"2ep"``, ``"1_000ba"``, ``"1e9tok"``, ``"0.1dur"``; an
            integer counts steps. The time starts at the best value, or at the first value. With one evaluation per epoch,
            ``"2ep"`` stops at the second evaluation without improvement.
        min_delta: smallest change that counts as an improvement, >= 0.
        goal: "min" if smaller is better, "max" if larger is better. None means "min" for a name with ``loss``, ``perplexity``
            or ``error``; other names need a goal. NaN is never better.

    Source: Prechelt 1998, Early stopping, but when?, section 2 (its class UP, with a length of training for a count).

    Example:
        >>> stop, clock = early_stop("loss", patience=2), Clock()
        >>> for loss in (3.0, 2.0, 2.5, float("nan")):
        ...     clock = clock.tick(samples=1, tokens=0, seconds=0.1)
        ...     print(stop.decide(clock, loss), stop.best)
        False 3.0
        False 2.0
        False 2.0
        True 2.0

    Raises:
        ConfigError: no name, an invalid ``patience``, ``min_delta`` or ``goal``, or no ``goal`` for a name that needs one.
    """
    return EarlyStop(metric, patience=patience, min_delta=min_delta, goal=goal)


class _StopDecision:
    """Step at which the run was stopped, if any. The decision is saved and dropped if the arguments change."""

    def __init__(self, caller: str, metric: str, goal: StopGoal, criterion: list[Plain]) -> None:
        self._caller, self._metric, self._criterion = caller, metric, criterion
        self._sign = -1.0 if goal == "min" else 1.0
        self.stopped_at: int | None = None
        self._restored = self._has_judged = False

    @property
    def stopped(self) -> bool:
        """True if the stop ended the run, in this process or before a restart."""
        return self.stopped_at is not None

    def _already_stopped(self, state: TrainState) -> bool:
        """Return True if the run had stopped already, so that no decision is needed.

        Raises:
            ConfigError: the state was saved before the decision, or a resumed run has trained past the stop.
        """
        if state._run_context.lineage.saved_steps.get(id(self)) == state.step:
            raise ConfigError(
                f"{self._caller}: metric {self._metric!r} must be judged before save_sharded, got a checkpoint of step "
                f"{state.step} first. A resumed run would lose the value. Call stop(state, numbers) before save_sharded."
            )
        if self._restored and self.stopped_at is not None and state.step > self.stopped_at:
            raise ConfigError(
                f"{self._caller}: the run must end at step {self.stopped_at} where it stopped, got step {state.step} after a "
                "restart. Give the stop to the loop: loader.until(length, stop=stop)."
            )
        return self.stopped

    def _record_decision(self, state: TrainState, stop: bool, **details: Plain) -> bool:
        self._has_judged = True
        if stop:
            self.stopped_at = state.step
            spans.record_event(self._caller, step=state.step, metric=self._metric, **details)
        return stop

    def state_dict(self) -> dict[str, Plain]:
        """Return the step of the stop, None before the stop, and the arguments of the decision."""
        return {"stopped_at": self.stopped_at, "criterion": list(self._criterion)}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Restore the decision if the arguments are the same. Mutates: the decision."""
        step = state.get("stopped_at") if state.get("criterion") == self._criterion else None
        self.stopped_at = step if isinstance(step, int) else None
        self._restored = True


class EarlyStop(_StopDecision):
    """Early stopping ``stop(state, numbers) -> bool``. See ``early_stop``.

    ``best`` is the best value so far, None before the first value. ``stopped`` is True after the run was stopped.
    """

    def __init__(
        self, metric: str, *, patience: Duration | int | str, min_delta: float = 0.0, goal: StopGoal | None = None
    ) -> None:
        chosen = _choose_goal("early_stop", metric, goal)
        self._patience = Duration.parse(patience)
        self._min_delta = check_number("early_stop", "min_delta", min_delta, minimum=0)
        super().__init__("early_stop", metric, chosen, [metric, str(self._patience), self._min_delta, chosen])
        self.best: float | None = None
        # count of the clock, in the unit of the patience, at the best value or at the first call
        self._best_at: float | None = None

    def __call__(self, state: TrainState, numbers: Mapping[str, float]) -> bool:
        """Judge the current value of the metric. Return True if the run must stop, on every rank, by the value of rank 0.

        Args:
            state: newest state, not yet saved at this step.
            numbers: metrics by name, as returned by ``reduce_metrics``.

        Mutates: the best value and its time, the decision.
        Collective: one all-gather of two numbers on the control channel; every rank must call it.
        Host sync: none.

        Raises:
            ConfigError: the metric is missing or not a number, the step was saved already with this stop in ``stateful``, or a
                resumed run has trained past the stop.
            PeerError: the same error on another rank.
        """
        if self._already_stopped(state):
            return True
        stop = self.decide(state.clock, _value_of_rank_0("early_stop", self._metric, numbers))
        return self._record_decision(state, stop, best=self.best)

    def decide(self, clock: Clock, value: float) -> bool:
        """Decide from a value and a time only. Mutates: the best value and its time."""
        now = clock.count(self._patience.unit)
        if self._best_at is None or self._is_better(value):
            self._best_at = now
        if self._is_better(value):
            self.best = value
        slack = _ROUNDING if self._patience.unit == "dur" else 0.0
        return now - self._best_at >= self._patience.value - slack

    def _is_better(self, value: float) -> bool:
        # Infinitely bad values and NaN never become the best value.
        if self.best is None:
            return value * self._sign > -math.inf
        return (value - self.best) * self._sign > self._min_delta

    def state_dict(self) -> dict[str, Plain]:
        """Return the best value, its time in the unit of the patience, and the decision."""
        return {"best": self.best, "at": self._best_at, "unit": self._patience.unit, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Continue from the result of ``state_dict``.

        Mutates: the best value and its time, the decision.

        Raises:
            ConfigError: the unit of ``patience`` differs from the saved unit, such as epochs instead of steps.
        """
        if state.get("unit") != self._patience.unit:
            raise ConfigError(
                f"early_stop: patience must have the saved unit {state.get('unit')!r}, got {str(self._patience)!r}. Keep the "
                "unit, or pass ignore=['stateful/<name>'] to start anew."
            )
        super().load_state_dict(state)
        best, best_at = state.get("best"), state.get("at")
        self.best = float(best) if isinstance(best, int | float) else None
        self._best_at = best_at if isinstance(best_at, int | float) else None

    def __repr__(self) -> str:
        return f"EarlyStop({self._metric!r}, patience={str(self._patience)!r}, best={self.best})"


@explain_arguments
def threshold_stop(metric: str, threshold: float, *, goal: StopGoal | None = None, stop_on_nan: bool = False) -> ThresholdStop:
    """Stop a run when a metric reaches ``threshold``: ``stop(state, numbers) -> bool``.

    Use it like ``early_stop``: judge before the save, and pass the stop to ``Step.init(stateful={"stop": stop})`` and
    ``loader.until(length, stop=stop)``.

    Formula: stop when ``value <= threshold`` (``"max"``: ``value >= threshold``)

    Args:
        metric: name of the metric.
        threshold: value that ends the run.
        goal: "min" if smaller is better, "max" if larger is better. None is as in ``early_stop``.
        stop_on_nan: if True, NaN stops the run, too.

    Source: the target quality of a time-to-accuracy benchmark, Coleman et al. 2017, DAWNBench.

    Example:
        >>> import dtrain as dt
        >>> stop = dt.monitors.threshold_stop("accuracy", 0.9, goal="max")
        >>> stop.decide(0.89), stop.decide(0.9), stop.decide(float("nan"))
        (False, True, False)

    Raises:
        ConfigError: no name, ``threshold`` is not a number, or ``goal`` is unknown, or missing for a name that needs one.
    """
    return ThresholdStop(metric, threshold, goal=goal, stop_on_nan=stop_on_nan)


class ThresholdStop(_StopDecision):
    """Threshold stopping. See ``threshold_stop``. ``stopped`` is True after the metric reached the threshold."""

    def __init__(self, metric: str, threshold: float, *, goal: StopGoal | None = None, stop_on_nan: bool = False) -> None:
        chosen = _choose_goal("threshold_stop", metric, goal)
        self._threshold, self._on_nan = check_number("threshold_stop", "threshold", threshold), stop_on_nan
        super().__init__("threshold_stop", metric, chosen, [metric, self._threshold, chosen, stop_on_nan])

    def __call__(self, state: TrainState, numbers: Mapping[str, float]) -> bool:
        """Judge the current value of the metric. Return True if the run must stop, on every rank, by the value of rank 0.

        Mutates: the decision.
        Collective: one all-gather of two numbers on the control channel; every rank must call it.
        Host sync: none.

        Raises:
            ConfigError: see ``EarlyStop``.
            PeerError: the metric is missing on another rank.
        """
        if self._already_stopped(state):
            return True
        value = _value_of_rank_0("threshold_stop", self._metric, numbers)
        return self._record_decision(state, self.decide(value), value=value if math.isfinite(value) else str(value))

    def decide(self, value: float) -> bool:
        """Decide from a value only."""
        if math.isnan(value):
            return self._on_nan
        return value * self._sign >= self._threshold * self._sign

    def __repr__(self) -> str:
        return f"ThresholdStop({self._metric!r}, {self._threshold:g}, goal={'min' if self._sign < 0 else 'max'!r})"


def _choose_goal(caller: str, metric: str, goal: StopGoal | None) -> StopGoal:
    """Return ``goal``; without one "min" for a metric that is known by its name to be better if smaller."""
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"{caller}: metric must be a name, got {metric!r}. Pass {caller}('eval/loss', ...), for example.")
    if goal is not None:
        return check_choice(caller, "goal", goal, _GOALS)
    if any(word in metric.lower() for word in _SMALLER_IS_BETTER):
        return "min"
    raise ConfigError(
        f"{caller}: goal must be given for metric {metric!r}, got None. Pass goal='max' if larger is better, or goal='min'."
    )


def _value_of_rank_0(caller: str, metric: str, numbers: Mapping[str, float]) -> float:
    """Return the value of rank 0 on every rank. Values that were not reduced differ, but all ranks must decide alike."""
    value, error = math.nan, None
    if metric not in numbers:
        error = ConfigError(
            f"{caller}: metric must be one of {', '.join(sorted(numbers)) or 'none'}, got {metric!r}. "
            "Choose one of the logged metrics, or log this one."
        )
    else:
        try:
            value = float(numbers[metric])
        except (TypeError, ValueError):
            error = ConfigError(
                f"{caller}: metric {metric!r} must be a number, got {numbers[metric]!r}. Log a number under this name."
            )
    rows = all_gather_numbers([value, error is not None], caller=caller)
    if error is not None:
        raise error
    failed = [rank for rank, (_, missing) in enumerate(rows) if missing]
    if failed:
        raise PeerError(
            f"{caller}: metric {metric!r} must be a number on every rank, got none on rank {failed[0]} ({len(failed)} of "
            f"{len(rows)} ranks). See the error of rank {failed[0]}."
        )
    return rows[0][0]
