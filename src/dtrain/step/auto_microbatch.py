"""Find the largest microbatch size that fits in memory. A failed probe is rolled back completely."""

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
    """Run each step with the largest microbatch that fits on all ranks; list the transform last, because it passes the size.

    The first step finds the size with probes: a few microbatches of a small size, whose peak memory predicts the next size.
    Later steps run as with a fixed size. If any rank runs out of memory in forward, backward or a reduction, all ranks roll
    the step back together and start again with a smaller size. The result is equal, bit for bit, to a step that
    started with that size.

    If memory cannot be measured (a CPU without ``testing.memory_budget``), the search starts with the whole local batch and
    halves a size that fails.

    The transform state is ``{"size", "whole", "found_on"}``. A resumed run starts with the saved size, and searches again on
    different devices, a different number of ranks or a different strategy.

    Args:
        initial: first size to try, in samples per rank; None searches.
        minimum: smallest size, measured first; a model with BatchNorm cannot run 1.
        divisor: divisor of every size except the whole batch; ``minimum`` is rounded up to a multiple.
        headroom: share of a device's memory that a measured size leaves free, in ``[0, 1)``.
        grow_interval: interval of searches for a larger size, for inputs that became smaller: ``1000`` steps, ``"1ep"``; None
            disables these searches.
        probe: microbatches per probe, at least 2: the second one runs beside the gradients of the first.
        snapshot_path: path of a memory snapshot that a rank writes if ``minimum`` does not fit; ``{rank}`` becomes the rank.

    Mutates: nothing by a failed step: gradients, buffers, the global random generators and allocated memory are restored.
    Changes by the loss function to other objects cannot be undone. A search resets the device's peak memory statistics.
    Collective: as ``microbatch_step``, whose second record has the status of each rank; a search adds one small record per
    probe. In the first step of each number of microbatches, and if a model's collectives depend on the batch, one record before
    each collective.
    Host sync: none.

    Example:
        transforms = [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch(headroom=0.1)]
        step = dt.compose_step(loss_fn, transforms)
        state = step.init(model, optimizer)
        state, metrics = step(state, batch)
        print(state.transform_states["auto_microbatch"]["size"])

    Raises:
        ConfigError: invalid arguments, or a ``microbatch_size`` from another transform.
        OutOfMemoryError: ``minimum`` does not fit, on all ranks, with the missing memory and suggestions.
        StepError: the loss function writes into its batch, or ranks reached different collectives, which were not issued.
        PeerError: another rank failed for another reason. The error is raised at once, without a timeout.
    """
    config = parse_search_config(_NAME, initial, minimum, divisor, headroom, grow_interval, probe, snapshot_path)

    def init(state: TrainState) -> TransformState:
        return {"size": 0, "whole": 0, "found_on": ""}

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if microbatch_size is not None:
                raise ConfigError(
                    f"auto_microbatch: microbatch_size must be None, got {microbatch_size} from another transform. Leave out "
                    "one of the two transforms."
                )
            return _run_step(config, inner, state, batch)

        return grad_fn

    return Transform(name=_NAME, init=init, grad=grad)


@dataclass(slots=True, eq=False)
class _SearchState:
    """State of the search in this process, which no checkpoint contains, because a resumed run can search again.

    Args:
        prober: runner of guarded steps.
        found_on: devices, ranks and strategy for which the size was found; other transform states are invalid here.
        barely_fits: if True, the last step fits only because the allocator freed cached memory.
        state_assumed: if True, the optimizer state was assumed, and the search runs again once the state exists.
        reserved: memory reserved for the optimizer until its first step.
    """

    prober: MicrobatchProber
    found_on: str = ""
    barely_fits: bool = False
    state_assumed: bool = False
    reserved: list[Tensor] = field(default_factory=list)


