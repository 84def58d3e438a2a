"""``transformer_flops``: what a token costs in a transformer, by the formula.

``peak_flops``: what a device could compute at most, as its vendor says.

``count_flops``: what a sample costs in any model, counted by torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtrain.batch import BatchSpec, count_samples_and_tokens, to_device
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.unshard import reshard
from dtrain.state import get_device
from dtrain.step.normalization import check_loss
from dtrain.typing import Batch, LossFn


def transformer_flops(*, params: int, layers: int, dim: int, seq: int, causal: bool = False) -> float:
    """Floating-point operations of training a transformer on one token: forward and backward, a multiply-add counted as two.

    Formula: ``6 * params + 12 * layers * dim * seq``; with ``causal=True``, ``6 * params + 6 * layers * dim * (seq + 1)``

    Each weight takes part in one multiply-add per token in the forward, and in two in the backward, which costs twice as much:
    for the gradient of its input and for its own. That is ``6 * params``. In each layer a token is compared with ``seq`` keys
    and gathers as many values, each of ``dim`` numbers over all heads: ``2 * 2 * dim * seq``, times 3 with the backward. The
    papers count every pair of tokens, although a causal model needs only half of them; so ``causal=False`` is the figure that
    is comparable with published ones, and ``causal=True`` is what is needed. Recomputed activations are not work that the model
    needs, and do not count. Norms, softmax and activation functions are left out: they are small.

    Args:
        params: weights that every token is multiplied with. A table of embeddings that is only looked up is not among them,
            one that is also the output layer is; of a mixture of experts, those that one token goes through.
        layers: blocks with attention.
        dim: heads times the size of one.
        seq: tokens that attention sees at once.
        causal: whether only the pairs of a causal model count.

    Raises:
        ConfigError: an argument that is no whole number of at least 1 (``layers`` and ``dim``: of at least 0).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; ``6 * params`` as Kaplan et al. 2020, arXiv:2001.08361, section
    2.1.

    Example:
        >>> transformer_flops(params=124_000_000, layers=12, dim=768, seq=1024)
        857246208.0
    """
    for name, value, least in (("params", params, 1), ("layers", layers, 0), ("dim", dim, 0), ("seq", seq, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(f"transformer_flops: {name} must be a whole number of at least {least}, got {value!r}")
    pairs = (seq + 1) / 2 if causal else seq
    return 6.0 * params + 12.0 * layers * dim * pairs


ComputeDtype: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
"""What products are computed in; ``tf32`` is float32 whose products torch may round (``set_float32_matmul_precision``)."""

_DTYPES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

_HOPPER = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}

# Words of the name that torch gives -> 10**12 operations a second, dense. A row holds for names with all its words; of several
# the one with the most. Words are whole ones, so that "L4" is not L40S, and "A10" not A100.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"fp32": 75.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0},
    "GB200": {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0},
    "GH200": _HOPPER,
    "H200": _HOPPER,
    "H200 NVL": _HOPPER_NVL,
    "H100": _HOPPER,
    "H100 PCIe": {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0},
    "H100 NVL": _HOPPER_NVL,
    "A100": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    "A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0},
    "L40S": {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0},
    "L4": {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5},
    "V100 SXM2": {"fp32": 15.7, "fp16": 125.0},
    "V100 SXM3": {"fp32": 15.7, "fp16": 125.0},
    "V100 PCIE": {"fp32": 14.0, "fp16": 112.0},
    "V100S PCIE": {"fp32": 16.4, "fp16": 130.0},
    "T4": {"fp32": 8.1, "fp16": 65.0},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0},
    "MI325X": _MI300X,
    "MI300X": _MI300X,
    "MI250X": {"fp32": 47.9, "fp16": 191.5, "bf16": 191.5},
    "MI250": {"fp32": 45.3, "fp16": 181.0, "bf16": 181.0},
}
_EXCLUDED_WORDS = (
    "Laptop",
    "Mobile",
    "Max-Q",
    "D",
    "Ti",
    "MIG",
    "GRID",
)  # words of relatives that are slower or faster than the row


def peak_flops(name: str, dtype: ComputeDtype | torch.dtype) -> float | None:
    """Operations a second that the device called ``name`` can do at most in products of ``dtype``, or None: not known.

    Dense, of matrix units where the device has some for this dtype, accumulated in float32 as torch does: datasheets often
    print twice that, which holds for sparse weights. Of devices that come in two parts torch sees each as a device, so the
    figures of MI250 and MI250X are those of one part. A slice of a GPU, and relatives such as a laptop's, are not known.

    Args:
        name: as ``torch.cuda.get_device_name()`` has it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: ``"fp32"``, ``"tf32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or torch's dtype; ``torch.float32`` is ``"fp32"``.

    Raises:
        ConfigError: another dtype.

    Source: the vendors' datasheets: NVIDIA GB200, B200 (HGX), GH200, H200, H100, A100, A40, A10, L40S, L4, V100, T4;
    NVIDIA Ada and Ampere GA102 architecture papers (RTX 4090, 3090); AMD Instinct MI325X, MI300X, MI250X, MI250. Figures that
    are given with sparsity are halved.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("Tesla T4", "bf16"), peak_flops("abacus", "fp32")
        (312000000000000.0, None, None)
    """
    kind = _DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if kind is None or kind not in get_args(ComputeDtype):
        raise ConfigError(f"peak_flops: dtype must be one of {', '.join(get_args(ComputeDtype))}, got {dtype!r}")
    words = set(name.replace("-", " ").replace("_", " ").split())
    if words & set(_EXCLUDED_WORDS):
        return None
    fitting = [row for row in _PEAKS if set(row.split()) <= words]
    if not fitting:
        return None
    tera = _PEAKS[max(fitting, key=lambda row: len(row.split()))].get(kind)
    return None if tera is None else tera * 1e12


_CALLER = "count_flops"


def count_flops(model: nn.Module, batch: Batch, loss_fn: LossFn, *, batch_spec: BatchSpec | None = None) -> float:
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
        >>> from dtrain.typing import LossSum
        >>> def loss(model, x):
        ...     return LossSum(total=model(x).sum(), weight=len(x))
        >>> count_flops(torch.nn.Linear(8, 4, bias=False), torch.ones(5, 8), loss)  # 2 * 8 * 4, forward and weight gradient
        128.0
    """
    samples, _ = count_samples_and_tokens(batch, batch_spec)
    if samples < 1:
        raise ConfigError(f"{_CALLER}: the batch has no sample; pass one microbatch")
    counter = _FlopCounter()
    with _restore_model_state(model), _eager_mode(), torch.enable_grad(), counter:
        loss = check_loss(loss_fn(model, to_device(batch, get_device(model))), caller=_CALLER)
        total = sum((term for term, _ in loss.terms.values()), loss.total)
        if not total.requires_grad:
            raise ConfigError(f"{_CALLER}: the loss depends on no trainable parameter; is the model frozen?")
        counter.backward = True
        total.backward()
    return counter.get_total_flops() / samples


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of shapes ``[batch, heads, seq, dim]``: scores, and their products with the values."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward_flops(grad: Sequence[int], *shapes: Any, **_: Any) -> int:
    return _attention_flops(*shapes) * 5 // 2


