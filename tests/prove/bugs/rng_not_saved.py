"""A denoiser whose generator of noise levels begins again in a resume; ``--fixed`` saves the generator."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


class Levels:
    """Noise levels, one a step for all ranks."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        return torch.rand((), generator=self.generator)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, saved):
        self.generator.set_state(saved["generator"])


def loss_fn(model, batch):
    x, noise, level = batch
    guess = model((1 - level) * x + level * noise)
    return dt.LossSum(total=(guess - noise).square().sum(), weight=guess.numel())


def dataset():
    x, noise = torch.randn(2, 48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, noise)


def main():
    with dt.init_dist():
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
        loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
        levels = Levels(seed=7)
        step = dt.compose_step(loss_fn)
        stateful = {"levels": levels} if FIXED else {}
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader, stateful=stateful)
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        log = dt.loggers.jsonl("metrics.jsonl")
        for batch in loader.until(STEPS):
            x, noise = batch
            state, metrics = step(state, (x, noise, levels.draw().expand(len(x), 1)))
            log(state.step, dt.reduce_metrics(metrics))
            dt.save_sharded("ckpt", state)


if __name__ == "__main__":
    main()
