"""Replace norms that consist of several operations by torch's norms, single kernels on a GPU: ``fused_layer_norm``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtrain.arguments import format_count
from dtrain.dist.init import get_dist_info
from dtrain.surgery.replace import apply_policies

# Relative tolerance for norms that compute in float32 or round at a different place.
_RTOL = 1e-4
_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)


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
        warnings.warn(
            f"fused_layer_norm: the {type(model).__name__} has no unfused norm and does not change. Its {num_torch_norms} "
            "nn.LayerNorm and nn.RMSNorm are single kernels on a GPU already.",
            stacklevel=2,
        )
        return report.model
    kind = get_dist_info().device.type
    if kind != "cuda":
        norms = format_count(len(report.replaced), "norm")
        warnings.warn(
            f"fused_layer_norm: torch has no fused norm on a {kind}. {norms} became torch's unfused norms, with the same "
            "results.",
            stacklevel=2,
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
    generator = torch.Generator().manual_seed(0)
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
