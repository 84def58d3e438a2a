"""beta-VAE; beta is steered so that the KL settles at a target (a simple proportional controller)."""
import math

import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

LATENT = 3
TARGET_KL = 1.5
STEPS = 8


class VAE(nn.Module):
    def __init__(self, d=12, h=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, h), nn.SiLU(), nn.Linear(h, d))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + eps * (0.5 * logvar).exp()
        kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(-1)
        return self.dec(z), kl


def with_eps(x, generator):
    return {"x": x, "eps": torch.randn(LATENT, generator=generator)}


control = {"beta": 0.1}


def elbo(model, batch):
    rec, kl = model(batch["x"], batch["eps"])
    err = F.mse_loss(rec, batch["x"], reduction="none").sum(-1)
    n = len(kl)
    loss = (err + control["beta"] * kl).sum()
    return dt.LossSum(total=loss, weight=n, aux={"kl": (kl.detach().sum(), n), "rec": (err.detach().sum(), n)})


g = torch.Generator().manual_seed(1)
mixing = torch.randn(LATENT, 12, generator=g)
data = torch.randn(288, LATENT, generator=g) @ mixing + 0.1 * torch.randn(288, 12, generator=g)

with dt.init_dist() as info:
    torch.manual_seed(9)
    mesh = dt.build_mesh()
    vae = dt.shard_model(VAE(), mesh, strategy="shard_grad_op")
    opt = torch.optim.Adam(vae.parameters(), lr=1e-2)
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=48, seed=3, transform=with_eps)
    step = dt.compose_step(elbo)
    state = step.init(vae, opt, loader=loader, stateful={"control": control})
    ckpt = dt.Checkpointer("vae_runs", keep_last=2)
    state = ckpt.load(state, missing_ok=True)
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        m = dt.reduce_metrics(metrics)
        # raise beta while the KL is above its target, lower it below
        control["beta"] = min(4.0, max(1e-3, control["beta"] * math.exp(0.5 * (m["kl"] - TARGET_KL))))
        info.print(f"it {state.step}: loss {m['loss']:.4f} rec {m['rec']:.4f} kl {m['kl']:.4f} beta {control['beta']:.4f}")
        if state.crossed(1):
            ckpt.save(state)
    ckpt.save(state)
