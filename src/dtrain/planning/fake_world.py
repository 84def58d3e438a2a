"""A world of ranks that are not there: this process is the first of them, and collectives do nothing.

What fake tensors cannot say, answered: values that are read on the host, and shapes that depend on values.

What CUDA's kernels keep for backward, where the CPU's keep more: a plan is made on a CPU, and most plans are for GPUs."""

from __future__ import annotations

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
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.dist.dispatch import is_collective
from dtrain.dist.init import DistInfo, fake_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import rng_state, set_rng_state
from dtrain.errors import ConfigError
from dtrain.run_context import AsyncScalar
from dtrain.testing.collective_counter import CollectiveCall, describe_collective

MAX_WORLD_SIZE = 4096
"""Ranks that a plan may have: tests hold it to this number."""


@contextmanager
def fake_world(world_size: int, *, dp_replicate: int = 1) -> Iterator[DeviceMesh]:
    """The mesh of ``world_size`` ranks, of which this process is the first, while the block runs.

    Agreements of the control group are made by this rank alone: the others would come with the same. What is sent on the mesh
    goes nowhere, and nothing comes.

    Mutates: the process groups of this process, which has none before and after. The global RNG is left as it was.

    Raises:
        ConfigError: there are process groups, or the numbers do not fit.
    """
    if dist.is_initialized():
        raise ConfigError(
            "plan: this process has process groups, and a plan needs pretended ones; make it before dt.init_dist(), or in "
            "another process"
        )
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ConfigError(f"plan: world_size must be a whole number from 1 to {MAX_WORLD_SIZE}, got {world_size!r}")
    # Registers the backend; the only place of torch that has it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    random = rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about results and time-outs, and the run itself will say them
            groups = {"control": dist.group.WORLD, "background": dist.group.WORLD, "backend": "fake"}
            with fake_dist_info(DistInfo(world_size=world_size, **groups)):  # type: ignore[arg-type]
                mesh = build_mesh(dp_replicate=dp_replicate, dp_shard=-1)
            with fake_dist_info(DistInfo(**groups)):  # type: ignore[arg-type]
                yield mesh
    finally:
        dist.destroy_process_group()
        set_rng_state(random)


_aten = torch.ops.aten


class FakeValueMode(TorchDispatchMode):
    """A context in which a number that is read from a fake tensor is 1, and what a mask selects is everything.

    So a plan goes on where a model looks at its data, and assumes the most memory that the data can ask for. Collectives, which
    do nothing, are noted in ``collectives``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and kind is not FakeTensor for kind in types):
            return NotImplemented
        if is_collective(func):
            self.collectives.extend(describe_collective(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is _aten._local_scalar_dense.default:
                return _fake_scalar(args[0].dtype)
            raise _data_dependent_error(func) from None
        except DynamicOutputShapeException:
            answer = _unmasked_result(func, args)
            if answer is None:
                raise _data_dependent_error(func) from None
            return answer


def _fake_scalar(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1


def _unmasked_result(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The result of ``func`` when nothing is left out by its mask; None for an operation that this does not know."""
    if func is _aten.nonzero.default:
        made: Tensor = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return made
    if func is _aten.masked_select.default:
        made = args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
        return made.reshape(-1)
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
        f"plan: the result of {func} depends on values, which a plan does not have; let the model compute it with shapes that "
        "do not depend on the data"
    )


class UnreadScalar(AsyncScalar):
    """A scalar on its way to the host that never arrives, as on a GPU that is busy."""

    def __init__(self) -> None:
        """Nothing is kept."""

    def copy_from(self, value: Tensor) -> None:
        """Does nothing."""

    def clear(self) -> None:
        """Does nothing."""

    def try_read(self) -> float | None:
        """None: it has not arrived."""
        return None


@contextmanager
def emulate_cuda_kernels() -> Iterator[None]:
    """A context in which these operations hold on fake tensors what they would hold on CUDA; they compute nothing.

    - RMSNorm is one kernel, which keeps its input and a number per row; on the CPU it is six operations.
    - Dropout keeps a mask of one byte per element; on the CPU it keeps the factors, as large as the input.
    - Attention with dropout is one kernel; on the CPU it keeps the scores, whose size is quadratic in the sequence.

    Mutates: three functions of torch, for the time of the block. Whoever took them from torch before has the CPU's.
    """
    changes = ((torch, "rms_norm", _rms_norm), (F, "dropout", _dropout), (F, "scaled_dot_product_attention", _attention))
    before = [getattr(module, name) for module, name, _ in changes]
    for (module, name, made), plain in zip(changes, before, strict=True):
        setattr(module, name, made(plain))
    try:
        yield
    finally:
        for (module, name, _), plain in zip(changes, before, strict=True):
            setattr(module, name, plain)


def _rms_norm(plain: Any) -> Any:
    def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
        if weight is not None and weight.dtype != input.dtype:  # then CUDA runs several kernels, too
            return plain(input, normalized_shape, weight, eps)
        return _RMSNorm.apply(input, tuple(normalized_shape), weight)  # type: ignore[no-untyped-call]

    return rms_norm


def _dropout(plain: Any) -> Any:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if inplace or not training or not 0 < p < 1:
            return plain(input, p, training, inplace)
        return _Dropout.apply(input)  # type: ignore[no-untyped-call]

    return dropout


def _attention(plain: Any) -> Any:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **more: Any,
    ) -> Any:
        return plain(query, key, value, attn_mask, 0.0, *args, **more)

    return scaled_dot_product_attention


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
