"""A diffusion model of small pictures: how they are noised, a U-Net that tells what the noise was, and how it makes pictures.

Time goes from 0, the picture, to 1, noise: ``noisy = cos(a) * z + sin(a) * noise`` with ``a = time * pi / 2``, the cosine
schedule of Nichol and Dhariwal 2021, arXiv:2102.09672, without its offset. The model is asked for the *velocity* of Salimans
and Ho 2022, arXiv:2202.00512: ``cos(a) * noise - sin(a) * z``. For latents of variance 1 it is uncorrelated with what the model
sees: no constant, and no multiple of the input, does better than 0, whose loss is 1.
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
    """A latent and its class as the model is to see them, and what it is to say; for ``build_loader(transform=...)``.

    Time and noise belong to the sample and the epoch, so they are the same on any number of ranks, and after a resume. In a
    share of ``forget`` the class is ``nobody``: so the model learns to make pictures of any class, too.
    """
    z, draw = sample["z"], torch.rand(2, generator=generator)
    noise = torch.randn(z.shape, generator=generator)
    kept, added = (part[0] for part in rotation(draw[:1]))
    label = sample["y"] if draw[1] >= forget else torch.full_like(sample["y"], nobody)
    return {"noisy": kept * z + added * noise, "time": draw[0], "label": label, "velocity": kept * noise - added * z}


class Block(nn.Module):
    """Two convolutions around which the picture goes unchanged; what time and class have to say comes in between."""

    def __init__(self, inside: int, outside: int, told: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.told = nn.Linear(told, outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.past = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.told(told)[:, :, None, None]
        return self.past(x) + self.conv2(F.silu(self.norm2(inner)))


class UNet(nn.Module):
    """The velocity [n, channels, side, side] of noisy latents, at two resolutions. Class number ``classes`` is nobody's."""

    def __init__(self, channels: int, classes: int, *, width: int = 48) -> None:
        super().__init__()
        self.width, told = width, 4 * width
        self.label = nn.Embedding(classes + 1, told)
        self.time = nn.Sequential(nn.Linear(width, told), nn.SiLU(), nn.Linear(told, told))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.fine = nn.ModuleList([Block(width, width, told), Block(width, width, told)])
        self.shrink = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.coarse = nn.ModuleList([Block(2 * width, 2 * width, told), Block(2 * width, 2 * width, told)])
        self.grow = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.last = nn.ModuleList([Block(2 * width, width, told), Block(2 * width, width, told)])
        self.norm, self.leave = nn.GroupNorm(8, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        waves = time[:, None] * torch.logspace(0, 3, self.width // 2, device=time.device)
        told = F.silu(self.time(torch.cat([waves.cos(), waves.sin()], 1)) + self.label(label))
        x, seen = self.enter(noisy), []
        for block in self.fine:
            x = block(x, told)
            seen.append(x)
        x = self.shrink(x)
        for block in self.coarse:
            x = block(x, told)
        x = self.grow(x)
        for block in self.last:
            x = block(torch.cat([x, seen.pop()], 1), told)
        return self.leave(F.silu(self.norm(x)))


@torch.no_grad()
def sample(model: nn.Module, noise: Tensor, label: Tensor, *, nobody: int, guidance: float, steps: int) -> Tensor:
    """Latents of the classes ``label``, made of ``noise`` in equal steps of time (DDIM: Song et al. 2021, arXiv:2010.02502).

    With ``guidance`` above 1 a step goes further than from what any picture would be to one of its class (Ho and Salimans 2022,
    arXiv:2207.12598); at 1 the model runs once a step and not twice.
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
