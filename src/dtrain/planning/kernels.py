"""What CUDA's kernels keep for backward, where the CPU's keep more: a plan is made on a CPU, and most plans are for GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def cuda_kernels() -> Iterator[None]:
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
