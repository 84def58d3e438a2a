"""Run torch's context parallelism: its ring attention, extended to the CPU, and refused where it would be wrong.

This module uses private names of torch's prototype. ``tests/shard/test_context_parallel.py`` compares gradients with those of
one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.dtensor import to_local

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Dim of positions in the tensors of ``scaled_dot_product_attention``.
_SEQ_DIM = 2
# Parts of torch's errors about attention without a ring.
_REFUSALS = ("Load balancing requires", "No available kernel", "No viable backend", "attn_bias is not supported")


@contextmanager
def ring_attention(
    axis: DeviceMesh, sequences: Sequence[tuple[Tensor, int]], buffers: Sequence[tuple[Tensor, int]]
) -> Iterator[None]:
    """Shard tensors over ``axis``, and let ``scaled_dot_product_attention`` use the keys of all ranks, inside the context.

    Attention that the ring cannot compute raises torch's error, with a note on what to change.

    Args:
        axis: mesh of the ranks that share sequences.
        sequences: tensors and their sequence dims, which are sharded in place and stay so.
        buffers: the same for tensors that are restored.

    Mutates: the tensors; torch's ``scaled_dot_product_attention``, inside the context.
    """
    from torch.distributed.tensor.experimental import context_parallel

    both = [*sequences, *buffers]
    tensors, dims = [tensor for tensor, _ in both], [dim for _, dim in both]
    sharded = context_parallel(
        axis, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers={tensor for tensor, _ in sequences}
    )
    try:
        with (
            _cpu_kernels() if axis.device_type == "cpu" else nullcontext(),
            _always_restored(sharded),
            sdpa_kernel(_fused_backends()),
        ):
            yield
    except RuntimeError as error:
        if any(text in str(error) for text in _REFUSALS):
            error.add_note(
                "context_parallel: attention must be causal (is_causal=True), without attn_mask, and have a fused kernel. On "
                "the CPU, dropout has none: set dropout_p to 0 there."
            )
        raise


@contextmanager
def _always_restored(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter torch's context, which restores nothing after an exception, and leave it as if there were none."""
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def _fused_backends() -> list[SDPBackend]:
    """Return the enabled backends, without the unfused one, for which torch has no ring."""
    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    return [backend for backend, is_enabled in enabled.items() if is_enabled]


@contextmanager
def _cpu_kernels() -> Iterator[None]:
    """Let torch's ring call the CPU's attention kernel, inside the context. Mutates: torch's table of kernels."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    kernels: dict[Any, Any] = _attention.custom_ops
    kernels.update({_FORWARD: _attend, _BACKWARD: _attend_backward})
    try:
        yield
    finally:
        del kernels[_FORWARD], kernels[_BACKWARD]


def _attend(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    query, key, value, *rest = (_local(value) for value in args)
    options = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | {name: _local(each) for name, each in options.items()}
    if options.pop("attn_mask", None) is not None:
        raise RuntimeError("attn_bias is not supported")
    with _sums_in_dtype_of(query):
        parts = _attention._templated_ring_attention(
            args[0].device_mesh.get_group(), _SEQ_DIM, kernel, query, key, value, **options
        )
    return _as_shards(parts, args[0])


def _attend_backward(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    grad, query, key, value, out, logsumexp, dropout_p, is_causal = (_local(value) for value in args)
    ring = _attention._templated_ring_attention_backward
    tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    with _sums_in_dtype_of(query):
        parts = ring(
            args[0].device_mesh.get_group(),
            _SEQ_DIM,
            kernel,
            grad_out=grad,
            grad_out_name="grad_out",
            is_causal=is_causal,
            dropout_p=dropout_p,
            **tensors,
            **{name: _local(each) for name, each in options.items()},
        )
    return _as_shards(parts, args[0])


def _local(value: Any) -> Any:
    return to_local(value) if isinstance(value, Tensor) else value


def _as_shards(parts: Sequence[Tensor], like: Any) -> tuple[Any, ...]:
    """Return DTensors with these shards, sharded over the same ranks and the same dim as ``like``."""
    return tuple(type(like).from_local(part, like.device_mesh, like.placements, run_check=False) for part in parts)


@contextmanager
def _sums_in_dtype_of(tensor: Tensor) -> Iterator[None]:
    """Let the ring sum the ranks' parts in float32, as on a GPU, or in float64 for tensors of float64, inside the context."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before = options.convert_to_f32
    options.convert_to_f32 = before and tensor.dtype != torch.float64
    try:
        yield
    finally:
        options.convert_to_f32 = before
