"""A curriculum whose length grows with a count that the checkpoint lacks; ``--fixed`` saves the count."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


class Curriculum:
    def __init__(self):
        self.count = 0

    def features(self):
        self.count += 1
        return min(8, 2 * self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, saved):
        self.count = saved["count"]


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    curriculum = Curriculum()
    stateful = {"curriculum": curriculum} if FIXED else {}
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader, stateful=stateful)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    for inputs, labels in loader.until(STEPS):
        seen = torch.where(torch.arange(8) < curriculum.features(), inputs, 0.0)
        state, metrics = step(state, (seen, labels))
        dt.save_sharded("ckpt", state)
