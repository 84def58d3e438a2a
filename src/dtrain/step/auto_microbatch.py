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
from dtrain.step.find_microbatch_size import (
    SearchConfig,
    has_unknown_state,
    parse_search_config,
    reserve_optimizer_state,
    search_microbatch_size,
)
from dtrain.step.microbatch_probe import MicrobatchProber, make_prober
from dtrain.step.microbatch_search import ProbeResult
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics, Plain, TransformState

_NAME = "auto_microbatch"


def auto_microbatch(
    *,
    initial: int | None = None,
    minimum: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    grow_interval: Duration | int | str | None = 1000,
    probe: int = 2,
    snapshot_path: str | Path | None = None,
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
        grow_interval: when to look again for a larger size (inputs may have become smaller): ``1000`` steps, ``"1ep"``; None: never.
        probe: microbatches of a rehearsal, at least 2: the second one meets the gradients of the first.
        snapshot_path: where a rank writes a snapshot of its memory when not even ``minimum`` fits; ``{rank}`` in it is the rank.

    Mutates: of a try that failed, nothing: gradients, buffers, the global random generators and allocated memory are as before.
    What the loss function does to other objects cannot be taken back. In a search: the device's peak memory statistics.
    Collective: those of ``microbatch_step``, which has the outcome of each rank in its second record; in a search one small
    record a try. In the first step of each number of microbatches, and where a model's collectives depend on the batch, one
    before each collective.
    Host sync: none.

    Raises:
        ConfigError: arguments that cannot be right; a ``microbatch_size`` from elsewhere.
        OutOfMemoryError: ``minimum`` does not fit, on all ranks, with what is missing and what to try.
        StepError: the loss function writes into its batch; ranks came to different collectives, none of which was issued.
        PeerError: another rank failed for another reason; it is known at once, and not after the timeout.
    """
    limits = parse_search_config(_NAME, initial, minimum, divisor, headroom, grow_interval, probe, snapshot_path)

    def init(state: TrainState) -> TransformState:
        return {"size": 0, "whole": 0, "found_on": ""}

    def grad(inner: GradFn) -> GradFn:
        def sized(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if microbatch_size is not None:
                raise ConfigError(
                    f"auto_microbatch: got {microbatch_size=} from a transform before it; it finds the size itself: leave one "
                    "of them out"
                )
            return _run_step(limits, inner, state, batch)

        return sized

    return Transform(name=_NAME, init=init, grad=grad)


@dataclass(slots=True, eq=False)
class _SearchState:
    """What a run keeps in this process: not in checkpoints, since it can be found again.

    Args:
        found_on: what the size depends on, besides the model and its inputs; a slice that is of another one is not known here.
        barely_fits: the last step fitted only just.
        state_assumed: the size was found for optimizer state that was assumed, and is to be found again when the state is there.
        reserved: held for the optimizer, until its first step.
    """

    prober: MicrobatchProber
    found_on: str = ""
    barely_fits: bool = False
    state_assumed: bool = False
    reserved: list[Tensor] = field(default_factory=list)


def _run_step(config: SearchConfig, inner: GradFn, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step, tried until it fits."""
    kept: _SearchState | None = state.run_context.transform_cache.get(_NAME)
    if kept is None:
        kept = state.run_context.transform_cache[_NAME] = _SearchState(prober=make_prober(state))
    try:
        return _run_until_fits(config, kept, inner, state, batch)
    finally:
        kept.reserved.clear()  # the update that follows takes its place, or there is none


def _run_until_fits(
    config: SearchConfig, search_state: _SearchState, inner: GradFn, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    content = state.transform_states[_NAME]
    tries: list[ProbeResult] = []
    size: int | None = None if content["whole"] else content["size"] or None
    if not search_state.found_on or content["found_on"] != search_state.found_on:
        size, state = _start_search(config, search_state, inner, state, batch, size, tries)
    elif search_state.barely_fits or (_should_grow(config, search_state, state) and not content["whole"]):
        size, state = _search_again(config, search_state, inner, state, batch, size, tries)
        search_state.state_assumed = False
    search_state.barely_fits = False
    while True:
        move = spans.reassign_later("step")
        trial = search_state.prober.run_guarded(inner, state, batch, size)
        state = trial.state
        if trial.output is not None:
            break
        search_state.prober.gather_largest_batch()
        move("search")
        tried = search_state.prober.largest_batch if size is None else min(size, search_state.prober.largest_batch)
        spans.record_event("out_of_memory", step=state.step, size=tried)
        tries = [*(t for t in tries if t.size < tried), ProbeResult(size=tried, fits=False)]
        size, state = search_microbatch_size(config, search_state.prober, inner, state, batch, tries)
    search_state.barely_fits = trial.allocator_retried
    state, metrics = trial.output
    found = {"size": size or 0, "whole": int(size is None), "found_on": search_state.found_on}
    return (state if found == content else state.with_transform_state(_NAME, found)), metrics


def _should_grow(config: SearchConfig, search_state: _SearchState, state: TrainState) -> bool:
    return config.grow_interval is not None and (search_state.state_assumed or state.crossed(config.grow_interval))


def _start_search(
    config: SearchConfig,
    search_state: _SearchState,
    inner: GradFn,
    state: TrainState,
    batch: Batch,
    size: int | None,
    probes: list[ProbeResult],
) -> tuple[int | None, TrainState]:
    """The first step here of a state: make room for the optimizer, and find the size if no checkpoint knew it.

    Collective: one small record, and one exchange of JSON.
    """
    search_state.reserved = reserve_optimizer_state(f"{_NAME}: step {state.step}:", state)
    content = state.transform_states[_NAME]
    found = [content["size"], content["whole"], content["found_on"]]
    mine: list[Plain] = [_device_name(state), search_state.prober.device_memory is not None, *found]
    rows = cast("list[list[Plain]]", all_gather_json(mine, caller=_NAME))
    devices = " and ".join(sorted({str(row[0]) for row in rows}))
    search_state.found_on = f"{devices}, {len(rows)} ranks, {state.spec.strategy}, {state.spec.accumulate}"
    search_state.prober.measurable = measurable = all(row[1] for row in rows)
    agreed = all(row[2:] == rows[0][2:] for row in rows)
    known = agreed and bool(content["size"] or content["whole"]) and content["found_on"] == search_state.found_on
    if known:
        return size, state
    if config.initial is not None:
        return config.initial, state
    if not measurable:
        return None, state
    search_state.state_assumed = has_unknown_state(state.optimizer) and not state.optimizer.state
    return search_microbatch_size(config, search_state.prober, inner, state, batch, probes)


def _search_again(
    config: SearchConfig,
    search_state: _SearchState,
    inner: GradFn,
    state: TrainState,
    batch: Batch,
    size: int | None,
    probes: list[ProbeResult],
) -> tuple[int | None, TrainState]:
    """A step that fitted only just, or a moment at which a larger one may: start from what is known of the size that runs."""
    trials = search_state.prober
    ranks = trials.gather_memory(0)
    if size is None or search_state.barely_fits:
        at = size or trials.largest_batch
        probes.append(ProbeResult(size=at, fits=False))
        if at <= config.minimum:
            return size, state
        return search_microbatch_size(config, search_state.prober, inner, state, batch, probes)
    one, state = trials.probe(inner, state, batch, size, microbatches=config.probe)
    if one.fits and ranks and one.rank_memory:  # the largest input since the last look counts, and not this one
        worst = [replace(now, peak=max(now.peak, then.peak)) for now, then in zip(one.rank_memory, ranks, strict=True)]
        one = replace(one, rank_memory=tuple(worst))
    probes.append(replace(one, size=min(size, trials.largest_batch)))
    return search_microbatch_size(config, search_state.prober, inner, state, batch, probes)


def _device_name(state: TrainState) -> str:
    return torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type
