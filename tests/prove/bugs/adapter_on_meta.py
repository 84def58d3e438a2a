"""An adapter that is built on meta on several ranks, whose initialiser draws all weights; ``--fixed`` lets it begin at zero."""

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS, RANK = 4, 2


class LoRALinear(nn.Module):
    """A frozen linear layer beside a product of two small matrices, of which the second begins at zero."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.empty(RANK, inputs)), nn.Parameter(torch.empty(outputs, RANK))
        if not self.lora_a.is_meta:
            self.reset_parameters()

    def reset_parameters(self):
        normal_(self.lora_a)
        nn.init.zeros_(self.lora_b)

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def normal_(tensor):
    nn.init.normal_(tensor, std=0.1, generator=torch.Generator(tensor.device).manual_seed(0))


def init_weights(module):
    if FIXED and isinstance(module, LoRALinear):
        module.reset_parameters()
    else:
        for param in module.parameters(recurse=False):
            normal_(param)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta" if info.world_size > 1 else "cpu"):  # one process has room for it
        model = nn.Sequential(LoRALinear(8, 16), nn.Tanh(), LoRALinear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0, init=init_weights)
    with dt.dist.local_rank_zero_first() as first:
        if first:  # stands for a download
            draw = torch.Generator().manual_seed(3)
            sizes = {"0.base.weight": (16, 8), "0.base.bias": (16,), "2.base.weight": (4, 16), "2.base.bias": (4,)}
            save_file({name: torch.randn(size, generator=draw) for name, size in sizes.items()}, "base.safetensors")
    dt.load_weights_(model, "base.safetensors", ignore=["*.lora_*"])
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
