"""Distils a convolutional teacher into a small student."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CLASSES, STEPS_PER_EPOCH, EPOCHS, GLOBAL_BATCH, T = 5, 4, 3, 12, 2.0


def conv_teacher():
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Conv1d(8, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = conv_teacher()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, CLASSES))
        self.teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x, y):
        with torch.no_grad():
            soft = (self.teacher(x) * 4 / T).softmax(-1)
        logits = self.student(x)
        kd = F.kl_div((logits / T).log_softmax(-1), soft, reduction="batchmean") * T * T
        return 0.7 * kd + 0.3 * F.cross_entropy(logits, y), logits


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    t = torch.linspace(0, 1, 32)
    x = torch.sin(2 * torch.pi * (y[:, None] + 1) * t) + 0.5 * torch.randn(n, 32, generator=g)
    return x.unsqueeze(1), y


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    on = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if on else (0, 1)
    torch.manual_seed(0)
    model = Distiller()
    x, y = make_data(GLOBAL_BATCH * STEPS_PER_EPOCH, 1)
    warm, _ = make_data(200, 2)
    with torch.no_grad():  # running statistics of the teacher
        nn.Module.train(model.teacher)
        for _ in range(20):
            model.teacher(warm)
        model.teacher.eval()
    val = make_data(60, 3)
    optimizer = torch.optim.Adam(model.student.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for i, rows in enumerate(order.split(GLOBAL_BATCH)):
            rows = rows[rank::world]
            loss, _ = model(x[rows], y[rows])
            optimizer.zero_grad()
            loss.backward()
            if on:
                for p in model.student.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(world)
                dist.all_reduce(loss.data)
            optimizer.step()
            if rank == 0:
                print(f"epoch {epoch} step {i} loss {loss.item() / world:.8f}", flush=True)
        model.eval()
        with torch.no_grad():
            loss, logits = model(*val)
        if rank == 0:
            accuracy = (logits.argmax(1) == val[1]).float().mean()
            print(f"epoch {epoch} val_loss {loss:.8f} val_acc {accuracy:.5f}", flush=True)
    if on:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
