"""A correct contrastive loop: negatives of all ranks, dropout, and blocks that backward computes again."""

from functools import partial

import torch
from torch import nn

import dtrain as dt


def contrast(model, batch):
    left, right = model(batch["left"]), model(batch["right"])
    everyone = dt.dist.all_gather_with_grad(right)
    ids = dt.dist.all_gather_ragged(batch["id"])
    own = (batch["id"][:, None] == ids).int().argmax(1)
    total = nn.functional.cross_entropy(left @ everyone.t(), own, reduction="sum")
    return dt.LossSum(total=total, weight=len(own))


class Pairs(torch.utils.data.Dataset):
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"left": self.x[index], "right": self.x[index].sin(), "id": index}


with dt.init_dist() as info:
    dt.seed_all(0, info.rank)
    mesh = dt.build_mesh()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)))
    dt.shard.checkpoint_activations(model, blocks=(nn.Sequential,))
    model = dt.shard_model(model, mesh, blocks=(nn.Sequential,))
    loader = dt.build_loader(Pairs(), mesh=mesh, global_batch_size=12, seed=0, last_batch="drop")
    step = dt.compose_step(contrast, grad=partial(dt.step.grad_cache_step, microbatch_size=4))
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in loader.until("4ba"):
        state, metrics = step(state, batch)
        print(dt.reduce_metrics(metrics)["loss"])
