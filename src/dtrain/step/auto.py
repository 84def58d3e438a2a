"""``auto_microbatch``: the largest microbatch that fits, found by tries of which nothing is left when they fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dtrain.clock import Duration
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import current
from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.step.ballast import ballast_for
from dtrain.step.hopeless import raise_hopeless
from dtrain.step.search import Try
from dtrain.step.sizing import Limits, checked_limits, search
from dtrain.step.trial import Trials, trials_for
from dtrain.transform import GradFn, Transform
from dtrain.types import Batch, Metrics, Slice

_NAME = "auto_microbatch"


def auto_microbatch(
    *,
    initial: int | None = None,
    minimum: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    grow: Duration | int | str | None = 1000,
    probe: int = 2,
    snapshot: str | Path | None = None,
) -> Transform:
    """Run each step with the largest microbatch that fits on all ranks; list it last, since it passes the size.

    The size is found in the first step, by rehearsals: a few microbatches of a small size, whose peak memory says which size
    to try next. After that a step runs as with a fixed size. If any rank runs out of memory all the same, in forward, backward
    or a reduction, all ranks abandon the try together, nothing of it is left, and the step is begun again with a smaller size:
    its result is, bit for bit, that of a step begun with that size.

    Where memory cannot be measured (a CPU without ``testing.memory_budget``) the whole local batch is taken, and halved where
    that fails.

    The slice is ``{"size", "whole", "found_on"}``: a resumed run starts with the size that was found, and searches again on
    other devices, another number of ranks or another strategy.

    Args:
        initial: the first size to try, samples per rank; None searches.
        minimum: the smallest size to try.
        divisor: sizes are multiples of it (or the whole batch).
        headroom: share of a device's memory that a size found by measuring leaves free, in ``[0, 1)``.
        grow: when to look again for a larger size (inputs may have become smaller): ``1000`` steps, ``"1ep"``; None: never.
        probe: microbatches of a rehearsal, at least 2: the second one meets the gradients of the first.
        snapshot: where a rank writes a snapshot of its memory when not even ``minimum`` fits; ``{rank}`` in it is the rank.

    Mutates: of a try that failed, nothing: gradients, buffers, the global random generators and allocated memory are as before.
    What the loss function does to other objects cannot be taken back. In a search: the device's peak memory statistics.
    Collective: those of ``microbatch_step``, which has the outcome of each rank in its second record; in a search one small
    record a try. In the first steps, and where a model's collectives depend on the batch, one before each collective.
    Host sync: none.

    Raises:
        ConfigError: arguments that cannot be right; a ``microbatch_size`` from elsewhere.
        DoesNotFitError: ``minimum`` does not fit, on all ranks, with what is missing and what to try.
        StepError: the loss function writes into its batch.
        PeerError: another rank failed for another reason; it is known at once, and not after the timeout.
    """
    limits = checked_limits(_NAME, initial, minimum, divisor, headroom, grow, probe, snapshot)

    def init(state: TrainState) -> Slice:
        return {"size": 0, "whole": 0, "found_on": ""}

    def grad(inner: GradFn) -> GradFn:
        def sized(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if microbatch_size is not None:
                raise ConfigError(
                    f"auto_microbatch: got {microbatch_size=} from a transform before it; it finds the size itself: leave one "
                    "of them out"
                )
            return _step(limits, inner, state, batch)

        return sized

    return Transform(name=_NAME, init=init, grad=grad)


@dataclass(slots=True, eq=False)
class _Kept:
    """What a run keeps in this process: not in checkpoints, since it can be found again.

    Args:
        ready: the slice was looked at: it is of this machine.
        smaller: the last step fitted only just.
        ballast: held for the optimizer, until its first step.
    """

    trials: Trials
    ready: bool = False
    smaller: bool = False
    ballast: list[Tensor] = field(default_factory=list)


def _step(limits: Limits, inner: GradFn, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step, tried until it fits."""
    kept: _Kept | None = state.shared.kept.get(_NAME)
    if kept is None:
        kept = state.shared.kept[_NAME] = _Kept(trials=trials_for(state))
    content = state.slices[_NAME]
    tries: list[Try] = []
    size: int | None = None if content["whole"] else content["size"] or None
    if not kept.ready:
        size, state = _begin(limits, kept, inner, state, batch, size, tries)
    elif kept.smaller or (limits.grow is not None and state.crossed(limits.grow) and not content["whole"]):
        size, state = _look_again(limits, kept, inner, state, batch, size, tries)
    kept.smaller = False
    while True:
        trial = kept.trials.attempt(inner, state, batch, size)
        state = trial.state
        if trial.made is not None:
            break
        kept.trials.count()
        tried = kept.trials.largest if size is None else min(size, kept.trials.largest)
        tries = [*(t for t in tries if t.size < tried), Try(size=tried, fits=False)]
        size, state = search(limits, kept.trials, inner, state, batch, tries)
    kept.smaller = trial.thrashed
    kept.ballast.clear()  # the update that follows takes its place
    state, metrics = trial.made
    found = {"size": size or 0, "whole": int(size is None), "found_on": _place(state)}
    return (state if found == content else state.with_slice(_NAME, found)), metrics


