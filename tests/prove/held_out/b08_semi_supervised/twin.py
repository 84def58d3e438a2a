"""FixMatch on points: a few labelled samples, many unlabelled ones with a weak and a strong view."""
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

CONF, LAMBDA, STEPS = 0.6, 1.0, 8


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=g)
    a = torch.rand(n, generator=g) * 3.1416
    x = torch.stack([a.cos() + y, a.sin() * (1 - 2 * y) + 0.5 * y], 1)
    return x + 0.1 * torch.randn(n, 2, generator=g), y


class Pool:
    """Unlabelled points, in turn; each rank takes its part of the next ``count``."""

    def __init__(self, points, rank, world):
        self.points, self.rank, self.world = points, rank, world
        self.cursor = {"next": 0}

    def take(self, count):
        start = self.cursor["next"]
        self.cursor["next"] = start + count
        rows = torch.arange(start, start + count) % len(self.points)
        g = torch.Generator().manual_seed(start)
        x = self.points[rows]
        weak = x + 0.02 * torch.randn(count, 2, generator=g)
        strong = x + 0.25 * torch.randn(count, 2, generator=g)
        return {"weak": weak[self.rank :: self.world], "strong": strong[self.rank :: self.world]}


def fixmatch(model, batch):
    logits = model(batch["x"])
    sup = F.cross_entropy(logits, batch["y"], reduction="sum")
    with torch.no_grad():
        p, pseudo = model(batch["weak"]).softmax(-1).max(-1)
    per = F.cross_entropy(model(batch["strong"]), pseudo, reduction="none") * (p > CONF)
    return dt.LossSum(
        total=sup + LAMBDA * per.sum(),
        weight=len(logits),
        aux={"unsup": (per.detach().sum(), len(per)), "used": ((p > CONF).sum(), len(p))},
    )


def main():
    with dt.init_dist() as dist:
        torch.manual_seed(4)
        mesh = dt.build_mesh()
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        net = dt.shard_model(net, mesh, strategy="replicate")
        optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)

        x, y = moons(48, 0)
        labelled = dt.build_loader({"x": x, "y": y}, mesh=mesh, global_batch_size=12, seed=0)
        pool = Pool(moons(480, 1)[0], dist.rank, dist.world_size)

        step = dt.compose_step(fixmatch)
        state = step.init(net, optim, loader=labelled, stateful={"pool": pool.cursor})
        state = dt.load_sharded("fixmatch", state, missing_ok=True)
        for batch in labelled.until(STEPS):
            state, metrics = step(state, {"x": batch["x"], "y": batch["y"], **pool.take(12)})
            m = dt.reduce_metrics(metrics)
            dist.print(f"step {state.step} loss {m['loss']:.5f} unsup {m['unsup']:.5f} used {m['used']:.2f}")
            dt.save_sharded("fixmatch", state, keep_last=2)


if __name__ == "__main__":
    main()
