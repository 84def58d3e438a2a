"""Message passing net on small random graphs; two tasks weighted by learned uncertainties (Kendall et al.)."""
import argparse
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class GraphNet(nn.Module):
    def __init__(self, feat=4, hid=20, rounds=2):
        super().__init__()
        self.inp = nn.Linear(feat, hid)
        self.msg = nn.ModuleList(nn.Linear(hid, hid) for _ in range(rounds))
        self.upd = nn.ModuleList(nn.GRUCell(hid, hid) for _ in range(rounds))
        self.edges = nn.Linear(hid, 1)
        self.dense = nn.Linear(hid, 2)

    def forward(self, x, adj):
        b, n, _ = x.shape
        h = torch.tanh(self.inp(x))
        for msg, upd in zip(self.msg, self.upd):
            m = adj @ msg(h)
            h = upd(m.flatten(0, 1), h.flatten(0, 1)).view(b, n, -1)
        pooled = h.mean(1)
        return self.edges(pooled)[:, 0], self.dense(pooled)


class UncertaintyLoss(nn.Module):
    def __init__(self, n_tasks):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n_tasks))

    def forward(self, losses):
        losses = torch.stack(losses)
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


def graphs(step, n, nodes=8):
    g = torch.Generator().manual_seed(1_000 + step)
    up = torch.triu(torch.rand(n, nodes, nodes, generator=g) < torch.rand(n, 1, 1, generator=g), 1)
    adj = (up | up.transpose(1, 2)).to(torch.get_default_dtype())
    x = torch.randn(n, nodes, 4, generator=g)
    n_edges = adj.sum((1, 2)) / 2
    return x, adj, n_edges / 7, (n_edges > 14).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    opts = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(55)
    model, criterion = GraphNet(), UncertaintyLoss(2)
    optimizer = torch.optim.Adam(chain(model.parameters(), criterion.parameters()), lr=1e-2)
    share = opts.graphs // world

    for step in range(opts.steps):
        batch = [t[rank * share:(rank + 1) * share] for t in graphs(step, opts.graphs)]
        model.zero_grad()
        criterion.zero_grad()
        log = torch.zeros(3)
        for x, adj, y_reg, y_cls in zip(*(t.split(opts.micro_batch) for t in batch)):
            reg, cls = model(x, adj)
            l_reg, l_cls = F.mse_loss(reg, y_reg), F.cross_entropy(cls, y_cls)
            part = len(x) / opts.graphs
            loss = criterion([l_reg, l_cls]) * part
            loss.backward()
            log += torch.stack([loss, l_reg * part, l_cls * part]).detach()
        for p in chain(model.parameters(), criterion.parameters()):
            dist.all_reduce(p.grad)
        dist.all_reduce(log)
        optimizer.step()
        if rank == 0:
            total, reg_, cls_ = log.tolist()
            print(f"{step}: total {total:.6f} edges {reg_:.6f} dense {cls_:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
