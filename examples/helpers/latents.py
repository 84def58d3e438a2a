"""Encode pictures as latents with a small autoencoder that is trained once, or as normalized pixels."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor, nn

import dtrain as dt
from helpers.pictures import Folder, Pictures

CHUNK = 256  # pictures per forward


class Pixels(nn.Module):
    """Codec whose latents are the pixels, with mean 0 and standard deviation 1 in each channel after ``fit_``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.encoder, self.decoder = channels, nn.Identity(), nn.Identity()
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("spread", torch.ones(channels, 1, 1))

    def encode(self, x: Tensor) -> Tensor:
        return (self.encoder(x) - self.mean) / self.spread

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z * self.spread + self.mean)

    def fit_(self, x: Tensor) -> None:
        with torch.no_grad():
            z = torch.cat([self.encoder(images) for images in x.split(CHUNK)])
        self.mean.copy_(z.mean((0, 2, 3)).view(-1, 1, 1))
        self.spread.copy_(z.std((0, 2, 3)).view(-1, 1, 1))


class Codec(Pixels):
    """Convert pictures [n, channels, side, side] to latents [n, channels + 1, side / 2, side / 2], and back."""

    def __init__(self, channels: int, *, width: int = 16) -> None:
        super().__init__(channels + 1)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 4, stride=2, padding=1),
            nn.SiLU(), nn.Conv2d(width, channels + 1, 3, padding=1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(channels + 1, width, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1),
        )  # fmt: skip

    def fit_(self, x: Tensor, *, steps: int = 200, batch: int = 64) -> None:
        """Train the autoencoder on the pictures, with a generator of its own."""
        draw = dt.dist.generator(x.device, "codec")
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = x[torch.randint(len(x), (batch,), generator=draw, device=x.device)]
            z = self.encoder(some)
            noise = 0.05 * torch.randn(z.shape, generator=draw, device=x.device)  # makes the decoder robust to small errors
            loss = (self.decoder(z + noise) - some).square().mean() + 1e-3 * z.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
        super().fit_(x)


def frozen_codec(codec: Pixels, file: Path, pictures: Pictures, dist: dt.dist.DistInfo, size: int) -> Pixels:
    """Return ``codec`` with the weights in ``file``, on the device of this rank. Rank 0 writes the file if it does not exist.

    One rank trains the codec for all, once per run, so that it is equal on all ranks and after a resume.
    """
    codec = codec.to(dist.device)
    if dist.rank == 0 and not file.exists():
        codec.fit_(at_size(pictures.train, size)["x"].to(dist.device))
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        save_file(codec.state_dict(), temporary)
        os.replace(temporary, file)  # a file with this name is complete
    dt.dist.all_gather_json(None, caller="frozen_codec")  # the other ranks wait
    codec.load_state_dict(load_file(file, device=str(dist.device)))
    return codec.requires_grad_(False).eval()


def at_size(dataset: TensorDict | Folder, size: int) -> TensorDict:
    """Load all pictures into memory, with sides of ``size`` pixels: ``{"x": [n, channels, size, size], "y": [n]}``."""
    loaded = (
        dataset
        if isinstance(dataset, TensorDict)
        else torch.stack([TensorDict(dataset[index]) for index in range(len(dataset))])
    )
    x = loaded["x"]
    if x.shape[-1] != size:
        x = nn.functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
    return TensorDict({"x": x, "y": loaded["y"]}, batch_size=[len(x)])


def encoded(codec: Pixels, dataset: TensorDict | Folder, size: int) -> TensorDict:
    """Return ``{"z": latents, "y": class}`` of every picture, for ``dt.data.memory_map``."""
    loaded = at_size(dataset, size)
    device = codec.mean.device
    z = torch.cat([codec.encode(images.to(device)).cpu() for images in loaded["x"].split(CHUNK)])
    return TensorDict({"z": z, "y": loaded["y"]}, batch_size=[len(z)])


def decoded(codec: Pixels, z: Tensor) -> Tensor:
    """Decode latents into pictures on the CPU."""
    return torch.cat([codec.decode(latents).cpu() for latents in z.split(CHUNK)])
