"""How large a microbatch may be, and the search for the largest that fits, by rehearsals of a step.

Reserve memory for optimizer state before the optimizer allocates it, so that the microbatch search accounts for it."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot
from dtrain.dtensor import to_local
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.memory.oom import is_out_of_memory
from dtrain.memory.snapshot import write_snapshot
from dtrain.state import TrainState
from dtrain.step.microbatch_probe import MicrobatchProber, make_prober
from dtrain.step.microbatch_search import ProbeResult, SizeBounds, next_size, split_by_fit
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.oom_guard import raise_does_not_fit
from dtrain.transform import GradFn, GradStep
from dtrain.typing import Batch, LossFn


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """What ``auto_microbatch`` was asked for; see there."""

    initial: int | None = None
    minimum: int = 1
    divisor: int = 1
    headroom: float = 0.05
    grow_interval: Duration | None = None
    probe: int = 2
    snapshot_path: str | Path | None = None

    def bounds(self, largest_batch: int, *, measurable: bool, accumulation_bytes: int) -> SizeBounds:
        """What a size may be for batches of ``largest_batch`` samples."""
        return SizeBounds(
            minimum=min(self.minimum, largest_batch),
            largest_batch=largest_batch,
            divisor=self.divisor,
            headroom=self.headroom,
            measurable=measurable,
            accumulation_bytes=accumulation_bytes,
        )


def parse_search_config(
    caller: str,
    initial: int | None,
    minimum: int,
    divisor: int | None,
    headroom: float,
    grow_interval: Duration | int | str | None,
    probe: int,
    snapshot_path: str | Path | None,
) -> SearchConfig:
    """What was asked for, as limits; the minimum is rounded up to a multiple of the divisor. ``caller`` begins a message.

    Raises:
        ConfigError: something that cannot be right.
    """
    for name, value in (("initial", initial), ("minimum", minimum), ("divisor", divisor)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{caller}: {name} must be a whole number of at least 1, got {value!r}")
    if initial is not None and initial < minimum:
        raise ConfigError(f"{caller}: {initial=} is below {minimum=}; a size is at least the minimum")
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ConfigError(f"{caller}: headroom is the share of memory left free, in [0, 1), got {headroom!r}")
    if type(probe) is not int or probe < 2:
        raise ConfigError(f"{caller}: probe counts microbatches, at least 2, got {probe!r}")
    divisor = divisor or 1
    if initial is not None and initial % divisor:
        raise ConfigError(f"{caller}: {initial=} is no multiple of {divisor=}; sizes are, but for the whole batch")
    return SearchConfig(
        initial=initial,
        minimum=-(-minimum // divisor) * divisor,
        divisor=divisor,
        headroom=headroom,
        grow_interval=None if grow_interval is None else Duration.parse(grow_interval),
        probe=probe,
        snapshot_path=snapshot_path,
    )


def search_microbatch_size(
    config: SearchConfig,
    prober: MicrobatchProber,
    inner: GradFn,
    state: TrainState,
    batch: Batch,
    probes: list[ProbeResult],
    *,
    caller: str = "auto_microbatch",
) -> tuple[int | None, TrainState]:
    """Rehearse sizes until the largest that fits is known; None is the whole local batch. ``caller`` begins the message.

    Mutates: ``probes``, which gets those made here.

    Raises:
        OutOfMemoryError: nothing fits, on all ranks.
    """

    def bounds() -> SizeBounds:
        spared = sum(param.numel() * param.element_size() for param in state.params.values() if param.requires_grad)
        return config.bounds(prober.largest_batch, measurable=prober.measurable, accumulation_bytes=spared)

    if probes:
        size = next_size(probes, bounds())
    elif prober.measurable:
        size = config.minimum
    else:  # nothing is known, not even how many samples there are
        tried, state = prober.probe(inner, state, batch, None, microbatches=config.probe)
        probes.append(tried)
        size = next_size(probes, bounds())
    while size is not None:
        prober.on_oom = (
            None if size > config.minimum or config.snapshot_path is None else _snapshot_writer(config.snapshot_path)
        )
        tried, state = prober.probe(inner, state, batch, size, microbatches=config.probe)
        probes.append(replace(tried, size=min(size, prober.largest_batch)))
        size = next_size(probes, bounds())
    if any(t.fits and t.size >= prober.largest_batch for t in probes):
        return None, state
    worked, _ = split_by_fit(probes)
    if not worked:
        raise_does_not_fit(
            f"{caller}: step {state.step}:",
            device=state.device,
            strategy=state.spec.strategy,
            oom_message=prober.oom_message,
            subject=f"a microbatch of {min(config.minimum, prober.largest_batch)}",
        )
    return worked[-1].size, state


def _snapshot_writer(path: str | Path) -> Callable[[], None]:
    """Write what holds the memory; a disk that is full as well must not keep this rank from telling the others."""

    def write() -> None:
        try:
            write_snapshot(path)
        except (ConfigError, OSError) as problem:
            print(f"dtrain: rank {get_dist_info().rank}: no snapshot of the memory: {problem}", file=sys.stderr)

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSearchResult:
    """What ``find_microbatch_size`` has found.

    Args:
        size: the largest microbatch that fits, in samples per rank.
        largest_batch: samples of the fullest rank's batch: more is of no use.
        probes: each size tried, in order, whether it fitted, and the memory of every rank where it can be measured.
        seconds: how long the search took on this rank.
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
    grad: GradStep = microbatch_step,
    minimum: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    probe: int = 2,
) -> MicrobatchSearchResult:
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
        OutOfMemoryError: ``minimum`` does not fit; on all ranks.
    """
    where = "find_microbatch_size"
    limits = parse_search_config(where, None, minimum, divisor, headroom, None, probe, None)
    trials, begun = make_prober(state), time.monotonic()
    tries: list[ProbeResult] = []
    inner: GradFn = partial(grad, loss_fn=loss_fn)
    trials.measurable = all(row[0] for row in all_gather_numbers([trials.device_memory is not None], caller=where))
    ballast = reserve_optimizer_state(f"{where}: step {state.step}:", state)  # held until the search is over
    best, _ = search_microbatch_size(limits, trials, inner, state, batch, tries, caller=where)
    del ballast
    return MicrobatchSearchResult(
        size=best or trials.largest_batch,
        largest_batch=trials.largest_batch,
        probes=tuple(tries),
        seconds=time.monotonic() - begun,
    )


_PROBE_SHAPE = (2, 2)  # the smallest shape that optimizers for matrices take too
_KNOWN_MODULES = ("torch.optim.", "dtrain.")  # modules whose optimizers change nothing in a step but state and parameters
_ASSUMED_STATE_TENSORS = 2  # state tensors for each parameter of any other optimizer: as many as Adam has
_IGNORED_METHODS = {"__init__", "__repr__"}  # a step calls neither


def reserve_optimizer_state(prefix: str, state: TrainState) -> list[Tensor]:
    """``allocate_missing_state`` the optimizer of ``state`` on every rank, or on none.

    Assumed state that has no room is left out: the optimizer may need less.

    Collective: one small record.

    Raises:
        OutOfMemoryError: there is no room for it; on all ranks.
    """
    ballast, refused = [], ""
    try:
        ballast = allocate_missing_state(state.optimizer)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        refused = str(problem) or type(problem).__name__
    if any(row[0] for row in all_gather_numbers([bool(refused)], caller=prefix.partition(":")[0])):
        ballast.clear()
        if has_unknown_state(state.optimizer):
            return ballast
        raise_does_not_fit(
            prefix, device=state.device, strategy=state.spec.strategy, oom_message=refused, subject="the optimizer's state"
        )
    return ballast


def allocate_missing_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors as large as the state that ``optimizer`` does not have yet; none when it has all of it.

    The state of an optimizer of torch or dtrain is found by a step of a twin on a parameter of four numbers. The optimizer
    itself is not touched: state of zeros is not the same as none if the first step is special (SGD with dampening). A step of
    any other optimizer may change whatever its code can reach, so none is made: two tensors are assumed for each parameter.

    Raises:
        torch.OutOfMemoryError: there is no room for it.
    """
    ballast: list[Tensor] = []
    for group in optimizer.param_groups:
        new = [param for param in group["params"] if param.requires_grad and not optimizer.state.get(param)]
        find = _assumed_dtypes if has_unknown_state(optimizer) else _probe_state_dtypes
        copies = {param.dtype: find(optimizer, group, param) for param in {p.dtype: p for p in new}.values()}
        for param in new:
            shard = to_local(param)
            ballast += [torch.empty_like(shard, dtype=dtype) for dtype in copies[param.dtype]]
    return ballast


def has_unknown_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state of ``optimizer`` is not known before its first step: some of its methods are the user's."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith(_KNOWN_MODULES):
            return False
        if any(callable(value) and name not in _IGNORED_METHODS for name, value in vars(base).items()):
            return True
    return True


def _assumed_dtypes(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    return [param.dtype] * _ASSUMED_STATE_TENSORS


def _probe_state_dtypes(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    """The dtypes of the state tensors that have a parameter's shape, for a parameter like ``param``."""
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=param.dtype, device=to_local(param).device))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{**group, "params": [probe]}])
    step: Any = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # past the hooks: nobody has asked for a step
    randomness = RNGSnapshot()  # an optimizer may draw
    try:
        with torch.no_grad():
            step(twin)
    except Exception:  # noqa: BLE001  # an optimizer that needs more than this to make a step: its state is not known before
        return []
    finally:
        randomness.restore()
    return [value.dtype for value in twin.state[probe].values() if isinstance(value, Tensor) and value.shape == probe.shape]