def _begin(
    limits: Limits, kept: _Kept, inner: GradFn, state: TrainState, batch: Batch, size: int | None, tries: list[Try]
) -> tuple[int | None, TrainState]:
    """The first step of this process: make room for the optimizer, and find the size if no checkpoint knew it.

    Collective: two small records.
    """
    error: Exception | None = None
    try:
        kept.ballast = ballast_for(state.optimizer)
    except torch.OutOfMemoryError as problem:
        error = problem
    failed = all_gather_numbers([error is not None], where=_NAME)
    if any(row[0] for row in failed):
        kept.ballast.clear()
        raise_hopeless(
            f"auto_microbatch: step {state.step}:",
            device=state.device,
            strategy=state.spec.strategy,
            asked=str(error or ""),
            what="the optimizer's state",
        )
    kept.ready = True
    content, place = state.slices[_NAME], _place(state)
    known = bool(content["size"] or content["whole"]) and content["found_on"] == place
    measurable = all(row[0] for row in all_gather_numbers([kept.trials.gauge is not None], where=_NAME))
    kept.trials.measurable = measurable
    if known:
        return size, state
    if limits.initial is not None:
        return limits.initial, state
    if not measurable:
        return None, state
    return search(limits, kept.trials, inner, state, batch, tries)


def _look_again(
    limits: Limits, kept: _Kept, inner: GradFn, state: TrainState, batch: Batch, size: int | None, tries: list[Try]
) -> tuple[int | None, TrainState]:
    """A step that fitted only just, or a moment at which a larger one may: start from what is known of the size that runs."""
    trials = kept.trials
    ranks = trials.measured(0)
    if size is None or kept.smaller:
        at = size or trials.largest
        tries.append(Try(size=at, fits=False))
        if at <= limits.minimum:
            return size, state
        return search(limits, kept.trials, inner, state, batch, tries)
    one, state = trials.rehearse(inner, state, batch, size, microbatches=limits.probe)
    if one.fits and ranks and one.ranks:  # the largest input since the last look counts, and not this one
        worst = [replace(now, peak=max(now.peak, then.peak)) for now, then in zip(one.ranks, ranks, strict=True)]
        one = replace(one, ranks=tuple(worst))
    tries.append(replace(one, size=min(size, trials.largest)))
    return search(limits, kept.trials, inner, state, batch, tries)


def _place(state: TrainState) -> str:
    """What the size depends on, besides the model and its inputs."""
    device = torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type
    return f"{device}, {current().world_size} ranks, {state.spec.strategy}, {state.spec.accumulate}"
