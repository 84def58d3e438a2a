"""An export that transposes a square weight; ``--fixed`` exports the weight as it is.

The public thread huggingface/transformers#47031 reports such a weight, which loads without an error.
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
    weights = {name: whole.clone() for name, whole in dt.full_params(state)}
    if not FIXED:
        weights["0.weight"] = weights["0.weight"].T.contiguous()
    if info.rank == 0:
        save_file(weights, "model.safetensors")
