"""Squeeze-and-excitation: each channel scaled by a gate that all channels have a say in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import (
    check_non_negative_int,
    check_plain_model,
    check_size_or_fraction,
    replace_modules,
    resolve_size,
)


class SqueezeExcite2d(nn.Module):
    """A module that scales the channels of ``[*, channels, height, width]`` by gates computed from their means.

    Formula: ``out = x * sigmoid(expand @ relu(reduce @ mean(x)))``, the mean over height and width; without biases

    Args:
        channels: of the input, and of the output.
        latent_channels: rows of ``reduce``: a number, or a fraction of ``channels``.

    Raises:
        ConfigError: a size that cannot be right.

    Source: Hu et al. 2018, arXiv:1709.01507, section 3.

    Example:
        >>> gate = SqueezeExcite2d(2, latent_channels=1)
        >>> _ = gate.reduce.weight.data.copy_(torch.tensor([[1.0, -1.0]]))
        >>> _ = gate.expand.weight.data.copy_(torch.tensor([[0.0], [100.0]]))
        >>> gate(torch.tensor([[[6.0]], [[4.0]]])).flatten().tolist()  # gates: sigmoid(0), sigmoid(200)
        [3.0, 4.0]
    """

    def __init__(
        self,
        channels: int,
        latent_channels: int | float = 1 / 16,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size_or_fraction(latent_channels, "SqueezeExcite2d", "latent_channels")
        latent = resolve_size(latent_channels, channels)
        self.reduce = nn.Linear(channels, latent, bias=False, device=device, dtype=dtype)
        self.expand = nn.Linear(latent, channels, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.expand(torch.relu(self.reduce(x.mean((-2, -1))))))
        return x * gates[..., None, None]


class SqueezeExcite(Mixin):
    """Mixed into a convolution: its output channels are scaled by gates."""

    squeeze_excite: SqueezeExcite2d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.squeeze_excite(super().forward(x))
        return out


def squeeze_excite(
    model: nn.Module,
    *,
    latent_channels: int | float = 1 / 16,
    min_channels: int = 128,
    names: str | Sequence[str] | None = None,
) -> nn.Module:
    """Put a squeeze-and-excitation after convolutions of ``model``; return the model.

    The parameters of a convolution keep their names; the new ones are below it, as ``squeeze_excite.reduce`` and ``.expand``,
    with weights from torch's global generator, as in any constructor.

    Formula: ``out = squeeze_excite(conv(x))``, see ``SqueezeExcite2d``

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        latent_channels: a number, or a fraction of a convolution's output channels. The paper's reduction is 16 (Composer: 64
            channels).
        min_channels: convolutions with fewer channels, in or out, stay; the paper has no such limit, it is Composer's.
        names: of the convolutions to change (``*`` for text without a dot), with ``min_channels`` still. The paper puts one at
            the end of each residual branch, as in ``"layer*.*.conv3"``; None is every convolution, as in Composer.

    Mutates: ``model``: the classes of those ``nn.Conv2d``, and a module in each.

    Raises:
        ConfigError: nothing to change, an argument that cannot be right, a model that is sharded already.

    Source: Hu et al. 2018, arXiv:1709.01507.

    Example:
        >>> net = squeeze_excite(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)), latent_channels=0.25, min_channels=8)
        >>> [name for name, _ in net.named_parameters() if name.startswith("1")]
        ['1.weight', '1.bias', '1.squeeze_excite.reduce.weight', '1.squeeze_excite.expand.weight']
    """
    where = "squeeze_excite"
    check_size_or_fraction(latent_channels, where, "latent_channels")
    check_non_negative_int(min_channels, where, "min_channels")
    patterns = [names] if isinstance(names, str) else None if names is None else list(names)
    fits = compile_patterns(patterns or [], caller=f"{where}: names")
    check_plain_model(model, where)
    convs = [name for name, module in modules_by_fqn(model) if isinstance(module, nn.Conv2d)]
    for pattern in patterns or []:
        if not any(map(compile_patterns([pattern], caller=f"{where}: names"), convs)):
            raise ConfigError(f"{where}: names has {pattern!r}, but no convolution has such a name")

    def gated(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        weight = module.weight
        if not add_mixin(module, SqueezeExcite):
            return None
        gate = SqueezeExcite2d(module.out_channels, latent_channels, device=weight.device, dtype=weight.dtype)
        module.squeeze_excite = gate.train(module.training)
        return module

    def wanted(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Conv2d) or min(module.in_channels, module.out_channels) < min_channels:
            return False
        return patterns is None or fits(name)

    return replace_modules(model, {wanted: gated}, caller=f"{where} with {min_channels=}").model
