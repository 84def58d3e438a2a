"""A transform that clips by the norm of the rank's own shards; ``--fixed`` clips by that of the whole gradient."""

import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS, MAX_NORM = 4, 0.1


def clip_shards(max_norm):
    def update(inner):
        def clipped(state, metrics):
            grads = [param.grad for param in state.params.values() if param.grad is not None]
            shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            norm = torch.stack([shard.norm() for shard in shards]).norm()
            for shard in shards:
                shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
            return inner(state, metrics)

        return clipped

    return dt.Transform(name="clip_shards", update=update)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    clip = dt.transforms.clip_by_norm(MAX_NORM) if FIXED else clip_shards(MAX_NORM)
    step = dt.compose_step(loss_fn, [clip])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, {"loss": dt.reduce_metrics(metrics)["loss"]})
