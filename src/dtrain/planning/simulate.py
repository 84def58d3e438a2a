"""Simulate a step of rank 0 on fake tensors: run the real code without memory, arithmetic or other ranks.

The simulation tracks memory by its purpose, and sums the collectives by kind. This process is the first rank of a fake process
group, and collectives do nothing. Values read on the host are 1, and a mask selects everything. Kernels keep the tensors for
backward that they would keep on CUDA.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from dtrain.arguments import check_choice, check_int, explain_fields
from dtrain.data.batch import list_tensors
from dtrain.dist.collective_replay import is_collective
from dtrain.dist.dtensor import dtensor_dispatcher
from dtrain.dist.init import DistInfo, fake_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import rng_state, set_rng_state
from dtrain.errors import ConfigError
from dtrain.memory.live_tensors import LiveBytes
from dtrain.planning.memory_trace import MemoryTrace, MemoryTracker
from dtrain.planning.operation_cache import PLAIN_TENSORS, CachedOperations, OperationCache
from dtrain.planning.step_work import CollectiveTraffic, StepWork, WorkCounter, extrapolate_traffic, iter_tensors, sum_traffic
from dtrain.planning.workload import Workload, build_on_meta
from dtrain.run_context import AsyncScalar
from dtrain.shard.activations import checkpoint_activations
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import (
    fsdp_param_groups,
    init_root,
    iter_grads,
    only_first_shards,
    unsharded_params,
    wrap_collectives,
)
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.materialize import allocate_meta_tensors
from dtrain.shard.params import StepHook
from dtrain.shard.precision import Precision
from dtrain.shard.spec import Accumulate
from dtrain.state import TrainState
from dtrain.step.compose import Step, compose_step
from dtrain.step.optimizer import apply_gradients
from dtrain.step.transform import Transform
from dtrain.testing.counters import CollectiveCall, describe_collective
from dtrain.transforms.context_sharding import context_parallel
from dtrain.typing import Batch, LossSum, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """Memory and collectives of one step.

    Args:
        trace: changes of memory.
        traffic: collectives by kind.
        batch_bytes: bytes of the rank's batch.
        work: floating-point operations, and memory traffic of the optimizer.
    """

    trace: MemoryTrace
    traffic: tuple[CollectiveTraffic, ...]
    batch_bytes: int
    work: StepWork


DeviceType: TypeAlias = Literal["cuda", "cpu"]
KeepPolicy: TypeAlias = Literal["nothing", "matmuls"]
SequenceMethod: TypeAlias = Literal["ring", "ulysses"]


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """Layout of a workload over ranks, with the argument names of ``shard_model`` and ``build_mesh``.

    Args:
        cp_method: ``method`` of ``context_parallel``, if ``cp`` > 1.
        checkpoint: None for no activation checkpointing, or ``keep`` of ``checkpoint_activations``.
        device: type of the simulated device. On ``"cuda"`` optimizers use their ``foreach`` form, as in torch, and some kernels
            keep less for backward.
    """

    world_size: int
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1
    strategy: str = "full_shard"
    precision: Precision | None = None
    accumulate: Accumulate = "local"
    checkpoint: KeepPolicy | None = None
    device: DeviceType = "cuda"
    cp_method: SequenceMethod = "ring"

    def __post_init__(self) -> None:
        check_choice("plan", "cp_method", self.cp_method, ("ring", "ulysses"))
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
        transforms: Sequence[Transform],
        config: ParallelismConfig,
        fake_values: FakeValueMode,
    ) -> None:
        self._workload, self._model, self._transforms, self._fake_values = workload, model, transforms, fake_values
        # Distance between neighbours along each axis that shard_model and build_mesh use.
        self._strides = dict.fromkeys(("dp_shard", "dp_all", "cp"), config.tp)
        self._strides["dp_replicate"] = config.world_size // config.dp_replicate
        self._tracker = MemoryTracker()
        optimizer = workload.optimizer(model.parameters())
        for group in optimizer.param_groups if config.device == "cuda" else ():
            # On CUDA, torch uses the foreach form unless an option is set.
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        # A simulated parameter has no values to compare.
        self._state = self._compose(1).init(model, optimizer, replica_check_every=0)
        monitor = self._state._run_context.monitor
        monitor.pending_weight = UnreadScalar()
        # A fake loss cannot be read on the host.
        monitor.nonfinite_losses.limit = None
        self._warm = False
        if self._state.spec.plain_params:
            # The hooks must run before the reducer's, which takes the gradients.
            for param in self._state.params.values():
                self._hook_gradient(param)
        # The traffic of parameters is equal for every size, and that of activations is not.
        self._sends_activations = config.cp * config.tp > 1
        self._traffic_of_two: dict[int, tuple[CollectiveTraffic, ...]] = {}

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
        key = microbatch_size if self._sends_activations else 0
        if key not in self._traffic_of_two:
            self._traffic_of_two[key] = self._measure(microbatch_size, 2).traffic
        traffic = extrapolate_traffic(self._traffic_of_two[key], three.traffic, microbatches)
        work, batch_bytes = three.work.of_microbatches(3, microbatches), three.batch_bytes * microbatches // 3
        return replace(three, traffic=traffic, batch_bytes=batch_bytes, work=work)

    def _measure(self, microbatch_size: int, microbatches: int) -> StepUsage:
        tracker, state = self._tracker, self._state
        self._fake_values.collectives.clear()
        self._fake_values.work.reset()
        with self._fake_values.counted_by(tracker.live):
            tracker.assign("parameters", state.params.values())
            tracker.assign("parameters", self._model.buffers())
            tracker.assign("optimizer", iter_tensors(state.optimizer.state))
            tracker.assign("transforms", iter_tensors(state.transform_states))
            tracker.reset()
            batch_bytes = self._run(microbatch_size, microbatches)
        traffic = sum_traffic(self._fake_values.collectives, self._strides)
        return StepUsage(trace=tracker.trace(), traffic=traffic, batch_bytes=batch_bytes, work=self._fake_values.work.work())

    def _run(self, microbatch_size: int, microbatches: int) -> int:
        """Run a step, and return the bytes of its batch."""
        batch = self._workload.batch(microbatch_size * microbatches)
        self._state, _ = self._compose(microbatch_size)(self._state, batch)
        return sum(tensor.nbytes for tensor in list_tensors(batch))

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
            with tracker.attribute_to("optimizer"), self._fake_values.work.update():
                return apply_gradients(state, metrics)

        return compose_step(
            traced_loss_fn,
            self._transforms,
            microbatch_size=microbatch_size,
            batch_spec=self._workload.batch_spec,
            update=update_fn,
        )

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
            param.register_post_accumulate_grad_hook(StepHook(mark))

    @contextmanager
    def _attribute_group(self, group: Any, part: Literal["gathered", "communication"]) -> Iterator[None]:
        with self._tracker.attribute_to(part):
            yield
        self._tracker.assign("gradients", iter_grads(group))


@contextmanager
def simulate(workload: Workload, config: ParallelismConfig, operations: OperationCache | None = None) -> Iterator[SimulatedRun]:
    """Yield a simulated run in its own fake process group. Runs that share ``operations`` compute equal operations once.

    Mutates: this process's process groups, of which there are none before and after.

    Raises:
        ConfigError: a layout that ``build_mesh`` or ``shard_model`` refuses, or existing process groups.
    """
    with fake_world(config) as mesh:
        operations = OperationCache() if operations is None else operations
        # The model is sharded on meta, because fake tensors take 4 ms for each parameter that is sharded over 1,000 ranks.
        with only_first_shards():
            model = build_on_meta(workload, CachedOperations(operations))
            if config.checkpoint is not None:
                checkpoint_activations(model, blocks=workload.blocks, keep=config.checkpoint)
            options: dict[str, Any] = {"blocks": workload.blocks, **workload.shard_args}
            if config.tp == 1:
                # A workload may have a plan for every layout.
                options.pop("tp_plan", None)
            options = {"strategy": config.strategy, "precision": config.precision, "accumulate": config.accumulate} | options
            model = shard_model(model, mesh, **options)
        with FakeValueMode(operations) as fake_values, emulate_cuda_kernels() if config.device == "cuda" else nullcontext():
            allocate_meta_tensors(model, torch.device("cpu"))
            init_root(model)
            yield SimulatedRun(workload, model, _transforms(workload, config, mesh), config, fake_values)


def _transforms(workload: Workload, config: ParallelismConfig, mesh: DeviceMesh) -> list[Transform]:
    """Return the transforms of a step on ``mesh``."""
    if config.cp == 1:
        return [*workload.transforms]
    if not workload.batch_seq_dims:
        raise ConfigError(
            f"plan: cp={config.cp} shards sequences, but the workload has no batch_seq_dims. Pass for example "
            "Workload(batch_seq_dims={'input_ids': 1, 'labels': 1})."
        )
    dims, buffer_dims = workload.batch_seq_dims, workload.buffer_seq_dims
    # The documents of packed rows are values, which a plan does not have, so each row is one document.
    cut = context_parallel(mesh, batch_seq_dims=dims, buffer_seq_dims=buffer_dims, method=config.cp_method, check=False)
    return [*workload.transforms, cut]


MAX_WORLD_SIZE = 4096
"""Largest number of simulated ranks, covered by tests."""


@contextmanager
def fake_world(config: ParallelismConfig) -> Iterator[DeviceMesh]:
    """Yield the mesh of the layout's ranks, of which this process is the first, inside the context.

    Exchanges of the control plane run on this rank alone, because all ranks would contribute equal values. Collectives of the
    mesh send and receive nothing. Dispatch modes do not see how DTensor computes shapes.

    Mutates: the process groups of this process, which has none before and after. The global RNG is restored.

    Raises:
        ConfigError: process groups exist, or the numbers are invalid.
    """
    if dist.is_initialized():
        raise ConfigError(
            "plan: this process has process groups, and a plan needs fake ones. Plan before dt.init_dist(), or in another "
            "process."
        )
    world_size = check_int("plan", "world_size", config.world_size, maximum=MAX_WORLD_SIZE)
    # The import registers the backend. torch has it only here.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    random = rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            # The warnings are about results and timeouts, and the real run will give them, too.
            warnings.simplefilter("ignore")
            with fake_dist_info(DistInfo(world_size=world_size, backend="fake")):
                mesh = build_mesh(dp_replicate=config.dp_replicate, dp_shard=-1, cp=config.cp, tp=config.tp)
            with fake_dist_info(DistInfo(backend="fake")), uncounted_dtensor_shapes():
                yield mesh
    finally:
        dist.destroy_process_group()
        # torch caches results by mesh, with the names of groups, and a later mesh of the same ranks is an equal mesh.
        if "torch.distributed.tensor" in sys.modules:
            dtensor_dispatcher().sharding_propagator.propagate_op_sharding.cache_clear()
            if clear_fast_path := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):
                clear_fast_path()
        set_rng_state(random)


_aten = torch.ops.aten
_DEVICE, _LOCAL_SCALAR = torch.ops.prim.device.default, _aten._local_scalar_dense.default


class FakeValueMode(CachedOperations):
    """Context in which tensors are fake, a number read from a tensor is 1, and a mask selects everything.

    So a model that reads its data can be simulated, with the most memory that the data can need. ``collectives`` records the
    collectives, which do nothing.
    """

    def __init__(self, operations: OperationCache) -> None:
        super().__init__(operations)
        self.collectives: list[CollectiveCall] = []
        self.work = WorkCounter()
        self._live: LiveBytes | None = None

    @contextmanager
    def counted_by(self, live: LiveBytes) -> Iterator[None]:
        """Let ``live`` count the tensors of all operations inside the context, as if ``live`` were entered as a mode.

        A second mode would cost each operation another pass through torch's dispatcher.
        """
        live.observe_resizes()
        self._live = live
        try:
            yield
        finally:
            self._live = None
            live.ignore_resizes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN_TENSORS.issuperset(types):
            return NotImplemented
        # C++ asks a fake tensor for its device about once per operation.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        live = self._live
        if live is None:
            return self._run(func, args, kwargs)
        before = live.count_arguments(func, args, kwargs)
        out = self._run(func, args, kwargs)
        live.count_result(func, out, before)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # The fake mode would take long for each number of an optimizer's state, and for the records of the profiler.
        if func is _LOCAL_SCALAR and isinstance(args[0], FakeTensor) and args[0].constant is None:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        namespace = _namespace(func)
        if namespace == "profiler":
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if namespace != "aten" and is_collective(func):
            self.collectives.extend(describe_collective(func, args, kwargs))
        try:
            out, flops = self._operations.run(func, args, kwargs)
        except DataDependentOutputException:
            raise _data_dependent_error(func) from None
        except DynamicOutputShapeException:
            result = _unmasked_result(func, args)
            if result is None:
                raise _data_dependent_error(func) from None
            return result
        self.work.count(func, args, kwargs, out, flops)
        return out


@cache
def _namespace(func: Any) -> str:
    return func.namespace  # type: ignore[no-any-return]


def _unmasked_result(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the result of ``func`` for a mask that selects everything; None for any other operation."""
    if func is _aten.nonzero.default:
        result: Tensor = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return result
    if func is _aten.masked_select.default:
        result = args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
        return result.reshape(-1)
    if func is _aten.index.Tensor:
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                indices += index.new_empty((index.ndim, index.numel()), dtype=torch.int64).unbind(0)
            else:
                indices.append(index)
        return func(args[0], indices)  # type: ignore[no-any-return]
    return None


