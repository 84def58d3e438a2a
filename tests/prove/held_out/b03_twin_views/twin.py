# self-supervised: two noisy views of a vector, NT-Xent style
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import dtrain as dt


@dataclass
class Cfg:
    dim: int = 20
    hidden: int = 48
    proj: int = 12
    tau: float = 0.2
    batch: int = 36
    steps: int = 7
    lr: float = 0.05


cfg = Cfg()


def two_views(sample, generator):
    x = sample["x"]
    noise = 0.3 * torch.randn(2, *x.shape, generator=generator)
    return {"id": sample["id"], "a": x + noise[0], "b": x + noise[1]}


def encoder(c):
    return nn.Sequential(nn.Linear(c.dim, c.hidden), nn.Tanh(), nn.Linear(c.hidden, c.proj))


def ntxent(model, batch):
    za = normalize(model(batch["a"]), dim=1)
    zb = normalize(model(batch["b"]), dim=1)
    others = dt.dist.all_gather_with_grad(zb)
    ids = dt.dist.all_gather_ragged(batch["id"])
    target = (batch["id"][:, None] == ids).int().argmax(1)
    logits = za @ others.t() / cfg.tau
    return dt.LossSum(total=cross_entropy(logits, target, reduction="sum"), weight=len(za))


def run():
    with dt.init_dist() as dist:
        torch.manual_seed(42)
        points = torch.randn(216, cfg.dim, generator=torch.Generator().manual_seed(7))
        data = {"id": torch.arange(216), "x": points}
        mesh = dt.build_mesh()
        net = dt.shard_model(encoder(cfg), mesh, strategy="replicate")
        opt = torch.optim.SGD(net.parameters(), lr=cfg.lr)
        loader = dt.build_loader(
            data, mesh=mesh, global_batch_size=cfg.batch, seed=0, transform=two_views, last_batch="drop"
        )
        step = dt.compose_step(ntxent, grad=dt.step.grad_cache_step, microbatch_size=6)
        state = step.init(net, opt, loader=loader)
        for batch in loader.until(cfg.steps):
            state, metrics = step(state, batch)
            dist.print(f"[{state.step}] ntxent={dt.reduce_metrics(metrics)['loss']:.6f}")


if __name__ == "__main__":
    run()
