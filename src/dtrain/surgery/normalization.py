"""Replace norms: by torch's fused norms, by norms in low precision, or by batch norms of small groups of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtrain.arguments import check_int, format_count, warn
from dtrain.dist.init import get_dist_info
from dtrain.surgery.replace import Mixin, ModuleSelector, ReplacementPolicy, apply_policies, mix_in, swap_class

# Relative tolerance for norms that compute in float32 or round at a different place.
_RTOL = 1e-4
_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fused_layer_norm(model: nn.Module) -> nn.Module:
    """Replace norms that consist of several operations by torch's ``LayerNorm`` or ``RMSNorm``; return the model.

    torch's norms run one kernel in forward on a GPU, so ``nn.LayerNorm`` and ``nn.RMSNorm`` do not change. Unfused norms are
    detected by a trial. A candidate has no children and no buffers, a ``weight`` ``[dim]``, perhaps a ``bias`` ``[dim]``, and
    one attribute between 0 and 1 for ``eps``. Its outputs for random inputs must equal those of torch's norm. RMS norms of T5
    and Llama are replaced. Gemma's norm, which adds 1 to its weight, is not. Names in checkpoints do not change. Under autocast
    call ``low_precision_layer_norm`` afterwards, because torch's RMS norm is not fused if input and weight have different
    dtypes.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, or ``y = x / sqrt(mean(x ** 2) + eps) * weight``

    Args:
        model: plain module before ``shard_model``; on meta, too.

    Mutates: ``model``. Parameter objects do not change.

    Example:
        >>> import dtrain as dt
        >>> class Norm(nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-6
        ...
        ...     def forward(self, x):
        ...         return (
        ...             x
        ...             * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        ...             * self.weight
        ...         )
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     dt.surgery.fused_layer_norm(nn.Sequential(Norm(2)))
        Sequential(
          (0): RMSNorm((2,), eps=1e-06, elementwise_affine=True)
        )

    Raises:
        ConfigError: the model is sharded already.

    Warns: UserWarning, if the model has no unfused norm (as a BERT of transformers); the model does not change. Also if this
        rank has no GPU, where torch's norms are not fused; the results are the same.

    Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.

    Suggested values:
        Llama and T5 of transformers, GPU: no values to choose (dtrain, ``examples/helpers/classifier.py``)
    When not to use: the model has torch's norms already, or runs on a CPU: the results are the same, and nothing is saved.
    """
    report = apply_policies(model, {_could_be_norm: _equivalent_torch_norm}, caller="fused_layer_norm", missing_ok=True)
    if not report.replaced:
        num_torch_norms = sum(isinstance(module, _TORCH_NORMS) for module in model.modules())
        warn(
            f"fused_layer_norm: the {type(model).__name__} has no unfused norm and does not change. Its {num_torch_norms} "
            "nn.LayerNorm and nn.RMSNorm are single kernels on a GPU already."
        )
        return report.model
    kind = get_dist_info().device.type
    if kind != "cuda":
        norms = format_count(len(report.replaced), "norm")
        warn(
            f"fused_layer_norm: torch has no fused norm on a {kind}. {norms} became torch's unfused norms, with the same "
            "results."
        )
    return report.model


def _could_be_norm(name: str, module: nn.Module) -> bool:
    params = dict(module.named_parameters())
    shapes = {param.shape for param in params.values()}
    affine = set(params) in ({"weight"}, {"weight", "bias"}) and len(shapes) == 1 and len(next(iter(shapes))) == 1
    is_leaf = not module._modules and not module._buffers
    return affine and is_leaf and not isinstance(module, _TORCH_NORMS) and _find_eps(module) is not None


def _find_eps(module: nn.Module) -> float | None:
    """Return the only attribute that can be ``eps``; None if there is none or several."""
    values = [value for key, value in module.__dict__.items() if "eps" in key and isinstance(value, float) and 0 < value < 1]
    return values[0] if len(values) == 1 else None


def _equivalent_torch_norm(module: nn.Module, name: str) -> nn.Module | None:
    """Return torch's norm with the same outputs and the parameters of ``module``; None without such a norm."""
    eps, dim = _find_eps(module), module.get_parameter("weight").shape[0]
    assert eps is not None, "_could_be_norm requires eps"
    has_bias = module._parameters.get("bias") is not None
    constructors: list[Callable[[], nn.Module]] = [lambda: nn.LayerNorm(dim, eps=eps, bias=has_bias, device="meta")]
    if not has_bias:
        constructors.append(lambda: nn.RMSNorm(dim, eps=eps, device="meta"))
    replacement = next((norm for norm in (kind() for kind in constructors) if _gives_same_output(module, norm, dim)), None)
    if replacement is not None:
        replacement._parameters.update(module._parameters)
        replacement.train(module.training)
    return replacement


def _gives_same_output(module: nn.Module, norm: nn.Module, dim: int) -> bool:
    """Return True if both modules return equal outputs for random weights and for inputs of usual size and of size ``eps``."""
    generator = torch.Generator("cpu").manual_seed(0)
    values = {key: torch.rand(dim, generator=generator, device="cpu") + 0.5 for key in dict(norm.named_parameters())}
    x = torch.randn(4, dim, generator=generator, device="cpu")
    inputs = torch.cat([x, 1e-3 * x, x + 1.0])
    expected, actual = (_run_copy_on_cpu(candidate, values, inputs) for candidate in (module, norm))
    return (
        expected is not None
        and actual is not None
        and expected.shape == actual.shape
        and torch.allclose(expected, actual, rtol=_RTOL)
    )


def _run_copy_on_cpu(module: nn.Module, values: dict[str, Tensor], inputs: Tensor) -> Tensor | None:
    """Return the output of a CPU copy of ``module`` with the given parameters; None if the copy fails."""
    copied = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        for key, param in copied.named_parameters():
            param.copy_(values[key])
        try:
            output = copied(inputs)
        # A module that raises any exception here is no norm.
        except Exception:  # noqa: BLE001
            return None
    return output if isinstance(output, Tensor) else None


def ghost_batches(x: Tensor, ghost_batch_size: int) -> tuple[Tensor, ...]:
    """Split ``x`` along its first axis into the fewest groups of at most ``ghost_batch_size`` samples, of even size.

    No group is much smaller than the others. A group of one sample, for which ``BatchNorm1d`` has no variance, occurs only in
    an odd batch with groups of 2.

    Formula: ``groups = ceil(len(x) / ghost_batch_size)``, of sizes that differ by at most 1

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1, which does not define ragged batches.

    Example:
        >>> import dtrain as dt
        >>> [len(group) for group in dt.surgery.ghost_batches(torch.zeros(9, 2), 4)]
        [3, 3, 3]
    """
    return x.tensor_split(max(1, -(-len(x) // ghost_batch_size)))


class Ghost(Mixin):
    """Mixin of a batch norm that normalizes each group of samples by its own statistics."""

    _ghost_batch_size: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            out: Tensor = super().forward(x)
            return out
        return torch.cat([super(Ghost, self).forward(group) for group in ghost_batches(x, self._ghost_batch_size)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self._ghost_batch_size}"


def ghost_batch_norm(model: nn.Module, *, ghost_batch_size: int = 32) -> nn.Module:
    """Compute the statistics of batch norms over at most ``ghost_batch_size`` samples; return the model.

    Groups are parts of the batch of one forward, which is a microbatch of this rank. A smaller batch is one group. Two ranks
    equal one rank if their groups contain the same samples. Each group updates the running statistics with the full momentum,
    as in the paper (Composer divides the momentum by the number of groups). On several ranks the running statistics of rank 0
    are used, as for any batch norm. Evaluation, parameters and names do not change.

    Formula: ``out = (x - mean(group)) / sqrt(var(group) + eps) * weight + bias``, for each group
    ``running = (1 - momentum) ** groups * running + sum_i (1 - momentum) ** (groups - i) * momentum * statistic_i``, i from 1

    Args:
        model: plain module before ``shard_model``; on meta, too.
        ghost_batch_size: largest group, at least 2 samples.

    Mutates: ``model``: the classes of its ``BatchNorm1d``, ``2d`` and ``3d``.
    Host sync: none of its own; torch's batch norm reads its count if ``momentum`` is None.

    Example:
        >>> import dtrain as dt
        >>> norm = dt.surgery.ghost_batch_norm(nn.BatchNorm1d(1, eps=1e-12), ghost_batch_size=2)
        >>> norm(torch.tensor([[0.0], [2.0], [10.0], [30.0]])).flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]

    Raises:
        ConfigError: no batch norm in the model, an invalid ``ghost_batch_size``, or a sharded model.

    Source: Hoffer et al. 2017, arXiv:1705.08741, algorithm 1; Dimitriou and Arandjelovic 2020, arXiv:2007.08554.

    Suggested values:
        CIFAR and ImageNet, batches of 4096: ``ghost_batch_size=128`` (Hoffer et al. 2017, experiments)
        ImageNet, ResNet-50: ``ghost_batch_size`` of 16, 32 or 64 (MosaicML Composer, method card of ghost batch norm)
    When not to use: a rank has no more samples than ``ghost_batch_size``: plain batch norm then computes the same. Small groups
        also run more kernels.
    """
    check_int("ghost_batch_norm", "ghost_batch_size", ghost_batch_size, minimum=2)

    def set_up(module: Ghost, name: str) -> None:
        module._ghost_batch_size = ghost_batch_size

    return mix_in(model, Ghost, lambda name, module: isinstance(module, _BATCH_NORMS), set_up, caller="ghost_batch_norm")


def cast_to_autocast_dtype(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast tensors to the autocast dtype of their device. Outside of autocast tensors do not change. None stays None.

    Formula: ``tensor.to(torch.get_autocast_dtype(device))``

    Source: torch's rules of autocast, which run layer norm in float32 on a GPU.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     cast_to_autocast_dtype(torch.tensor([1.0, 1.001]))[0].tolist()
        [1.0, 1.0]
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    kind = first.device.type
    if not _is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _is_autocast_enabled(kind: str) -> bool:
    # The meta device has no autocast.
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _without_autocast(kind: str) -> AbstractContextManager[None]:
    return torch.autocast(kind, enabled=False) if _is_autocast_enabled(kind) else nullcontext()


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Layer norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.LayerNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Source: Ba et al. 2016, arXiv:1607.06450; low precision as in MosaicML Composer.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionLayerNorm(2)(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.], dtype=torch.bfloat16, grad_fn=<NativeLayerNormBackward0>)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[*, normalized_shape]``; the shape does not change."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        # Autocast would run the norm in float32.
        with _without_autocast(input.device.type):
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """RMS norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.RMSNorm``.

    Formula: ``y = x / sqrt(mean(x ** 2) + eps) * weight``, with ``x`` and ``weight`` rounded before

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; low precision as in ``LowPrecisionLayerNorm``.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionRMSNorm(2)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[*, normalized_shape]``; the shape does not change."""
        low, weight = cast_to_autocast_dtype(x, self.weight)
        assert low is not None
        with _without_autocast(x.device.type):
            return functional.rms_norm(low, list(self.normalized_shape), weight, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """Group norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.GroupNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample, with ``x``,
    ``weight`` and ``bias`` rounded before

    Source: Wu and He 2018, arXiv:1803.08494; low precision as in MosaicML Composer.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionGroupNorm(1, 2)(
        ...         torch.tensor([[[1.0], [3.0]]])
        ...     ).flatten().tolist()
        [-1.0, 1.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[batch, channels, ...]``; the shape does not change."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        with _without_autocast(input.device.type):
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


def low_precision_layer_norm(model: nn.Module) -> nn.Module:
    """Run layer norms and RMS norms in the autocast dtype instead of float32; return the model.

    The norms read and write half of the bytes. torch's kernels still accumulate in float32. The edit acts under
    ``torch.autocast`` (``autocast("bf16")``) only; with ``Precision(param="bf16")`` norms already run in low precision. Names
    in checkpoints do not change.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Args:
        model: model with ``nn.LayerNorm`` or ``nn.RMSNorm``, before ``shard_model``; subclasses do not change.

    Mutates: ``model``. Parameter objects do not change.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.low_precision_layer_norm(nn.Sequential(nn.LayerNorm(2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([1.0, 3.0])).dtype
        torch.bfloat16

    Raises:
        ConfigError: the model has no such norm, or is sharded.

    Source: Ba et al. 2016, arXiv:1607.06450; low precision as in MosaicML Composer.

    Suggested values:
        MosaicBERT, bf16: no values to choose (Portes et al. 2023, arXiv:2312.17482)
        BERT on the CPU, bf16: no values to choose (dtrain, ``examples/pretrain_bert.py``)
    When not to use: the run does not use autocast: nothing changes. Keep float32 norms if a residual stream of fp16 grows
        large.
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.LayerNorm: lambda norm, name: swap_class(norm, LowPrecisionLayerNorm),
        nn.RMSNorm: lambda norm, name: swap_class(norm, LowPrecisionRMSNorm),
    }
    return apply_policies(model, policies, caller="low_precision_layer_norm").model


def low_precision_group_norm(model: nn.Module) -> nn.Module:
    """Run group norms in the autocast dtype instead of float32; return the model. See ``low_precision_layer_norm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample

    Args:
        model: model with ``nn.GroupNorm``, before ``shard_model``; subclasses do not change.

    Mutates: ``model``. Parameter objects do not change.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.low_precision_group_norm(nn.Sequential(nn.GroupNorm(1, 2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([[[1.0], [3.0]]])).flatten().tolist()
        [-1.0, 1.0]

    Raises:
        ConfigError: the model has no group norm, or is sharded.

    Source: Wu and He 2018, arXiv:1803.08494; low precision as in MosaicML Composer.

    Suggested values:
        diffusion U-Net with autocast: bf16 or fp16, no values to choose (dtrain, ``examples/train_diffusion.py``)
    When not to use: the run does not use autocast: nothing changes. Large activations of fp16 may overflow in the norm; bf16
        does not.
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.GroupNorm: lambda norm, name: swap_class(norm, LowPrecisionGroupNorm)
    }
    return apply_policies(model, policies, caller="low_precision_group_norm").model
