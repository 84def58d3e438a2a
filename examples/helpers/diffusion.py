"""Define a diffusion model of small pictures: the noising, a U-Net that predicts the velocity, and the sampler.

Time goes from 0, the picture, to 1, noise: ``noisy = cos(a) * z + sin(a) * noise`` with ``a = time * pi / 2``, the cosine
schedule of Nichol and Dhariwal 2021, arXiv:2102.09672, without its offset. The model predicts the *velocity* of Salimans
and Ho 2022, arXiv:2202.00512: ``cos(a) * noise - sin(a) * z``. For latents of variance 1 it is uncorrelated with the
input of the model: no constant and no multiple of the input has a lower loss than 0, whose loss is 1.
"""

import math

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn


def rotation(time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of picture and noise at times ``[n]``: two tensors ``[n, 1, 1, 1]``."""
    angle = time.view(-1, 1, 1, 1) * (math.pi / 2)
    return angle.cos(), angle.sin()


def noised(sample: TensorDict, generator: torch.Generator, *, nobody: int, forget: float) -> dict[str, Tensor]:
    """Return the inputs and the target of the model for a latent and its class; for ``build_loader(transform=...)``.

    Time and noise depend on the sample and the epoch, so they are the same on any number of ranks, and after a resume. With
    probability ``forget`` the class is ``nobody``, so that the model learns unconditional samples as well.
    """
    z, draw = sample["z"], torch.rand(2, generator=generator)
    noise = torch.randn(z.shape, generator=generator)
    kept, added = (factor[0] for factor in rotation(draw[:1]))
    label = sample["y"] if draw[1] >= forget else torch.full_like(sample["y"], nobody)
    return {"noisy": kept * z + added * noise, "time": draw[0], "label": label, "velocity": kept * noise - added * z}


class Block(nn.Module):
    """Residual block of two convolutions. The embedding of time and class is added between them."""

    def __init__(self, in_channels: int, out_channels: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.told = nn.Linear(embedding, out_channels)
        self.norm2, self.conv2 = nn.GroupNorm(8, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.past = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.told(embedding)[:, :, None, None]
        return self.past(x) + self.conv2(F.silu(self.norm2(inner)))


class UNet(nn.Module):
    """Predict the velocity [n, channels, side, side] of noisy latents, at two resolutions. Class ``classes`` means no class."""

    def __init__(self, channels: int, classes: int, *, width: int = 48) -> None:
        super().__init__()
        self.width, embedding = width, 4 * width
        self.label = nn.Embedding(classes + 1, embedding)
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.fine = nn.ModuleList([Block(width, width, embedding), Block(width, width, embedding)])
        self.shrink = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.coarse = nn.ModuleList([Block(2 * width, 2 * width, embedding), Block(2 * width, 2 * width, embedding)])
        self.grow = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.last = nn.ModuleList([Block(2 * width, width, embedding), Block(2 * width, width, embedding)])
        self.norm, self.leave = nn.GroupNorm(8, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        waves = time[:, None] * torch.logspace(0, 3, self.width // 2, device=time.device)
        embedding = F.silu(self.time(torch.cat([waves.cos(), waves.sin()], 1)) + self.label(label))
        x, skipped = self.enter(noisy), []
        for block in self.fine:
            x = block(x, embedding)
            skipped.append(x)
        x = self.shrink(x)
        for block in self.coarse:
            x = block(x, embedding)
        x = self.grow(x)
        for block in self.last:
            x = block(torch.cat([x, skipped.pop()], 1), embedding)
        return self.leave(F.silu(self.norm(x)))


@torch.no_grad()
def sample(model: nn.Module, noise: Tensor, label: Tensor, *, nobody: int, guidance: float, steps: int) -> Tensor:
    """Sample latents of the classes ``label`` from ``noise``, in equal time steps (DDIM; Song et al. 2021, arXiv:2010.02502).

    ``guidance`` above 1 extrapolates from the unconditional to the conditional prediction (Ho and Salimans 2022,
    arXiv:2207.12598). At 1 the model runs once per step, otherwise twice.
    """
    x = noise
    for now, after in zip(range(steps, 0, -1), range(steps - 1, -1, -1), strict=True):
        time = torch.full([len(x)], now / steps, device=x.device)
        velocity = model(x, time, label)
        if guidance != 1.0:
            velocity = torch.lerp(model(x, time, torch.full_like(label, nobody)), velocity, guidance)
        kept, added = rotation(time)
        z, eps = kept * x - added * velocity, added * x + kept * velocity
        kept, added = rotation(time.new_full([len(x)], after / steps))
        x = kept * z + added * eps
    return x
