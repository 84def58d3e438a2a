"""Provide a fake process group, fake values and CUDA's memory use, so that a step can run on fake tensors on one CPU.

This process is the first rank, and collectives do nothing. Values read on the host are 1, and a mask selects everything.
Kernels keep the tensors for backward that they would keep on CUDA.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dtrain.arguments import check_int
from dtrain.dist.collective_replay import is_collective
from dtrain.dist.dtensor import dtensor_dispatcher
from dtrain.dist.init import DistInfo, fake_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import rng_state, set_rng_state
from dtrain.errors import ConfigError
from dtrain.planning.step_work import WorkCounter
from dtrain.run_context import AsyncScalar
from dtrain.testing.counters import CollectiveCall, describe_collective

MAX_WORLD_SIZE = 4096
"""Largest number of simulated ranks, covered by tests."""


@contextmanager
def fake_world(world_size: int, *, dp_replicate: int = 1, cp: int = 1, tp: int = 1) -> Iterator[DeviceMesh]:
    """Yield the mesh of ``world_size`` ranks, of which this process is the first, inside the context.

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
    check_int("plan", "world_size", world_size, maximum=MAX_WORLD_SIZE)
    # The import registers the backend. torch has it only here.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    random = rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            # The warnings are about results and timeouts, and the real run will give them, too.
            warnings.simplefilter("ignore")
            with fake_dist_info(DistInfo(world_size=world_size, backend="fake")):
                mesh = build_mesh(dp_replicate=dp_replicate, dp_shard=-1, cp=cp, tp=tp)
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
_DEVICE = torch.ops.prim.device.default


class FakeValueMode(TorchDispatchMode):
    """Context in which a number read from a fake tensor is 1, and a mask selects everything.

    So a model that reads its data can be simulated, with the most memory that the data can need. ``collectives`` records the
    collectives, which do nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[CollectiveCall] = []
        self.work = WorkCounter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and kind is not FakeTensor for kind in types):
            return NotImplemented
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        # An exception of the fake mode for each number of an optimizer's state would be slow.
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor) and args[0].constant is None:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        if is_collective(func):
            self.collectives.extend(describe_collective(func, args, kwargs))
        try:
            out = func(*args, **kwargs)
            self.work.count(func, args, kwargs, out)
            return out
        except DataDependentOutputException:
            raise _data_dependent_error(func) from None
        except DynamicOutputShapeException:
            result = _unmasked_result(func, args)
            if result is None:
                raise _data_dependent_error(func) from None
            return result


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
