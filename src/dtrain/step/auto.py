"""``auto_microbatch``: the largest microbatch that fits, found by tries of which nothing is left when they fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from dtrain import spans
from dtrain.dist.collectives import all_gather_json
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.step.ballast import agreed_ballast, is_assumed
from dtrain.step.search import Try
from dtrain.step.sizing import Limits, checked_limits, search
from dtrain.step.trial import Trials, trials_for
from dtrain.transform import GradFn, Transform
from dtrain.types import Batch, Metrics, Plain, Slice

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
        minimum: the smallest size to try, and the first to be measured; a model with BatchNorm cannot run 1.
        divisor: sizes are multiples of it (or the whole batch); ``minimum`` is rounded up to one.
        headroom: share of a device's memory that a size found by measuring leaves free, in ``[0, 1)``.
        grow: when to look again for a larger size (inputs may have become smaller): ``1000`` steps, ``"1ep"``; None: never.
        probe: microbatches of a rehearsal, at least 2: the second one meets the gradients of the first.
        snapshot: where a rank writes a snapshot of its memory when not even ``minimum`` fits; ``{rank}`` in it is the rank.

    Mutates: of a try that failed, nothing: gradients, buffers, the global random generators and allocated memory are as before.
    What the loss function does to other objects cannot be taken back. In a search: the device's peak memory statistics.
    Collective: those of ``microbatch_step``, which has the outcome of each rank in its second record; in a search one small
    record a try. In the first step of each number of microbatches, and where a model's collectives depend on the batch, one
    before each collective.
    Host sync: none.

    Raises:
        ConfigError: arguments that cannot be right; a ``microbatch_size`` from elsewhere.
        DoesNotFitError: ``minimum`` does not fit, on all ranks, with what is missing and what to try.
        StepError: the loss function writes into its batch; ranks came to different collectives, none of which was issued.
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
        place: what the size depends on, besides the model and its inputs; a slice that is of another one is not known here.
        smaller: the last step fitted only just.
        assumed: the size was found for optimizer state that was assumed, and is to be found again when the state is there.
        ballast: held for the optimizer, until its first step.
    """

    trials: Trials
    place: str = ""
    smaller: bool = False
    assumed: bool = False
    ballast: list[Tensor] = field(default_factory=list)


def _step(limits: Limits, inner: GradFn, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step, tried until it fits."""
    kept: _Kept | None = state.shared.kept.get(_NAME)
    if kept is None:
        kept = state.shared.kept[_NAME] = _Kept(trials=trials_for(state))
    try:
        return _tried(limits, kept, inner, state, batch)
    finally:
        kept.ballast.clear()  # the update that follows takes its place, or there is none


def _tried(limits: Limits, kept: _Kept, inner: GradFn, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    content = state.slices[_NAME]
    tries: list[Try] = []
    size: int | None = None if content["whole"] else content["size"] or None
    if not kept.place or content["found_on"] != kept.place:
        size, state = _begin(limits, kept, inner, state, batch, size, tries)
    elif kept.smaller or (_may_grow(limits, kept, state) and not content["whole"]):
        size, state = _look_again(limits, kept, inner, state, batch, size, tries)
        kept.assumed = False
    kept.smaller = False
    while True:
        move = spans.moving("step")
        trial = kept.trials.attempt(inner, state, batch, size)
        state = trial.state
        if trial.made is not None:
            break
        kept.trials.count()
        move("search")
        tried = kept.trials.largest if size is None else min(size, kept.trials.largest)
        spans.event("out_of_memory", step=state.step, size=tried)
        tries = [*(t for t in tries if t.size < tried), Try(size=tried, fits=False)]
        size, state = search(limits, kept.trials, inner, state, batch, tries)
    kept.smaller = trial.thrashed
    state, metrics = trial.made
    found = {"size": size or 0, "whole": int(size is None), "found_on": kept.place}
    return (state if found == content else state.with_slice(_NAME, found)), metrics


def _may_grow(limits: Limits, kept: _Kept, state: TrainState) -> bool:
    return limits.grow is not None and (kept.assumed or state.crossed(limits.grow))


def _begin(
    limits: Limits, kept: _Kept, inner: GradFn, state: TrainState, batch: Batch, size: int | None, tries: list[Try]
) -> tuple[int | None, TrainState]:
    """The first step here of a state: make room for the optimizer, and find the size if no checkpoint knew it.

    Collective: one small record, and one exchange of JSON.
    """
    kept.ballast = agreed_ballast(f"{_NAME}: step {state.step}:", state)
    content = state.slices[_NAME]
    found = [content["size"], content["whole"], content["found_on"]]
    mine: list[Plain] = [_device_name(state), kept.trials.gauge is not None, *found]
    rows = cast("list[list[Plain]]", all_gather_json(mine, where=_NAME))
    devices = " and ".join(sorted({str(row[0]) for row in rows}))
    kept.place = f"{devices}, {len(rows)} ranks, {state.spec.strategy}, {state.spec.accumulate}"
    kept.trials.measurable = measurable = all(row[1] for row in rows)
    agreed = all(row[2:] == rows[0][2:] for row in rows)
    known = agreed and bool(content["size"] or content["whole"]) and content["found_on"] == kept.place
    if known:
        return size, state
    if limits.initial is not None:
        return limits.initial, state
    if not measurable:
        return None, state
    kept.assumed = is_assumed(state.optimizer) and not state.optimizer.state
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


def _device_name(state: TrainState) -> str:
    return torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type
