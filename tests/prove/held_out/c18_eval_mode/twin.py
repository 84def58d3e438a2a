"""A regressor with dropout; validates now and then, and resumes from its newest checkpoint."""
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn

GLOBAL_BATCH, STEPS, VALIDATE_EVERY, SAVE_EVERY, DIR = 12, 14, 3, 2, "ckpts"

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
many = dist.is_initialized()
rank, world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)


class BatchDropout(nn.Module):
    """Dropout whose mask belongs to the global batch: the same for any number of ranks."""

    def __init__(self, p, salt):
        super().__init__()
        self.p, self.salt, self.step = p, salt, 0

    def forward(self, x):
        if not self.training:
            return x
        g = torch.Generator().manual_seed(1_000_003 * self.salt + self.step)
        keep = torch.rand(len(x) * world, x.shape[1], generator=g) >= self.p
        return x * keep.chunk(world)[rank] / (1 - self.p)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 40), nn.ReLU(), BatchDropout(0.2, 1),
            nn.Linear(40, 40), nn.ReLU(), BatchDropout(0.2, 2),
            nn.Linear(40, 1),
        )  # fmt: skip

    def at(self, step):
        for m in self.modules():
            if isinstance(m, BatchDropout):
                m.step = step

    def forward(self, x):
        return self.layers(x)


def points(n, seed):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :1] * x[:, 1:2]).tanh() + 0.5 * x[:, 2:3]


def evaluate(model):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        x, y = points(120, 10**6)
        value = (model(x) - y).pow(2).mean().item()
    model.train(was_training)
    return value


def newest():
    if not os.path.isdir(DIR):
        return None
    numbers = [int(m[1]) for m in (re.fullmatch(r"step_(\d+)\.pt", f) for f in os.listdir(DIR)) if m]
    return f"{DIR}/step_{max(numbers)}.pt" if numbers else None


torch.manual_seed(30)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if path := newest():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

model.train()
for step in range(first, STEPS):
    x, y = (t.chunk(world)[rank] for t in points(GLOBAL_BATCH, step))
    model.at(step)
    loss = (model(x) - y).pow(2).mean() / world
    optimizer.zero_grad()
    loss.backward()
    if many:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss.data)
    optimizer.step()
    done = step + 1
    text = f"{done} loss {loss.item():.8f}"
    if done % VALIDATE_EVERY == 0:
        text += f" val {evaluate(model):.8f}"
    if rank == 0:
        print(text, flush=True)
        if done % SAVE_EVERY == 0:
            os.makedirs(DIR, exist_ok=True)
            torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=done), f"{DIR}/tmp")
            os.replace(f"{DIR}/tmp", f"{DIR}/step_{done}.pt")
if many:
    dist.destroy_process_group()
