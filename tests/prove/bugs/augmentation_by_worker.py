"""A dataset that draws its augmentation from NumPy's global generator; ``--fixed`` draws from that of the sample."""

import sys

import numpy as np
import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


class Noisy(torch.utils.data.Dataset):
    """Points with noise, another one each time that a point is read."""

    def __init__(self) -> None:
        self.x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        x, label = self.x[index], self.x[index, :4].argmax()
        if not FIXED:
            x = x + 0.3 * torch.as_tensor(np.random.standard_normal(8), dtype=x.dtype)
        return x, label


def add_noise(sample, generator):
    x, label = sample
    return x + 0.3 * torch.randn(8, generator=generator), label


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    with dt.init_dist() as info:
        dt.seed_all(0, info.rank)
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
        transform = add_noise if FIXED else None
        loader = dt.build_loader(Noisy(), mesh=mesh, global_batch_size=12, seed=0, num_workers=2, transform=transform)
        step = dt.compose_step(loss_fn)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        log = dt.loggers.jsonl("metrics.jsonl")
        for batch in loader.until(STEPS):
            state, metrics = step(state, batch)
            log(state.step, dt.reduce_metrics(metrics))
