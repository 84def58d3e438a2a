"""A checkpoint without the loader, so a resume reads the first batches again; ``--fixed`` saves its position."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


def main():
    with dt.init_dist():
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
        loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
        kept = loader if FIXED else dt.checkpoint.not_saved(loader)
        step = dt.compose_step(loss_fn)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=kept)
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        log = dt.loggers.jsonl("metrics.jsonl")
        for batch in loader.until("2ep"):
            if state.step == STEPS:
                break
            state, metrics = step(state, batch)
            log(state.step, dt.reduce_metrics(metrics))
            dt.save_sharded("ckpt", state)


if __name__ == "__main__":
    main()
