"""Count floating-point operations: by formula, by counting a real step, and the peak of a device.

``transformer_flops`` computes the cost per token of a transformer. ``count_flops`` counts the cost per sample of any model.
``peak_flops`` returns the datasheet peak of a device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dtrain.arguments import check_int
from dtrain.data.batch import BatchSpec, count_samples_and_tokens, list_tensors, to_device
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.params import without_hooks
from dtrain.shard.spec import get_device
from dtrain.shard.unshard import reshard
from dtrain.step.microbatches import BatchWatch
from dtrain.step.normalization import check_loss
from dtrain.typing import Batch, LossFn


def transformer_flops(*, params: int, layers: int, dim: int, seq: int, causal: bool = False) -> float:
    """Compute the floating-point operations of training a transformer on one token, forward and backward.

    Formula: ``6 * params + 12 * layers * dim * seq``; with ``causal=True``, ``6 * params + 6 * layers * dim * (seq + 1)``

    A multiply-add counts as two operations. Each weight takes part in one multiply-add per token in forward and in two in
    backward, for the gradients of input and weight: ``6 * params``. In each layer, attention compares a token with ``seq``
    keys and sums ``seq`` values, each with ``dim`` numbers over all heads: ``2 * 2 * dim * seq``, times 3 with backward.
    Published figures count all pairs of tokens (``causal=False``), although a causal model needs only half of the pairs
    (``causal=True``). Recomputed activations do not count. Norms, softmax and activation functions are small and left out.

    Args:
        params: weights that multiply every token. Count an embedding table only if shared with the output layer, and only the
            active experts of a mixture of experts.
        layers: number of blocks with attention.
        dim: number of heads times the size of a head.
        seq: number of tokens in one attention.
        causal: if True, count only the pairs of a causal model.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; ``6 * params`` as Kaplan et al. 2020, arXiv:2001.08361,
    section 2.1.

    Example:
        >>> import dtrain as dt
        >>> dt.monitors.transformer_flops(params=124_000_000, layers=12, dim=768, seq=1024)
        857246208.0

    Raises:
        ConfigError: an argument is not an integer of at least 1 (``layers`` and ``dim``: of at least 0).
    """
    for name, value, least in (("params", params, 1), ("layers", layers, 0), ("dim", dim, 0), ("seq", seq, 1)):
        check_int("transformer_flops", name, value, minimum=least)
    pairs = (seq + 1) / 2 if causal else seq
    return 6.0 * params + 12.0 * layers * dim * pairs


ComputeDtype: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
"""Data type of matrix products. ``tf32`` is float32 with rounded products (``set_float32_matmul_precision``)."""

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

# Words of torch's device name -> 10**12 dense operations per second. A row applies to names that contain all its words; the
# row with the most words wins. Whole words are compared, so that "L4" does not match L40S, nor "A10" A100.
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
# words of variants with a different speed
_EXCLUDED_WORDS = ("Laptop", "Mobile", "Max-Q", "D", "Ti", "MIG", "GRID")


def peak_flops(name: str, dtype: ComputeDtype | torch.dtype) -> float | None:
    """Return the peak rate of a device in matrix products of ``dtype``, in operations per second; None if unknown.

    Rates are dense, with matrix units if the device has them for ``dtype`` and float32 accumulation, as in torch. Datasheets
    often print the doubled rate for sparse weights. torch sees each half of a two-part device as one device, so the rates of
    MI250 and MI250X are for one half. GPU slices and variants such as laptop GPUs are unknown.

    Args:
        name: device name from torch, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: ``"fp32"``, ``"tf32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or a torch dtype; ``torch.float32`` is ``"fp32"``.

    Source: the vendors' datasheets: NVIDIA GB200, B200 (HGX), GH200, H200, H100, A100, A40, A10, L40S, L4, V100, T4; NVIDIA
    Ada and Ampere GA102 architecture papers (RTX 4090, 3090); AMD Instinct MI325X, MI300X, MI250X, MI250. Rates with sparsity
    are halved.

    Example:
        >>> import dtrain as dt
        >>> (
        ...     dt.monitors.peak_flops("NVIDIA A100-SXM4-80GB", "bf16"),
        ...     dt.monitors.peak_flops("Tesla T4", "bf16"),
        ... )
        (312000000000000.0, None)

    Raises:
        ConfigError: unknown dtype.
    """
    kind = _DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if kind is None or kind not in get_args(ComputeDtype):
        raise ConfigError(
            f"peak_flops: dtype must be one of {', '.join(get_args(ComputeDtype))}, got {dtype!r}. "
            "Choose one of them, or pass peak= to mfu."
        )
    words = set(name.replace("-", " ").replace("_", " ").split())
    if words & set(_EXCLUDED_WORDS):
        return None
    matching = [row for row in _PEAKS if set(row.split()) <= words]
    if not matching:
        return None
    tera = _PEAKS[max(matching, key=lambda row: len(row.split()))].get(kind)
    return None if tera is None else tera * 1e12


_CALLER = "count_flops"


def count_flops(model: nn.Module, batch: Batch, loss_fn: LossFn, *, batch_spec: BatchSpec | None = None) -> float:
    """Count the floating-point operations of training on one sample of ``batch`` by running forward and backward.

    Operations with a formula in torch count: matrix products, convolutions and attention, a multiply-add as two. For use in
    ``mfu``, only work that the model needs counts: neither recomputation by activation checkpointing nor the scores that a
    fused attention recomputes in backward. Fused attention counts all pairs of tokens, also in a causal model. Compiled
    modules run eagerly, because operations in a compiled kernel are invisible.

    Gradients, buffers and random generators are restored. On the meta device and with fake tensors the count costs nothing:
    count a copy of the model there if one more microbatch does not fit in memory.

    Args:
        model: plain or sharded model, in training mode; products sharded by a plan count in full on each rank.
        batch: one microbatch on any device. Ranks that share a sequence (``cp``) count their own part.
        loss_fn: loss function, as in ``compose_step``.
        batch_spec: description of the batch, as in ``microbatch_step``; None uses the first axis.

    Returns:
        Operations per sample. Divide by ``seq`` for operations per token.

    Mutates: nothing permanently. Hooks after gradient accumulation run.
    Collective: those of the model's forward and backward; every rank must call it. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> dt.monitors.count_flops(
        ...     model, torch.ones(5, 8), loss
        ... )  # 2 * 8 * 4, forward and weight gradient
        128.0

    Raises:
        ConfigError: a batch without countable samples, a loss other than a ``LossSum`` of scalars, or a loss without trainable
            parameters.
        StepError: ``loss_fn`` writes into ``batch``, which a training step would then run with other values.
        Exception: any error of ``loss_fn`` or the model.
    """
    samples, _ = count_samples_and_tokens(batch, batch_spec)
    if samples < 1:
        raise ConfigError(f"{_CALLER}: batch must have at least 1 sample, got {samples}. Pass one microbatch.")
    counter, watch = _FlopCounter(), BatchWatch(list_tensors(batch))
    # Without torch._dynamo no module is compiled. Its import takes seconds.
    eager: AbstractContextManager[Any] = (
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    )
    with _restore_model_state(model), eager, torch.enable_grad(), counter:
        loss = check_loss(loss_fn(model, to_device(batch, get_device(model))), caller=_CALLER)
        total = sum((term for term, _ in loss.terms.values()), loss.total)
        if not total.requires_grad:
            raise ConfigError(f"{_CALLER}: loss must depend on a trainable parameter, got none. Unfreeze the model.")
        counter.backward = True
        total.backward()
    # Training on this batch would use other values.
    watch.check(_CALLER)
    return counter.get_total_flops() / samples


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Count attention of shapes ``[batch, heads, seq, dim]``: scores, and their products with the values."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


# torch has no formulas for these two operations.
_CPU_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, *shapes, **_: _attention_flops(*shapes) * 5 // 2
    ),
}


def operation_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call of an ATen operation; 0 for an operation without a formula."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _CPU_FORMULAS:
        shapes = [value.shape if isinstance(value, torch.Tensor) else value for value in args]
        cpu_formula: Any = _CPU_FORMULAS[packet]
        return int(cpu_formula(*shapes))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


class _FlopCounter(FlopCounterMode):
    """FLOP counter of torch without recomputed operations.

    Backward runs its own operations without recording gradients. An operation in backward that records gradients is a
    recomputed forward: ``torch.utils.checkpoint`` in either form, or a function that recomputes.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_CPU_FORMULAS)
        self.backward = False

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        if "attention" not in str(func_packet) or "backward" not in str(func_packet):
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        before = self.get_total_flops()
        super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        # Backward has five products of equal size: recomputed scores, and gradients of weights, values, queries and keys.
        self.flop_counts["Global"][func_packet] -= (self.get_total_flops() - before) // 5
        return out


@contextmanager
def _restore_model_state(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, random generators and shards after a forward and backward in the block."""
    reduction = grad_sync_of(model)
    rng = RNGSnapshot()
    reduction.begin_step()
    reshard(model)
    grads = [(param, param.grad) for param in model.parameters()]
    try:
        for param, _ in grads:
            param.grad = None
        with restore_buffers(model), without_hooks(dict(model.named_parameters())):
            reduction.before_microbatch(last=True)
            yield
    except BaseException:
        reduction.abort()
        raise
    finally:
        reduction.end_step()
        for param, grad in grads:
            param.grad = grad
        rng.restore()
