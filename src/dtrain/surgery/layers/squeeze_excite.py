"""Scale the channels of convolutions by gates computed from all channels (squeeze-and-excitation): ``squeeze_excite``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.surgery.replace import (
    Mixin,
    add_mixin,
    apply_policies,
    check_plain_model,
    check_size_or_fraction,
    resolve_size,
)


class SqueezeExcite2d(nn.Module):
    """Module that scales the channels of ``[*, channels, height, width]`` by gates computed from channel means.

    Formula: ``out = x * sigmoid(expand @ relu(reduce @ mean(x)))``, with the mean over height and width, without biases

    Args:
        channels: input and output channels.
        latent_channels: rows of ``reduce``, as a number or a fraction of ``channels``.

    Example:
        >>> import dtrain as dt
        >>> gate = dt.surgery.SqueezeExcite2d(2, latent_channels=1)
        >>> _ = gate.reduce.weight.data.copy_(torch.tensor([[1.0, -1.0]]))
        >>> _ = gate.expand.weight.data.copy_(torch.tensor([[0.0], [100.0]]))
        >>> gate(
        ...     torch.tensor([[[6.0]], [[4.0]]])
        ... ).flatten().tolist()  # gates: sigmoid(0), sigmoid(200)
        [3.0, 4.0]

    Raises:
        ConfigError: ``latent_channels`` is invalid.

    Source: Hu et al. 2018, arXiv:1709.01507, section 3.
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
        gates = torch.sigmoid(self.expand(torch.relu(self.reduce(reduce(x, "... h w -> ...", "mean")))))
        return x * rearrange(gates, "... c -> ... c 1 1")


class SqueezeExcite(Mixin):
    """Mixin of a convolution that scales its output channels by gates."""

    squeeze_excite: SqueezeExcite2d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.squeeze_excite(super().forward(x))
        return out


def squeeze_excite(
    model: nn.Module,
    *,
    latent_channels: int | float = 1 / 16,
    min_channels: int = 128,
    select: str | Sequence[str] | None = None,
) -> nn.Module:
    """Add a squeeze-and-excitation after convolutions of ``model``; return the model.

    The convolution's parameters keep their names. The new parameters are ``squeeze_excite.reduce`` and
    ``squeeze_excite.expand`` of the convolution, initialized from torch's global generator.

    Formula: ``out = squeeze_excite(conv(x))``, see ``SqueezeExcite2d``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        latent_channels: number, or fraction of a convolution's output channels. The paper reduces by 16 (Composer: 64
            channels).
        min_channels: smallest number of input and output channels of convolutions to change; from Composer, not from the paper.
        select: names of the convolutions to change (``*`` matches text without a dot), subject to ``min_channels``; None
            selects every convolution, as in Composer. The paper uses the end of each residual branch, as in
            ``"layer*.*.conv3"``.

    Mutates: ``model``: the classes of the selected ``nn.Conv2d``, and one new module in each.

    Example:
        >>> import dtrain as dt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
        >>> model = dt.surgery.squeeze_excite(model, latent_channels=0.25, min_channels=8)
        >>> [name for name, _ in model.named_parameters() if name.startswith("1")]
        ['1.weight', '1.bias', '1.squeeze_excite.reduce.weight', '1.squeeze_excite.expand.weight']

    Raises:
        ConfigError: nothing to change, an invalid argument, or a sharded model.

    Source: Hu et al. 2018, arXiv:1709.01507.

    Suggested values:
        ImageNet, SE-ResNet-50: ``latent_channels=0.0625`` (reduction 16) (Hu et al. 2018)
        ImageNet, ResNet-50, best speed for its accuracy: ``latent_channels=64``, ``min_channels=128`` (MosaicML Composer,
            method card of squeeze-and-excitation)
    When not to use: time counts more than accuracy: Composer's card reports about 25 % less throughput for 0.5 to 1.5 %
        accuracy. A pretrained model changes its outputs at once.
    """
    caller = "squeeze_excite"
    check_size_or_fraction(latent_channels, caller, "latent_channels")
    check_int(caller, "min_channels", min_channels, minimum=0)
    patterns = [select] if isinstance(select, str) else None if select is None else list(select)
    is_match = compile_patterns(patterns or [], caller=f"{caller}: names")
    check_plain_model(model, caller)
    convs = [name for name, module in modules_by_fqn(model) if isinstance(module, nn.Conv2d)]
    for pattern in patterns or []:
        if not any(map(compile_patterns([pattern], caller=f"{caller}: names"), convs)):
            raise ConfigError(f"{caller}: select has{pattern!r}, but no convolution matches. Correct the pattern.")

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        weight, channels = module.weight, module.out_channels
        gated = add_mixin(module, SqueezeExcite)
        if gated is not None:
            gate = SqueezeExcite2d(channels, latent_channels, device=weight.device, dtype=weight.dtype)
            gated.squeeze_excite = gate.train(gated.training)
        return gated

    def is_selected(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Conv2d) or min(module.in_channels, module.out_channels) < min_channels:
            return False
        return patterns is None or is_match(name)

    return apply_policies(model, {is_selected: policy}, caller=f"{caller} with {min_channels=}").model
