"""How large a microbatch may be, and the search for the largest that fits, by rehearsals of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import current
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.memory.snapshot import write_snapshot
from dtrain.state import TrainState
from dtrain.step.ballast import agreed_ballast
from dtrain.step.hopeless import raise_hopeless
from dtrain.step.microbatch import microbatch_step
from dtrain.step.search import Bounds, Try, propose, sorted_out
from dtrain.step.trial import Trials, trials_for
from dtrain.transform import GradFn, GradStep
from dtrain.types import Batch, LossFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ``auto_microbatch`` was asked for; see there."""

    initial: int | None = None
    minimum: int = 1
    divisor: int = 1
    headroom: float = 0.05
    grow: Duration | None = None
    probe: int = 2
    snapshot: str | Path | None = None

    def bounds(self, largest: int, *, measurable: bool, spared: int) -> Bounds:
        """What a size may be for batches of ``largest`` samples."""
        return Bounds(
            minimum=min(self.minimum, largest),
            largest=largest,
            divisor=self.divisor,
            headroom=self.headroom,
            measurable=measurable,
            spared=spared,
        )


def checked_limits(
    where: str,
    initial: int | None,
    minimum: int,
    divisor: int | None,
    headroom: float,
    grow: Duration | int | str | None,
    probe: int,
    snapshot: str | Path | None,
) -> Limits:
    """What was asked for, as limits; the minimum is rounded up to a multiple of the divisor. ``where`` begins a message.

    Raises:
        ConfigError: something that cannot be right.
    """
    for name, value in (("initial", initial), ("minimum", minimum), ("divisor", divisor)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
    if initial is not None and initial < minimum:
        raise ConfigError(f"{where}: {initial=} is below {minimum=}; a size is at least the minimum")
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ConfigError(f"{where}: headroom is the share of memory left free, in [0, 1), got {headroom!r}")
    if type(probe) is not int or probe < 2:
        raise ConfigError(f"{where}: probe counts microbatches, at least 2, got {probe!r}")
    divisor = divisor or 1
    if initial is not None and initial % divisor:
        raise ConfigError(f"{where}: {initial=} is no multiple of {divisor=}; sizes are, but for the whole batch")
    return Limits(
        initial=initial,
        minimum=-(-minimum // divisor) * divisor,
        divisor=divisor,
        headroom=headroom,
        grow=None if grow is None else Duration.parse(grow),
        probe=probe,
        snapshot=snapshot,
    )


def search(
    limits: Limits,
    trials: Trials,
    inner: GradFn,
    state: TrainState,
    batch: Batch,
    tries: list[Try],
    *,
    where: str = "auto_microbatch",
) -> tuple[int | None, TrainState]:
    """Rehearse sizes until the largest that fits is known; None is the whole local batch. ``where`` begins the message.

    Mutates: ``tries``, which gets those made here.

    Raises:
        DoesNotFitError: nothing fits, on all ranks.
    """

    def bounds() -> Bounds:
        spared = sum(param.numel() * param.element_size() for param in state.params.values() if param.requires_grad)
        return limits.bounds(trials.largest, measurable=trials.measurable, spared=spared)

    if tries:
        size = propose(tries, bounds())
    elif trials.measurable:
        size = limits.minimum
    else:  # nothing is known, not even how many samples there are
        tried, state = trials.rehearse(inner, state, batch, None, microbatches=limits.probe)
        tries.append(tried)
        size = propose(tries, bounds())
    while size is not None:
        trials.on_failure = None if size > limits.minimum or limits.snapshot is None else _snapshot(limits.snapshot)
        tried, state = trials.rehearse(inner, state, batch, size, microbatches=limits.probe)
        tries.append(replace(tried, size=min(size, trials.largest)))
        size = propose(tries, bounds())
    if any(t.fits and t.size >= trials.largest for t in tries):
        return None, state
    worked, _ = sorted_out(tries)
    if not worked:
        raise_hopeless(
            f"{where}: step {state.step}:",
            device=state.device,
            strategy=state.spec.strategy,
            asked=trials.asked,
            what=f"a microbatch of {min(limits.minimum, trials.largest)}",
        )
    return worked[-1].size, state


def _snapshot(path: str | Path) -> Callable[[], None]:
    """Write what holds the memory; a disk that is full as well must not keep this rank from telling the others."""

    def write() -> None:
        try:
            write_snapshot(path)
        except (ConfigError, OSError) as problem:
            print(f"dtrain: rank {current().rank}: no snapshot of the memory: {problem}", file=sys.stderr)

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """What ``find_microbatch_size`` has found.

    Args:
        size: the largest microbatch that fits, in samples per rank.
        largest: samples of the fullest rank's batch: more is of no use.
        tries: each size tried, in order, whether it fitted, and the memory of every rank where it can be measured.
        seconds: how long the search took on this rank.
    """

    size: int
    largest: int
    tries: tuple[Try, ...]
    seconds: float


def find_microbatch_size(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    grad: GradStep = microbatch_step,
    minimum: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    probe: int = 2,
) -> SizeReport:
    """The largest microbatch that fits, by the search of ``auto_microbatch`` alone; no step is made.

    Args:
        state: not spent, and not changed.
        batch: this rank's samples, of the largest kind that will come.
        loss_fn: as of ``microbatch_step``.
        grad: what is called with ``microbatch_size``; a ``partial`` may describe the batch.
        minimum, divisor, headroom, probe: as of ``auto_microbatch``.

    Mutates: nothing that lasts: gradients, buffers and the global random generators are as before. The device's peak memory
    statistics start again.
    Collective: those of ``microbatch_step`` for ``probe`` microbatches a try, and two small records.

    Raises:
        ConfigError: arguments that cannot be right.
        DoesNotFitError: ``minimum`` does not fit; on all ranks.
    """
    where = "find_microbatch_size"
    limits = checked_limits(where, None, minimum, divisor, headroom, None, probe, None)
    trials, begun = trials_for(state), time.monotonic()
    tries: list[Try] = []
    inner: GradFn = partial(grad, loss_fn=loss_fn)
    trials.measurable = all(row[0] for row in all_gather_numbers([trials.gauge is not None], where=where))
    ballast = agreed_ballast(f"{where}: step {state.step}:", state)  # held until the search is over
    best, _ = search(limits, trials, inner, state, batch, tries, where=where)
    del ballast
    return SizeReport(size=best or trials.largest, largest=trials.largest, tries=tuple(tries), seconds=time.monotonic() - begun)