_CPU_FORMULAS = {  # torch has no formulas for these two
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


class _FlopCounter(FlopCounterMode):
    """Torch's counter, without what is computed a second time.

    A backward runs its own operations without recording gradients. What runs there while gradients are recorded is a piece of
    the forward once more, of ``torch.utils.checkpoint`` in either form or of a function that does so itself.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_CPU_FORMULAS)
        self.backward = False

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        if not _is_fused_attention_backward(func_packet):
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        before = self.get_total_flops()
        super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        # Five products of one size: the scores again, then the gradients of weights, values, queries and keys.
        self.flop_counts["Global"][func_packet] -= (self.get_total_flops() - before) // 5
        return out


def _is_fused_attention_backward(func_packet: Any) -> bool:
    name = str(func_packet)
    return "attention" in name and "backward" in name


@contextmanager
def _restore_model_state(model: nn.Module) -> Iterator[None]:
    """A forward and backward in between leave gradients, buffers, random generators and shards as they are."""
    reduction = grad_sync_of(model)
    kept = RNGSnapshot()
    reduction.begin_step()
    reshard(model)
    grads = [(param, param.grad) for param in model.parameters()]
    try:
        for param, _ in grads:
            param.grad = None
        with restore_buffers(model):
            reduction.before_microbatch(last=True)
            yield
    except BaseException:
        reduction.abort()
        raise
    finally:
        reduction.end_step()
        for param, grad in grads:
            param.grad = grad
        kept.restore()


def _eager_mode() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and it takes seconds to import
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
