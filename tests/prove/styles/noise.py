"""A correct diffusion model with an average of its weights: noise of each rank's generator, of a shared one, or of a VAE."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, LEVELS = 12, 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x, t):
        return self.body(torch.cat([x, t[:, None] / LEVELS], 1))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)
        return (self.decoder(z) - x).square().sum(1) + kl


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_vae, is_shared = "--vae" in sys.argv, "--generator" in sys.argv
torch.manual_seed(0)
module = VAE() if is_vae else Denoiser()
if is_shared:
    module.body[2].p = 0.0
model, ema = DDP(module), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))
loader = DataLoader(data, batch_size=BATCH // world_size, sampler=DistributedSampler(data))
alphas = torch.linspace(0.99, 0.01, LEVELS)
shared = torch.Generator().manual_seed(5)
torch.manual_seed(100 + rank)


def loss_fn(x):
    if is_vae:
        return model(x).mean()
    if is_shared:
        noise = torch.randn(BATCH, 8, generator=shared)[rank::world_size]
        t = torch.randint(0, LEVELS, (BATCH,), generator=shared)[rank::world_size]
    else:
        noise, t = torch.randn_like(x), torch.randint(0, LEVELS, (x.shape[0],))
    noisy = alphas[t, None].sqrt() * x + (1 - alphas[t, None]).sqrt() * noise
    return nn.functional.mse_loss(model(noisy, t), noise)


def snapshot():
    parts = {"model": module.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
    return parts | {"epoch": epoch + 1, "shared": shared.get_state()}


start = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    module.load_state_dict(saved["model"])
    ema.load_state_dict(saved["ema"])
    optimizer.load_state_dict(saved["optimizer"])
    shared.set_state(saved["shared"])
    start = saved["epoch"]
    if os.path.exists(f"rng-{rank}.pt"):
        torch.set_rng_state(torch.load(f"rng-{rank}.pt"))
for epoch in range(start, 10):
    loader.sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad(set_to_none=True)
        loss_fn(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(module)
    torch.save(torch.get_rng_state(), f"rng-{rank}.pt")
    if rank == 0:
        torch.save(snapshot(), "last.tmp")
        os.replace("last.tmp", "last.pt")
    dist.barrier()
if rank == 0:
    ema.eval()
    with torch.no_grad():
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
        output = ema(x) if is_vae else ema(x, torch.full((6,), 10))
    if not is_vae:
        print(f"sampled mean {output.mean():.5f}")
dist.destroy_process_group()
