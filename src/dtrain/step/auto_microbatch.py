"""Find the largest microbatch size that fits in memory, and run a step that did not fit again with a smaller size.

``oom_guard`` detects that a rank is out of memory, tells all ranks, and rolls the step or the probe back.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from dtrain import spans
from dtrain.arguments import check_int, check_number
from dtrain.data.batch import BatchSpec, FailedBatch, counts_tokens
from dtrain.device import device_name
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import write_snapshot
from dtrain.schedules.durations import Duration
from dtrain.state import TrainState
from dtrain.step.compose import bind_grad_options
from dtrain.step.microbatch_search import ProbeResult, SizeBounds, next_size, split_by_fit
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.oom_guard import MicrobatchProber, has_unknown_state, make_prober, raise_does_not_fit, reserve_optimizer_state
from dtrain.step.transform import BeforeDivision, GradFn, GradStep, Transform
from dtrain.typing import Batch, LossFn, Metrics, Plain, TransformState

_NAME = "auto_microbatch"


def auto_microbatch(
    *,
    initial_size: int | None = None,
    min_size: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    grow_every: Duration | int | str | None = 1000,
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

    A batch of ``build_loader(max_tokens=)`` is split by a limit of tokens instead: sizes are tokens of a microbatch, at most
    ``max_tokens``. A microbatch has at least one sample. Samples and their order stay the same.

    The transform state is ``{"size", "whole", "found_on"}``. A resumed run starts with the saved size, and searches again on
    different devices, a different number of ranks or a different strategy.

    Args:
        initial_size: first size to try, in samples per rank, or in tokens as above; None searches.
        min_size: smallest size, measured first; a model with BatchNorm cannot run 1.
        divisor: divisor of every size in samples except the whole batch; ``min_size`` is rounded up to a multiple.
        headroom: share of a device's memory that a measured size leaves free, in ``[0, 1)``.
        grow_every: interval of searches for a larger size, for inputs that became smaller: ``1000`` steps, ``"1ep"``; None
            disables these searches.
        probe: microbatches per probe, at least 2: the second one runs beside the gradients of the first.
        snapshot_path: path of a memory snapshot that a rank writes if ``min_size`` does not fit; ``{rank}`` becomes the rank.

    Mutates: nothing by a failed step: gradients, buffers, the global random generators and allocated memory are restored.
    Changes by the loss function to other objects cannot be undone. A search resets the device's peak memory statistics.
    Collective: as ``microbatch_step``, whose second record has the status of each rank; a search adds one small record per
    probe. In the first step of each number of microbatches (under tp and cp: and of their shapes), and if a model's collectives
    depend on the batch's values, one record before each collective.
    Host sync: none.

    Example:
        transforms = [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch(headroom=0.1)]
        step = dt.compose_step(loss_fn, transforms)
        state = step.init(model, optimizer)
        state, metrics = step(state, batch)
        print(state.transform_states["auto_microbatch"]["size"])

    Raises:
        ConfigError: invalid arguments, or a ``microbatch_size`` from another transform.
        OutOfMemoryError: ``min_size`` does not fit, on all ranks, with the missing memory and suggestions.
        StepError: the loss function writes into its batch, or ranks reached different collectives, which were not issued.
        PeerError: another rank failed for another reason. The error is raised at once, without a timeout.
    """
    config = _Config(
        caller=_NAME,
        initial_size=initial_size,
        min_size=min_size,
        divisor=divisor,
        headroom=headroom,
        probe=probe,
        grow_every=None if grow_every is None else Duration.parse(grow_every),
        snapshot_path=snapshot_path,
    )

    def init(state: TrainState) -> TransformState:
        return {"size": 0, "whole": 0, "found_on": ""}

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if microbatch_size is not None:
                raise ConfigError(
                    f"auto_microbatch: microbatch_size must be None, got {microbatch_size} from another transform. Leave out "
                    "one of the two transforms."
                )
            cache = state._run_context.transform_cache
            kept: _Kept = cache.get(_NAME) or cache.setdefault(_NAME, _Kept(prober=make_prober(state)))
            # A size in samples says nothing about tokens. A failed batch raises on all ranks.
            if not isinstance(batch, FailedBatch) and kept.by_tokens != counts_tokens(batch):
                kept.by_tokens, kept.found_on = not kept.by_tokens, ""
            try:
                return _run_until_fits(_Search(config, kept.prober, inner, batch, state, by_tokens=kept.by_tokens), kept)
            finally:
                # The update that follows allocates the reserved memory.
                kept.reserved.clear()

        return grad_fn

    return Transform(name=_NAME, init=init, grad=BeforeDivision(grad))