def _data_dependent_error(func: Any) -> ConfigError:
    return ConfigError(
        f"plan: the shape of the result of {func} depends on values, which a plan does not have. Let the model compute it with "
        "shapes that do not depend on the data."
    )


@contextmanager
def uncounted_dtensor_shapes() -> Iterator[None]:
    """Let DTensor compute the shapes of its results outside of all dispatch modes, inside the context.

    DTensor runs an operation that is new to it on fake tensors of the whole shapes. In a step they hold no memory, but inside
    the simulation they would be counted like the tensors of the step.

    Mutates: a method of torch's sharding propagator, inside the context.
    """
    propagator = dtensor_dispatcher().sharding_propagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(op_schema: Any) -> Any:
        with _disable_current_modes():
            return original(op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


class UnreadScalar(AsyncScalar):
    """Scalar that never arrives on the host, as on a busy GPU."""

    def __init__(self) -> None:
        """Allocate nothing."""

    def copy_from(self, value: Tensor) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def try_read(self) -> float | None:
        """Return None, because the scalar has not arrived."""
        return None


@contextmanager
def emulate_cuda_kernels() -> Iterator[None]:
    """Let operations on fake tensors keep the tensors that they would keep on CUDA, inside the context.

    - RMSNorm is one kernel on CUDA, which keeps its input and a number per row; on the CPU, six operations.
    - Dropout keeps a mask of one byte per element on CUDA; on the CPU, the factors, as large as the input.
    - Attention with dropout is one kernel on CUDA; the CPU keeps the scores, quadratic in the sequence length.

    Mutates: three functions of torch, inside the context. Code that imported the functions before uses the CPU's.
    """
    rms_norm, dropout, attention = torch.rms_norm, F.dropout, F.scaled_dot_product_attention

    def cuda_rms_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        # With different dtypes CUDA runs several kernels, too.
        if weight is not None and weight.dtype != input.dtype:
            return rms_norm(input, normalized_shape, weight, eps)
        return _RMSNorm.apply(input, tuple(normalized_shape), weight)  # type: ignore[no-untyped-call]

    def cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if inplace or not training or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return _Dropout.apply(input)  # type: ignore[no-untyped-call]

    # torch's ring replaces the function by its name.
    @wraps(attention)
    def cuda_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    places = ((torch, "rms_norm"), (F, "dropout"), (F, "scaled_dot_product_attention"))
    try:
        for (module, name), function in zip(places, (cuda_rms_norm, cuda_dropout, cuda_attention), strict=True):
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in zip(places, (rms_norm, dropout, attention), strict=True):
            setattr(module, name, function)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        scale = x.new_empty(x.shape[: x.ndim - len(shape)], dtype=torch.float32)
        ctx.save_for_backward(x, scale, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])
