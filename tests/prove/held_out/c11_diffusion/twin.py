"""A small denoising diffusion model on the two-moons curve, resumable."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

T, BATCH, STEPS, SAVE_EVERY = 50, 24, 12, 2
OUT = Path("out_diffusion")


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def moons(n):
    a = torch.linspace(0, torch.pi, n // 2)
    upper = torch.stack([a.cos(), a.sin()], 1)
    lower = torch.stack([1 - a.cos(), 0.5 - a.sin()], 1)
    return torch.cat([upper, lower])


class Run:
    def __init__(self):
        self.parallel = "WORLD_SIZE" in os.environ
        if self.parallel:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.parallel else 0
        self.world = dist.get_world_size() if self.parallel else 1
        torch.manual_seed(21)
        self.core = Denoiser()
        self.model = DDP(self.core) if self.parallel else self.core
        self.optimizer = torch.optim.Adam(self.core.parameters(), lr=3e-3)
        self.rng = torch.Generator().manual_seed(22)
        self.step = 0
        self.data = moons(240)
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.2, T), 0)

    def save(self):
        if self.rank:
            return
        OUT.mkdir(exist_ok=True)
        state = {
            "step": self.step,
            "model": self.core.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
        }
        torch.save(state, OUT / "partial")
        os.replace(OUT / "partial", OUT / f"step_{self.step:05d}.pt")

    def load(self):
        saved = sorted(OUT.glob("step_*.pt"))
        if not saved:
            return
        state = torch.load(saved[-1])
        self.step = state["step"]
        self.core.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.set_state(state["rng"])

    def train_step(self):
        rows = torch.randint(0, len(self.data), (BATCH,), generator=self.rng)
        t = torch.randint(0, T, (BATCH,), generator=self.rng)
        noise = torch.randn(BATCH, 2, generator=self.rng)
        rows, t, noise = (v.chunk(self.world)[self.rank] for v in (rows, t, noise))
        a = self.alpha_bar[t].unsqueeze(1)
        noisy = a.sqrt() * self.data[rows] + (1 - a).sqrt() * noise
        loss = (self.model(noisy, t) - noise).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        loss = loss.detach()
        if self.parallel:
            dist.all_reduce(loss)
        return loss.item() / self.world


def main():
    run = Run()
    run.load()
    while run.step < STEPS:
        loss = run.train_step()
        if run.rank == 0:
            print(f"{run.step}: {loss:.8f}", flush=True)
        if run.step % SAVE_EVERY == 0:
            run.save()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