@dataclass(slots=True, eq=False)
class _Kept:
    """Values kept between the steps of a run in this process. A resumed run can search again, so no checkpoint has them.

    Args:
        prober: runner of guarded steps.
        found_on: devices, ranks and strategy for which the size was found; other transform states are invalid here.
        by_tokens: if True, sizes are tokens.
        barely_fits: if True, the last step fits only because the allocator freed cached memory.
        state_assumed: if True, the optimizer state was assumed, and the search runs again once the state exists.
        reserved: memory reserved for the optimizer until its first step.
    """

    prober: MicrobatchProber
    found_on: str = ""
    by_tokens: bool = False
    barely_fits: bool = False
    state_assumed: bool = False
    reserved: list[Tensor] = field(default_factory=list)


def _run_until_fits(search: _Search, kept: _Kept) -> tuple[TrainState, Metrics]:
    """Run the step with the largest size that fits; search a smaller size as often as it runs out of memory."""
    state, prober = search.state, search.prober
    size = _choose_size(search, kept)
    while True:
        reassign = spans.reassign_later("step")
        result = prober.run_guarded(search.inner, search.state, search.batch, size)
        search.state = result.state
        if result.output is not None:
            break
        prober.gather_memory()
        reassign("search")
        failed = search.find_effective_size(size)
        spans.record_event("out_of_memory", step=state.step, size=failed)
        search.probes = [*(t for t in search.probes if t.size < failed), ProbeResult(size=failed, fits=False)]
        size = search.run()
    kept.barely_fits = result.allocator_retried
    saved, (state, metrics) = state.transform_states[_NAME], result.output
    current = {"size": size or 0, "whole": int(size is None), "found_on": kept.found_on}
    return (state if current == saved else state.with_transform_state(_NAME, current)), metrics


def _choose_size(search: _Search, kept: _Kept) -> int | None:
    """Return the size to begin with: that of the last step, unless it barely fits, or a larger one is due to be searched.

    Mutates: ``kept``.
    """
    state, config = search.state, search.config
    saved = state.transform_states[_NAME]
    size: int | None = None if saved["whole"] else saved["size"] or None
    if not kept.found_on or saved["found_on"] != kept.found_on:
        return _choose_first_size(search, kept, size)
    if not kept.barely_fits:
        is_due = config.grow_every is not None and (kept.state_assumed or state.crossed(config.grow_every))
        if saved["whole"] or not is_due:
            return size
    kept.state_assumed = False
    return search.shrink(size) if kept.barely_fits else search.grow(size)


def _choose_first_size(search: _Search, kept: _Kept, saved_size: int | None) -> int | None:
    """Return the size of the first step of a state in this process: from a checkpoint, else ``initial``, else by a search.

    Collective: one small record, and one exchange of JSON. Mutates: ``kept``, which reserves optimizer state.
    """
    state, prober = search.state, search.prober
    kept.reserved = reserve_optimizer_state(f"{_NAME}: step {state.step}:", state)
    saved = state.transform_states[_NAME]
    device = device_name(state.device)
    is_failed = isinstance(search.batch, FailedBatch)
    own: list[Plain] = [device, prober.device_memory is not None, is_failed, saved["size"], saved["whole"], saved["found_on"]]
    rows = cast("list[list[Plain]]", all_gather_json(own, caller=_NAME))
    devices = " and ".join(sorted({str(row[0]) for row in rows}))
    kept.found_on = f"{devices}, {len(rows)} ranks, {state.spec.strategy}, {state.spec.accumulate}"
    kept.found_on += ", tokens" if kept.by_tokens else ""
    if any(row[2] for row in rows):
        # A rank whose batch failed does not know the unit of the size, so all ranks choose it again.
        kept.found_on = ""
    prober.measurable = all(row[1] for row in rows)
    agreed = all(row[3:] == rows[0][3:] for row in rows)
    if agreed and bool(saved["size"] or saved["whole"]) and saved["found_on"] == kept.found_on:
        return saved_size
    if search.config.initial_size is not None or not prober.measurable:
        return search.config.initial_size
    kept.state_assumed = has_unknown_state(state.optimizer) and not state.optimizer.state
    return search.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSearchResult:
    """Result of ``find_microbatch_size``.

    Args:
        size: largest microbatch that fits, in samples per rank; in tokens for a batch of ``build_loader(max_tokens=)``.
        largest_batch: samples of the rank with the largest batch, or tokens of the largest microbatch; a larger size has no
            effect.
        probes: probed sizes in order, with the memory of every rank if measurable.
        seconds: duration of the search on this rank.
    """

    size: int
    largest_batch: int
    probes: tuple[ProbeResult, ...]
    seconds: float


