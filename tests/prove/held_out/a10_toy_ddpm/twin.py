import copy, glob, math, os
import torch, torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

T = 50
betas = torch.linspace(1e-3, 0.1, T)
abar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.temb = nn.Embedding(T, 12)
        self.f = nn.Sequential(nn.Linear(14, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        return self.f(torch.cat([x, self.temb(t)], -1))


def spiral(n, g):
    u = torch.rand(n, generator=g) * 3 * math.pi
    return torch.stack([u * torch.cos(u), u * torch.sin(u)], 1) / 6


def noised(n, seed):
    g = torch.Generator().manual_seed(seed)
    x0 = spiral(n, g)
    t = torch.randint(0, T, (n,), generator=g)
    eps = torch.randn(n, 2, generator=g)
    a = abar[t][:, None].to(x0.dtype)
    return a.sqrt() * x0 + (1 - a).sqrt() * eps, t, eps


@torch.no_grad()
def ema_update(ema, model, decay):
    for pe, p in zip(ema.parameters(), model.parameters()):
        pe.lerp_(p, 1 - decay)


def latest():
    found = sorted(glob.glob("ckpts/ddpm_*.pt"))
    return found[-1] if found else None


def main(batch=60, steps=8, lr=5e-3, decay=0.9):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    net = Denoiser()
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    step = 0

    ck = latest()
    if ck:
        state = torch.load(ck)
        net.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        opt.load_state_dict(state["opt"])
        step = state["step"]

    val = noised(120, 555)
    while step < steps:
        xt, t, eps = (v[rank::world] for v in noised(batch, 100 + step))
        loss = (model(xt, t) - eps).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        ema_update(ema, net, decay)
        step += 1

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            with torch.no_grad():
                val_ema = (ema(val[0], val[1]) - val[2]).pow(2).mean().item()
            print(f"step {step}/{steps} loss={mean.item() / world:.6f} val_ema={val_ema:.6f}", flush=True)
            os.makedirs("ckpts", exist_ok=True)
            torch.save({"model": net.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "step": step}, "ckpts/part")
            os.replace("ckpts/part", f"ckpts/ddpm_{step:05d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
