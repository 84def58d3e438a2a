"""Early stopping that a resume begins anew, so the run stops later; ``--fixed`` saves best value and patience."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS, PATIENCE = 6, 2


class EarlyStop:
    """Best validation loss, and how often it was not reached since."""

    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def update(self, loss):
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, saved):
        self.best, self.bad = saved["best"], saved["bad"]


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    labels = torch.randint(4, (samples,), generator=torch.Generator().manual_seed(seed))  # nothing to learn: it overfits
    return torch.utils.data.TensorDataset(x, labels)


def main():
    with dt.init_dist():
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
        loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
        held_out = dt.build_loader(dataset(32, 2), mesh=mesh, global_batch_size=16, seed=0, shuffle=False)
        step = dt.compose_step(loss_fn)
        stop = EarlyStop()
        stateful = {"stop": stop} if FIXED else {}
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=3.0), loader=loader, stateful=stateful)
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        log = dt.loggers.jsonl("metrics.jsonl")
        for batch in loader.until(STEPS):
            state, metrics = step(state, batch)
            loss = dt.reduce_metrics(dt.evaluate(model, held_out, loss_fn))["loss"]
            stop.update(loss)
            log(state.step, dt.reduce_metrics(metrics) | {"held_out_loss": loss, "bad": stop.bad})
            dt.save_sharded("ckpt", state)
            if stop.bad >= PATIENCE:
                break


if __name__ == "__main__":
    main()
