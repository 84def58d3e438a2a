"""Run torch's context parallelism: its ring attention, extended to the CPU, and refused where it would be wrong.

This module uses private names of torch's prototype. ``tests/shard/test_context_parallel.py`` compares gradients with those of
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError

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

    Arguments of attention that the ring cannot compute raise a ``ConfigError``. Attention without a fused kernel raises torch's
    error, with a note on what to change.

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
            _checked_arguments(),
            sdpa_kernel(_fused_backends()),
        ):
            yield
    except RuntimeError as error:
        if any(text in str(error) for text in _REFUSALS):
            error.add_note(
                "context_parallel: attention must have a fused kernel. Give query, key and value the same batch size and head "
                "size, and the same number of heads or enable_gqa=True."
            )
        raise


@contextmanager
def count_attention_calls() -> Iterator[list[None]]:
    """Yield a list that gets an entry for each call of ring attention. Use it inside of ``ring_attention``.

    Mutates: torch's ``scaled_dot_product_attention``, inside the context.
    """
    attend, calls = functional.scaled_dot_product_attention, list[None]()

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(None)
        return attend(*args, **options)

    functional.scaled_dot_product_attention = counted
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = attend


@contextmanager
def _checked_arguments() -> Iterator[None]:
    """Refuse arguments of attention that the ring cannot compute, before torch computes another result or raises its own error.

    Mutates: torch's ``scaled_dot_product_attention``, inside the context.
    """
    ring: Callable[..., Tensor] = functional.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        problem = None
        if attn_mask is not None:
            problem = f"attn_mask must be None, got a mask of shape {list(attn_mask.shape)}"
        elif not is_causal:
            problem = "is_causal must be True, got False"
        # The ring computes several blocks, and torch's backward repeats the random numbers of the last block only.
        elif dropout_p:
            problem = f"dropout_p must be 0, got {dropout_p}"
        elif query.ndim != 4:
            problem = f"query must be [batch, heads, seq, dim], got {query.ndim} dims"
        elif query.shape[2] != key.shape[2]:
            problem = f"query and key must have the same length, got {query.shape[2]} and {key.shape[2]}"
        if problem is not None:
            raise ConfigError(
                f"context_parallel: scaled_dot_product_attention: {problem}. Use causal self-attention without "
                "a mask and without dropout; for transformers see docs/parallelism.md."
            )
        return ring(query, key, value, None, 0.0, True, scale=scale, enable_gqa=enable_gqa)

    checked: Any = attend
    functional.scaled_dot_product_attention = checked
    try:
        yield
    finally:
        # torch restores its own function only.
        functional.scaled_dot_product_attention = ring


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