def _run_step(config: SearchConfig, inner: GradFn, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    search_state: _SearchState | None = state.run_context.transform_cache.get(_NAME)
    if search_state is None:
        search_state = state.run_context.transform_cache[_NAME] = _SearchState(prober=make_prober(state))
    try:
        return _run_until_fits(config, search_state, inner, state, batch)
    finally:
        # The update that follows allocates the reserved memory.
        search_state.reserved.clear()


def _run_until_fits(
    config: SearchConfig, search_state: _SearchState, inner: GradFn, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    saved = state.transform_states[_NAME]
    prober = search_state.prober
    probes: list[ProbeResult] = []
    size: int | None = None if saved["whole"] else saved["size"] or None
    if not search_state.found_on or saved["found_on"] != search_state.found_on:
        size, state = _start_search(config, search_state, inner, state, batch, size, probes)
    elif search_state.barely_fits or (_should_grow(config, search_state, state) and not saved["whole"]):
        size, state = _search_again(config, search_state, inner, state, batch, size, probes)
        search_state.state_assumed = False
    search_state.barely_fits = False
    while True:
        reassign = spans.reassign_later("step")
        result = prober.run_guarded(inner, state, batch, size)
        state = result.state
        if result.output is not None:
            break
        prober.gather_largest_batch()
        reassign("search")
        failed = prober.largest_batch if size is None else min(size, prober.largest_batch)
        spans.record_event("out_of_memory", step=state.step, size=failed)
        probes = [*(t for t in probes if t.size < failed), ProbeResult(size=failed, fits=False)]
        size, state = search_microbatch_size(config, prober, inner, state, batch, probes)
    search_state.barely_fits = result.allocator_retried
    state, metrics = result.output
    current = {"size": size or 0, "whole": int(size is None), "found_on": search_state.found_on}
    return (state if current == saved else state.with_transform_state(_NAME, current)), metrics


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
    """Run the first step of a state in this process: reserve optimizer state; search unless a checkpoint has the size.

    Collective: one small record, and one exchange of JSON.
    """
    prober = search_state.prober
    search_state.reserved = reserve_optimizer_state(f"{_NAME}: step {state.step}:", state)
    saved = state.transform_states[_NAME]
    own: list[Plain] = [
        _device_name(state),
        prober.device_memory is not None,
        saved["size"],
        saved["whole"],
        saved["found_on"],
    ]
    rows = cast("list[list[Plain]]", all_gather_json(own, caller=_NAME))
    devices = " and ".join(sorted({str(row[0]) for row in rows}))
    search_state.found_on = f"{devices}, {len(rows)} ranks, {state.spec.strategy}, {state.spec.accumulate}"
    prober.measurable = measurable = all(row[1] for row in rows)
    agreed = all(row[2:] == rows[0][2:] for row in rows)
    if agreed and bool(saved["size"] or saved["whole"]) and saved["found_on"] == search_state.found_on:
        return size, state
    if config.initial is not None:
        return config.initial, state
    if not measurable:
        return None, state
    search_state.state_assumed = has_unknown_state(state.optimizer) and not state.optimizer.state
    return search_microbatch_size(config, prober, inner, state, batch, probes)


def _search_again(
    config: SearchConfig,
    search_state: _SearchState,
    inner: GradFn,
    state: TrainState,
    batch: Batch,
    size: int | None,
    probes: list[ProbeResult],
) -> tuple[int | None, TrainState]:
    """Search again from the current size, after a step that barely fits or at the end of a ``grow_interval``."""
    prober = search_state.prober
    ranks = prober.gather_memory(0)
    if size is None or search_state.barely_fits:
        current = size or prober.largest_batch
        probes.append(ProbeResult(size=current, fits=False))
        if current <= config.minimum:
            return size, state
        return search_microbatch_size(config, prober, inner, state, batch, probes)
    result, state = prober.probe(inner, state, batch, size, microbatches=config.probe)
    # The largest input since the last search decides, so each rank uses the larger of the two peaks.
    if result.fits and ranks and result.rank_memory:
        worst = [replace(now, peak=max(now.peak, then.peak)) for now, then in zip(result.rank_memory, ranks, strict=True)]
        result = replace(result, rank_memory=tuple(worst))
    probes.append(replace(result, size=min(size, prober.largest_batch)))
    return search_microbatch_size(config, prober, inner, state, batch, probes)


def _device_name(state: TrainState) -> str:
    return torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type
