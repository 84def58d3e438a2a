"""Search the largest microbatch size that fits, with probes of a step.

Optimizer state is reserved before the optimizer allocates it, so that the search accounts for it.
"""

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
    """Parsed arguments of ``auto_microbatch``; see its documentation."""

    initial: int | None = None
    minimum: int = 1
    divisor: int = 1
    headroom: float = 0.05
    grow_interval: Duration | None = None
    probe: int = 2
    snapshot_path: str | Path | None = None

    def bounds(self, largest_batch: int, *, measurable: bool, accumulation_bytes: int) -> SizeBounds:
        """Return the limits of a size for batches of ``largest_batch`` samples."""
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
    """Return the arguments of a search as a ``SearchConfig``; the minimum is rounded up to a multiple of the divisor.

    Raises:
        ConfigError: an invalid argument; the message begins with ``caller``.
    """
    for name, value in (("initial", initial), ("minimum", minimum), ("divisor", divisor)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{caller}: {name} must be a whole number of at least 1, got {value!r}.")
    if initial is not None and initial < minimum:
        raise ConfigError(f"{caller}: initial must be at least minimum, got {initial=} and {minimum=}.")
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ConfigError(f"{caller}: headroom must be a share of memory in [0, 1), got {headroom!r}.")
    if type(probe) is not int or probe < 2:
        raise ConfigError(f"{caller}: probe must be a number of microbatches of at least 2, got {probe!r}.")
    divisor = divisor or 1
    if initial is not None and initial % divisor:
        raise ConfigError(f"{caller}: initial must be a multiple of divisor, got {initial=} and {divisor=}.")
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
    """Probe sizes until the largest that fits is known; return None for the whole local batch.

    Mutates: ``probes``, which receives the new probes.

    Raises:
        OutOfMemoryError: no size fits, on all ranks; the message begins with ``caller``.
    """

    def bounds() -> SizeBounds:
        grad_bytes = sum(param.numel() * param.element_size() for param in state.params.values() if param.requires_grad)
        return config.bounds(prober.largest_batch, measurable=prober.measurable, accumulation_bytes=grad_bytes)

    if probes:
        size = next_size(probes, bounds())
    elif prober.measurable:
        size = config.minimum
    else:
        # Nothing is known yet, not even the number of samples, so the first probe runs the whole batch.
        result, state = prober.probe(inner, state, batch, None, microbatches=config.probe)
        probes.append(result)
        size = next_size(probes, bounds())
    while size is not None:
        prober.on_oom = (
            None if size > config.minimum or config.snapshot_path is None else _snapshot_writer(config.snapshot_path)
        )
        result, state = prober.probe(inner, state, batch, size, microbatches=config.probe)
        probes.append(replace(result, size=min(size, prober.largest_batch)))
        size = next_size(probes, bounds())
    if any(t.fits and t.size >= prober.largest_batch for t in probes):
        return None, state
    fitting, _ = split_by_fit(probes)
    if not fitting:
        raise_does_not_fit(
            f"{caller}: step {state.step}:",
            device=state.device,
            strategy=state.spec.strategy,
            oom_message=prober.oom_message,
            subject=f"a microbatch of {min(config.minimum, prober.largest_batch)}",
        )
    return fitting[-1].size, state


def _snapshot_writer(path: str | Path) -> Callable[[], None]:
    """Return a function that writes a memory snapshot and prints errors on stderr, so that all ranks learn of the OOM."""

    def write() -> None:
        try:
            write_snapshot(path)
        except (ConfigError, OSError) as problem:
            print(f"dtrain: rank {get_dist_info().rank}: no snapshot of the memory was written: {problem}", file=sys.stderr)

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSearchResult:
    """Result of ``find_microbatch_size``.

    Args:
        size: largest microbatch that fits, in samples per rank.
        largest_batch: samples of the rank with the largest batch; a larger microbatch has no effect.
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
    grad: GradStep = microbatch_step,
    minimum: int = 1,
    divisor: int | None = None,
    headroom: float = 0.05,
    probe: int = 2,
) -> MicrobatchSearchResult:
    """Find the largest microbatch that fits, with the search of ``auto_microbatch``. No step is made.

    Args:
        state: state of the run, which stays valid and does not change.
        batch: this rank's samples, as large as the largest batch of the run.
        loss_fn: function that returns the summed loss and the weight of one microbatch.
        grad: gradient function with a ``microbatch_size``; a ``partial`` may set its ``batch_spec``.
        minimum, divisor, headroom, probe: as in ``auto_microbatch``.

    Mutates: nothing that lasts: gradients, buffers and the global random generators are restored. The device's peak memory
    statistics are reset.
    Collective: as ``microbatch_step`` for ``probe`` microbatches per probe, and two small records.

    Example:
        result = dt.memory.find_microbatch_size(state, batch, loss_fn=loss_fn)
        step = dt.compose_step(loss_fn, grad=partial(dt.microbatch_step, microbatch_size=result.size))

    Raises:
        ConfigError: invalid arguments.
        OutOfMemoryError: ``minimum`` does not fit; on all ranks.
    """
    caller = "find_microbatch_size"
    config = parse_search_config(caller, None, minimum, divisor, headroom, None, probe, None)
    prober, started = make_prober(state), time.monotonic()
    probes: list[ProbeResult] = []
    inner: GradFn = partial(grad, loss_fn=loss_fn)
    prober.measurable = all(row[0] for row in all_gather_numbers([prober.device_memory is not None], caller=caller))
    # The reserved memory must exist until the search is over.
    reserved = reserve_optimizer_state(f"{caller}: step {state.step}:", state)
    best, _ = search_microbatch_size(config, prober, inner, state, batch, probes, caller=caller)
    del reserved
    return MicrobatchSearchResult(
        size=best or prober.largest_batch,
        largest_batch=prober.largest_batch,
        probes=tuple(probes),
        seconds=time.monotonic() - started,
    )


# The smallest shape that optimizers for matrices accept, too.
_PROBE_SHAPE = (2, 2)
# Optimizers of these modules change only state and parameters in a step.
_KNOWN_MODULES = ("torch.optim.", "dtrain.")
# State tensors per parameter of any other optimizer: as many as Adam has.
_ASSUMED_STATE_TENSORS = 2
# A step calls neither of these methods.
_IGNORED_METHODS = {"__init__", "__repr__"}


def reserve_optimizer_state(prefix: str, state: TrainState) -> list[Tensor]:
    """Allocate tensors as large as the missing optimizer state, on every rank or on no rank.

    Assumed state that does not fit is left out, because the optimizer may need less.

    Collective: one small record.

    Raises:
        OutOfMemoryError: the state does not fit; on all ranks.
    """
    reserved, oom_message = [], ""
    try:
        reserved = allocate_missing_state(state.optimizer)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        oom_message = str(problem) or type(problem).__name__
    if any(row[0] for row in all_gather_numbers([bool(oom_message)], caller=prefix.partition(":")[0])):
        reserved.clear()
        if has_unknown_state(state.optimizer):
            return reserved
        raise_does_not_fit(
            prefix,
            device=state.device,
            strategy=state.spec.strategy,
            oom_message=oom_message,
            subject="the optimizer's state",
        )
    return reserved


def allocate_missing_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return tensors as large as the state that ``optimizer`` does not have yet.

    For an optimizer of torch or dtrain, a copy of the optimizer runs a step on a parameter of four numbers. The optimizer
    itself does not change: state of zeros differs from no state if the first step is special (SGD with dampening). A step of
    any other optimizer may change objects outside of the optimizer, so two tensors are assumed for each parameter.

    Raises:
        torch.OutOfMemoryError: the tensors do not fit.
    """
    reserved: list[Tensor] = []
    for group in optimizer.param_groups:
        new = [param for param in group["params"] if param.requires_grad and not optimizer.state.get(param)]
        find_dtypes = _assumed_dtypes if has_unknown_state(optimizer) else _probe_state_dtypes
        dtypes = {param.dtype: find_dtypes(optimizer, group, param) for param in {p.dtype: p for p in new}.values()}
        for param in new:
            shard = to_local(param)
            reserved += [torch.empty_like(shard, dtype=dtype) for dtype in dtypes[param.dtype]]
    return reserved


def has_unknown_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state of ``optimizer`` is unknown before its first step, because the user defines its methods."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith(_KNOWN_MODULES):
            return False
        if any(callable(value) and name not in _IGNORED_METHODS for name, value in vars(base).items()):
            return True
    return True


def _assumed_dtypes(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    return [param.dtype] * _ASSUMED_STATE_TENSORS


def _probe_state_dtypes(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> list[torch.dtype]:
    """Return the dtypes of the state tensors that have a parameter's shape, for a parameter like ``param``."""
    probe = torch.nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=param.dtype, device=to_local(param).device))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{**group, "params": [probe]}])
    # The undecorated method runs no hooks, because this is no step of the run.
    step: Any = type(optimizer).step
    step = getattr(step, "__wrapped__", step)
    # An optimizer may use random numbers.
    rng_snapshot = RNGSnapshot()
    try:
        with torch.no_grad():
            step(twin)
    # The state of an optimizer that cannot run this step is unknown.
    except Exception:  # noqa: BLE001
        return []
    finally:
        rng_snapshot.restore()
    return [value.dtype for value in twin.state[probe].values() if isinstance(value, Tensor) and value.shape == probe.shape]
