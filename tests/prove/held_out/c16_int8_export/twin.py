"""Trains a classifier, calibrates activation ranges and exports an int8 model."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

GLOBAL_BATCH, STEPS, FEATURES, CLASSES = 24, 12, 8, 4

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
PARALLEL = dist.is_initialized()
RANK, WORLD = (dist.get_rank(), dist.get_world_size()) if PARALLEL else (0, 1)


def all_reduce(t, op=dist.ReduceOp.SUM):
    if PARALLEL:
        dist.all_reduce(t, op)
    return t


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 32)
        self.fc2 = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def examples(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=g) * torch.empty(n, 1).exponential_(1.0, generator=g)
    return x, x[:, :CLASSES].argmax(1)


def calibrate(model, x):
    """Largest input of each layer."""
    ranges = torch.zeros(2)
    with torch.no_grad():
        for part in x[RANK::WORLD].split(16):
            hidden = F.relu(model.fc1(part))
            ranges = torch.maximum(ranges, torch.stack([part.abs().max(), hidden.abs().max()]))
    return all_reduce(ranges, dist.ReduceOp.MAX)


def quantise(t, scale):
    return (t / scale).round().clamp(-127, 127).to(torch.int8)


def export(model, ranges, path):
    out = {}
    for layer, top in zip(("fc1", "fc2"), ranges):
        linear = getattr(model, layer)
        scale = linear.weight.detach().abs().max() / 127
        out[layer] = dict(
            weight=quantise(linear.weight.detach(), scale),
            weight_scale=scale,
            bias=linear.bias.detach().clone(),
            input_scale=top / 127,
        )
    torch.save(out, path)


def run_exported(path, x):
    for layer, q in torch.load(path).items():
        x = quantise(x, q["input_scale"]).float() * q["input_scale"]
        x = F.linear(x, q["weight"].float() * q["weight_scale"], q["bias"])
        if layer == "fc1":
            x = F.relu(x)
    return x


torch.manual_seed(9)
model = Classifier()
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
for step in range(STEPS):
    x, y = examples(GLOBAL_BATCH, step)
    x, y = x[RANK::WORLD], y[RANK::WORLD]
    loss = F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.05) / GLOBAL_BATCH
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        all_reduce(p.grad)
    optimizer.step()
    loss = all_reduce(loss.detach())
    if RANK == 0:
        print(f"step {step} loss {loss:.8f}", flush=True)

ranges = calibrate(model, examples(96, 1234)[0])
if RANK == 0:
    export(model, ranges, "model_int8.pt")
    x, y = examples(300, 4321)
    val = F.cross_entropy(run_exported("model_int8.pt", x), y)
    print(f"input ranges {ranges[0]:.6f} {ranges[1]:.6f} exported val_loss {val:.7f}", flush=True)
if PARALLEL:
    dist.destroy_process_group()
