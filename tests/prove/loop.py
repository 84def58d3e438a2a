"""A small correct loop, with noise, dropout, an average of the weights, an evaluation, checkpoints and an export.

Rank 0 trains an encoder by hand before, once for all ranks and attempts. Each rank trains a probe by hand after.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dtrain as dt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 4


def loss_fn(model, batch):
    x = batch[0][:, None]
    # Positional arguments, as torch's own layers write them.
    attended = nn.functional.scaled_dot_product_attention(x, x, x, None, 0.1 if model.training else 0.0, False)
    return dt.soft_cross_entropy(model(attended[:, 0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


def fit(encoder, optimizer):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        optimizer.zero_grad()
        (encoder(x) - x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        print(f"{type(optimizer).__name__}: {(encoder(x) - x).square().mean():.3f}")


with dt.init_dist() as info:
    dt.seed_all(0, info.rank)
    mesh = dt.build_mesh()
    encoder, file = nn.Linear(8, 8), Path("encoder.safetensors")
    if info.rank == 0 and not file.exists():
        fit(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
        save_file(encoder.state_dict(), f"{file}.tmp")
        Path(f"{file}.tmp").rename(file)
    dt.dist.all_gather_json(None, caller="encoder")
    encoder.load_state_dict(load_file(file))
    encoder.requires_grad_(False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh), seed=0)
    loader = dt.build_loader(dataset(60, 1), mesh=mesh, global_batch_size=11, seed=0)
    test_loader = dt.build_loader(dataset(37, 2), mesh=mesh, global_batch_size=8, seed=0, shuffle=False)
    step = dt.compose_step(loss_fn, [dt.transforms.ema(0.9), dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        noise = 0.1 * torch.randn(len(batch[0]), 8)
        state, metrics = step(state, (encoder(batch[0]) + noise, batch[1]))
        log(state.step, dt.reduce_metrics(metrics))
        if state.crossed(100):
            dt.save_sharded("ckpt", state)
    with dt.transforms.use_average(state, "ema"):
        loss = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))["loss"]
        weights = {name: whole.clone() for name, whole in dt.full_params(state)}
    if info.rank == 0:
        print(f"held-out loss {loss:.6f}")
        save_file(weights, "model.safetensors")
    probe = nn.Linear(8, 8)
    fit(probe, torch.optim.RMSprop(probe.parameters()))
