"""Sentence pair similarity (siamese bag of words); accuracy with torchmetrics after every epoch."""
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy


@dataclass
class TrainConfig:
    vocab: int = 50
    length: int = 7
    width: int = 16
    batch_size: int = 24
    eval_batch_size: int = 12
    lr: float = 2e-2
    epochs: int = 3
    seed: int = 13


class Siamese(nn.Module):
    def __init__(self, c: TrainConfig):
        super().__init__()
        self.bag = nn.EmbeddingBag(c.vocab, c.width, mode="mean")
        self.mix = nn.Linear(c.width, c.width)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        za, zb = torch.tanh(self.mix(self.bag(a))), torch.tanh(self.mix(self.bag(b)))
        return (za * zb).sum(-1) + self.bias


def pairs(c: TrainConfig, n: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(5, (n, 2), generator=g)
    words = topic[..., None] * 10 + torch.randint(10, (n, 2, c.length), generator=g)
    same = (topic[:, 0] == topic[:, 1]) | (torch.rand(n, generator=g) < 0.1)
    return TensorDataset(words[:, 0], words[:, 1], same.float())


@torch.no_grad()
def evaluate(accelerator, model, loader):
    metric = BinaryAccuracy(sync_on_compute=False)
    model.eval()
    for a, b, y in loader:
        logits = model(a, b)
        logits, y = accelerator.gather_for_metrics((logits, y))
        metric.update(logits, y.long())
    model.train()
    return metric.compute().item()


def train(c: TrainConfig):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(c.seed)
    world = accelerator.num_processes
    model = Siamese(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr)
    train_loader = DataLoader(pairs(c, 48, 0), batch_size=c.batch_size // world)
    eval_loader = DataLoader(pairs(c, 43, 1), batch_size=c.eval_batch_size // world)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for epoch in range(c.epochs):
        for i, (a, b, y) in enumerate(train_loader):
            loss = nn.functional.binary_cross_entropy_with_logits(model(a, b), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"epoch {epoch} batch {i} loss {accelerator.gather(loss.detach()).mean():.6f}")
        accelerator.print(f"epoch {epoch} eval accuracy {evaluate(accelerator, model, eval_loader):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    train(TrainConfig())
