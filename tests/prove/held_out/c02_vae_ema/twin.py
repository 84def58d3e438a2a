import copy
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BATCH = 24
STEPS = 12
DECAY = 0.9
FOLDER = "checkpoints"


class VAE(nn.Module):
    def __init__(self, dim=16, hidden=32, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    def forward(self, x, noise):
        mu, logvar = self.enc(x).chunk(2, 1)
        recon = self.dec(mu + noise * torch.exp(0.5 * logvar))
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(1)
        return (recon - x).pow(2).sum(1) + 0.5 * kl


def batch_of(step, data):
    g = torch.Generator().manual_seed(1000 + step)
    rows = torch.randperm(len(data), generator=g)[:BATCH]
    return data[rows], torch.randn(BATCH, 4, generator=g)


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    data = torch.randn(360, 4) @ torch.randn(4, 16) + 0.1 * torch.randn(360, 16)
    train, held = data[:312], data[312:]
    model = VAE()
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / STEPS)))
    start = 0
    found = sorted(glob.glob(f"{FOLDER}/step_*.pt"))
    if found:
        ck = torch.load(found[-1])
        start = ck["step"]
        model.load_state_dict(ck["model"])
        ema.load_state_dict(ck.get("ema", ck["model"]))
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])

    for step in range(start, STEPS):
        x, noise = batch_of(step, train)
        x, noise = x[rank::world], noise[rank::world]
        loss = model(x, noise).sum() / BATCH
        opt.zero_grad()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss.data)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters()):
                e.lerp_(p, 1 - DECAY)
            val = ema(held, torch.zeros(len(held), 4)).mean().item()
        if rank == 0:
            print(f"{step + 1:3d} loss {loss.item():.8f} ema_val {val:.8f}", flush=True)
            if (step + 1) % 2 == 0:
                os.makedirs(FOLDER, exist_ok=True)
                ck = dict(
                    step=step + 1,
                    model=model.state_dict(),
                    ema=ema.state_dict(),
                    opt=opt.state_dict(),
                    sched=sched.state_dict(),
                )
                path = f"{FOLDER}/step_{step + 1:05d}.pt"
                torch.save(ck, path + ".tmp")
                os.replace(path + ".tmp", path)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
