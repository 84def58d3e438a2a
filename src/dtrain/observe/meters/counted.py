"""``measure_flops``: what a sample costs in any model, counted by torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtrain.batch import BatchSpec, count_batch, to_device
from dtrain.dist.rng import KeptRandomness
from dtrain.errors import ConfigError
from dtrain.shard.reduction import reduction_of
from dtrain.shard.replicas import buffers_restored
from dtrain.shard.whole import reshard
from dtrain.state import device_of
from dtrain.step.sums import checked_loss
from dtrain.types import Batch, LossFn

_WHERE = "measure_flops"


def measure_flops(model: nn.Module, batch: Batch, loss_fn: LossFn, *, batch_spec: BatchSpec | None = None) -> float:
    """Floating-point operations of training on one sample of ``batch``: its forward and backward, counted as they run.

    Counted are the operations that torch has a formula for: products of matrices, convolutions and attention, a multiply-add as
    two. What activation checkpointing computes a second time is run and not counted, and neither are the scores that a fused
    attention computes again in its backward: it is what the model needs, for ``mfu``. Fused attention counts all pairs of
    tokens, also of a causal model. Compiled modules run as they are written, since nothing is seen inside of a compiled kernel.

    Gradients, buffers and random generators are afterwards as they were. Works on the meta device and on fake tensors, where
    it costs nothing: count a copy of the model there if one microbatch more is too much.

    Args:
        model: plain or sharded, in the mode that it trains in; a plan's cut products count whole, on each rank.
        batch: one microbatch, on any device. Of ranks that have a part of each sequence (``cp``), each counts its own part.
        loss_fn: as for ``compose_step``.
        batch_spec: where the batch axis is; None takes the first one.

    Returns:
        Operations a sample; times ``1 / seq`` they are those of a token.

    Mutates: nothing that is left. Hooks that run after a gradient was accumulated do run.
    Collective: those of the model's forward and backward; every rank must call it. Host sync: none.

    Raises:
        ConfigError: a batch without samples or whose samples cannot be counted, a loss that is no ``LossSum`` of single
            numbers, or one that no parameter takes part in.
        Exception: whatever ``loss_fn`` or the model raises.

    Example:
        >>> from dtrain.types import LossSum
        >>> def loss(model, x):
        ...     return LossSum(total=model(x).sum(), weight=len(x))
        >>> measure_flops(torch.nn.Linear(8, 4, bias=False), torch.ones(5, 8), loss)  # 2 * 8 * 4, forward and weight gradient
        128.0
    """
    samples, _ = count_batch(batch, batch_spec)
    if samples < 1:
        raise ConfigError(f"{_WHERE}: the batch has no sample; pass one microbatch")
    counter = _Needed()
    with _untouched(model), _uncompiled(), torch.enable_grad(), counter:
        loss = checked_loss(loss_fn(model, to_device(batch, device_of(model))), where=_WHERE)
        total = sum((term for term, _ in loss.terms.values()), loss.total)
        if not total.requires_grad:
            raise ConfigError(f"{_WHERE}: the loss depends on no trainable parameter; is the model frozen?")
        counter.backward = True
        total.backward()
    return counter.get_total_flops() / samples


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of shapes ``[batch, heads, seq, dim]``: scores, and their products with the values."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(grad: Sequence[int], *shapes: Any, **_: Any) -> int:
    return _attention(*shapes) * 5 // 2


_ON_CPU = {  # torch has no formulas for these two
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class _Needed(FlopCounterMode):
    """Torch's counter, without what is computed a second time.

    A backward runs its own operations without recording gradients. What runs there while gradients are recorded is a piece of
    the forward once more, of ``torch.utils.checkpoint`` in either form or of a function that does so itself.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_ON_CPU)
        self.backward = False

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        if not _is_fused_backward(func_packet):
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        before = self.get_total_flops()
        super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        # Five products of one size: the scores again, then the gradients of weights, values, queries and keys.
        self.flop_counts["Global"][func_packet] -= (self.get_total_flops() - before) // 5
        return out


def _is_fused_backward(func_packet: Any) -> bool:
    name = str(func_packet)
    return "attention" in name and "backward" in name


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """A forward and backward in between leave gradients, buffers, random generators and shards as they are."""
    reduction = reduction_of(model)
    kept = KeptRandomness()
    reduction.begin()
    reshard(model)
    grads = [(param, param.grad) for param in model.parameters()]
    try:
        for param, _ in grads:
            param.grad = None
        with buffers_restored(model):
            reduction.before_microbatch(last=True)
            yield
    except BaseException:
        reduction.abort()
        raise
    finally:
        reduction.end()
        for param, grad in grads:
            param.grad = grad
        kept.put_back()


def _uncompiled() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and it takes seconds to import
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
