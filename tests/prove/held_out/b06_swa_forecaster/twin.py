"""Forecast the next value of a noisy sine with a small MLP; keeps a running mean of the weights (SWA)."""
import math

import torch
from torch import nn
from torch.func import functional_call

import dtrain as dt

WINDOW = 12


def series(length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length) * 0.3
    return t.sin() + 0.4 * (t * math.pi / 5).cos() + 0.05 * torch.randn(length, generator=g)


def windows(s):
    w = s.unfold(0, WINDOW + 1, 1)
    return w.clone()


def build():
    return nn.Sequential(nn.Linear(WINDOW, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))


def mse(model, batch):
    pred = model(batch[:, :-1])[:, 0]
    return dt.LossSum(total=(pred - batch[:, -1]).square().sum(), weight=len(batch))


def swa(first):
    """Average the weights of all steps from ``first`` on."""

    def init(state):
        return {"mean": {k: p.detach().clone() for k, p in state.params.items()}, "n": 0}

    def update(inner):
        def averaged(state, metrics):
            state, metrics = inner(state, metrics)
            if state.step < first:
                return state, metrics
            mean, n = state.transform_states["swa"]["mean"], state.transform_states["swa"]["n"] + 1
            with torch.no_grad():
                for k, p in state.params.items():
                    mean[k].add_((p - mean[k]) / n)
            return state.with_transform_state("swa", {"mean": mean, "n": n}), metrics

        return averaged

    return dt.Transform(name="swa", init=init, update=update, uses_grad=False)


def main():
    with dt.init_dist() as dist:
        torch.manual_seed(21)
        mesh = dt.build_mesh()
        plain = build()
        model = dt.shard_model(build(), mesh, strategy="full_shard", blocks=(nn.Linear,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
        loader = dt.build_loader(windows(series(300, 0)), mesh=mesh, global_batch_size=36, seed=8)
        step = dt.compose_step(mse, [swa(first=2)])
        state = step.init(model, optimizer, loader=loader)
        state = dt.load_sharded("swa_ckpt", state, missing_ok=True)
        test = windows(series(120, 1))
        for batch in loader.until("8ba"):
            state, metrics = step(state, batch)
            loss = dt.reduce_metrics(metrics)["loss"]
            mean = dict(dt.full_params(state.transform_states["swa"]["mean"]))
            with torch.no_grad():
                out = functional_call(plain, mean, (test[:, :-1],))[:, 0]
            dist.print(f"{state.step:3d} train {loss:.6f} swa test {(out - test[:, -1]).square().mean():.6f}")
            dt.save_sharded("swa_ckpt", state, keep_last=2)


main()
