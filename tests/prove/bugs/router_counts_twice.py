"""A router that counts tokens in a forward which activation checkpointing repeats; ``--fixed`` counts in a buffer, once."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
EXPERTS, STEPS, RATE = 4, 4, 0.01


class MixtureBlock(nn.Module):
    """Send each token to its best expert, with a bias that balances the experts' loads."""

    def __init__(self, dim):
        super().__init__()
        self.router, self.experts = nn.Linear(dim, EXPERTS), nn.ModuleList(nn.Linear(dim, dim) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        if FIXED:
            self.register_buffer("counts", torch.zeros(EXPERTS), persistent=False)  # recomputation works on copies of buffers
        else:
            self.counts = torch.zeros(EXPERTS)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot((scores + self.bias).argmax(-1), EXPERTS)
        self.counts += chosen.sum(0)
        gates = (scores * chosen)[..., None]
        return x + (gates * torch.stack([expert(x) for expert in self.experts], dim=-2)).sum(-2)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    torch.manual_seed(0)
    block = MixtureBlock(16)
    model = nn.Sequential(nn.Linear(8, 16), block, nn.Linear(16, 4))
    model = dt.shard.checkpoint_activations(model, blocks=(MixtureBlock,))
    model = dt.shard_model(model, mesh, strategy="replicate", buffers="own")
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        load = dt.dist.reduce_sum(block.counts)
        block.bias += RATE * (load.mean() - load)
        block.counts.zero_()
        log(state.step, dt.reduce_metrics(metrics) | {"tokens_routed": load.sum().item()})