def find_microbatch_size(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    batch_spec: BatchSpec | None = None,
    grad: GradStep = microbatch_step,
    min_size: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    probe: int = 2,
) -> MicrobatchSearchResult:
    """Find the largest microbatch that fits, with the search of ``auto_microbatch``. No step is made.

    Args:
        state: state of the run, which stays valid and does not change.
        batch: this rank's samples, as large as the largest batch of the run.
        loss_fn: function that returns the summed loss and the weight of one microbatch.
        batch_spec: description of the batch, passed to ``grad``.
        grad: gradient function with a ``microbatch_size``.
        min_size, divisor, headroom, probe: as in ``auto_microbatch``.

    Mutates: nothing that lasts: gradients, buffers and the global random generators are restored. The device's peak memory
    statistics are reset.
    Collective: as ``microbatch_step`` for ``probe`` microbatches per probe, and two small records.

    Example:
        result = dt.step.find_microbatch_size(state, batch, loss_fn=loss_fn)
        step = dt.compose_step(loss_fn, microbatch_size=result.size)

    A size in tokens is the ``max_tokens`` of a loader whose microbatches need no further split.

    Raises:
        ConfigError: invalid arguments.
        OutOfMemoryError: ``min_size`` does not fit; on all ranks.
    """
    caller = "find_microbatch_size"
    config = _Config(caller=caller, min_size=min_size, divisor=divisor, headroom=headroom, probe=probe)
    prober, started = make_prober(state), time.monotonic()
    grad = bind_grad_options(caller, grad, batch_spec=batch_spec)
    search = _Search(config, prober, partial(grad, loss_fn=loss_fn), batch, state, by_tokens=counts_tokens(batch))
    prober.measurable = all(row[0] for row in all_gather_numbers([prober.device_memory is not None], caller=caller))
    # The reserved memory must exist until the search is over.
    reserved = reserve_optimizer_state(f"{caller}: step {state.step}:", state)
    best = search.run()
    del reserved
    return MicrobatchSearchResult(
        size=best or search.find_effective_size(None),
        largest_batch=search.find_effective_size(None),
        probes=tuple(search.probes),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """Arguments of ``auto_microbatch``; see its documentation. The minimum is rounded up to a multiple of the divisor.

    Raises:
        ConfigError: an invalid argument; the message begins with ``caller``.
    """

    caller: str
    initial_size: int | None = None
    min_size: int
    divisor: int | None
    headroom: float
    probe: int
    grow_every: Duration | None = None
    snapshot_path: str | Path | None = None

    def __post_init__(self) -> None:
        caller, initial, divisor = self.caller, self.initial_size, self.divisor or 1
        for name, value, least in (
            ("initial_size", initial, 1),
            ("min_size", self.min_size, 1),
            ("divisor", self.divisor, 1),
            ("probe", self.probe, 2),
        ):
            if value is not None:
                check_int(caller, name, value, minimum=least)
        check_number(caller, "headroom", self.headroom, minimum=0, below=1)
        if initial is not None and initial < self.min_size:
            raise ConfigError(
                f"{caller}: initial_size must be at least min_size, got initial_size={initial} and min_size={self.min_size}. "
                "Raise initial_size, or lower min_size."
            )
        if initial is not None and initial % divisor:
            raise ConfigError(
                f"{caller}: initial_size must be a multiple of divisor, got initial_size={initial} and {divisor=}. "
                "Round initial_size to a multiple of divisor."
            )
        object.__setattr__(self, "min_size", -(-self.min_size // divisor) * divisor)


@dataclass(slots=True, eq=False)
class _Search:
    """Search for the largest size in one step.

    Args:
        config: limits of the search.
        prober: runner of probes.
        inner: function that leaves the gradient.
        batch: this rank's samples.
        state: state of the step, with the time of all probes so far.
        by_tokens: if True, sizes are tokens; equal on all ranks.
        probes: results of all probes so far.
        token_sizes: possible limits of tokens, on any rank, ascending; empty if sizes count samples, or before the first probe.
    """

    config: _Config
    prober: MicrobatchProber
    inner: GradFn
    batch: Batch
    state: TrainState
    by_tokens: bool = False
    probes: list[ProbeResult] = field(default_factory=list)
    token_sizes: tuple[int, ...] = ()

    def run(self) -> int | None:
        """Probe sizes until the largest that fits is known; return None for the whole local batch.

        Raises:
            OutOfMemoryError: no size fits, on all ranks.
        """
        config, prober = self.config, self.prober
        if not self.probes and not prober.measurable:
            # Nothing is known yet, not even the number of samples, so the first probe runs the whole batch.
            self._probe(None)
        size = next_size(self.probes, self._find_bounds()) if self.probes else config.min_size
        while size is not None:
            is_smallest = self.find_effective_size(size) <= self._find_bounds().min_size if self.probes else True
            path = config.snapshot_path
            prober.on_oom = partial(_snapshot, path) if is_smallest and path is not None else None
            self._probe(size)
            size = next_size(self.probes, self._find_bounds())
        bounds = self._find_bounds()
        if any(t.fits and t.size >= bounds.largest_batch for t in self.probes):
            return None
        fitting, _ = split_by_fit(self.probes)
        if not fitting:
            raise_does_not_fit(
                f"{config.caller}: step {self.state.step}:",
                device=self.state.device,
                strategy=self.state.spec.strategy,
                oom_message=prober.oom_message,
                subject=f"a microbatch of {bounds.min_size}{' tokens' if bounds.sizes else ''}",
            )
        return fitting[-1].size

    def shrink(self, size: int | None) -> int | None:
        """Return a smaller size after a step of ``size`` that barely fits; the same size if it is the minimum."""
        self.prober.gather_memory()
        current = self.find_effective_size(size)
        self.probes.append(ProbeResult(size=current, fits=False))
        return size if current <= self._find_bounds().min_size else self.run()

    def grow(self, size: int | None) -> int | None:
        """Search again from ``size``. The largest input since the last search decides, so each rank uses the larger peak."""
        ranks = self.prober.gather_memory()
        result = self._probe(size)
        if result.fits and ranks and result.rank_memory:
            worst = [replace(now, peak=max(now.peak, then.peak)) for now, then in zip(result.rank_memory, ranks, strict=True)]
            self.probes[-1] = replace(result, rank_memory=tuple(worst))
        return self.run()

    def _probe(self, size: int | None) -> ProbeResult:
        result, self.state = self.prober.probe(self.inner, self.state, self.batch, size, microbatches=self.config.probe)
        result = replace(result, size=self.find_effective_size(size))
        self.probes.append(result)
        return result

    def find_effective_size(self, size: int | None) -> int:
        """Return the possible size with the effect of ``size``; None is the whole batch, or the microbatches of the loader.

        Collective: as ``_find_bounds``.
        """
        bounds = self._find_bounds()
        if size is None:
            return bounds.largest_batch
        return bounds.round_down(size) if bounds.sizes else min(size, bounds.largest_batch)

    def _find_bounds(self) -> SizeBounds:
        """Return the limits of a size.

        Collective: one exchange of JSON, in the first call of a search by tokens.
        """
        config, largest, smallest, accumulation_bytes = self.config, self.prober.largest_batch, self.config.min_size, 0
        if self.by_tokens:
            self.token_sizes = self.token_sizes or _gather_token_sizes(self.batch, config.caller)
            largest = self.token_sizes[-1]
            smallest = next((size for size in self.token_sizes if size >= config.min_size), largest)
        else:
            trained = [param for param in self.state.params.values() if param.requires_grad]
            accumulation_bytes = sum(param.numel() * param.element_size() for param in trained)
        return SizeBounds(
            min_size=min(smallest, largest),
            largest_batch=largest,
            divisor=config.divisor or 1,
            headroom=config.headroom,
            measurable=self.prober.measurable,
            accumulation_bytes=accumulation_bytes,
            sizes=self.token_sizes,
        )


def _gather_token_sizes(batch: Batch, caller: str) -> tuple[int, ...]:
    """Return the tokens of all parts of samples on all ranks, ascending, from the longest sample of any rank on.

    Each of them is the exact size of a part, so the memory of a size is that of its tokens.

    Collective: one exchange of JSON.
    """
    counted = [tokens for tokens in batch.part_tokens if tokens] if counts_tokens(batch) else []
    own = [max([1, *(tokens[0] for tokens in counted)]), *sorted({size for tokens in counted for size in tokens})]
    rows = cast("list[list[int]]", all_gather_json(cast("list[Plain]", own), caller=caller))
    longest = max(row[0] for row in rows)
    return tuple(sorted({longest, *(size for row in rows for size in row[1:] if size > longest)}))


def _snapshot(path: str | Path) -> None:
    """Write a memory snapshot. An error is only printed, so that all ranks learn that memory ran out."""
    try:
        write_snapshot(path)
    except (ConfigError, OSError) as problem:
        print(f"dtrain: rank {get_dist_info().rank}: no snapshot of the memory was written: {problem}", file=sys.stderr)
