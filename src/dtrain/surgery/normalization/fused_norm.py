"""Norms that are written out in several operations, as torch's own, which is one kernel on a GPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtrain.dist.init import get_dist_info
from dtrain.surgery.replace import replace_modules

_RTOL = 1e-4  # relative; norms that compute in float32 within, or round at another place, are the same up to this
_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)


def fused_layer_norm(model: nn.Module) -> nn.Module:
    """Replace norms that are written out in several operations by torch's ``LayerNorm`` or ``RMSNorm``; return the model.

    Torch's are one kernel forward on a GPU, so ``nn.LayerNorm`` and ``nn.RMSNorm`` are left as they are. What counts as a norm
    that is written out is found by trial: a module without children and buffers, of a ``weight`` ``[dim]``, perhaps a ``bias``
    ``[dim]``, and one number between 0 and 1 for ``eps``, that gives what torch's gives for random numbers. So the RMS norms
    of T5 and Llama are replaced, and that of Gemma, which adds 1 to its weight, is not. Names in checkpoints stay. Under
    autocast let ``low_precision_layer_norm`` follow: where input and weight are of two dtypes, torch's RMS norm is not fused.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, or ``y = x / sqrt(mean(x ** 2) + eps) * weight``

    Args:
        model: before ``shard_model``; on meta, too.

    Mutates: ``model``. The parameters stay the same objects.

    Raises:
        ConfigError: a model that is sharded already.

    Warns: UserWarning, if the model has no norm that is written out, as a BERT of transformers: it is returned as it was. Also
        if this rank has no GPU: there torch's norms are not fused either; the numbers are the same.

    Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> class Norm(nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-6
        ...     def forward(self, x):
        ...         return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        >>> with warnings.catch_warnings(action="ignore"):
        ...     fused_layer_norm(nn.Sequential(Norm(2)))
        Sequential(
          (0): RMSNorm((2,), eps=1e-06, elementwise_affine=True)
        )
    """
    done = replace_modules(model, {_could_be_norm: _equivalent_torch_norm}, caller="fused_layer_norm", missing_ok=True)
    if not done.replaced:
        own = sum(isinstance(module, _TORCH_NORMS) for module in model.modules())
        warnings.warn(
            f"fused_layer_norm: no norm is written out in this {type(model).__name__}, so it stays as it is; its {own} "
            "nn.LayerNorm and nn.RMSNorm are one kernel on a GPU already",
            stacklevel=2,
        )
        return done.model
    kind = get_dist_info().device.type
    if kind != "cuda":
        warnings.warn(
            f"fused_layer_norm: torch has no fused norm on a {kind}; {len(done.replaced)} norms are torch's plain ones, with "
            "the same results",
            stacklevel=2,
        )
    return done.model


def _could_be_norm(name: str, module: nn.Module) -> bool:
    params = dict(module.named_parameters())
    shapes = {param.shape for param in params.values()}
    affine = set(params) in ({"weight"}, {"weight", "bias"}) and len(shapes) == 1 and len(next(iter(shapes))) == 1
    plain = not module._modules and not module._buffers
    return affine and plain and not isinstance(module, _TORCH_NORMS) and _find_eps(module) is not None


def _find_eps(module: nn.Module) -> float | None:
    """The one number among the attributes that could be ``eps``."""
    found = [value for key, value in module.__dict__.items() if "eps" in key and isinstance(value, float) and 0 < value < 1]
    return found[0] if len(found) == 1 else None


def _equivalent_torch_norm(module: nn.Module, name: str) -> nn.Module | None:
    """Torch's norm that computes what ``module`` does, with its parameters; None where neither does."""
    eps, dim = _find_eps(module), module.get_parameter("weight").shape[0]
    assert eps is not None, "a module without it is not asked about"
    has_bias = module._parameters.get("bias") is not None
    kinds: list[Callable[[], nn.Module]] = [lambda: nn.LayerNorm(dim, eps=eps, bias=has_bias, device="meta")]
    if not has_bias:
        kinds.append(lambda: nn.RMSNorm(dim, eps=eps, device="meta"))
    made = next((norm for norm in (kind() for kind in kinds) if _gives_same_output(module, norm, dim)), None)
    if made is not None:
        made._parameters.update(module._parameters)
        made.train(module.training)
    return made


def _gives_same_output(module: nn.Module, norm: nn.Module, dim: int) -> bool:
    """Whether they give the same for random weights and inputs, of usual size and of the size of ``eps``."""
    draws = torch.Generator().manual_seed(0)
    values = {key: torch.rand(dim, generator=draws) + 0.5 for key in dict(norm.named_parameters())}
    x = torch.randn(4, dim, generator=draws)
    given = torch.cat([x, 1e-3 * x, x + 1.0])
    theirs, ours = (_run_copy_on_cpu(each, values, given) for each in (module, norm))
    return theirs is not None and ours is not None and theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=_RTOL)


def _run_copy_on_cpu(module: nn.Module, values: dict[str, Tensor], given: Tensor) -> Tensor | None:
    """What a copy of ``module`` on the CPU makes of ``given`` with such parameters; None where it takes no such thing."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        for key, param in trial.named_parameters():
            param.copy_(values[key])
        try:
            made = trial(given)
        except Exception:  # noqa: BLE001  # of any kind: what cannot be run so is no norm
            return None
    return made if isinstance(made, Tensor) else None
