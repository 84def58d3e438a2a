"""Simulate a step of rank 0 on fake tensors: run the real code without memory, arithmetic or other ranks.

The simulation tracks memory by its purpose, and sums the collectives by kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from dtrain.arguments import check_choice, check_int
from dtrain.dtensor import to_local
from dtrain.memory.live_tensors import LiveBytes
from dtrain.planning.fake_world import FakeValueMode, UnreadScalar, emulate_cuda_kernels, fake_world
from dtrain.planning.traffic import CollectiveTraffic, extrapolate_traffic, sum_traffic
from dtrain.planning.workload import Workload, build_on_meta
from dtrain.shard.activation_checkpoint import checkpoint_activations
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import (
    fsdp_param_groups,
    init_root,
    iter_grads,
    unsharded_params,
    wrap_collectives,
)
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.materialize import allocate_meta_tensors
from dtrain.shard.precision import Precision
from dtrain.state import Accumulate, TrainState
from dtrain.step.compose import Step, compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients
from dtrain.typing import Batch, LossSum, Metrics

MemoryPart: TypeAlias = Literal[
    "parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations"
]
StepPhase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes of one rank by purpose.

    Args:
        parameters: shards of this rank, unsharded parameters, and buffers.
        gradients: full gradients before their reduction, and gradients of the shards.
        optimizer: optimizer state, and temporary tensors of its step.
        transforms: transform states, such as an average of the weights.
        gathered: parameters gathered for the current units.
        communication: buffers of collectives.
        activations: all other tensors: activations kept for backward, temporary tensors, and the batch.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    transforms: int = 0
    gathered: int = 0
    communication: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))


class MemoryTracker:
    """Tracker of the storages of fake tensors by purpose.

    A storage belongs to the part of the context (``attribute_to``) of its allocation, until ``assign`` moves it. The runner of
    the step sets ``phase``.
    """

    def __init__(self) -> None:
        self.live = LiveBytes(fake=True, on_change=self._on_change)
        self.phase: StepPhase = "forward"
        self._part: MemoryPart = "activations"
        self._storages: dict[int, tuple[MemoryPart, int]] = {}
        self._current: dict[MemoryPart, int] = {f.name: 0 for f in fields(MemoryBreakdown)}  # type: ignore[misc]
        self.reset()

    def reset(self) -> None:
        """Start the measurements of a new step."""
        self._max_by_part = dict(self._current)
        self._at_rest = dict(self._current)
        self._peaks: dict[StepPhase, int] = {}
        self._at_peak = dict(self._current)
        self._peak_total = 0

    def usage(self, traffic: Sequence[CollectiveTraffic]) -> StepUsage:
        """Return the measurements since ``reset``, with the step's collectives."""
        return StepUsage(
            peaks=dict(self._peaks),
            at_rest=MemoryBreakdown(**self._at_rest),
            at_peak=MemoryBreakdown(**self._at_peak),
            max_by_part=MemoryBreakdown(**self._max_by_part),
            traffic=tuple(traffic),
        )

    @contextmanager
    def attribute_to(self, part: MemoryPart) -> Iterator[None]:
        """Attribute allocations inside the context to ``part``."""
        previous, self._part = self._part, part
        try:
            yield
        finally:
            self._part = previous

    def assign(self, part: MemoryPart, tensors: Iterable[Tensor]) -> None:
        """Attribute the storages of ``tensors`` to ``part``, whether counted before or not."""
        with self.attribute_to(part):
            for tensor in map(to_local, tensors):
                self.live.count([tensor])
                key = id(tensor.untyped_storage())
                previous, size = self._storages.get(key, (part, 0))
                if previous != part:
                    self._storages[key] = part, size
                    self._current[previous] -= size
                    self._grow(part, size)

    def _on_change(self, key: int, change: int) -> None:
        part, size = self._storages.get(key, (self._part, 0))
        if size + change:
            self._storages[key] = part, size + change
        else:
            self._storages.pop(key, None)
        if change < 0:
            self._current[part] += change
            return
        self._grow(part, change)
        total = sum(self._current.values())
        if total > self._peaks.get(self.phase, -1):
            self._peaks[self.phase] = total
        if total > self._peak_total:
            self._peak_total, self._at_peak = total, dict(self._current)

    def _grow(self, part: MemoryPart, size: int) -> None:
        self._current[part] += size
        self._max_by_part[part] = max(self._max_by_part[part], self._current[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """Memory and collectives of one step.

    Args:
        peaks: most bytes held at once in each phase.
        at_rest: parts before the step.
        at_peak: parts at the time of the peak.
        max_by_part: most bytes of each part, at any time.
        traffic: collectives by kind.
    """

    peaks: dict[StepPhase, int]
    at_rest: MemoryBreakdown
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown
    traffic: tuple[CollectiveTraffic, ...]


DeviceType: TypeAlias = Literal["cuda", "cpu"]
KeepPolicy: TypeAlias = Literal["nothing", "matmuls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """Layout of a workload over ranks, with the argument names of ``shard_model`` and ``build_mesh``.

    Args:
        checkpoint: None for no activation checkpointing, or ``keep`` of ``checkpoint_activations``.
        device: type of the simulated device. On ``"cuda"`` optimizers use their ``foreach`` form, as in torch, and some kernels
            keep less for backward.
    """

    world_size: int
    dp_replicate: int = 1
    tp: int = 1
    strategy: str = "full_shard"
    precision: Precision | None = None
    accumulate: Accumulate = "local"
    checkpoint: KeepPolicy | None = None
    device: DeviceType = "cuda"

    def __post_init__(self) -> None:
        check_choice("plan", "checkpoint", self.checkpoint, (None, "nothing", "matmuls"))
        check_choice("plan", "device", self.device, ("cuda", "cpu"))


class SimulatedRun:
    """Sharded model on fake tensors, with its optimizer, that can run steps with batches of any size.

    ``simulate`` creates it. The first step is not measured, because it creates optimizer state and torch infers shapes.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        device: DeviceType,
        fake_values: FakeValueMode,
        strides: Mapping[str, int],
    ) -> None:
        self._workload, self._model, self._fake_values, self._strides = workload, model, fake_values, strides
        self._tracker = MemoryTracker()
        optimizer = workload.optimizer(model.parameters())
        if device == "cuda":
            _use_foreach(optimizer)
        self._state = self._compose(1).init(model, optimizer)
        monitor = self._state.run_context.monitor
        monitor.pending_weight = UnreadScalar()
        # A fake loss cannot be read on the host.
        monitor.nonfinite_losses.limit = None
        self._warm = False
        if self._state.spec.plain_params:
            # The hooks must run before the reducer's, which takes the gradients.
            for param in self._state.params.values():
                self._hook_gradient(param)
        self._traffic_of_two: tuple[CollectiveTraffic, ...] | None = None

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones once, over all ranks."""
        return sum(param.numel() for param in self._state.params.values())

    def step(self, microbatch_size: int, microbatches: int) -> StepUsage:
        """Run a step and return its memory and collectives; at most three of many equal microbatches run.

        Raises:
            ConfigError: sizes that are not integers from 1.
        """
        check_int("plan", "microbatch_size", microbatch_size)
        check_int("plan", "microbatches", microbatches)
        if not self._warm:
            self._run(1, min(microbatches, 2))
            self._install_hooks()
            self._warm = True
        if microbatches <= 3:
            return self._measure(microbatch_size, microbatches)
        three = self._measure(microbatch_size, 3)
        # The traffic belongs to parameters and gradients, so it is equal for every size.
        if self._traffic_of_two is None:
            self._traffic_of_two = self._measure(microbatch_size, 2).traffic
        return replace(three, traffic=extrapolate_traffic(self._traffic_of_two, three.traffic, microbatches))

    def _measure(self, microbatch_size: int, microbatches: int) -> StepUsage:
        tracker, state = self._tracker, self._state
        self._fake_values.collectives.clear()
        with tracker.live:
            tracker.assign("parameters", state.params.values())
            tracker.assign("parameters", self._model.buffers())
            tracker.assign("optimizer", _iter_tensors(state.optimizer.state))
            tracker.assign("transforms", _iter_tensors(state.transform_states))
            tracker.reset()
            self._run(microbatch_size, microbatches)
        return tracker.usage(sum_traffic(self._fake_values.collectives, self._strides))

    def _run(self, microbatch_size: int, microbatches: int) -> None:
        batch = self._workload.batch(microbatch_size * microbatches)
        self._state, _ = self._compose(microbatch_size)(self._state, batch)

    def _compose(self, microbatch_size: int) -> Step:
        tracker, loss_fn = self._tracker, self._workload.loss_fn

        def traced_loss_fn(model: nn.Module, batch: Batch) -> LossSum:
            tracker.phase = "forward"
            loss = loss_fn(model, batch)
            tracker.phase = "backward"
            return loss

        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            tracker.phase = "update"
            tracker.assign("gradients", [param.grad for param in state.params.values() if param.grad is not None])
            with tracker.attribute_to("optimizer"):
                return apply_gradients(state, metrics)

        grad = partial(microbatch_step, microbatch_size=microbatch_size, **self._workload.step_args)
        return compose_step(traced_loss_fn, self._workload.transforms, grad=grad, update=update_fn)

    def _install_hooks(self) -> None:
        """Attribute FSDP2's memory and the gradients. Mutates: hooks of parameters, of FSDP2's units and of the reducer."""
        reducer = grad_sync_of(self._model).reducer
        if reducer is not None:
            reducer.allocate = self._allocate_bucket
        for group in fsdp_param_groups(self._model):
            wrap_collectives(group, partial(self._attribute_group, group))
            for param in unsharded_params(group):
                self._hook_gradient(param)
        for name in self._state.spec.ignored_params:
            self._hook_gradient(self._state.params[name])

    def _allocate_bucket(self, *args: Any, **kwargs: Any) -> Tensor:
        # The gradients of the update are views of the buckets.
        with self._tracker.attribute_to("communication"):
            return torch.empty(*args, **kwargs)

    def _hook_gradient(self, param: Tensor) -> None:
        def mark(owner: Tensor) -> None:
            if owner.grad is not None:
                self._tracker.assign("gradients", [owner.grad])

        if param.requires_grad:
            param.register_post_accumulate_grad_hook(mark)

    @contextmanager
    def _attribute_group(self, group: Any, part: Literal["gathered", "communication"]) -> Iterator[None]:
        with self._tracker.attribute_to(part):
            yield
        self._tracker.assign("gradients", iter_grads(group))


@contextmanager
def simulate(workload: Workload, config: ParallelismConfig) -> Iterator[SimulatedRun]:
    """Yield a simulated run in its own fake process group.

    Mutates: this process's process groups, of which there are none before and after.

    Raises:
        ConfigError: a layout that ``build_mesh`` or ``shard_model`` refuses, or existing process groups.
    """
    with fake_world(config.world_size, dp_replicate=config.dp_replicate, tp=config.tp) as mesh:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # The model is sharded on meta, because fake tensors take 4 ms for each parameter that is sharded over 1,000 ranks.
        model = _shard(workload, config, mesh, build_on_meta(workload, fake))
        with fake, FakeValueMode() as fake_values, emulate_cuda_kernels() if config.device == "cuda" else nullcontext():
            allocate_meta_tensors(model, torch.device("cpu"))
            init_root(model)
            yield SimulatedRun(workload, model, config.device, fake_values, _strides(config))


def _strides(config: ParallelismConfig) -> dict[str, int]:
    """Return the distance between neighbours along each axis that ``shard_model`` and ``build_mesh`` use."""
    return {"dp_shard": config.tp, "dp_all": config.tp, "dp_replicate": config.world_size // config.dp_replicate}


def _shard(workload: Workload, config: ParallelismConfig, mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    if config.checkpoint is not None:
        checkpoint_activations(model, blocks=workload.blocks, keep=config.checkpoint)
    options: dict[str, Any] = {
        "strategy": config.strategy,
        "precision": config.precision,
        "accumulate": config.accumulate,
        "blocks": workload.blocks,
        **workload.shard_args,
    }
    if config.tp == 1:
        # A workload may have a plan for every layout.
        options.pop("tp_plan", None)
    return shard_model(model, mesh, **options)


def _use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` use its ``foreach`` form, as on CUDA, unless an option is set. Mutates: its groups."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iter_tensors(item)
